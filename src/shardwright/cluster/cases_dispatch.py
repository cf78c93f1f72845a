"""What issuing the common operators takes, each timed where it stands among others.

An operator is inserted at every place of a chain of others, and what the chain then takes longer is its own: its node in
autograd's graph made, run and freed, the gradients of its weights stored. Every weight wants its gradient and has one of its
own at every place. An inserted operator must keep its input's shape, so some come with others (the views around a
convolution); what those take is known from the cases before and subtracted.

A chain is short and stays in the caches; a model does not. How much longer the same operators take there is seen on the
yardstick (:mod:`shardwright.cluster.pace`), whose parts are known: all times are scaled so that they add up to it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.cluster.pace import BLOCKS, HEADS, PARTS, Yardstick, passes, size_on

SECTIONS = 12
PLACES = 4 * SECTIONS


@dataclass(frozen=True)
class Insert:
    """An operator by the number of its place (which says which of its weights to use), ``times`` over, with others."""

    apply: Callable[[int, Tensor], Tensor]
    weights: Sequence[Tensor] = ()
    times: int = 1
    beside: tuple[tuple[str, int], ...] = ()


class Chain:
    """Four kinds of operators in turn, and after each of them what is inserted."""

    def __init__(self, device: torch.device, insert: Insert | None = None) -> None:
        shape, dtype = size_on(device)
        width = shape[2]

        def weight(*sizes: int) -> Tensor:
            return torch.full(sizes, 1 / width, device=device, dtype=dtype, requires_grad=True)

        self._x = torch.ones(shape, device=device, dtype=dtype)
        self._sections = [[weight(width, width), *(weight(width) for _ in range(3))] for _ in range(SECTIONS)]
        self._inserted = None if insert is None else insert.apply
        self._weights = [*(() if insert is None else insert.weights), *(w for each in self._sections for w in each)]

    def __call__(self, x: Tensor) -> Tensor:
        inserted, place = self._inserted, 0
        for matrix, bias, scale, shift in self._sections:
            for base in (
                lambda x, matrix=matrix, bias=bias: F.linear(x, matrix, bias),
                torch.relu,
                lambda x, scale=scale, shift=shift: F.layer_norm(x, x.shape[2:], scale, shift),
                lambda x: x * self._x,
            ):
                x = base(x)
                if inserted is not None:
                    x = inserted(place, x)
                place += 1
        return x

    def best(self) -> tuple[float, float]:
        """Forward and backward seconds, the fastest of a few."""
        found = []
        for _ in range(3):
            for weight in self._weights:
                weight.grad = None
            found.append(passes(self, self._x))
        return min(found, key=sum)


class _Module(nn.Module):
    """Reads a parameter and calls another module, as modules do."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.weight)


def cases(device: torch.device) -> Mapping[str, Insert]:
    """By name; ``accumulate`` is the sum of two gradients of one tensor, ``mm`` a product of two matrices, ``lstm`` a layer
    over the sequence, ``lstm_call`` over sequences of one step (:func:`_per_step` tells the call from its steps).

    ``joined`` (two tensors and a piece cut off) only serves to tell ``slice`` and ``cat`` apart.
    """
    shape, dtype = size_on(device)
    rows, width = shape[0] * shape[1], shape[2]
    half, channels = width // 2, 8 if width > 8 else 4
    image = (1, channels, 16, rows * width // (16 * channels)) if width > 8 else (1, channels, 4, 4)
    heads = (shape[0], HEADS, shape[1], width // HEADS)

    def weights(*sizes: int) -> list[Tensor]:
        return [torch.full(sizes, 0.1, device=device, dtype=dtype, requires_grad=True) for _ in range(PLACES)]

    matrices, scales, shifts = weights(width, width), weights(width), weights(width)
    filters, gains, offsets = weights(channels, channels, 3, 3), weights(channels), weights(channels)
    other = torch.ones(shape, device=device, dtype=dtype)
    module = _Module(other)
    mean, variance = (torch.full((channels,), value, device=device, dtype=dtype) for value in (0.0, 1.0))

    def simple(apply: Callable[[Tensor], Tensor], *beside: tuple[str, int], times: int = 1) -> Insert:
        return Insert(lambda place, x: apply(x), (), times, beside)

    def weighted(apply: Callable[[int, Tensor], Tensor], *weights: list[Tensor]) -> Insert:
        return Insert(apply, [weight for each in weights for weight in each])

    def viewed(view: tuple[int, ...], apply: Callable[[int, Tensor], Tensor], *weights: list[Tensor]) -> Insert:
        made = weighted(lambda place, x: apply(place, x.view(view)).view(shape), *weights)
        return Insert(made.apply, made.weights, beside=(("view", 2),))

    layers = [nn.LSTM(width, width, batch_first=True, device=device, dtype=dtype) for _ in range(PLACES)]
    recurrences = [w for layer in layers for w in layer.parameters()]

    def recurrent(sequences: int) -> Insert:
        view = (sequences, rows // sequences, width)
        made = Insert(lambda place, x: layers[place](x.view(view))[0].reshape(shape), recurrences)
        return Insert(made.apply, made.weights, beside=(("view", 2),))

    def normed(place: int, x: Tensor) -> Tensor:
        return F.batch_norm(x, mean, variance, gains[place], offsets[place], training=True)

    def attended(x: Tensor) -> Tensor:
        x = x.view(heads)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True).reshape(shape)

    return {
        "add": simple(lambda x: x + other),
        "mul": simple(lambda x: x * other),
        "accumulate": simple(lambda x: x + x, ("add", 1)),
        "view": simple(lambda x: x.view(shape).transpose(0, 1).unsqueeze(0).squeeze(0).transpose(0, 1), times=5),
        "relu": simple(torch.relu),
        "dropout": simple(lambda x: F.dropout(x, 0.1)),
        "softmax": simple(lambda x: torch.softmax(x, -1)),
        "linear": weighted(lambda place, x: F.linear(x, matrices[place], shifts[place]), matrices, shifts),
        "matmul": weighted(lambda place, x: x @ matrices[place], matrices),
        "mm": viewed((rows, width), lambda place, x: x @ matrices[place], matrices),
        "layer_norm": weighted(
            lambda place, x: F.layer_norm(x, (width,), scales[place], shifts[place]), scales, shifts
        ),
        "rms_norm": weighted(lambda place, x: F.rms_norm(x, (width,), scales[place]), scales),
        "joined": simple(lambda x: torch.cat([x, other], -1)[..., :width]),
        "slice": simple(lambda x: torch.cat([x[..., :half], x[..., half:]], -1), ("joined", 1), ("accumulate", 1)),
        "cat": simple(lambda x: torch.cat([x[..., :half], x[..., half:]], -1), ("slice", 2), ("accumulate", 1)),
        "chunk": simple(lambda x: torch.cat(x.chunk(2, -1), -1), ("cat", 1)),
        "conv2d": viewed(image, lambda place, x: F.conv2d(x, filters[place], padding=1), filters),
        "batch_norm": viewed(image, normed, gains, offsets),
        "max_pool2d": viewed(image, lambda place, x: F.max_pool2d(x, 3, 1, 1)),
        "scaled_dot_product_attention": simple(attended, ("view", 2), ("accumulate", 2)),
        "lstm": recurrent(shape[0]),
        "lstm_call": recurrent(rows),
        "sum": simple(lambda x: x.sum(0, keepdim=True).expand(shape), ("view", 1)),
        "module": simple(module, ("mul", 1), times=2),
    }


def _per_step(table: dict[str, list[float]], steps: int) -> None:
    """From a call over so many steps and one over a single step, what a call takes by itself and what each step adds.

    >>> table = {"lstm": [40.0, 80.0], "lstm_call": [10.0, 18.0]}
    >>> _per_step(table, 31)
    >>> table == {"lstm": [1.0, 62.0 / 30], "lstm_call": [9.0, 18.0 - 62.0 / 30]}
    True
    """
    for i in (0, 1):
        whole, one = table["lstm"][i], table["lstm_call"][i]
        table["lstm"][i] = max(whole - one, 0.0) / (steps - 1)
        table["lstm_call"][i] = max(one - table["lstm"][i], 0.0)


def dispatch_seconds(yardstick: Yardstick, rounds: int = 3, repeats: int = 7) -> dict[str, list[float]]:
    """What the host takes to issue each kind of operator, forward and backward, when the yardstick is shortest.

    Every operator is timed in several rounds, so that a bad moment does not spoil one of them.
    """
    made = cases(yardstick.device)
    added: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    chain = Chain(yardstick.device)
    for name, case in [*made.items()] * rounds:
        with suppress(RuntimeError):  # a kernel that the device lacks
            longer = Chain(yardstick.device, case)
            for _ in range(repeats):
                # In units of the chain, which is timed in turn with it, the pace of the host does not matter.
                short, long = chain.best(), longer.best()
                added[name].append(((long[0] - short[0]) / sum(short), (long[1] - short[1]) / sum(short)))
    table: dict[str, list[float]] = {}
    for name, case in made.items():
        if added[name]:
            known = [sum(times * table[other][i] for other, times in case.beside) for i in (0, 1)]
            middle = [statistics.median(pair[i] for pair in added[name]) / PLACES for i in (0, 1)]
            table[name] = [max((middle[i] - known[i]) / case.times, 0.0) for i in (0, 1)]
            if name == "slice":
                table[name][0] = table["view"][0]  # it is one; only its backward pass differs
    table.pop("joined", None)
    table["module"][1] = 0.0
    if "lstm_call" in table:
        _per_step(table, size_on(yardstick.device)[0][1])
    for i in (0, 1):
        parts = BLOCKS * sum(times * table[name][i] for name, times in PARTS.items())
        for row in table.values():
            row[i] *= yardstick.fastest[i] / parts
    return table | {"yardstick": list(yardstick.fastest)}
