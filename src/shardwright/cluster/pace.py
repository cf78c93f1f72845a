"""How fast the host is just now: a core that nobody else uses, and a yardstick that is timed beside what is measured.

Cores of virtual machines are often hardware threads: while the thread beside it works, for whomever, a core runs at about
half its speed, and the scheduler inside the machine cannot know. What issuing operators takes therefore flips between two
values, many times a minute. Two remedies, both needed on a busy machine: the process is tied to the core that is least
disturbed (the thread that runs backward passes takes turns with the main one, so one core is enough for both), and a small
training step of fixed size is timed before and after everything that is measured. Divided by that, times repeat.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F

LOOP = 20_000
"""Additions of one look at a core: half a millisecond."""


def _look() -> float:
    """Seconds that this core takes for a fixed piece of Python."""
    total, began = 0, time.perf_counter()
    for number in range(LOOP):
        total += number
    return time.perf_counter() - began


def quietest_core(rounds: int = 7) -> int | None:
    """The core of those allowed that runs Python fastest (the median of a few looks); None where none can be chosen."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    allowed = os.sched_getaffinity(0)
    looks: dict[int, list[float]] = {core: [] for core in sorted(allowed)}
    try:
        for _ in range(rounds):
            for core, samples in looks.items():
                os.sched_setaffinity(0, {core})
                samples.append(_look())
    finally:
        os.sched_setaffinity(0, allowed)
    return min(looks, key=lambda core: statistics.median(looks[core]))


def _tie(cores: set[int]) -> None:
    """Tie every thread of this process to these cores; threads started later inherit it."""
    for thread in map(int, os.listdir("/proc/self/task")):
        try:
            os.sched_setaffinity(thread, cores)
        except OSError:  # a thread that ended meanwhile
            continue


@contextmanager
def on_quietest_core() -> Iterator[int | None]:
    """This process on its quietest core and nowhere else; gives the core, or None where processes cannot be tied."""
    core = quietest_core()
    if core is None or not os.path.isdir("/proc/self/task"):
        yield None
        return
    allowed = os.sched_getaffinity(0)
    _tie({core})
    try:
        yield core
    finally:
        _tie(allowed)


BLOCKS, HEADS = 12, 2
PARTS = {"layer_norm": 2, "linear": 6, "view": 7, "scaled_dot_product_attention": 1, "mul": 1, "add": 2, "dropout": 2}
PARTS |= {"relu": 1, "accumulate": 4, "module": 11}
"""What a block of the yardstick consists of, by the names of :mod:`shardwright.cluster.cases_dispatch`."""


class _Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down, self.dropout = nn.Linear(width, width), nn.Linear(width, width), nn.Dropout(0.1)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.before(x)
        query, key, value = (
            self._heads(self.query(normed)),
            self._heads(self.key(normed)),
            self._heads(self.value(normed)),
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.down(torch.relu(self.up(self.between(x)))))


def size_on(device: torch.device) -> tuple[tuple[int, int, int], torch.dtype]:
    """Shape and dtype of the tensors: nothing to compute for a processor, the usual kernels of an accelerator."""
    if device.type != "cuda":
        return (2, 4, 8), torch.float32
    # Older devices only emulate bfloat16, and not for every kernel.
    usual = torch.cuda.is_bf16_supported(including_emulation=False)
    return (2, 16, 128), torch.bfloat16 if usual else torch.float32


class Yardstick:
    """Forward and backward passes of a transformer on tensors so small that only the host's time is seen.

    It is as long as a model, so that its modules, weights and graph do not stay in the caches either.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        shape, dtype = size_on(device)
        self._blocks = nn.Sequential(*(_Block(shape[2]) for _ in range(BLOCKS))).to(device=device, dtype=dtype)
        self._x = torch.ones(shape, device=device, dtype=dtype)
        self.fastest = min((self.passes() for _ in range(20)), key=sum)
        """Forward and backward seconds when the host was fastest."""

    def passes(self) -> tuple[float, float]:
        """What the host takes for the forward and the backward pass, now."""
        self._blocks.zero_grad(set_to_none=True)
        return passes(self._blocks, self._x)

    def seconds(self) -> float:
        """How long the yardstick is just now: the fastest of a few, since whatever ran before has emptied the caches."""
        return min(sum(self.passes()) for _ in range(3))

    def beside(self, timed: Callable[[], float], repeats: int) -> list[tuple[float, float]]:
        """``timed``'s own seconds again and again, each with the mean of the yardstick before and after it."""
        found, before = [], self.seconds()
        for _ in range(repeats):
            taken, after = timed(), self.seconds()
            found.append((taken, (before + after) / 2))
            before = after
        return found


def passes(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[float, float]:
    """The host's seconds for a model's forward and backward pass."""
    if x.is_cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    out = model(x)
    between = time.perf_counter()
    out.backward(x)
    return between - began, time.perf_counter() - between
