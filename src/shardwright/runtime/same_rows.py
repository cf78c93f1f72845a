"""Do the ranks still bring the same rows? A cheap digest of every batch, compared before the step.

Ranks that hold copies of a tensor must be fed alike, or they train on mixtures that no loss curve gives away. From every
input about a thousand elements, evenly spread and at another offset every time, are summed with odd weights modulo 2^64 (a
multilinear hash; Lemire and Kaser, 2014) into one number per kind of layout, and those are gathered along every mesh axis:
one message of a few bytes per axis. On accelerators the answer of one call is read at the next one, so that the host need
not wait for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from shardwright._torch_compat import local_of
from shardwright.operators.rules import Layout
from shardwright.runtime.agreement import refuse_odd
from shardwright.runtime.handshake import Handshake

ELEMENTS = 1024
_FACTOR = 0x1E3779B97F4A7C15
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Axes = tuple[int, ...]


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Odd numbers, wrapped around."""
    return torch.arange(1, 2 * ELEMENTS, 2, device=device) * _FACTOR


def digest_of(tensor: Tensor, number: int) -> Tensor:
    """One number of a sample of a tensor; ``number`` says which sample.

    >>> x = torch.arange(5000.0)
    >>> bool(digest_of(x, 0) == digest_of(x.clone(), 0)), bool(digest_of(x, 0) == digest_of(x + 1, 0))
    (True, False)
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    apart = max(1, -(-tensor.numel() // ELEMENTS))
    chosen = torch.arange(number % apart, tensor.numel(), apart, device=tensor.device)
    picked = tensor.view(_INTEGERS[tensor.itemsize]).take(chosen).to(torch.int64)
    return (picked * _weights(tensor.device)[: len(chosen)]).sum()


class SameRows:
    """Compares the batches of one kind of call of a module, before it is run."""

    def __init__(self, handshake: Handshake, layouts: Mapping[str, Layout], ranks: Tensor, every: int) -> None:
        """``layouts`` say how plain tensors are given, ``ranks`` is the mesh; after ``every`` calls they are compared."""
        self._handshake, self._every, self._ranks = handshake, every, ranks
        self._alike = {name: _replicated(layout) for name, layout in layouts.items()}
        self._calls = 0
        self._sums: dict[tuple[str, Axes], Any] = {}
        self._waiting: tuple[Tensor, list[tuple[str, Axes]]] | None = None

    def __call__(
        self, inputs: Mapping[str, Tensor], kind: int, random_state: Tensor | None = None, at_once: bool = False
    ) -> None:
        """Compare what the ranks bring to this call, and its ``kind``; ``at_once``: the host waits for the answer.

        Raises
        ------
        RunError
            When the ranks make different calls, or those that must hold the same rows differ, naming them.
        """
        self._settle()
        if not self._every:
            return
        self._calls += 1
        found: dict[tuple[str, Axes], Tensor] = {}
        for place, (name, leaf) in enumerate(inputs.items()):
            alike = _replicated(leaf.placements) if isinstance(leaf, DTensor) else self._alike[name]
            if alike and not leaf.is_meta:
                value = digest_of(local_of(leaf), self._calls) * (2 * place + 1)
                found["batch", alike] = found.get(("batch", alike), 0) + value
        if random_state is not None:
            everywhere = tuple(range(len(self._handshake.lines)))
            found["random state", everywhere] = digest_of(random_state.view(torch.int64), 0)
        for key, value in found.items():  # calls between two comparisons count too, each with a weight of its own
            self._sums[key] = self._sums.get(key, 0) * _FACTOR + value
        if self._calls % self._every == 0:
            self._send(kind, at_once)

    def _send(self, kind: int, at_once: bool) -> None:
        sums, self._sums = self._sums, {}
        columns = {_column(key): total.to(self._handshake.device) for key, total in sums.items()}
        self._waiting = (self._handshake.tell(kind, columns, at_once), list(sums))
        if at_once or self._handshake.device.type == "cpu":
            self._settle()

    def _settle(self) -> None:
        """Read the last answer."""
        self._handshake.settle()
        if self._waiting is None:
            return
        gathered, keys = self._waiting
        self._waiting = None
        lines = self._handshake.lines
        axes = len(lines)
        table = gathered.cpu().view(*(line.size for line in reversed(lines)), self._handshake.width)
        table = table.permute(*reversed(range(axes)), axes)
        for key in keys:
            what, alike = key
            others = [axis for axis in range(axes) if axis not in alike]
            column = table[..., _column(key)]
            groups = column.permute(*others, *alike).reshape(-1, *(table.shape[axis] for axis in alike))
            ranks = self._ranks.permute(*others, *alike).reshape(groups.shape)
            for digests, members in zip(groups.flatten(1).tolist(), ranks.flatten(1).tolist(), strict=True):
                refuse_odd(what, dict(zip(members, digests, strict=True)))


def _column(key: tuple[str, Axes]) -> int:
    """Where in the message a digest stands: after the kind the random state, then batches by the axes they are alike on."""
    what, alike = key
    return 1 if what == "random state" else 1 + sum(1 << axis for axis in alike)


def _replicated(layout: Sequence[object]) -> Axes:
    return tuple(axis for axis, placement in enumerate(layout) if isinstance(placement, Replicate))
