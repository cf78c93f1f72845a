"""What calibration runs, second part: kernels bound by memory, each over sizes, forward and backward.

They are named after the operator they measure, so that pricing finds the curve of ``layer_norm`` for ``aten.layer_norm``
and falls back to a kind of kernel for an operator that was not measured. Bytes are those of all inputs and outputs of
the forward operator, in both passes: the ratio then says what a pass really moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from shardwright.cluster.cases import Case, Maker, Run, gradients
from shardwright.operators.families.embeddings import SORTED
from shardwright.operators.work import NARROW, SHORT

Tensors = list[torch.Tensor]
NEVER_LARGE = frozenset(("embedding_few",))
"""Kernels that other ones take over from at a few kilobytes."""


@dataclass(frozen=True)
class Kernel:
    """``make`` builds the inputs for about so many elements, ``apply`` runs the operator on them."""

    name: str
    make: Callable[[Maker, int, str], Tensors]
    apply: Callable[..., torch.Tensor]
    backward: bool = True
    channels: int = 0
    forward: bool = True
    only: str = ""
    """The kind of device that has it."""


def _one(make: Maker, elements: int, dtype: str) -> Tensors:
    return [make(max(elements // 1024, 1), 1024, dtype=dtype)]


def _two(make: Maker, elements: int, dtype: str) -> Tensors:
    return _one(make, elements, dtype) + _one(make, elements, dtype)


def _norm(make: Maker, elements: int, dtype: str) -> Tensors:
    return [*_one(make, elements, dtype), make(1024, dtype=dtype), make(1024, dtype=dtype)]


def _narrow(make: Maker, elements: int, dtype: str) -> Tensors:
    """As many elements in shorter rows: sums over the rows then have few columns to share out."""
    return [make(max(elements // NARROW, 1), NARROW, dtype=dtype)]


def _narrow_norm(make: Maker, elements: int, dtype: str) -> Tensors:
    return [*_narrow(make, elements, dtype), make(NARROW, dtype=dtype), make(NARROW, dtype=dtype)]


def _image(make: Maker, elements: int, dtype: str) -> Tensors:
    return [make(max(elements // (64 * 28 * 28), 2), 64, 28, 28, dtype=dtype)]


def _image_norm(make: Maker, elements: int, dtype: str) -> Tensors:
    return _channel_norm(64)(make, elements, dtype)


def _channel_norm(channels: int) -> Callable[[Maker, int, str], Tensors]:
    def build(make: Maker, elements: int, dtype: str) -> Tensors:
        image = make(max(elements // (channels * 28 * 28), 2), channels, 28, 28, dtype=dtype)
        weight, bias = make(channels, dtype="float32"), make(channels, dtype="float32")
        weight.running = torch.zeros_like(weight), torch.ones_like(weight)  # type: ignore[attr-defined]  # not timed
        return [image, weight, bias]

    return build


def _short(make: Maker, elements: int, dtype: str) -> Tensors:
    return [make(max(elements // SHORT, 1), SHORT, dtype=dtype)]


def _scaled(make: Maker, elements: int, dtype: str) -> Tensors:
    rows = max(elements // 1024, 1)
    return [make(rows, 1024, dtype=dtype), make(rows, 1, dtype=dtype)]


def _crossed(make: Maker, elements: int, dtype: str) -> Tensors:
    rows = max(elements // 4096, 1)
    return [make(rows, 64, 1, dtype=dtype), make(rows, 1, 64, dtype=dtype)]


def _lookup(make: Maker, elements: int, dtype: str) -> Tensors:
    rows = max(elements // 1024, 1)
    return _rows_of(make, rows, min(max(16 * rows, 32), 32000), 1024, dtype)


def _sorted_lookup(make: Maker, elements: int, dtype: str) -> Tensors:
    """More rows than are looked at one by one, narrow ones where there are few elements: what sorting costs is seen there.
    The table is small, because filling its gradient is priced apart."""
    columns = min(max(elements // (SORTED + 1024), 4), 1024)
    rows = max(elements // columns, SORTED + 1024)
    return _rows_of(make, rows, 8192, columns, dtype)


def _few_rows(make: Maker, elements: int, dtype: str) -> Tensors:
    return _rows_of(make, min(max(elements // 1024, 1), SORTED), 1024, 1024, dtype)


def _rows_of(make: Maker, rows: int, table: int, columns: int, dtype: str) -> Tensors:
    return [torch.randint(0, table, (rows,), device=make.device), make(table, columns, dtype=dtype)]


def _classes(make: Maker, elements: int, dtype: str) -> Tensors:
    rows = max(elements // 32768, 8)
    return [make(rows, 32768, dtype=dtype), torch.randint(0, 32768, (rows,), device=make.device)]


def _flat(make: Maker, elements: int, dtype: str) -> Tensors:
    return [make(max(elements // 65536, 1), 256, 256, dtype=dtype)]


def _picks(make: Maker, elements: int, dtype: str) -> Tensors:
    return [make(max(elements // 64, 1), 64, dtype=dtype)]


def _batch_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    mean, variance = weight.running  # type: ignore[attr-defined]
    return F.batch_norm(x, mean, variance, weight, bias, training=True)


KERNELS = (
    Kernel("add", _two, torch.add, backward=False),
    Kernel("mul", _two, torch.mul),
    Kernel("div", _two, torch.div),
    Kernel("elementwise", _two, lambda a, b: torch.addcmul(a, a, b)),
    *(
        Kernel(name, _one, getattr(torch, name))
        for name in ("relu", "tanh", "sigmoid", "exp", "neg", "rsqrt", "square")
    ),
    Kernel("pow", _one, lambda a: torch.pow(a, 2)),
    Kernel("gelu", _one, F.gelu),
    Kernel("silu", _one, F.silu),
    Kernel("dropout", _one, lambda a: F.dropout(a, 0.1, training=True)),
    Kernel("softmax", _one, lambda a: torch.softmax(a, -1)),
    Kernel("log_softmax", _one, lambda a: torch.log_softmax(a, -1)),
    Kernel("layer_norm", _norm, lambda x, w, b: F.layer_norm(x, (1024,), w, b)),
    Kernel("layer_norm_narrow", _narrow_norm, lambda x, w, b: F.layer_norm(x, (NARROW,), w, b)),
    Kernel("rms_norm", _norm, lambda x, w, b: F.rms_norm(x, (1024,), w)),
    Kernel("group_norm", _image_norm, lambda x, w, b: F.group_norm(x, 8, w.to(x.dtype), b.to(x.dtype))),
    *(Kernel("batch_norm", _channel_norm(c), _batch_norm, channels=c) for c in (32, 64, 128, 256, 1024)),
    Kernel("max_pool2d", _image, lambda x: F.max_pool2d(x, 3, 2, 1)),
    Kernel("avg_pool2d", _image, lambda x: F.avg_pool2d(x, 3, 1, 1)),
    Kernel("adaptive_avg_pool2d", _image, lambda x: F.adaptive_avg_pool2d(x, 1)),
    Kernel("upsample_nearest2d", _image, lambda x: F.interpolate(x, scale_factor=2.0)),
    Kernel("roll", _image, lambda x: torch.roll(x, (3, 3), (2, 3))),
    Kernel("cross_entropy_loss", _classes, F.cross_entropy),
    Kernel("embedding", _lookup, F.embedding),
    Kernel("embedding_sorted", _sorted_lookup, F.embedding, forward=False, only="cuda"),
    Kernel("embedding_few", _few_rows, F.embedding, forward=False, only="cuda"),
    Kernel("fill", _one, torch.zeros_like, backward=False),
    Kernel("broadcast", _scaled, torch.mul, backward=False),
    Kernel("crossed", _crossed, torch.add, backward=False),
    Kernel("sum", _one, lambda a: a.sum(0)),
    Kernel("sum_narrow", _narrow, lambda a: a.sum(0), backward=False),
    Kernel("mean", _one, lambda a: a.mean(-1)),
    Kernel("mean_narrow", _short, lambda a: a.mean(-1), backward=False),
    Kernel("cat", _two, lambda a, b: torch.cat([a, b], -1)),
    Kernel("clone", _one, torch.clone),
    Kernel("copy", _flat, lambda a: a.transpose(1, 2).contiguous()),
    Kernel("copy_rows", _flat, lambda a: a.transpose(0, 1).contiguous(), backward=False),
    Kernel("to", _one, lambda a: a.to(torch.float32 if a.dtype != torch.float32 else torch.bfloat16)),
    Kernel("cumsum", _one, lambda a: a.cumsum(0)),
    Kernel("topk", _picks, lambda a: a.topk(2, -1)[0]),
    Kernel("where", _two, lambda a, b: torch.where(a > 0, a, b)),
    Kernel("masked_fill", _one, lambda a: a.masked_fill(a > 0, 0.0)),
)


def _bytes(name: str, inputs: Tensors, out: torch.Tensor) -> float:
    if name == "fill":  # nothing is read
        return float(out.numel() * out.element_size())
    if name == "embedding_few":  # every block of threads walks through all indices
        return inputs[0].numel() * 8.0
    if name.startswith("embedding"):  # only the rows looked up are read
        return inputs[0].numel() * 8.0 + 2 * out.numel() * out.element_size()
    return float(sum(t.numel() * t.element_size() for t in [*inputs, out]))


def memory_kernels(make: Maker, dtype: str, sizes: tuple[int, ...]) -> Iterator[Case]:
    """Every memory-bound kernel at every size."""
    for kernel in KERNELS:
        for elements in sizes if kernel.only in ("", make.device.type) else ():
            with torch.device("meta"):
                sample = kernel.make(Maker(torch.device("meta")), elements, dtype)
                amount = _bytes(kernel.name, sample, kernel.apply(*sample))

            def forward(kernel: Kernel = kernel, elements: int = elements) -> Run:
                tensors = kernel.make(make, elements, dtype)
                return lambda: kernel.apply(*tensors)

            def result(kernel: Kernel = kernel, elements: int = elements) -> tuple[torch.Tensor, Tensors]:
                tensors = [t.requires_grad_(t.is_floating_point()) for t in kernel.make(make, elements, dtype)]
                out = kernel.apply(*tensors)
                used = [t for t in tensors if t.requires_grad]
                return out, used[:2] if kernel.name == "rms_norm" else used

            more = (("channels", float(kernel.channels)),) if kernel.channels else ()
            if kernel.forward:
                yield Case(kernel.name, "forward", dtype, (("bytes", amount), *more), 0.0, amount, forward)
            if kernel.backward:
                if kernel.name == "embedding":  # the table's gradient is written as a whole
                    amount += sample[1].numel() * sample[1].element_size()
                yield Case(kernel.name, "backward", dtype, (("bytes", amount), *more), 0.0, amount, gradients(result))
