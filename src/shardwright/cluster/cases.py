"""What calibration runs: matrix products, attention and recurrences over shapes, dtypes and passes.

A case knows its features, flops and bytes exactly as pricing counts them (:mod:`shardwright.operators.work`), so that the
ratio of measured to ideal seconds carries over. Shapes are ranges: batches of tokens by widths, heads by sequence lengths;
none is taken from a model that predictions are judged on. Lists are long; whoever runs them may stop at any point, because
they are shuffled, or curve by curve in turn, ends first.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

Run = Callable[[], Any]
BLOCK = 2**16
MODEL_BYTES, LAYERS = 2**26, 64
"""A model whose weights are taken in turn: so many bytes come from memory every time, no cache holds them. One of so many
layers that has fewer bytes in all stays in the caches."""
BYTES = {"float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclass(frozen=True)
class Case:
    """One kernel at one size: ``build`` makes its tensors and returns what to time."""

    kernel: str
    step: str
    dtype: str
    features: tuple[tuple[str, float], ...]
    flops: float
    bytes: float
    build: Callable[[], Run]


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, "float32" if name == "tf32" else name)


def gradients(make: Callable[[], tuple[torch.Tensor, list[torch.Tensor]]]) -> Callable[[], Run]:
    """Build a backward pass: ``make`` returns a result and the tensors its gradient is wanted for."""

    def build() -> Run:
        out, wanted = make()
        grad = torch.randn_like(out) * 0.1 if out.is_cuda else torch.full_like(out, 0.1)
        return lambda: torch.autograd.grad(out, wanted, grad, retain_graph=True)

    return build


class Maker:
    """Random tensors on a device; values are small so that long chains stay finite, and random because power matters.

    On a CPU, where drawing numbers would take most of the time, large tensors repeat a random block.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory: dict[str, torch.Tensor] = {}

    def __call__(self, *shape: int, dtype: str = "float32", grad: bool = False) -> torch.Tensor:
        drawn: tuple[int, ...] = shape
        count = math.prod(shape)
        if self.device.type == "cpu" and count > BLOCK:
            drawn = (BLOCK,)
        tensor = torch.randn(*drawn, device=self.device, dtype=torch.float32).mul_(0.1).to(torch_dtype(dtype))
        if drawn != shape:
            tensor = tensor.repeat(-(-count // BLOCK))[:count].view(shape)
        return tensor.requires_grad_(grad)

    def weights(self, rows: int, columns: int, dtype: str) -> Iterator[torch.Tensor]:
        """A weight for every call. On a CPU another one each time, as the layers of a model follow each other: with few
        rows a product takes as long as its weight takes to come, and the same one again would come from a cache."""
        count, whole = rows * columns, MODEL_BYTES // BYTES[dtype]
        if self.device.type != "cpu" or count * LAYERS < whole or 2 * count > whole:
            return itertools.repeat(self(rows, columns, dtype=dtype))
        if dtype not in self._memory:
            self._memory[dtype] = self(whole, dtype=dtype)
        pieces = self._memory[dtype][: whole // count * count].view(-1, rows, columns)
        return itertools.cycle(pieces.unbind())


def _product(make: Maker, m: int, n: int, k: int, dtype: str, step: str, kernel: str) -> Case:
    """One product of sizes (m, n, k), its operands laid out as a linear layer's pass lays them out."""

    def build() -> Run:
        if step == "weight":  # x.T @ grad, as grad.T @ x transposed
            a, b = make(k, m, dtype=dtype).t(), make(k, n, dtype=dtype)
            return lambda: torch.mm(a, b)
        a, backward = make(m, k, dtype=dtype), step == "input"  # grad @ w, else x @ w.T
        weights = make.weights(*((k, n) if backward else (n, k)), dtype)
        if step == "biased":  # x @ w.T + b, for which libraries choose another kernel
            bias = make(n, dtype=dtype)
            return lambda: torch.addmm(bias, a, next(weights).t())
        return lambda: torch.mm(a, next(weights) if backward else next(weights).t())

    features = (("m", float(m)), ("n", float(n)), ("k", float(k)))
    moved = (m * k + k * n + m * n) * BYTES[dtype]
    return Case(kernel, step, dtype, features, 2.0 * m * n * k, moved, build)


def matmuls(make: Maker, dtype: str, most_flops: float, backward_rows: int = 256) -> Iterator[Case]:
    """Products over a grid of sizes, in the forms a linear layer uses (with a bias and backward from so many rows on)."""
    rows = (1, 4, 16, 64, 256, 1024, 4096, 8192, 16384, 65536)
    widths = (64, 256, 768, 1024, 2048, 4096, 8192, 16384)
    for m, n, k in itertools.product(rows, widths, widths):
        if m * n * k * 2 > most_flops or max(m, n, k) > 128 * max(min(m, n, k), 64):
            continue
        yield _product(make, m, n, k, dtype, "forward", "matmul")
        if m >= backward_rows:
            yield _product(make, m, n, k, dtype, "input", "matmul")
            yield _product(make, n, k, m, dtype, "weight", "matmul")
            yield _product(make, m, n, k, dtype, "biased", "matmul")


UNALIGNED = {"matmul_unaligned": (1001, 10001, 50257), "matmul_even": (1002, 10004, 30522)}
"""Widths whose rows are no multiple of 16 bytes: odd ones, and for 2-byte numbers those of 4 or 8 bytes."""


def odd_matmuls(make: Maker, dtype: str, most_flops: float) -> Iterator[Case]:
    """Products with a width that is no multiple of eight, such as a vocabulary of 50257 or 30522."""
    for kernel, widths in UNALIGNED.items():
        if kernel == "matmul_even" and BYTES[dtype] >= 4:
            continue
        for m, odd, k in itertools.product((512, 2048, 8192, 16384), widths, (768, 1600, 4096)):
            if m * odd * k * 2 <= most_flops:
                yield _product(make, m, odd, k, dtype, "forward", kernel)
                yield _product(make, m, k, odd, dtype, "input", kernel)
                yield _product(make, odd, k, m, dtype, "weight", kernel)


def batched(make: Maker, dtype: str, most_flops: float) -> Iterator[Case]:
    """Batches of products."""
    for b, m, n, k in itertools.product(
        (4, 32, 256), (64, 256, 1024, 4096), (64, 256, 1024, 4096), (64, 256, 1024, 4096)
    ):
        moved = b * (m * k + k * n + m * n) * BYTES[dtype]
        if 2.0 * b * m * n * k > most_flops or moved > 2e9:
            continue

        def build(b: int = b, m: int = m, n: int = n, k: int = k) -> Run:
            left, right = make(b, m, k, dtype=dtype), make(b, k, n, dtype=dtype)
            return lambda: torch.bmm(left, right)

        features = (("m", float(m)), ("n", float(n)), ("k", float(k)), ("batch", float(b)))
        yield Case("bmm", "forward", dtype, features, 2.0 * b * m * n * k, moved, build)


def attentions(make: Maker, dtype: str, most_flops: float) -> Iterator[Case]:
    """Scaled dot-product attention: plain, causal, with a mask and with a bias that has a gradient.

    Few shapes: libraries plan each one for a second.
    """
    heads, lengths = (16, 128, 512), (128, 512, 1024, 2048, 4096)
    grid = [*itertools.product(heads, lengths, (64,), ("", "_causal"))]
    grid += itertools.product((64, 256), (512, 2048, 8192), (128,), ("", "_causal"))
    grid += itertools.product((64, 256), (128, 512, 1024, 2048), (64,), ("_masked",))
    grid += itertools.product((16, 64, 256), (64, 256, 1024), (64,), ("_biased",))
    for count, length, width, kind in grid:
        causal, masked, biased = kind == "_causal", kind == "_masked", kind == "_biased"
        flops = 4.0 * count * length * length * width * (0.5 if causal else 1.0)
        moved = 4 * count * length * width * BYTES[dtype] + (length * length if masked else 0)
        moved += count * length * length * BYTES[dtype] if biased else 0
        if flops > most_flops or moved > 4e9 or (masked and length > 4096):
            continue
        features = (
            ("heads", float(count)),
            ("rows", float(length)),
            ("columns", float(length)),
            ("width", float(width)),
        )
        batch = 4 if count % 4 == 0 else 1
        sizes = (batch, count // batch, length, width, causal, masked, biased)

        def tensors(grad: bool, sizes: tuple = sizes) -> tuple[list[torch.Tensor], Callable[..., torch.Tensor]]:
            batch, count, length, width, causal, masked, biased = sizes
            made = [make(batch, length, count, width, dtype=dtype, grad=grad).transpose(1, 2) for _ in range(3)]
            mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=make.device).tril() if masked else None
            if biased:
                made.append(make(batch, count, length, length, dtype=dtype, grad=grad))
                return made, F.scaled_dot_product_attention
            return made, functools.partial(F.scaled_dot_product_attention, attn_mask=mask, is_causal=causal)

        def forward(tensors: Callable = tensors) -> Run:
            made, apply = tensors(False)
            return lambda: apply(*made)

        def result(tensors: Callable = tensors) -> tuple[torch.Tensor, list[torch.Tensor]]:
            made, apply = tensors(True)
            return apply(*made), made

        yield Case(f"attention{kind}", "forward", dtype, features, flops, moved, forward)
        yield Case(f"attention{kind}", "backward", dtype, features, 2.5 * flops, 2 * moved, gradients(result))


def recurrences(make: Maker, dtype: str, most_flops: float) -> Iterator[Case]:
    """One LSTM layer over sequences."""
    for length, batch, width in itertools.product((16, 64, 256), (16, 64, 256), (128, 512, 1024, 2048, 4096)):
        flops = 2.0 * 8 * width * width * length * batch
        if flops > most_flops:
            continue
        moved = (2 * length * batch * width + 8 * width * width + 8 * width + 4 * batch * width) * BYTES[dtype]
        features = (("steps", float(length)), ("batch", float(batch)), ("width", float(width)))
        sizes = (length, batch, width)

        def layer(sizes: tuple = sizes) -> tuple[torch.Tensor, list[torch.Tensor]]:
            length, batch, width = sizes
            lstm = torch.nn.LSTM(width, width, device=make.device, dtype=torch_dtype(dtype))
            x = make(length, batch, width, dtype=dtype, grad=True)
            return lstm(x)[0], [x, *lstm.parameters()]

        def forward(sizes: tuple = sizes) -> Run:
            length, batch, width = sizes
            lstm = torch.nn.LSTM(width, width, device=make.device, dtype=torch_dtype(dtype))
            x = make(length, batch, width, dtype=dtype)
            return lambda: lstm(x)

        yield Case("lstm", "forward", dtype, features, flops, moved, forward)
        yield Case("lstm", "backward", dtype, features, 2 * flops, 2 * moved, gradients(layer))


def shuffled(cases: Iterator[Case], seed: int = 0) -> list[Case]:
    """The cases in a fixed random order: stopping early leaves an even sample."""
    items = list(cases)
    random.Random(seed).shuffle(items)
    return items


def ends_first(cases: Iterator[Case], seed: int = 0) -> list[Case]:
    """The cases of all curves in turn, of each the smallest, the largest, then halfway between those before: stopping early
    leaves every curve its whole range. The smallest take no time and tell what any kernel costs at least, without which
    everything small is overpriced; without its upper end a curve says little, for small kernels cost the same whatever
    they do.
    """
    curves: dict[tuple, list[Case]] = {}
    for case in cases:
        kind = (case.kernel, case.step, case.dtype, *case.features[1:])  # of every number of channels both ends
        curves.setdefault(kind, []).append(case)
    turns: list[list[Case]] = []
    for items in curves.values():
        items.sort(key=lambda case: case.bytes)
        order, spans = [0, len(items) - 1], [(0, len(items) - 1)]
        for low, high in spans:
            if high - low > 1:
                middle = (low + high) // 2
                order.append(middle)
                spans += [(low, middle), (middle, high)]
        turns.append([items[place] for place in dict.fromkeys(order)])
    random.Random(seed).shuffle(turns)
    return [case for turn in itertools.zip_longest(*turns) for case in turn if case is not None]
