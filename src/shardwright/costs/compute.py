"""Seconds of one operator under many splits at once: its kernels on the local shapes, priced by the device's calibration.

A kernel takes its ideal (roofline) seconds times the ratio calibration measured for kernels of its kind at that size;
without calibration, plain assumptions stand in, and the price says so (``mesh.device.calibration``). Exchanges between
the pieces while an operator runs are added as collectives. Views cost the device nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shardwright.cluster import Curve, Device, Mesh
from shardwright.cluster.fitting import peak_dtype
from shardwright.costs import collectives
from shardwright.costs.engines import engine_seconds
from shardwright.graph.core import DTYPE_BYTES, Op, Tensor
from shardwright.operators.record import measured_name
from shardwright.operators.rules import OpRules, Shard, Split, Window
from shardwright.operators.work import LocalOp, Work, kernels

KINDS_WITHOUT_CURVE = {"matmul": 0.7, "bmm": 0.55, "convolution": 0.5, "grouped": 0.5, "depthwise": 0.3}
KINDS_WITHOUT_CURVE |= {"attention": 0.5, "attention_causal": 0.45, "attention_masked": 0.3, "lstm": 0.2}
MEASURED_BEFORE = {"grouped": "convolution", "attention_biased": "attention_masked"}
"""Kinds that older profiles have under another name."""
MEMORY_EFFICIENCY = 0.75
GPU_KERNEL_FLOOR = 2.5e-6
BACKWARD = 1.5
"""Bytes of an elementwise operator's backward kernel over those of its forward one: the output's gradient, what was saved
and the input's gradient, where there were an input and an output."""


def _cuts(rules: OpRules, splits: Sequence[Split]) -> np.ndarray:
    """[splits, axes]: index of the loop each axis cuts, -1 for none."""
    number = {loop.name: i for i, loop in enumerate(rules.loops)}
    table = [[-1 if name is None else number[name] for name in split] for split in splits]
    return np.array(table, dtype=np.int64).reshape(len(splits), -1)


def _local_extents(shape: Sequence[int], needs: Sequence, cuts: np.ndarray, sizes: Sequence[float]) -> np.ndarray:
    """[splits, dims]: local extents of one tensor; ``needs`` is what each loop asks of (or gives) it."""
    pieces = np.ones((len(cuts), len(shape)))
    extra = np.zeros((len(cuts), len(shape)))
    for number, need in enumerate(needs):
        if isinstance(need, (Shard, Window)):
            for axis, size in enumerate(sizes):
                pieces[:, need.dim] *= np.where(cuts[:, axis] == number, size, 1)
            if isinstance(need, Window):
                overlap = max(need.high - need.low + 1 - need.scale, 0)
                extra[:, need.dim] += np.where((cuts == number).any(axis=1), overlap, 0)
    extents = np.array(shape, dtype=float)
    return np.minimum(_longest(extents, pieces) + extra, extents) if len(shape) else np.ones((len(cuts), 0))


def _longest(extents: np.ndarray | float, pieces: np.ndarray) -> np.ndarray:
    """Points of the largest of so many pieces (shares make them fractions, hence the room for rounding)."""
    return np.ceil(extents / pieces - 1e-9)


def localise(
    op: Op, rules: OpRules, tensors: Mapping[str, Tensor], splits: Sequence[Split], sizes: Sequence[float]
) -> LocalOp:
    """The operator as the rank with the largest pieces sees it, for every split."""
    cuts = _cuts(rules, splits)
    inputs = [tensors[name] for name in op.inputs]
    outputs = [(i, tensors[name]) for i, name in enumerate(op.outputs) if name is not None]
    share = np.ones(len(splits))
    for number, loop in enumerate(rules.loops):
        if loop.divides and loop.extent > 0:
            pieces = np.where(cuts == number, np.array(sizes), 1).prod(axis=1)
            share *= _longest(loop.extent, pieces) / loop.extent
    return LocalOp(
        op,
        rules.kind,
        measured_name(op.target),
        inputs,
        [t for _, t in outputs],
        [_local_extents(t.shape, [r.inputs[i] for r in rules.loops], cuts, sizes) for i, t in enumerate(inputs)],
        [_local_extents(t.shape, [r.outputs[i] for r in rules.loops], cuts, sizes) for i, t in outputs],
        rules.flops * share,
    )


def _assumed_ratio(work: Work, device: Device, ideal: np.ndarray, peak: float) -> np.ndarray:
    """How far from ideal a kernel stays on a device nobody calibrated.

    Small and skinny shapes leave arithmetic units idle; they do not slow memory down, which bounds the skinniest.
    """
    family = work.curve.split("/")[0]
    if family not in KINDS_WITHOUT_CURVE:
        return np.full(len(work.bytes), 1 / MEMORY_EFFICIENCY)
    efficiency = np.full(len(work.bytes), KINDS_WITHOUT_CURVE[family])
    tile = 96 if device.kind == "cuda" else 8
    if family in ("matmul", "bmm", "convolution", "grouped"):
        m, n, k = work.features[:, 0], work.features[:, 1], work.features[:, 2]
        efficiency = efficiency * (m / (m + tile)) * (n / (n + tile)) * (k / (k + tile))
    arithmetic = work.flops / peak / np.maximum(efficiency, 1e-3)
    memory = work.bytes / device.bandwidth / MEMORY_EFFICIENCY
    return np.maximum(arithmetic, memory) / np.maximum(ideal, 1e-30)


def _name(work: Work) -> tuple[str, str, str]:
    family, which = work.curve.split("/")
    return family, work.dtype, which


def _curve(name: str, dtype: str, which: str, device: Device) -> Curve | None:
    """The measured curve of a kernel: its own dtype's, else that of a dtype of equal width, else that of float32."""
    curves = {} if device.profile is None else device.profile.by_name
    dtypes = [dtype, {"float16": "bfloat16", "bfloat16": "float16"}.get(dtype, "float32"), "float32"]
    return next((curves[key] for d in dtypes if (key := f"{name}/{d}/{which}") in curves), None)


def _seconds(work: Work, device: Device, ideal: np.ndarray, peak: float) -> np.ndarray:
    """Real seconds: by what was measured, or assumed for a device (or a dense kernel) nobody measured."""
    family, which = work.curve.split("/")
    curve = _curve(family, work.dtype, which, device)
    if curve is None and family in MEASURED_BEFORE:
        family = MEASURED_BEFORE[family]
        curve = _curve(family, work.dtype, which, device)
    if curve is None and device.profile is not None and family not in KINDS_WITHOUT_CURVE:
        curve = _curve("elementwise", work.dtype, "forward", device)
        if curve is not None and which == "backward":
            return curve.seconds(BACKWARD * work.features, BACKWARD * ideal)
    if curve is None:
        return ideal * _assumed_ratio(work, device, ideal, peak)
    seconds = curve.seconds(work.features, ideal)
    narrow = None if work.narrow is None else _curve(f"{family}_narrow", work.dtype, which, device)
    if narrow is not None:
        seconds = seconds + work.narrow * (narrow.seconds(work.features, ideal) - seconds)
    if work.alignment is not None and (work.alignment < 16).any():
        seconds = _misaligned(seconds, work, device, ideal)
    return seconds


def _misaligned(seconds: np.ndarray, work: Work, device: Device, ideal: np.ndarray) -> np.ndarray:
    """Products whose rows are no multiple of 16 bytes: odd widths of 2-byte numbers apart from even ones.

    Asynchronous copies need 4 bytes, so odd widths fall back two generations of kernels, even ones one.
    """
    assert work.alignment is not None
    family, which = work.curve.replace("biased", "forward").split("/")
    slow = _curve(f"{family}_unaligned", work.dtype, which, device)
    if slow is None:
        return seconds
    odd = slow.seconds(work.features, ideal)
    between = _curve(f"{family}_even", work.dtype, which, device) if DTYPE_BYTES[work.dtype] < 4 else None
    even = odd if between is None else between.seconds(work.features, ideal)
    return np.select([work.alignment >= 16, work.alignment >= 4], [seconds, even], odd)


def kernel_seconds(work: Work, device: Device) -> np.ndarray:
    """Seconds of one kernel, for every split.

    A kernel takes at least the floor: below the smallest size measured, time stays while work shrinks. As another engine
    runs it, it takes what that engine's profile says.
    """
    if device.engine is not None and (seconds := engine_seconds(work, device)) is not None:
        return seconds
    if work.instead is not None and _curve(*_name(work), device) is None:
        work = work.instead
    peak = device.peak(peak_dtype(work.curve.split("/")[0], work.dtype))
    flops = work.padded if work.padded is not None and device.kind == "cuda" else work.flops
    ideal = np.maximum(flops / peak, work.bytes / device.bandwidth)
    floor = GPU_KERNEL_FLOOR if device.kind == "cuda" else device.launch_overhead
    if device.profile is not None and device.profile.kernel_floor:
        floor = device.profile.kernel_floor
    return np.maximum(_seconds(work, device, ideal, peak), floor)


def _exchange_seconds(
    rules: OpRules, splits: Sequence[Split], mesh: Mesh, cuts: np.ndarray, training: bool
) -> np.ndarray:
    seconds = np.zeros((len(splits), 2))
    extents = {loop.name: loop.extent for loop in rules.loops}
    for number, loop in enumerate(rules.loops):
        for exchange in loop.exchanges:
            points = np.full(len(splits), float(exchange.points))
            for name in exchange.loops:
                pieces = np.where(cuts == [r.name for r in rules.loops].index(name), mesh.sizes, 1).prod(axis=1)
                points *= np.ceil(extents[name] / pieces)
            amount = points * DTYPE_BYTES[exchange.dtype]
            for axis, line in enumerate(mesh.axes):
                once = np.where(cuts[:, axis] == number, collectives.all_reduce(amount, line), 0.0)
                seconds[:, 0] += once
                seconds[:, 1] += once * exchange.backward if training else 0.0
    return seconds


def op_times(
    op: Op,
    rules: OpRules,
    tensors: Mapping[str, Tensor],
    splits: Sequence[Split],
    mesh: Mesh,
    training: bool = True,
    copies: str = "",
    pieces: Sequence[float] | None = None,
) -> np.ndarray:
    """Forward and backward seconds of an operator on the device, one row per split.

    ``copies`` names the kernel by which a view copies its input where it cannot alias it; ``pieces`` says, for a rank that
    takes its own share, into how many pieces as large as that every mesh axis cuts. The host's time to issue the
    operator is not part of it (:func:`~shardwright.costs.host.dispatch_seconds`): on an accelerator it runs ahead.
    """
    local = localise(op, rules, tensors, splits, mesh.sizes if pieces is None else pieces)
    forward, backward = kernels(local, copies)
    seconds = np.zeros((len(splits), 2))
    for work in forward:
        seconds[:, 0] += kernel_seconds(work, mesh.device)
    if training and op.grad and any(t.grad for t in local.inputs):
        for work in backward:
            seconds[:, 1] += kernel_seconds(work, mesh.device)
    return seconds + _exchange_seconds(rules, splits, mesh, _cuts(rules, splits), training)
