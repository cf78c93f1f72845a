"""What a plan does, in one sentence of the field's words, and what it makes of the devices: parameters, rate, MFU.

An axis of the mesh is named after what most of the floating-point operations are cut by along it; what differs is named
by its module. Weights are those bytes of parameters that rest in shards, told apart by whether they are gathered for use
(FSDP) or stay cut (tensor parallelism). MFU is model flops utilisation (Chowdhery et al., 2022): the products of forward
and backward, nothing recomputed, over the peak rate of all devices.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import prod

from torch.distributed.tensor import Shard

from shardwright.cluster.fitting import peak_dtype
from shardwright.graph import Graph, Op
from shardwright.operators import analyse
from shardwright.operators.rules import OpRules
from shardwright.operators.strategy import Strategy
from shardwright.plans import Plan
from shardwright.plans.stages import Stage
from shardwright.reports.summary import rate_text, work_of
from shardwright.search.baselines import BASELINES
from shardwright.search.labels import Labels, label_loops

CUTS = {
    "batch": "splits the batch",
    "sequence": "splits the sequence",
    "spatial": "splits rows and columns of pictures",
    "features": "cuts features",
    "own": "splits rows among experts",
    "whole": "computes the same",
}
"""By the label of loops; what no input gave a label is a dim of the model's own."""
NAMED = 2
"""Modules that are cut otherwise than most are named up to so many."""
NOTICED = 0.01
"""Of the flops or of the weights, from which share on a module is named."""


def summary_of(plan: Plan, graph: Graph) -> list[str]:
    """A plan in sentences: what it does, what it makes of the devices, how the fastest recipe compares.

    >>> len(summary_of(plan, graph))
    3
    """
    return [*filter(None, (what_it_does(plan, graph), use_of_devices(plan, graph), beside_recipes(plan)))]


def beside_recipes(plan: Plan) -> str:
    """How much longer the fastest recipe of the comparison takes; nothing where none fits.

    >>> beside_recipes(plan)                                                          # doctest: +SKIP
    'The fastest recipe, zero-2, takes 1.05 times as long.'
    """
    known = [row for row in plan.candidates if row.name in BASELINES and row.simulated and row.prediction is not None]
    fitting = [(row.prediction.step_seconds, row.name) for row in known if row.prediction and row.prediction.fits]
    if not fitting or not plan.prediction.step_seconds or plan.search in BASELINES:
        return ""
    seconds, name = min(fitting)
    ratio = f"{seconds / plan.prediction.step_seconds:.2f}"
    return f"The fastest recipe, {name}, takes {'as long' if ratio == '1.00' else f'{ratio} times as long'}."


def what_it_does(plan: Plan, graph: Graph) -> str:
    """One sentence: how every axis of the mesh cuts the work, how weights rest, what is computed again.

    >>> what_it_does(plan, graph)                                                     # doctest: +SKIP
    'Splits the batch 8 ways, cuts features of head 4 ways; 98 % of the weights rest in shards, gathered once per step.'
    """
    rules = {op.name: analyse(op, graph.tensors) for op in graph.ops}
    labels = label_loops(graph, rules)
    said = [_stage(stage, graph, rules, labels, graph.training) for stage in plan.stages]
    before = ""
    if len(plan.stages) > 1 or plan.microbatches > 1:
        before = f"{len(said)} stages, {plan.microbatches} micro-batches; " if len(said) > 1 else ""
        before = before or f"{plan.microbatches} micro-batches, gradients added up; "
    if len(set(said)) > 1:
        said = [f"stage {number} {text}" for number, text in enumerate(said)]
        said = [*said[:NAMED], f"{len(said) - NAMED} more stages"] if len(said) > NAMED + 1 else said
    sentence = before + "; ".join(dict.fromkeys(said)) + "."
    return sentence[0].upper() + sentence[1:]


def _stage(stage: Stage, graph: Graph, rules: Mapping[str, OpRules], labels: Labels, training: bool) -> str:
    strategy, mine = stage.strategy, set(stage.operators)
    ops = [op for op in graph.ops if op.name in mine]
    parts = [*_work(strategy, ops, graph, rules, labels), *_weights(strategy, ops, graph, rules)]
    if strategy.recomputed and training:
        light = " (what is cheap to compute)" if strategy.lightly >= set(strategy.recomputed) else ""
        parts.append(f"recomputes {len(strategy.recomputed)} blocks{light}")
    return "; ".join(parts) or "one device each" * (len(ops) < len(graph.ops)) or "runs on one device"


def _work(
    strategy: Strategy, ops: Iterable[Op], graph: Graph, rules: Mapping[str, OpRules], labels: Labels
) -> Iterable[str]:
    """What the axes cut of most of the work, and of whatever counts too."""
    ops, all_weights = list(ops), max(graph.parameter_bytes, 1)
    weights = {op.name: sum(graph.tensors[n].bytes for n in set(op.inputs) & set(graph.parameter_of)) for op in ops}
    total = max(sum(rules[op.name].flops for op in ops), 1.0)
    main: dict[int, str] = {}
    for axis in (number for number, size in enumerate(strategy.sizes) if size > 1):
        shares: dict[str, float] = defaultdict(float)
        for op in ops:
            shares[_cut(op, axis, strategy, labels)] += rules[op.name].flops or weights[op.name] / all_weights
        main[axis] = max(shares, key=shares.__getitem__)
    told = [_told(name, "", _ways(strategy, main, name)) for name in dict.fromkeys(main.values())]
    others: dict[tuple[str, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for op in ops:
        cut = {axis: _cut(op, axis, strategy, labels) for axis in main}
        for name in dict.fromkeys(cut.values()):
            counts = rules[op.name].flops / total
            if name != "whole":  # to look up rows on every rank costs nothing; to cut a table that is as large does
                counts = max(counts, weights[op.name] / all_weights)
            if counts and any(cut[axis] == name != main[axis] for axis in main):
                others[name, _ways(strategy, cut, name)][_module(op)] += counts
    for (name, ways), modules in others.items():
        large = sorted((m for m, share in modules.items() if share >= NOTICED), key=lambda m: -modules[m])
        if large:
            more = f", {large[1]} and {len(large) - NAMED} more" if len(large) > NAMED else ""
            told.append(_told(name, f" in {large[0]}{more}" if more else f" in {' and '.join(large)}", ways))
    return [", ".join(told)] if told else []


def _told(name: str, where: str, ways: int) -> str:
    return f"{CUTS[name]}{where} {f'on {ways} devices' if name == 'whole' else f'{ways} ways'}"


def _cut(op: Op, axis: int, strategy: Strategy, labels: Labels) -> str:
    loop = strategy.splits[op.name][axis]
    return "whole" if loop is None else labels.get(op.name, {}).get(loop) or ("own" if loop == "own" else "features")


def _ways(strategy: Strategy, cut: Mapping[int, str], name: str) -> int:
    return prod(strategy.sizes[axis] for axis, label in cut.items() if label == name)


def _module(op: Op) -> str:
    """The module, equal blocks alike: ``blocks.*.mlp``.

    >>> _module(Op("a", "aten.mm.default", (), (), (), "blocks.3.mlp"))
    'blocks.*.mlp'
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", op.module) or op.short


def _weights(strategy: Strategy, ops: Iterable[Op], graph: Graph, rules: Mapping[str, OpRules]) -> Iterable[str]:
    """How parameters rest: in shards that are gathered, in parts that are used as they are, or whole."""
    gathered: dict[str, bool] = {}
    for op in ops:
        needs = rules[op.name].layouts(strategy.splits[op.name], "inputs", len(op.inputs))
        for name, need in zip(op.inputs, needs, strict=True):
            if name in graph.parameter_of:
                rest = strategy.resting[name]
                moved = any(isinstance(r, Shard) and r != n for r, n in zip(rest, need, strict=True))
                gathered[name] = gathered.get(name, False) or moved
    size = {name: graph.tensors[name].bytes for name in gathered}
    total = sum(size.values())
    sharded = {name for name in gathered if any(isinstance(p, Shard) for p in strategy.resting[name])}
    if not total or prod(strategy.sizes) == 1:
        return []
    parts = []
    fetched = {name for name in sharded if gathered[name]}
    if (share := sum(size[name] for name in fetched) / total) >= NOTICED:
        again = sum(size[name] for name in fetched & strategy.regathered) / total > share / 2
        late = sum(size[name] for name in fetched & strategy.whole_gradients) / total > share / 2
        when = "for forward and again for backward" if again else "once per step"
        parts.append(f"{_share(share)} weights rest in shards, gathered {when}")
        parts[-1] += ", their gradients scattered at its end" if late else ""
    if (share := sum(size[name] for name in sharded - fetched) / total) >= NOTICED:
        parts.append(f"{_share(share)} weights stay cut")
    return parts or ["every device holds all weights"]


def _share(share: float) -> str:
    return "all" if share > 0.995 else f"{100 * share:.0f} % of the"


def use_of_devices(plan: Plan, graph: Graph) -> str:
    """Parameters, tokens (or samples) a second, and the share of the devices' peak rate that the model's own products take.

    >>> use_of_devices(plan, graph)                                                   # doctest: +SKIP
    '1.31 billion parameters; 496,000 tokens a second, MFU 43 % (of bfloat16 989 Tflop/s a device).'
    """
    parameters = sum(graph.tensors[p.tensor].elements for p in graph.parameters)
    said, work, seconds = [f"{rate_text(parameters)} parameters"], work_of(graph), plan.prediction.step_seconds
    flops: dict[str, float] = defaultdict(float)
    for op in graph.ops:
        for name in op.outputs[:1]:
            if name is not None:
                rules = analyse(op, graph.tensors)
                flops[peak_dtype(rules.kind, graph.tensors[name].dtype)] += rules.flops
    if work is not None and seconds:
        rate = f"{rate_text(work.count / seconds)} {work.unit} a second"
        devices = [mesh.device for mesh in plan.meshes for _ in range(mesh.devices)]
        if any(flops.values()) and graph.training:
            dtype = max(flops, key=flops.__getitem__)
            ideal = sum(3 * amount / sum(d.peak(kind) for d in devices) for kind, amount in flops.items())
            rate += (
                f", MFU {100 * ideal / seconds:.0f} % (of {devices[0].peak(dtype) / 1e12:.3g} Tflop/s {dtype} a device)"
            )
        said.append(rate)
    return "; ".join(said) + "."
