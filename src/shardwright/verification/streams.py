"""Are a plan's own random numbers what they should be? Independent where a tensor is cut, one pattern where it is whole.

Numbers that are drawn cannot be compared with those of one process, but they can be looked at: the graph is run with the
operators that draw as its results. All copies of one piece must be the same numbers; two pieces of one tensor must not be,
nor two passes; a dropout must drop its share (within six standard deviations) and scale the rest. This is asked of tensors
that all mesh axes cut, that one axis cuts, and that none does. What a training run drew is looked at in the same way
(:func:`judged_draws`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard

from shardwright._torch_compat import dump_tree, flatten_tree
from shardwright.graph import Graph, Op, Ref
from shardwright.operators import analyse
from shardwright.operators.rules import chunk, output_layouts
from shardwright.operators.strategy import Strategy
from shardwright.runtime import parallelize
from shardwright.verification.compare import Comparison
from shardwright.verification.draws import drawing
from shardwright.verification.gathering import Gathered, gathered
from shardwright.verification.recorded import size_of
from shardwright.verification.shown import rate_of

SIGMAS = 6.0
LEAST = 16
"""Pieces of fewer elements may be equal by chance."""
CERTAIN = 20.0
"""Masks are equal by chance with a probability below ``exp(-20)``, two in a thousand million, or are not compared."""


def looked_at(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    graph: Graph,
    strategy: Strategy,
) -> list[Comparison]:
    """Draw once on every rank of a strategy; rank 0 gets what was found about every operator that draws."""
    operators = drawing(graph)
    probe = _shown(graph, operators)
    parallel = parallelize(model, strategy, args, kwargs, graph=probe, keep=True)
    torch.manual_seed(0)
    passes = []
    for _ in range(2):
        with torch.no_grad():
            results = parallel(*args, **kwargs)
        passes.append(gathered({str(place): result for place, result in enumerate(results)}, together=True))
    return _judged(graph, operators, strategy, *passes) if dist.get_rank() == 0 else []


def judged_draws(
    graph: Graph, operators: Sequence[Op], strategy: Strategy | None, passes: Sequence[Sequence[Tensor]]
) -> list[Comparison]:
    """What the operators of a training run drew, pass by pass; ``strategy`` says how they were cut, where that is known."""
    results: list[Comparison] = []
    for place, op in enumerate(operators):
        draws, about, rate = [drawn[place] for drawn in passes], f"{op.name} ({op.target})", rate_of(op)
        if rate is not None:
            results.append(_share(about, sum(int(drawn.sum()) for drawn in draws), sum(map(_count, draws)), rate))
        if strategy is not None:
            results += _independent(graph, op, strategy, draws[0].double(), about)
        results += _anew(op, draws, about)
    return results


def _count(tensor: Tensor) -> int:
    return tensor.numel()


def _anew(op: Op, draws: Sequence[Tensor], about: str) -> list[Comparison]:
    """No pass may draw what another one drew, unless chance may have it so."""
    rate = rate_of(op)
    agreeing = 0.5 if rate is None else rate**2 + (1 - rate) ** 2
    if draws[0].numel() * -math.log(max(agreeing, 1e-300)) < CERTAIN:
        return []
    alike = sum(torch.equal(one, other) for one, other in itertools.combinations(draws, 2))
    return [Comparison("stream", f"{about}: passes of {len(draws)} that drew the same", float(alike), 1.0, 0.0)]


def variants(graph: Graph, strategy: Strategy) -> Iterator[tuple[str, Strategy]]:
    """A strategy as it is, with its random operators cut by the last mesh axis only, and with them whole."""
    yield "cut", strategy
    names, axes = [op.name for op in drawing(graph)], len(strategy.axes)
    last = {name: (*(None,) * (axes - 1), strategy.splits[name][-1]) for name in names}
    if axes > 1:
        yield "cut by one axis", replace(strategy, splits={**strategy.splits, **last})
    yield "whole", replace(strategy, splits={**strategy.splits, **dict.fromkeys(names, (None,) * axes)})


def _shown(graph: Graph, operators: Sequence[Op]) -> Graph:
    """The graph with what the operators draw, and what they draw upon, as its results."""
    shown = [name for op in operators for name in (op.outputs[0], *op.inputs[:1]) if name is not None]
    tree = dump_tree(flatten_tree(shown)[1])
    return replace(graph, outputs=tuple(map(Ref, shown)), output_tree=tree, mutations=())


def _judged(
    graph: Graph, operators: Sequence[Op], strategy: Strategy, found: Gathered, again: Gathered
) -> list[Comparison]:
    results: list[Comparison] = []
    places = itertools.count()
    for op in operators:
        place = str(next(places))
        before = found.tensors[str(next(places))] if op.inputs else None
        drawn, (spread, rank) = found.tensors[place], found.spreads[place]
        both = (found.tensors[place], again.tensors[place])
        about = f"{op.name} ({op.target})"
        size = size_of(drawn)
        results.append(
            Comparison("stream", f"{about}: copies" + f", rank {rank}" * bool(spread), spread, size, 1e-5 * size)
        )
        rate = rate_of(op)
        results += _anew(op, both if rate is None else [(tensor != 0) for tensor in both], about)
        if rate is not None and before is not None and before.shape == drawn.shape:
            results += _dropout(about, before, drawn, rate)
            drawn = (drawn != 0).double()
        results += _independent(graph, op, strategy, drawn, about)
    return results


def _dropout(about: str, before: Tensor, after: Tensor, rate: float) -> list[Comparison]:
    live = before != 0
    kept = (after != 0) & live
    count = max(int(live.sum()), 1)
    scaled = before.double() * (0.0 if rate == 1.0 else 1.0 / (1.0 - rate))
    error = float(torch.where(kept, (after.double() - scaled).abs(), 0.0).max()) if after.numel() else 0.0
    size = float(scaled.abs().max()) if after.numel() else 0.0
    return [
        _share(about, int(kept.sum()), count, rate),
        Comparison("stream", f"{about}: scale of what is kept", error, size, 4 * torch.finfo(after.dtype).eps * size),
    ]


def _share(about: str, kept: int, count: int, rate: float) -> Comparison:
    sigma = math.sqrt(rate * (1 - rate) / max(count, 1))
    away = abs(kept / max(count, 1) - (1 - rate))
    return Comparison("stream", f"{about}: share that is kept", away, 1 - rate, SIGMAS * sigma)


def _independent(graph: Graph, op: Op, strategy: Strategy, drawn: Tensor, about: str) -> list[Comparison]:
    """No two pieces of a cut tensor may be equal; what is compared is how many pairs are."""
    rules = analyse(op, graph.tensors)
    layout = output_layouts(rules, strategy.splits[op.name], len(op.outputs))[0]
    cuts: dict[int, int] = {}
    for placement, size in zip(layout, strategy.sizes, strict=True):
        if isinstance(placement, Shard):
            cuts[placement.dim] = cuts.get(placement.dim, 1) * size
    if not cuts or drawn.numel() < LEAST * math.prod(cuts.values()):
        return []
    pieces = [drawn]
    for dim, count in cuts.items():
        spans = [chunk(drawn.shape[dim], count, i) for i in range(count)]
        least = min(stop - start for start, stop in spans)
        pieces = [piece.narrow(dim, start, least) for piece in pieces for start, _ in spans]
    alike = sum(torch.equal(one, other) for one, other in itertools.combinations(pieces, 2))
    return [Comparison("stream", f"{about}: equal pieces of {len(pieces)}", float(alike), 1.0, 0.0)]
