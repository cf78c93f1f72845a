"""What training loops ask of a model, each as one function that every process of a pool calls with the kind of plan.

Everything is compared with the same loop in one process, in float64. The table of :mod:`runtime.test_features` says which
feature is run under which kind of plan.
"""

from __future__ import annotations

import copy
import functools
import os
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardwright
from lowering.strategies import mesh_with
from runtime.pipelines import halves, pipeline_plan
from runtime.workers import captured
from shardwright.cluster import parse_cluster
from shardwright.graph import Graph
from shardwright.graph.repeats import block_paths, span_of
from shardwright.plans import Plan, from_json, to_json
from shardwright.runtime import parallelize
from shardwright.runtime.assistant import assist
from shardwright.runtime.checkpoint import load_checkpoint, save_checkpoint
from shardwright.runtime.clipping import clip_gradients
from shardwright.runtime.moving import move
from shardwright.runtime.replanning import ELASTIC_VARIABLE
from shardwright.runtime.rows import sampler
from shardwright.runtime.shards import whole
from shardwright.runtime.whole_state import whole_state
from shardwright.schedules import Schedule
from shardwright.search.baselines import restriction
from shardwright.search.choose import solve
from shardwright.search.formulate import formulate
from shardwright.verification.prepare import all_double

KINDS = ("one mesh", "accumulation", "1f1b", "interleaved-1f1b", "zb-v")
ROWS, COUNT = 7, 4
"""Micro-batches of two rows, and one of a single row."""
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.linear(self.norm(x)).tanh())


class Model(nn.Module):
    """Vectors in, classes out; the mean loss is over the labels that count, a skip reads the vectors again at the end."""

    def __init__(self, dropout: float = 0.0, blocks: int = 4) -> None:
        super().__init__()
        self.begin = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.back, self.head = nn.Linear(8, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.begin(x)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.back(hidden) + x)
        if labels is None:
            return {"logits": logits}
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def batch(rows: int = ROWS, length: int = 3, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(5, (rows, length), generator=generator)
    labels[0, 0] = -100
    return torch.randn(rows, length, 6, dtype=torch.float64, generator=generator), labels


def built(dropout: float = 0.0, blocks: int = 4) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    return Model(dropout, blocks).double(), batch(), {}


@functools.cache
def example(dropout: float = 0.0, blocks: int = 4) -> tuple[Any, Graph]:
    model, args, _ = built(dropout, blocks)
    return model, captured(model, args)


def stages_of(graph: Graph, count: int) -> list[list[str]]:
    """As many runs of operators, each beginning with a block where there are any: what stands before the first and after
    the last belongs to these."""
    starts = [span_of(graph, path).start for path in block_paths(graph)]
    if len(starts) < count:
        return halves(graph, count)
    borders = [0, *(starts[i * len(starts) // count] for i in range(1, count)), len(graph.ops)]
    return [[op.name for op in graph.ops[a:b]] for a, b in pairwise(borders)]


def planned(kind: str, graph: Graph, count: int = COUNT, recipe: str = "fsdp", size: int | None = None) -> Plan:
    """A plan of this kind for all processes: ``one mesh`` by a recipe, the others along the batch where a stage has several
    ranks."""
    size = dist.get_world_size() if size is None else size
    if kind == "one mesh":
        stated = formulate(graph, mesh_with((size,)), within=restriction(recipe, 1))
        plan = Plan.of(graph, stated.strategy(solve(stated.problem).answer), optimizer="sgd")
        return replace(plan, captured=graph)
    if kind == "accumulation":
        order = Schedule.parse(" ".join(f"0F{n} 0B{n}" for n in range(count)))
        return pipeline_plan(graph, stages_of(graph, 1), count, order, size, inside="data")
    each = size // 2
    if kind == "1f1b":
        return pipeline_plan(graph, stages_of(graph, 2), count, kind, each, inside="data")
    return pipeline_plan(graph, stages_of(graph, 4), count, kind, each, devices=2, inside="data")


def found(kind: str, graph: Graph) -> Plan:
    """A plan of this kind as the planner gives it."""
    from shardwright.planner import Options, Pipelining, plan_graph, plan_pipeline

    text: list[Any] = [None]
    if dist.get_rank() == 0:
        cluster, options = (
            parse_cluster(f"local:{dist.get_world_size()}"),
            Options("fsdp", baselines=(), fewer_devices=False),
        )
        if kind == "one mesh":
            plan = plan_graph(graph, cluster, options)
        else:
            stages = {"accumulation": 1, "1f1b": 2}.get(kind, 4)
            schedule = "1f1b" if kind == "accumulation" else kind
            plan = plan_pipeline(graph, cluster, Pipelining(stages, COUNT, schedule), options)
        text = [to_json(plan)]
    dist.broadcast_object_list(text)
    return from_json(text[0])


def modules(kind: str, **options: Any) -> tuple[Any, Any]:
    model, graph = example()
    return parallelize(copy.deepcopy(model), planned(kind, graph), graph=graph, **options), copy.deepcopy(model)


def same_gradients(ours: Any, theirs: Any) -> None:
    """Whatever this rank has."""
    for name, parameter in ours.named_parameters():
        wanted = theirs.get_parameter(name).grad
        assert (parameter.grad is None) == (wanted is None), name
        if wanted is not None:
            torch.testing.assert_close(whole(parameter.grad), wanted, **TOLERANCE)


def same_weights(ours: Any, theirs: Any) -> None:
    """Whatever this rank has."""
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(whole(parameter.detach()), theirs.get_parameter(name).detach(), **TOLERANCE)


def pass_of_both(ours: Any, theirs: Any, *args: Tensor, scale: float = 1.0, inputs: bool = False) -> None:
    """A forward and a backward pass, with gradients of ``inputs`` where these are asked for."""
    results, found = [], []
    for module in (ours, theirs):
        module.zero_grad()
        given = [x.clone().requires_grad_(inputs and x.is_floating_point()) for x in args]
        results.append(module(*given))
        (results[-1]["loss"] * scale).backward()
        found.append(given[0].grad)
    for name, mine in results[0].items():
        torch.testing.assert_close(mine, results[1][name], **TOLERANCE)
    assert (found[1] is not None) == inputs
    torch.testing.assert_close(*found, **TOLERANCE) if inputs else None
    same_gradients(ours, theirs)


def train(module: Any, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[float]:
    losses = []
    for number in range(first, first + steps):
        optimizer.zero_grad()
        loss = module(*batch(seed=number))["loss"]
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def other_shapes(rank: int, kind: str, folder: str) -> None:
    """The last rows of an epoch, fewer than there are micro-batches or ranks, other lengths; passes that are held back by
    one kind of call and taken along by another."""
    ours, theirs = modules(kind)
    pass_of_both(ours, theirs, *batch())
    pass_of_both(ours, theirs, *batch(seed=2), scale=0.25)
    for rows, length in ((5, 3), (1, 3), (ROWS, 4)):
        pass_of_both(ours, theirs, *batch(rows, length))
    for module in (ours, theirs):
        module.zero_grad()
    with ours.no_sync():
        for seed in (4, 5):
            ours(*batch(5, seed=seed))["loss"].backward()
    assert all(parameter.grad is None for parameter in ours.parameters())
    ours(*batch(seed=6))["loss"].backward()
    for seed, rows in ((4, 5), (5, 5), (6, ROWS)):
        theirs(*batch(rows, seed=seed))["loss"].backward()
    same_gradients(ours, theirs)
    pass_of_both(ours, theirs, *batch())
    assert len(ours._programs) == 4  # planned, 5 and 1 rows, another length


def evaluation(rank: int, kind: str, folder: str) -> None:
    """In evaluation mode, with and without labels and gradients, and without gradients in training mode."""
    ours, theirs = modules(kind)
    pass_of_both(ours, theirs, *batch())
    with torch.no_grad():
        torch.testing.assert_close(ours(*batch())["loss"], theirs(*batch())["loss"], **TOLERANCE)
    for module in (ours, theirs):
        module.eval()
    for rows in (ROWS, 4):
        x, labels = batch(rows, seed=3)
        with torch.no_grad():
            torch.testing.assert_close(ours(x)["logits"], theirs(x)["logits"], **TOLERANCE)
            torch.testing.assert_close(ours(x, labels)["loss"], theirs(x, labels)["loss"], **TOLERANCE)
    with torch.inference_mode():
        torch.testing.assert_close(ours(x)["logits"].clone(), theirs(x)["logits"].clone(), **TOLERANCE)
    pass_of_both(ours, theirs, *batch(4, seed=3))
    for module in (ours, theirs):
        module.train()
    pass_of_both(ours, theirs, *batch())


def input_gradients(rank: int, kind: str, folder: str) -> None:
    """As a module before the model would want them."""
    ours, theirs = modules(kind)
    for rows, length, scale in ((ROWS, 3, 1.0), (ROWS, 3, 0.25), (5, 3, 1.0), (ROWS, 4, 1.0)):
        pass_of_both(ours, theirs, *batch(rows, length), scale=scale, inputs=True)
    pass_of_both(ours, theirs, *batch())


def rows_per_rank(rank: int, kind: str, folder: str) -> None:
    """Every process reads its rows: together they are the batch of one process, also the last, smaller one."""
    ours, theirs = modules(kind, inputs="rows")
    x, labels = batch(2 * ROWS + 3)
    for number, rows in enumerate(sampler(range(len(x)), planned(kind, example()[1]))):
        own = slice(ROWS * number, ROWS * (number + 1))
        losses = []
        for module, which in ((ours, rows), (theirs, own)):
            module.zero_grad()
            losses.append(module(x[which], labels[which])["loss"])
            losses[-1].backward()
        torch.testing.assert_close(*losses, **TOLERANCE)
        same_gradients(ours, theirs)
    assert number == 2


def local_inputs(rank: int, kind: str, folder: str) -> None:
    """Every process is given its part of the batch as the plan cuts it."""
    ours, theirs = modules(kind, inputs="local", outputs="local")
    given, graph = batch(), example()[1]
    strategy = ours.program.strategy
    own = []
    for entry, x in zip(graph.inputs, given, strict=True):
        (placement,) = strategy.resting[entry.tensor]
        own.append(x if placement.is_replicate() else x.tensor_split([-(-len(x) // 2)])[rank])
    loss, wanted = ours(*own)["loss"], theirs(*given)["loss"]
    torch.testing.assert_close(loss, wanted, **TOLERANCE)
    loss.backward(), wanted.backward()
    same_gradients(ours, theirs)


def checkpoints(rank: int, kind: str, folder: str) -> None:
    """Written under this kind of plan, gone on with under every other, momentum included."""
    ours, theirs = modules(kind)
    model, graph = example()
    optimizer, single = (torch.optim.AdamW(m.parameters(), lr=0.05) for m in (ours, theirs))
    assert load_checkpoint(folder, ours, optimizer) is None
    expected = train(theirs, single, 4)
    assert train(ours, optimizer, 2) == pytest.approx(expected[:2], rel=1e-9)
    save_checkpoint(folder, 2, ours, optimizer)
    for other in KINDS:
        resumed = parallelize(copy.deepcopy(model), planned(other, graph), graph=graph)
        again = torch.optim.AdamW(resumed.parameters(), lr=0.3)
        found = load_checkpoint(folder, resumed, again)
        assert found is not None and found["step"] == 2
        assert train(resumed, again, 2, first=2) == pytest.approx(expected[2:], rel=1e-9), other
        same_weights(resumed, theirs)
    read = parallelize(copy.deepcopy(model), planned(kind, graph), graph=graph, weights=f"{folder}/step-2")
    mine = whole_state(read.state_dict())
    for name, tensor in whole_state(ours.state_dict()).items():
        assert torch.equal(mine[name], tensor), name


def moves(rank: int, kind: str, folder: str) -> None:
    """From this kind of plan to every other and back while it trains."""
    ours, theirs = modules(kind)
    optimizer, single = (torch.optim.AdamW(m.parameters(), lr=0.05) for m in (ours, theirs))
    graph = example()[1]
    others = [planned(other, graph) for other in KINDS if other != kind]
    for number, plan in enumerate([None, *others, planned(kind, graph)]):
        if plan is not None:
            move(ours, optimizer, plan)
        (mine,), (wanted,) = train(ours, optimizer, 1, number), train(theirs, single, 1, number)
        assert mine == pytest.approx(wanted, rel=1e-9), number
    same_weights(ours, theirs)


def compiled(rank: int, kind: str, folder: str) -> None:
    """``model.compile()``: regions of every program as one function each; what the compiler makes of one is replaced by the
    function itself."""
    from runtime.test_regions import uncompiled
    from shardwright.runtime import regions

    before, regions.compiled_function = regions.compiled_function, uncompiled
    try:
        ours, theirs = modules(kind)
        ours.compile()
        optimizer, single = (torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (ours, theirs))
        assert train(ours, optimizer, 5) == pytest.approx(train(theirs, single, 5), rel=1e-9)
        same_weights(ours, theirs)
        pass_of_both(ours, theirs, *batch(5), inputs=True)
    finally:
        regions.compiled_function = before
    executors = [part.executor for part in ours._planned.parts.values()]
    assert executors and all(executor._compiled.functions for executor in executors)


def dropout(rank: int, kind: str, folder: str) -> None:
    """One process is given the random numbers that the ranks drew, in training; the same seed gives the same numbers."""
    from shardwright.verification.verify import verify_rank

    model, graph = example(0.25)
    plan = planned(kind, graph)
    found = verify_rank(functools.partial(built, 0.25), {True: plan}, 3, False, True)
    assert found is None or (found.agrees and found.cuts), (
        found.agrees,
        found.cuts,
        [c for run in found.runs for c in run.comparisons if not c.agrees],
    )
    assert found is None or any("random" in text for text in found.compared), found.compared
    ours = parallelize(copy.deepcopy(model), plan, graph=graph)
    losses = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        losses.append([float(ours(*batch())["loss"].detach()) for _ in range(2)])
    assert losses[0] == losses[1] != losses[2] and losses[0][0] != losses[0][1]
    ours.eval()
    torch.testing.assert_close(ours(*batch())["loss"], model.eval()(*batch())["loss"], **TOLERANCE)
    model.train()


def _no_group(*_: Any, **__: Any) -> Any:
    raise AssertionError("a copy makes a process group")


def averages_and_copies(rank: int, kind: str, folder: str) -> None:
    """Averages of the weights, a twin that trains by itself, no process group made for either."""
    import pickle

    ours, theirs = modules(kind)
    made, dist.new_group = dist.new_group, _no_group
    try:
        _follow(ours, theirs)
        if rank == 0:  # an average that one rank keeps needs no other
            AveragedModel(ours).update_parameters(ours)
    finally:
        dist.new_group = made
    with pytest.raises(shardwright.ShardwrightError, match="cannot be pickled"):
        pickle.dumps(ours)


def _follow(ours: Any, theirs: Any) -> None:
    averages = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for m in (ours, theirs)]
    plain = [AveragedModel(m) for m in (ours, theirs)]
    before, twin = copy.deepcopy(theirs), copy.deepcopy(ours)
    for module, *followers in zip((ours, theirs), averages, plain, strict=True):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for number in range(3):
            optimizer.zero_grad()
            module(*batch(seed=number))["loss"].backward()
            clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
            for follower in followers:
                follower.update_parameters(module)
    for mine, true in [
        (ours, theirs),
        *((mine.module, true.module) for mine, true in (averages, plain)),
        (twin, before),
    ]:
        same_weights(mine, true)
        with torch.no_grad():
            torch.testing.assert_close(mine(*batch())["logits"], true(*batch())["logits"], **TOLERANCE)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (twin, before)]
    losses = [train(m, optimizer, 2) for m, optimizer in zip((twin, before), optimizers, strict=True)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    same_weights(twin, before)


def whole_states(rank: int, kind: str, folder: str) -> None:
    """Whole weights of all stages, on every rank or the first; a whole ``state_dict`` is read again."""
    ours, theirs = modules(kind)
    optimizer, single = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs))
    train(ours, optimizer, 1), train(theirs, single, 1)
    found = whole_state(ours.state_dict())
    assert found.keys() == theirs.state_dict().keys()
    assert (len(ours.state_dict()) < len(found)) == (len(ours.plan.stages) > 1)
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(found[name], tensor, **TOLERANCE)
    assert bool(whole_state(ours.state_dict(), everywhere=False)) == (rank == 0)
    fresh, _ = modules(kind)
    fresh.load_state_dict(theirs.state_dict())
    same_weights(fresh, theirs)
    assert not fresh.load_state_dict({}, strict=False).unexpected_keys
    with pytest.raises(RuntimeError, match="Missing key"):
        fresh.load_state_dict({})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        fresh.load_state_dict({**theirs.state_dict(), "strange": torch.zeros(2)})


def clipping(rank: int, kind: str, folder: str) -> None:
    """torch's own norms and clipping, and ours."""
    ours, theirs = modules(kind)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, theirs)]
    for order in (2.0, 1.0, float("inf")):
        for foreach in (None, True, False):
            norms = []
            for module, optimizer in zip((ours, theirs), optimizers, strict=True):
                optimizer.zero_grad()
                (10 * module(*batch())["loss"]).backward()
                gradients = [p.grad for p in module.parameters()]
                norms.append([get_total_norm(gradients, order, foreach=foreach)])
                norms[-1].append(torch.stack([g.norm() for g in gradients]).norm())
                norms[-1].append(clip_gradients(module, 0.5) if order == 2.0 else norms[-1][0])
                norms[-1].append(clip_grad_norm_(module.parameters(), 0.3, order, foreach=foreach))
                optimizer.step()
            mine = [whole(x.detach()) for x in norms[0]]
            torch.testing.assert_close(mine, norms[1], **TOLERANCE)
    same_weights(ours, theirs)


def moved_work(rank: int, kind: str, folder: str) -> None:
    """The assistant deals the work out otherwise, in several ways, and back; the losses stay those of one process."""
    model, graph = example(blocks=8)
    plan = planned(kind, graph, count=2, recipe="data-parallel")
    ours, theirs = parallelize(copy.deepcopy(model), plan, graph=graph), copy.deepcopy(model)
    optimizer, single = (torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (ours, theirs))
    assistant = assist(ours, optimizer)
    assistant._movers[0].mover.traces = False
    far, rows = [train(ours, optimizer, 1)[0] - train(theirs, single, 1)[0]], assistant.rows
    total = sum(rows)
    assert total > 2 and len(rows) >= 2
    first = [total - len(rows) + 1, *[1] * (len(rows) - 1)]
    for dealt in (first, first[::-1], rows):
        assert assistant.move(dealt) and list(assistant.rows) == list(dealt)
        far.append(train(ours, optimizer, 1, len(far))[0] - train(theirs, single, 1, len(far))[0])
    assistant.leave()
    assert max(map(abs, far)) < 1e-9
    same_weights(ours, theirs)


def inference(rank: int, kind: str, folder: str) -> None:
    """A plan of calls in evaluation mode: no passes back; other rows and lengths as they come."""
    model = copy.deepcopy(example()[0]).eval()
    x = batch()[0]
    with torch.no_grad():
        graph = captured(model, (x,))
    plan = planned(kind, graph)
    forward = Schedule(tuple(tuple(a for a in order if a.kind == "F") for order in plan.schedule.orders))
    ours = parallelize(copy.deepcopy(model), replace(plan, schedule=forward), graph=graph)
    assert not ours.training and not ours._stages.training
    with torch.no_grad():
        for rows, length in ((ROWS, 3), (5, 3), (1, 3), (ROWS, 4), (ROWS, 3)):
            x = batch(rows, length)[0]
            torch.testing.assert_close(ours(x)["logits"], model(x)["logits"], **TOLERANCE)


@functools.cache
def gpt2() -> tuple[Any, Graph]:
    """And what is called with tokens and labels."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 4, "n_positions": 32, "vocab_size": 48}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=1)
    model = transformers.GPT2LMHeadModel(config).double()
    with all_double():
        return model, captured(model, (), {"input_ids": tokens(8, 12), "labels": tokens(8, 12)})


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 48, (rows, length), generator=torch.Generator().manual_seed(seed))


def language_models(kind: str) -> tuple[Any, Any]:
    model, graph = gpt2()
    plan = planned(kind, graph, recipe="megatron")
    return parallelize(model, plan, graph=graph, keep=True), copy.deepcopy(model)


@all_double()
def generate(rank: int, kind: str, folder: str) -> None:
    """The library's own loop gives the tokens of one process, also where the texts begin with padding; and loops that keep
    using the cache they made, one that grows and one that does not."""
    import transformers

    ours, theirs = (model.eval() for model in language_models(kind))
    start = tokens(2, 5)
    mask = torch.ones_like(start)
    mask[0, :2] = 0
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 5}):
        found = []
        for model in (theirs, ours):
            torch.manual_seed(3)
            found.append(model.generate(start, attention_mask=mask, max_new_tokens=14, pad_token_id=1, **options))
        assert torch.equal(*found) and found[0].shape[1] > 16
    assert len(ours._programs) == 3  # the planned one, the prompt and a token: the cache goes from one to the next
    assert sum("StaticCache" in prepared.graph.input_tree for prepared in ours._programs._recent) == 2
    kinds = (transformers.DynamicCache, transformers.StaticCache)
    for cached, options in zip(kinds, ({}, {"max_cache_len": 8}), strict=True):
        found = []
        for model in (theirs, ours):
            cache, logits = cached(config=theirs.config, **options), []
            with torch.no_grad():
                for text in (tokens(2, 5), tokens(2, 1, seed=1), tokens(2, 1, seed=2)):
                    output = model(input_ids=text, past_key_values=cache, use_cache=True)
                    logits.append(output.logits[:, -1])
            assert int(cache.get_seq_length()) == int(output.past_key_values.get_seq_length()) == 7
            found.append(whole(torch.stack(logits)))
        torch.testing.assert_close(*found, **TOLERANCE)


@all_double()
def save_pretrained(rank: int, kind: str, folder: str) -> None:
    """Written by the first rank in the model's own class, read by the library."""
    import transformers

    ours, theirs = language_models(kind)
    for module in (ours, theirs):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module(input_ids=tokens(8, 12), labels=tokens(8, 12)).loss.backward()
        optimizer.step()
    ours.save_pretrained(folder)
    written = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(written.get_parameter(name).detach(), parameter.detach(), **TOLERANCE)
    assert type(written.config) is type(theirs.config) and written.lm_head.weight is written.transformer.wte.weight


def trainer(rank: int, kind: str, folder: str) -> None:
    """Hugging Face's Trainer: losses and norms of one process, evaluation, checkpoints, resuming."""
    from integrations.trainer import trains

    trains(rank, kind, folder)


def accelerate(rank: int, kind: str, folder: str) -> None:
    """Accelerate's loop: accumulation, clipping, evaluation, states, resuming."""
    from integrations.accelerator import accelerates

    accelerates(rank, kind, folder)


def lightning(rank: int, kind: str, folder: str) -> None:
    """Lightning's Trainer: losses of one process, evaluation, checkpoints, resuming."""
    from integrations.lightning import lightning

    lightning(rank, kind, folder)


def other_ranks(rank: int, kind: str, folder: str) -> None:
    """A job comes back with fewer and with more processes than its plan is for, and goes on from its checkpoint."""
    ours, theirs = modules(kind)
    model, graph = example()
    optimizer, single = (torch.optim.AdamW(m.parameters(), lr=0.05) for m in (ours, theirs))
    expected = train(theirs, single, 3)
    train(ours, optimizer, 1)
    save_checkpoint(folder, 1, ours, optimizer)
    os.environ[ELASTIC_VARIABLE] = "1"
    try:
        for size in (2, 8):
            plan = replace(planned(kind, graph, size=size), cluster=parse_cluster(f"local:{size}"))
            resumed = parallelize(copy.deepcopy(model), plan, graph=graph)
            assert resumed.plan.devices == dist.get_world_size() != plan.devices
            again = torch.optim.AdamW(resumed.parameters(), lr=0.3)
            assert load_checkpoint(folder, resumed, again) is not None
            assert train(resumed, again, 2, first=1) == pytest.approx(expected[1:], rel=1e-9), size
            same_weights(resumed, theirs)
    finally:
        del os.environ[ELASTIC_VARIABLE]
