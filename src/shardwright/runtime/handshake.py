"""What the ranks are about to do, told to each other in one small message before they do it.

A rank that makes another call than the others (an evaluation on rank 0 alone, say) would send what nobody waits for, and
wait for what nobody sends. So every call of a parallelized module, and every norm over the stages of a pipeline, begins with
a few numbers from every rank, of one size whatever the call: first its kind, then what must be the same (digests of batches,
:mod:`~shardwright.runtime.same_rows`) or is put together (norms, :mod:`~shardwright.runtime.norms`). On accelerators the
answer is read at the next handshake, so that the host need not wait for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardwright._torch_compat import start_gathering
from shardwright.errors import RunError
from shardwright.program.steps import Line
from shardwright.runtime.agreement import REMEDY

WITH_GRADIENTS, WITHOUT_GRADIENTS, NEW_CALL, NORM = range(4)
_WORDS = ("calls the model", "calls the model without gradients", "makes a call of a new kind", "takes a norm (clips)")


def kind(what: int, which: int = 0) -> int:
    """The number of one kind of call; ``which`` tells those apart that are described by the same words."""
    return (which << 2) | what


class Handshake:
    """The ranks along ``lines`` tell each other a few numbers; ``ranks`` is the mesh. Without lines this one is alone."""

    def __init__(self, lines: Sequence[Line], ranks: Tensor, device: torch.device) -> None:
        self.lines, self.device = lines, device
        self.width = 1 + 2 ** len(lines)
        turned = ranks.permute(*reversed(range(ranks.ndim))) if ranks.ndim == len(lines) else ranks
        self._ranks: list[int] = turned.flatten().tolist()
        self._unread: list[Tensor] = []

    def tell(self, what: int, numbers: Mapping[int, Tensor] | None = None, at_once: bool = False) -> Tensor:
        """Every rank calls this with the kind of its call and integers by their columns (from 1 to ``width - 1``); gives
        those of all, a row a rank (the last line's ranks outermost), the kinds in column 0. ``at_once``: the host waits
        until it knows that all make the same call.

        Raises
        ------
        RunError
            When the ranks make different calls, or one makes none.
        """
        given = {0: _constant(what, self.device), **(numbers or {})}
        table = torch.stack([given.get(column, _constant(0, self.device)) for column in range(self.width)])[None]
        try:
            for line in self.lines:
                table = start_gathering(table, line.size, line.group).wait()
        except RuntimeError as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
            raise RunError(
                f"This rank {_WORDS[what & 3]}, and not all others do: the ranks make different calls, or one has ended or "
                f"hangs ({reason}).",
                REMEDY,
            ) from error
        self._unread.append(table)
        if at_once or self.device.type == "cpu":
            self.settle()
        return table

    def settle(self) -> None:
        """Read what kinds of calls the others have made since this was last asked."""
        unread, self._unread = self._unread, []
        for table in unread if self.lines else ():
            self._compare(table[:, 0].tolist())

    def _compare(self, kinds: Sequence[int]) -> None:
        if len(set(kinds)) == 1:
            return
        told: dict[int, list[int]] = {}
        for rank, what in zip(self._ranks, kinds, strict=True):
            told.setdefault(what, []).append(rank)
        parts = [f"{_named(ranks)} {_WORDS[what & 3]}" for what, ranks in told.items()]
        again = " (another one, or from another line)" if len({what & 3 for what in told}) == 1 else ""
        raise RunError(f"The ranks make different calls: {', '.join(sorted(parts))}{again}.", REMEDY)


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:8])) + (", …" if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'each of ranks'} {shown}"


@functools.lru_cache(maxsize=256)
def _constant(number: int, device: torch.device) -> Tensor:
    return torch.tensor(number, dtype=torch.int64, device=device)
