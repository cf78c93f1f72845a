"""Which kernels an operator runs as, and the work they do on local shapes: flops, bytes and shape features.

An operator is priced as kernels: a matrix product's backward is two more products, an elementwise operator's reads the
gradient and what was saved, a slice's fills zeros. A kernel's *ideal* seconds are those of the roofline (Williams,
Waterman, Patterson 2009): the larger of flops over peak and bytes over bandwidth; calibration measures how far from
ideal each kind of kernel stays at each size. Features are those calibration measured with: sizes of the product for
matrix products and convolutions, bytes for memory-bound kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.cluster.cases_memory import NARROW, SHORT, SORTED, WIDE
from shardwright.graph.core import DTYPE_BYTES, Atom, Op, Tensor

SAME_KERNEL = {
    "_native_batch_norm_legit_functional": "batch_norm",
    "_native_batch_norm_legit": "batch_norm",
    "native_batch_norm": "batch_norm",
    "native_layer_norm": "layer_norm",
    "native_group_norm": "group_norm",
    "native_dropout": "dropout",
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
    "_to_copy": "to",
    "stack": "cat",
    "contiguous": "copy",
    "nll_loss": "cross_entropy_loss",
    "nll_loss_nd": "cross_entropy_loss",
}
"""Operators that run as the kernel calibration measured under another name."""

LINEAR = frozenset(("add", "sub", "rsub"))
PRODUCTS = frozenset(("mul", "div", "maximum", "minimum", "where", "pow"))
LOOKUPS = frozenset(("embedding", "index_select", "gather", "index"))
CUTS = frozenset(("slice", "select", "narrow"))
PIECES = frozenset(("chunk", "split", "split_with_sizes", "unbind", "tensor_split"))
STEPS = ("forward", "backward")
ALIASES = frozenset(("detach", "alias", "lift_fresh_copy"))


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


@dataclass(frozen=True)
class LocalOp:
    """An operator seen by one rank: local extents of inputs and outputs, [splits, dims] each, and its share of the work."""

    op: Op
    kind: str
    name: str
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


def base_name(target: str) -> str:
    """``aten.add.Tensor`` → ``add``."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target


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


def _kept(part: Tensor, whole: Tensor) -> list[bool]:
    """For every dim of ``whole``, whether a tensor that is broadcast to it has that dim too."""
    shape = (1,) * (len(whole.shape) - len(part.shape)) + tuple(part.shape)
    return [mine == all_ for mine, all_ in zip(shape, whole.shape, strict=True)]


def _argument(op: Op, index: int, name: str, default: object) -> object:
    return op.args[index] if len(op.args) > index else op.kwarg(name, default)  # type: ignore[arg-type]


def does_nothing(op: Op, tensors: Sequence[Tensor], output: Tensor | None) -> bool:
    """Whether the operator hands its input on: a dropout that drops nothing, a cast to the same dtype."""
    name = base_name(op.target)
    if name == "dropout":
        return _argument(op, 1, "p", 0.5) == 0 or _argument(op, 2, "train", True) is False
    if name in ("to", "type_as"):
        casts = output is not None and bool(tensors) and tensors[0].dtype == output.dtype
        return casts and not any(isinstance(a, Atom) and a.kind == "memory_format" for a in op.args)
    return name in ALIASES


def _binary_backward(local: LocalOp) -> list[Work]:
    """Each input's gradient is one product (none for sums); a broadcast input's is summed over what was broadcast."""
    out, found = local.output_bytes, []
    size = DTYPE_BYTES[local.dtype]
    for index, tensor in enumerate(local.inputs):
        if not tensor.grad:
            continue
        if local.name in PRODUCTS:
            found.append(memory_work("mul/forward", local.dtype, 3 * out))
        if tensor.elements < local.outputs[0].elements:
            moved = out + local.elements(index) * size
            found.append(summed(local.dtype, moved, local.output_shapes[0], _kept(tensor, local.outputs[0])))
    return found


def _binary_forward(local: LocalOp, name: str) -> Work:
    """An operator of two tensors. Where one is repeated along some dims, as a scale of every row is, positions are computed
    number by number, which costs more than the bytes; more so where both are."""
    plain = memory_work(f"{name}/forward", local.dtype, local.bytes)
    out = local.outputs[0]
    repeated = [1 < tensor.elements < out.elements for tensor in local.inputs]
    if sum(repeated) == 0:
        return plain
    kind = "broadcast" if sum(repeated) < len(repeated) else "crossed"
    return memory_work(f"{kind}/forward", local.dtype, local.bytes, instead=plain)


def _lookup(local: LocalOp) -> tuple[list[Work], list[Work]]:
    table = 0 if local.inputs[0].grad or "float" in local.inputs[0].dtype else 1
    indices = sum((local.input_bytes(i) for i in range(len(local.inputs)) if i != table), np.zeros(len(local.flops)))
    moved = indices + 2 * local.output_bytes
    forward = [memory_work("embedding/forward", local.dtype, moved)]
    if not local.inputs[table].grad:
        return forward, []
    size = local.input_bytes(table)
    plain = memory_work("embedding/backward", local.dtype, moved + size)
    filled = memory_work("fill/forward", local.dtype, size)
    if local.name in ("gather", "index_select"):  # added to zeros, wherever it belongs
        return forward, [filled, memory_work("elementwise/forward", local.dtype, moved)]
    few = local.name == "embedding" and local.inputs[1 - table].elements <= SORTED
    if few:
        return forward, [memory_work("embedding_few/backward", local.dtype, indices, instead=plain), filled]
    return forward, [memory_work("embedding_sorted/backward", local.dtype, moved, instead=plain), filled]


def _batch_norm(local: LocalOp) -> tuple[list[Work], list[Work]]:
    """Its kernels give each channel one block of threads, so few channels leave most of a GPU idle."""
    moved = local.bytes
    features = np.stack([moved, local.input_shapes[0][:, 1]], axis=1)
    passes = [Work(f"batch_norm/{step}", local.dtype, np.zeros_like(moved), moved, features) for step in STEPS]
    return passes[:1], passes[1:] if any(t.grad for t in local.inputs) else []


def _left(local: LocalOp) -> list[bool]:
    """For every dim of the input of a sum or mean, whether it is left."""
    rank, dims = len(local.inputs[0].shape), _argument(local.op, 1, "dim", None)
    if isinstance(dims, int) and not isinstance(dims, bool):
        dims = (dims,)
    gone = {d % max(rank, 1) for d in dims if isinstance(d, int)} if isinstance(dims, tuple | list) else set()
    gone = gone or set(range(rank))
    return [dim not in gone for dim in range(rank)]


def _view_backward(local: LocalOp) -> list[Work]:
    """A view's gradient is a view, unless elements were left out (zeros are filled in) or repeated (they are summed)."""
    if not local.inputs or not local.inputs[0].grad:
        return []
    whole, part = local.input_bytes(0), local.output_bytes
    if local.name in CUTS:
        return [memory_work("clone/forward", local.dtype, whole), memory_work("clone/forward", local.dtype, 2 * part)]
    if local.name in PIECES:
        return [memory_work("cat/forward", local.dtype, 2 * whole)]
    if local.name in ("expand", "repeat", "expand_as") and local.outputs[0].elements > local.inputs[0].elements:
        kept = _kept(local.inputs[0], local.outputs[0]) if local.name != "repeat" else [True]
        extents = local.output_shapes[0] if local.name != "repeat" else local.input_shapes[0][:, -1:]
        return [summed(local.dtype, whole + part, extents, kept)]
    return []


def memory_kernels(local: LocalOp, copies: str) -> tuple[list[Work], list[Work]]:
    """Kernels of an operator that is bound by memory."""
    if does_nothing(local.op, local.inputs, local.outputs[0] if local.outputs else None):
        return [], []
    if local.kind == "view" or (local.name == "contiguous" and not copies):
        gradients = _view_backward(local)
        if not copies:
            return [], gradients
        copied = [memory_work(f"{copies}/forward", local.dtype, local.bytes)]
        return copied, gradients or (copied if local.inputs[0].grad else [])
    if local.name in LOOKUPS and len(local.inputs) >= 2:
        return _lookup(local)
    name = SAME_KERNEL.get(local.name, local.name)
    if name == "batch_norm":
        return _batch_norm(local)
    columns = local.input_shapes[0][:, -1] if name == "layer_norm" else None
    forward = [memory_work(f"{name}/forward", local.dtype, local.bytes, columns)]
    if name in ("sum", "mean") and local.outputs and len(local.inputs) == 1:
        forward = [summed(local.dtype, local.bytes, local.input_shapes[0], _left(local))]
    if local.name in LINEAR | PRODUCTS and len(local.inputs) > 1:
        forward = [_binary_forward(local, name)]
    if not any(t.grad for t in local.inputs) or local.kind == "creation":
        return forward, []
    if local.name in LINEAR or (local.name in PRODUCTS and len(local.inputs) > 1):
        return forward, _binary_backward(local)
    if local.name in ("mul", "div"):  # by a number
        return forward, forward
    if local.name == "clone":
        return forward, []
    return forward, [memory_work(f"{name}/backward", local.dtype, local.bytes, columns)]
