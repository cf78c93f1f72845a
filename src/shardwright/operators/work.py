"""Which kernels an operator runs as, and the work they do on local shapes: flops, bytes and shape features.

An operator is priced as kernels: a matrix product's backward is two more products, an elementwise operator's reads the
gradient and what was saved, a slice's fills zeros. A kernel's *ideal* seconds are those of the roofline (Williams,
Waterman, Patterson 2009): the larger of flops over peak and bytes over bandwidth; calibration measures how far from
ideal each kind of kernel stays at each size. Features are those calibration measured with: sizes of the product for
matrix products and convolutions, bytes for memory-bound kernels. What is particular about an operator stands in its record;
any other moves its inputs and outputs through memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.graph.core import DTYPE_BYTES, Op, Tensor
from shardwright.operators.record import record

WIDE, NARROW, SHORT = 1024, 128, 32
"""Columns of the tensors that calibration measures with; some kernels are timed with two of these."""
STEPS = ("forward", "backward")


@dataclass(frozen=True)
class Work:
    """One kernel for many splits at once: ``curve`` names its calibration, arrays have one entry per split.

    ``alignment`` is, for a product, the power of two of bytes that its rows are multiples of: below 16 its fast kernels
    do not run. ``padded`` are the flops of a GPU's kernel that works on whole tiles. ``narrow`` says, from 0 to 1, how much
    its rows are like the narrow ones of calibration, where those are measured apart. ``instead`` is priced on devices whose
    calibration has no such curve.
    """

    curve: str
    dtype: str
    flops: np.ndarray
    bytes: np.ndarray
    features: np.ndarray
    alignment: np.ndarray | None = None
    padded: np.ndarray | None = None
    narrow: np.ndarray | None = None
    instead: Work | None = None


Kernels = tuple[list[Work], list[Work]]
"""Those of the forward pass, and of the backward pass."""


@dataclass(frozen=True)
class LocalOp:
    """An operator seen by one rank: local extents of inputs and outputs, [splits, dims] each, and its share of the work."""

    op: Op
    kind: str
    name: str
    """That its kernels were measured under."""
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    input_shapes: Sequence[np.ndarray]
    output_shapes: Sequence[np.ndarray]
    flops: np.ndarray

    def elements(self, index: int, output: bool = False) -> np.ndarray:
        return (self.output_shapes if output else self.input_shapes)[index].prod(axis=1)

    def input_bytes(self, index: int) -> np.ndarray:
        return self.elements(index) * DTYPE_BYTES[self.inputs[index].dtype]

    @property
    def output_bytes(self) -> np.ndarray:
        """Bytes of all outputs."""
        parts = [s.prod(axis=1) * DTYPE_BYTES[t.dtype] for t, s in zip(self.outputs, self.output_shapes, strict=True)]
        return sum(parts, np.zeros(len(self.flops)))

    @property
    def bytes(self) -> np.ndarray:
        """Bytes of all inputs and outputs; an input used twice is read once."""
        first = {tensor.name: index for index, tensor in reversed(list(enumerate(self.inputs)))}
        return sum((self.input_bytes(index) for index in first.values()), self.output_bytes)

    @property
    def dtype(self) -> str:
        """The dtype the arithmetic runs in: that of the first floating-point tensor."""
        floating = [t.dtype for t in [*self.inputs, *self.outputs] if "float" in t.dtype]
        return floating[0] if floating else "int64"


def memory_work(
    curve: str,
    dtype: str,
    amount: np.ndarray,
    columns: np.ndarray | None = None,
    fewest: int = NARROW,
    instead: Work | None = None,
) -> Work:
    """A kernel bound by the bytes it moves, in rows of so many ``columns`` where that matters to it; ``fewest`` is how many
    calibration's narrow rows have."""
    narrow = None
    if columns is not None:
        narrow = np.clip(np.log2(WIDE / np.maximum(columns, 1)) / np.log2(WIDE / fewest), 0.0, 1.0)
    return Work(curve, dtype, np.zeros_like(amount), amount, amount[:, None], narrow=narrow, instead=instead)


def summed(dtype: str, amount: np.ndarray, extents: np.ndarray, kept: Sequence[bool]) -> Work:
    """A sum over the dims of ``extents`` ([splits, dims]) that are not ``kept``. Where the last dim is summed, threads share
    a row and short rows leave them idle; where it is kept, each has sums of its own and few sums do."""
    short = next((number for number, stays in enumerate(reversed(kept)) if stays), len(kept))
    if short or not len(kept):
        return memory_work("mean/forward", dtype, amount, extents[:, len(kept) - short :].prod(axis=1), SHORT)
    return memory_work("sum/forward", dtype, amount, extents[:, np.flatnonzero(kept)].prod(axis=1))


def kept_dims(part: Tensor, whole: Tensor) -> list[bool]:
    """For every dim of ``whole``, whether a tensor that is broadcast to it has that dim too."""
    shape = (1,) * (len(whole.shape) - len(part.shape)) + tuple(part.shape)
    return [mine == all_ for mine, all_ in zip(shape, whole.shape, strict=True)]


def product(
    dtype: str,
    m: np.ndarray,
    n: np.ndarray,
    k: np.ndarray,
    batch: np.ndarray,
    curve: str,
    alignment: np.ndarray | None = None,
) -> Work:
    """A (batch of) matrix product(s)."""
    moved = (m * k + k * n + m * n) * batch * DTYPE_BYTES[dtype]
    return Work(curve, dtype, 2 * m * n * k * batch, moved, np.stack([m, n, k, batch], axis=1), alignment)


def does_nothing(op: Op, tensors: Sequence[Tensor], output: Tensor | None) -> bool:
    """Whether the operator hands its input on: a dropout that drops nothing, a cast to the same dtype."""
    hands_on = record(op.target).hands_on
    return hands_on is not None and hands_on(op, tensors, output)


def kernels(local: LocalOp, copies: str = "") -> Kernels:
    """The kernels of an operator's forward and backward pass. ``copies``: how a view copies, where it must."""
    if does_nothing(local.op, local.inputs, local.outputs[0] if local.outputs else None):
        return [], []
    if local.kind == "view":
        return view_kernels(local, copies)
    known = record(local.op.target).kernels
    return memory_kernels(local) if known is None else known(local)


def view_kernels(local: LocalOp, copies: str) -> Kernels:
    """A view's gradient is a view, unless elements were left out (zeros are filled in) or repeated (they are summed)."""
    known = record(local.op.target).view_gradient
    gradients = known(local) if known is not None and local.inputs and local.inputs[0].grad else []
    if not copies:
        return [], gradients
    copied = [memory_work(f"{copies}/forward", local.dtype, local.bytes)]
    return copied, gradients or (copied if local.inputs[0].grad else [])


def memory_kernels(local: LocalOp, columns: np.ndarray | None = None) -> Kernels:
    """One kernel that is bound by the bytes of inputs and outputs, and one for its backward pass."""
    forward = [memory_work(f"{local.name}/forward", local.dtype, local.bytes, columns)]
    if not any(t.grad for t in local.inputs) or local.kind == "creation":
        return forward, []
    return forward, [memory_work(f"{local.name}/backward", local.dtype, local.bytes, columns)]
