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

from shardwright._torch_compat import local_of, start_gathering
from shardwright.lowering.collectives import Line
from shardwright.operators.rules import Layout
from shardwright.runtime.agreement import refuse_odd

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
    """Compares the batches of one module's calls; ``lines`` are the ranks along every mesh axis through this one."""

    def __init__(
        self, lines: Sequence[Line], layouts: Mapping[str, Layout], ranks: Tensor, device: torch.device, every: int
    ) -> None:
        """``layouts`` say how plain tensors are given, ``ranks`` is the mesh, ``every`` calls are one comparison."""
        self._lines, self._device, self._every, self._ranks = lines, device, every, ranks
        self._alike = {name: _replicated(layout) for name, layout in layouts.items()}
        self._calls = 0
        self._sums: dict[tuple[str, Axes], Any] = {}
        self._waiting: tuple[Tensor, list[tuple[str, Axes]]] | None = None

    def __call__(self, inputs: Mapping[str, Tensor], random_state: Tensor | None = None) -> None:
        """Compare what the ranks bring to this call.

        Raises
        ------
        RunError
            When ranks that must hold the same rows differ, naming them.
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
            found["random state", tuple(range(len(self._lines)))] = digest_of(random_state.view(torch.int64), 0)
        for key, value in found.items():  # calls between two comparisons count too, each with a weight of its own
            self._sums[key] = self._sums.get(key, 0) * _FACTOR + value
        if self._sums and self._calls % self._every == 0:
            self._send()

    def _send(self) -> None:
        sums, self._sums = self._sums, {}
        mine = torch.stack([total.to(self._device) for total in sums.values()])[None]
        for line in self._lines:
            mine = start_gathering(mine, line.size, line.group).wait()
        self._waiting = (mine, list(sums))
        if self._device.type == "cpu":
            self._settle()

    def _settle(self) -> None:
        """Read the last answer."""
        if self._waiting is None:
            return
        gathered, keys = self._waiting
        self._waiting = None
        axes = len(self._lines)
        table = gathered.cpu().view(*(line.size for line in reversed(self._lines)), len(keys))
        table = table.permute(*reversed(range(axes)), axes)
        for number, (what, alike) in enumerate(keys):
            others = [axis for axis in range(axes) if axis not in alike]
            groups = table[..., number].permute(*others, *alike).reshape(-1, *(table.shape[axis] for axis in alike))
            ranks = self._ranks.permute(*others, *alike).reshape(groups.shape)
            for digests, members in zip(groups.flatten(1).tolist(), ranks.flatten(1).tolist(), strict=True):
                refuse_odd(what, dict(zip(members, digests, strict=True)))


def _replicated(layout: Sequence[object]) -> Axes:
    return tuple(axis for axis, placement in enumerate(layout) if isinstance(placement, Replicate))
