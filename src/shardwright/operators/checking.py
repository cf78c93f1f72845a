"""Every rule can be checked by running it: the whole operator against its pieces, forward and backward.

All ranks run in one process as threads in lock-step; ``exchange`` meets at a barrier. Local inputs are cut out of the
whole ones with differentiable operations and the results are put together again, so PyTorch's own gradients of the pieces
are compared with those of the whole: a rule that is wrong in either direction is found. Replicated results enter with
weights that add up to one, which is the gradient convention of the whole project.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Partial, Shard

from shardwright._torch_compat import operator
from shardwright.graph import Op, Ref, Tensor, Value
from shardwright.operators.deriving import derived
from shardwright.operators.pieces import Call, Piece, build, plain
from shardwright.operators.rules import Need, OpRules, Placement, Window, chunk
from shardwright.process_wide import in_turn

Cuts = Sequence[tuple[str, int]]
"""Per mesh axis the loop that is cut and into how many pieces."""


@dataclass(frozen=True)
class Disagreement:
    """What a wrong rule looks like when it is run."""

    target: str
    cuts: tuple[tuple[str, int], ...]
    shapes: tuple[tuple[int, ...], ...]
    what: str

    def __str__(self) -> str:
        if not self.cuts:
            return f"{self.target}: {self.what}; input shapes {list(self.shapes)}"
        cuts = " and ".join(f"loop {loop!r} into {pieces}" for loop, pieces in self.cuts)
        return f"{self.target}: cutting {cuts} disagrees in {self.what}; input shapes {list(self.shapes)}"


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors are tiny here and ranks are threads: PyTorch's own threads only get in their way."""
    with in_turn():
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def execute(op: Op, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Run an operator on concrete tensors given in the order of ``Op.inputs``."""
    place = iter(inputs)

    def fill(value: Value) -> Any:
        if isinstance(value, Ref):
            return next(place)
        if isinstance(value, tuple):
            return [fill(v) for v in value]
        return plain(value)

    args = [fill(a) for a in op.args]
    kwargs = {k: fill(v) for k, v in op.kwargs}
    result = operator(op.target)(*args, **kwargs)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


@dataclass(frozen=True)
class _Rank:
    """One rank: its coordinate on every axis and its ranges of the cut loops."""

    coordinate: tuple[int, ...]
    ranges: dict[str, tuple[int, int]]


def ranks_of(rules: OpRules, cuts: Cuts) -> list[_Rank] | None:
    """All ranks of a split; ``None`` where some piece would be empty or uneven."""
    found = []
    for coordinate in itertools.product(*(range(pieces) for _, pieces in cuts)):
        ranges: dict[str, tuple[int, int]] = {}
        for (loop, pieces), index in zip(cuts, coordinate, strict=True):
            rule = rules.by_name[loop]
            start, stop = ranges.get(loop, (0, rule.extent))
            if rule.divides:
                if rule.even and (stop - start) % pieces:
                    return None
                low, high = chunk(stop - start, pieces, index)
                if low >= high:
                    return None
                start, stop = start + low, start + high
            ranges[loop] = (start, stop)
        found.append(_Rank(coordinate, ranges))
    return found


class Meeting:
    """Where the ranks exchange: everybody puts a tensor down, waits, and reduces those of its group."""

    def __init__(self, ranks: Sequence[_Rank], cuts: Cuts) -> None:
        self.barrier = threading.Barrier(len(ranks))
        self.held: list[Any] = [None] * len(ranks)
        self.ranks = ranks
        self.cuts = cuts

    def exchange(self, rank: int) -> Callable[[torch.Tensor, str, str], torch.Tensor]:
        def exchange(x: torch.Tensor, reduce: str, loop: str) -> torch.Tensor:
            self.held[rank] = x
            self.barrier.wait(timeout=60)
            mine = self.ranks[rank].coordinate
            fixed = [a for a, (name, _) in enumerate(self.cuts) if name != loop]
            group = [
                self.held[r] for r, other in enumerate(self.ranks) if all(other.coordinate[a] == mine[a] for a in fixed)
            ]
            self.barrier.wait(timeout=60)
            stacked = torch.stack(group)
            if reduce == "sum":
                return stacked.sum(0)  # autograd adds up the gradients of all ranks
            return _reduced(stacked, reduce).detach()

        exchange.shared_backward = True  # type: ignore[attr-defined]  # read by kernels that would exchange in theirs
        return exchange


def take(
    x: torch.Tensor, needs: Sequence[Need], cuts: Cuts, rank: _Rank, rules: OpRules, position: int
) -> torch.Tensor:
    """One rank's local input, cut differentiably out of the whole one."""
    done: set[tuple[str, int]] = set()
    for axis, need in enumerate(needs):
        loop, pieces = cuts[axis]
        start, stop = rank.ranges[loop]
        if isinstance(need, Partial):
            # Unequal shares that add up to one: an unreduced sum.
            x = x * ((rank.coordinate[axis] + 1) / (pieces * (pieces + 1) / 2))
        elif isinstance(need, (Shard, Window)) and (loop, need.dim) not in done:
            done.add((loop, need.dim))
            extent = x.shape[need.dim]
            if isinstance(need, Window):
                first, end, _, _ = need.region(start, stop, extent)
            else:
                unit = extent // rules.by_name[loop].extent if rules.by_name[loop].even else 1
                first, end = start * unit, stop * unit
            x = x.narrow(need.dim, first, end - first)
    return x


def join(
    parts: Sequence[torch.Tensor], placements: Sequence[Placement], cuts: Cuts, ranks: Sequence[_Rank]
) -> torch.Tensor:
    """The whole output from every rank's, axis by axis from the innermost."""
    held = {rank.coordinate: part for rank, part in zip(ranks, parts, strict=True)}
    for axis in reversed(range(len(cuts))):
        pieces = cuts[axis][1]
        outer = {c[:axis] for c in held}
        merged = {}
        for c in outer:
            group = [held[(*c, n)] for n in range(pieces)]
            placement = placements[axis]
            if isinstance(placement, Shard):
                merged[c] = torch.cat(group, placement.dim)
            elif isinstance(placement, Partial):
                stacked = torch.stack(group)
                merged[c] = _reduced(stacked, str(placement.reduce_op))
            else:
                if any(not torch.allclose(group[0], other, equal_nan=True) for other in group[1:]):
                    raise _Different("a replicated output that differs between the pieces")
                merged[c] = _share(group)
        held = merged
    return held[()]


def _reduced(stacked: torch.Tensor, reduce: str) -> torch.Tensor:
    if reduce == "sum":
        return stacked.sum(0)
    if reduce in ("prod", "product"):
        return stacked.prod(0)
    return stacked.amax(0) if reduce == "max" else stacked.amin(0)


def _share(group: Sequence[torch.Tensor]) -> torch.Tensor:
    """One of several equal tensors, its gradient spread over all of them."""
    if not group[0].is_floating_point():
        return group[0]
    total = len(group) * (len(group) + 1) / 2
    weighted = [t * ((n + 1) / total) for n, t in enumerate(group)]
    return torch.stack(weighted).sum(0)


class _Different(Exception):  # noqa: N818 - carries a finding
    pass


def run_pieces(
    op: Op,
    tensors: Mapping[str, Tensor],
    rules: OpRules,
    cuts: Cuts,
    ranks: Sequence[_Rank],
    inputs: Sequence[torch.Tensor],
) -> list[tuple[Any, ...]]:
    """Every rank's outputs, computed in lock-step threads."""
    meeting = Meeting(ranks, cuts)
    results: list[Any] = [None] * len(ranks)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        rank = ranks[number]
        try:
            local = [
                take(x, [rules.by_name[loop].inputs[i] for loop, _ in cuts], cuts, rank, rules, i)
                for i, x in enumerate(inputs)
            ]
            piece: Piece = build(Call(op, tensors, rules, rank.ranges))
            if piece.kernel is not None:
                made = piece.kernel(*local, exchange=meeting.exchange(number))
                results[number] = tuple(made) if isinstance(made, (tuple, list)) else (made,)
            else:
                assert piece.op is not None
                results[number] = execute(piece.op, local)
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results


def check(
    op: Op, tensors: Mapping[str, Tensor], inputs: Sequence[torch.Tensor], cuts: Cuts, rules: OpRules | None = None
) -> Disagreement | None:
    """Run an operator whole and cut; ``None`` if they agree or the split does not exist for these sizes.

    Floating-point inputs should be float64; those whose tensor has ``grad`` are differentiated.
    """
    rules = derived(op, tensors) if rules is None else rules
    ranks = ranks_of(rules, cuts)
    if ranks is None:
        return None
    leaves = [
        x.detach().clone().requires_grad_(tensors[name].grad and (x.is_floating_point() or x.is_complex()))
        for name, x in zip(op.inputs, inputs, strict=True)
    ]
    whole = execute(op, leaves)
    try:
        parts = run_pieces(op, tensors, rules, cuts, ranks, leaves)
        split = [
            join([part[o] for part in parts], [rules.by_name[loop].outputs[o] for loop, _ in cuts], cuts, ranks)
            if name is not None
            else None
            for o, name in enumerate(op.outputs)
        ]
        what = _compare(op, whole, split, leaves)
    except _Different as finding:
        what = str(finding)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        what = f"running it: {type(error).__name__}: {error}"
    if what is None:
        return None
    return Disagreement(op.target, tuple(cuts), tuple(tuple(x.shape) for x in inputs), what)


def _compare(op: Op, whole: Sequence[Any], split: Sequence[Any], leaves: Sequence[torch.Tensor]) -> str | None:
    used = [(a, b, o) for o, (a, b) in enumerate(zip(whole, split, strict=False)) if op.outputs[o] is not None]
    for expected, got, o in used:
        if expected.shape != got.shape:
            return f"the shape of output {o}: {tuple(expected.shape)} whole, {tuple(got.shape)} split"
        if expected.dtype != got.dtype:
            return f"the dtype of output {o}: {expected.dtype} whole, {got.dtype} split"
        if not torch.allclose(expected, got, rtol=1e-7, atol=1e-9, equal_nan=True):
            return f"output {o} (largest difference {_difference(expected, got):.3g})"
    wanted = [x for x in leaves if x.requires_grad]
    trained = [(a, b) for a, b, _ in used if a.requires_grad]
    if not wanted or not trained:
        return None
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(a.shape, generator=generator, dtype=torch.float64).to(a.dtype) for a, _ in trained]
    expected_grads = torch.autograd.grad([a for a, _ in trained], wanted, cotangents, allow_unused=True)
    if any(not b.requires_grad for _, b in trained):
        return "gradients: a split output carries none"
    got_grads = torch.autograd.grad([b for _, b in trained], wanted, cotangents, allow_unused=True)
    for n, (expected, got) in enumerate(zip(expected_grads, got_grads, strict=True)):
        e = torch.zeros_like(wanted[n]) if expected is None else expected
        g = torch.zeros_like(wanted[n]) if got is None else got
        if not torch.allclose(e, g, rtol=1e-6, atol=1e-8, equal_nan=True):
            return f"the gradient of differentiable input {n} (largest difference {_difference(e, g):.3g})"
    return None


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.dtype == torch.bool:
        return float((a != b).any())
    return float((a - b).detach().abs().max()) if a.numel() else 0.0
