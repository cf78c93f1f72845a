"""Pipelines beside plans on one mesh: the faster is the plan, its bound holds for both, and what is delivered can be run."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from shardwright.cluster import parse_cluster
from shardwright.errors import Infeasible, LoweringError
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, plan_graph, plan_jointly
from shardwright.planner.delivering import deliver
from shardwright.planner.frontier import spanning
from shardwright.planner.joint import NEVER, PROMISING, Joint, TooLargeSimulatedError, _model, find_pipelines
from shardwright.planner.planning import PIPELINES_NOT_SEARCHED
from shardwright.planner.staging import Composed, _order, expected, shape_of
from shardwright.plans import Plan
from shardwright.plans.proof_text import proof_text
from shardwright.plans.serial import from_json, to_json
from shardwright.program.microbatches import microbatches
from shardwright.program.pipeline import Pipeline, check
from shardwright.search.conditions import Conditions
from shardwright.search.joint.orders import OTHERS
from shardwright.search.joint.pipelines import JointPlan, Model, NothingToGain
from shardwright.search.joint.readings import computing_all_the_time
from shardwright.search.joint.space import Space
from shardwright.search.joint.timed import Run, Timed
from shardwright.simulator import simulate_plan
from shardwright.simulator.what_if import order_name
from shardwright.zoo.reference import resolve

CLUSTER = parse_cluster("2x2xH100")
QUICK = Options(search="data-parallel", baselines=(), recompute="none", fewer_devices=False)


@pytest.fixture(scope="module")
def graph() -> Graph:
    resolved = resolve("gpt:layers=4,width=256,heads=4,vocab=512,seq=128", batch=16)
    return capture(resolved.model, resolved.args, resolved.kwargs)


@pytest.fixture(scope="module")
def joint(graph: Graph) -> Joint:
    return find_pipelines(graph, CLUSTER, QUICK)


def test_every_pipeline_that_was_found_can_be_delivered_and_read_again(graph: Graph, joint: Joint) -> None:
    least = max(stage.memory_bytes for stage in joint.best.stages)
    found = [joint.best, *joint.under([0.6 * least])]
    found += [plan for plan in joint.recipes.values() if isinstance(plan, JointPlan)]
    found += joint.others.values()
    assert set(joint.others) == set(OTHERS)
    for one in found:
        plan = joint.deliver(one)
        assert one.schedule in (order_name(plan.schedule), "gpipe") or len(one.stages) == 1
        assert {name for stage in plan.stages for name in stage.operators} == {op.name for op in graph.ops}
        assert [len(stage.ranks) for stage in plan.stages] == [stage.devices for stage in one.stages]
        assert any("by sums" in note for note in plan.notes)
        assert plan.prediction.step_seconds == pytest.approx(simulate_plan(plan, graph).seconds)
        assert all(stage.prediction is not None for stage in plan.stages)
        again = from_json(to_json(plan), "plan")
        assert (again.stages, again.schedule) == (plan.stages, plan.schedule)
        check(Pipeline.of(graph, plan.stages, plan.microbatches, plan.schedule))
        assert joint.best.bound_seconds <= one.step_seconds
        bound, step = joint.best.bound_seconds, plan.prediction.step_seconds
        assert plan.proof.step_bound == (bound if bound <= step else 0.0)  # overlap may undercut a bound on sums


@pytest.fixture(scope="module")
def staged() -> Joint:
    """Two stages of a wide model, whose passes take longer than what issues them."""
    resolved = resolve("gpt:layers=4,width=2048,heads=16,vocab=512,seq=512", batch=8, dtype="bfloat16")
    graph = capture(resolved.model, resolved.args, resolved.kwargs)
    joint = find_pipelines(graph, parse_cluster("2xH100"), QUICK, names=())
    space = joint.space.spaces[0]
    found = Timed(space, space.rows).plan([Run(0, 2, 1), Run(2, 4, 1)])
    assert found is not None
    return replace(joint, best=replace(found, bound_seconds=joint.best.bound_seconds), others={})


def test_the_order_of_passes_is_the_fastest_there_is(staged: Joint) -> None:
    alone = staged.deliver(staged.best)
    others = {name: staged.space.same_in(name, staged.best) for name in OTHERS}
    steps = {name: staged.deliver(plan).prediction.step_seconds for name, plan in others.items() if plan is not None}
    plan, judged = staged.fastest()
    assert plan is not None
    taken = order_name(plan.schedule)
    assert taken in steps and plan.prediction.step_seconds == min(steps.values()) < alone.prediction.step_seconds
    every = {"pipeline": alone.prediction.step_seconds, **steps}
    simulated = {name: one.seconds for name, one in judged.items() if one.refusal is None}
    assert simulated == {name: every[name] for name in simulated} and {"pipeline", taken} <= set(simulated)
    note = next(note for note in plan.notes if note.startswith(f"the passes run in the order {taken}"))
    assert all(name in note for name in ("1f1b", *simulated) if name not in ("pipeline", taken))
    assert plan.proof.step_bound <= plan.prediction.step_seconds


def test_an_order_that_is_no_faster_is_not_taken(staged: Joint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal ones 1F1B is the plan."""
    plain = staged.deliver(staged.best)
    real = Joint.deliver

    def alike(self: Joint, found: JointPlan, reference: str = "") -> Plan:
        return replace(real(self, found, reference), prediction=plain.prediction)

    monkeypatch.setattr(Joint, "deliver", alike)
    plan, judged = staged.fastest()
    assert set(judged) & set(OTHERS)
    assert plan is not None and order_name(plan.schedule) == "1f1b"


def test_an_order_in_which_the_whole_batch_is_not_there_yet_is_refused(staged: Joint) -> None:
    found = staged.space.same_in("zb-h1", staged.best)
    assert found is not None
    with pytest.raises(LoweringError, match="needs the whole batch"):
        _order(found, whole_batch=True)


def test_a_stage_of_one_block_recomputes_it(graph: Graph, joint: Joint) -> None:
    """Nothing in such a stage repeats, so no block was found in it, and it held everything."""
    space = joint.space.spaces[0]
    found = Timed(space, space.rows).plan([Run(at, at + 1, 1) for at in range(4)])
    assert found is not None
    again = replace(found, stages=tuple(replace(stage, recomputed_blocks=1) for stage in found.stages))
    assert [len(stage.strategy.recomputed) for stage in joint.deliver(again).stages] == [1] * 4
    assert joint.deliver(again).prediction.memory_bytes < joint.deliver(found).prediction.memory_bytes


def test_pipelines_that_do_not_fit_teach_the_search_what_they_need(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that hold three times what they are priced at: found within a little less memory was nothing that fits."""
    loose = find_pipelines(graph, CLUSTER, QUICK, names=())
    limit = 1.2 * max(stage.memory_bytes for stage in loose.best.stages)
    joint = find_pipelines(graph, CLUSTER, replace(QUICK, memory_limit=limit), names=())
    prices = {id(row.price.strategy): row.price for space in joint.space.spaces for row in space.rows}
    tried, real = [], Joint.deliver

    def needed(found: JointPlan) -> list[float]:
        return [
            prices[id(s.strategy)].resting.of(s.last_block - s.first_block, s.first_block == 0, s.last_block == 4)
            + s.holds * 3 * prices[id(s.strategy)].held.block * (s.last_block - s.first_block - s.recomputed_blocks)
            for s in found.stages
        ]

    def deliver(self: Joint, found: JointPlan, reference: str = "") -> Plan:
        tried.append(found)
        if max(needed(found)) > limit:
            error = TooLargeSimulatedError("too large")
            error.stage_bytes = tuple(needed(found))
            raise error
        return real(replace(self, options=replace(QUICK, ignore_device_memory=True)), found)

    monkeypatch.setattr(Joint, "deliver", deliver)
    assert max(needed(joint.best)) > limit
    assert all(max(needed(found)) > limit for found in joint.under([0.9 * limit, 0.8 * limit]))
    plan, judged = joint.fastest()
    assert plan is not None and judged["pipeline"].refusal is None
    rows = {row.name: row for row in joint.candidates(judged)}
    assert rows["pipeline"].mesh[0] == ("stage", len(judged["pipeline"].found.stages))
    assert max(needed([found for found in tried if found.schedule == "1f1b"][-1])) <= limit
    monkeypatch.setattr("shardwright.planner.joint.CORRECTIONS", 0)

    def attempts(most: int) -> int:
        """Of the order that is tried most often, where each may learn so many times."""
        monkeypatch.setattr("shardwright.planner.joint.FEW_CORRECTIONS", most)
        tried.clear()
        _, judged = joint.fastest()
        assert judged["pipeline"].refusal is not None
        return max(sum(found.schedule == order for found in tried) for order in OTHERS)

    assert attempts(0) == 1 < attempts(2)


def test_stages_of_alpa_that_recompute_everything_do_so_when_they_are_delivered(graph: Graph) -> None:
    """They were delivered as if they kept everything, so that the recipe did not fit where it does."""
    for limit in (60e6, 50e6, 45e6, 40e6):
        try:
            joint = find_pipelines(graph, CLUSTER, replace(QUICK, memory_limit=limit), names=("alpa",))
        except Infeasible:
            continue
        found = joint.recipes["alpa"]
        if isinstance(found, str) or not any(stage.recomputed_blocks for stage in found.stages):
            continue
        plan = replace(joint, options=replace(QUICK, ignore_device_memory=True)).deliver(found)
        for stage, planned in zip(found.stages, plan.stages, strict=True):
            assert stage.recomputed_blocks in (0, stage.last_block - stage.first_block)
            assert len(planned.strategy.recomputed) == stage.recomputed_blocks
        return
    pytest.fail("alpa recomputed nowhere")


def test_stages_on_unlike_meshes_share_the_embedding(graph: Graph, joint: Joint) -> None:
    space = joint.space.spaces[0]
    found = Timed(space, space.rows).plan([Run(0, 2, 1), Run(2, 4, 2)])
    assert found is not None
    plan = joint.deliver(found)
    assert [len(stage.ranks) for stage in plan.stages] == [1, 2]
    pipe = Pipeline.of(graph, plan.stages, plan.microbatches, plan.schedule)
    assert [pipe.meetings(owners) for _, owners in pipe.ties] == [(((0,), (1, 2)),)]


def test_one_stage_holds_one_micro_batch_whatever_the_recipe(joint: Joint) -> None:
    """GPipe's one stage would hold all of them, and the same stage of megatron-3d was taken not to fit either."""
    space = joint.space.spaces[0]
    plans = [Timed(space, space.rows, name).plan([Run(0, 4, 2)]) for name in ("gpipe", "1f1b")]
    one, other = (joint.deliver(found) for found in plans if found is not None)
    assert (one.schedule, one.prediction) == (other.schedule, other.prediction)


def test_the_faster_of_one_mesh_and_a_pipeline_is_the_plan(graph: Graph) -> None:
    plan, joint = plan_jointly(graph, CLUSTER, QUICK)
    assert joint is not None
    steps = {c.name: c.prediction.step_seconds for c in plan.candidates if c.prediction and c.prediction.fits}
    assert {"megatron-3d", "gpipe", "pipedream", "alpa"} <= {c.name for c in plan.candidates}
    assert plan.prediction.step_seconds == min(steps.values())
    assert 0 < plan.proof.step_bound <= min(steps.values())
    assert "pipelines of 4 or 16 micro-batches" in proof_text(plan)


def test_where_nothing_fits_on_one_mesh_the_plan_is_a_pipeline(graph: Graph, joint: Joint) -> None:
    """Whole on every device the model takes more than a device of a pipeline does with one stage of it."""
    whole = plan_graph(graph, CLUSTER, QUICK).prediction.memory_bytes
    staged = max(stage.prediction.memory_bytes for stage in joint.deliver(joint.best).stages if stage.prediction)
    assert staged < 0.95 * whole
    options = replace(QUICK, memory_limit=(staged + whole) / 2)
    plan, _ = plan_jointly(graph, CLUSTER, options)
    assert plan.stages and plan.prediction.fits
    with pytest.raises(Infeasible, match="fits"):  # a search by name is one on one mesh
        plan_jointly(graph, CLUSTER, options, pipelines=PROMISING)
    curve = spanning([], joint)
    assert all(
        a.memory_bytes > b.memory_bytes and a.step_seconds < b.step_seconds for a, b in itertools.pairwise(curve)
    )


def test_where_nothing_fits_on_one_mesh_pipelines_are_searched_unasked(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plan_jointly(graph, CLUSTER, QUICK, pipelines=PROMISING)[1] is None  # a search by name is one on one mesh

    def nothing(*_: object, **__: object) -> Plan:
        raise Infeasible("nothing fits.", f"Ask for less. {PIPELINES_NOT_SEARCHED}")

    monkeypatch.setattr("shardwright.planner.joint.plan_graph", nothing)
    plan, joint = plan_jointly(graph, CLUSTER, Options(), pipelines=PROMISING)
    assert plan.stages and joint is not None
    with pytest.raises(Infeasible, match=r"nothing fits\. Ask for less\. Pipelines: no pipeline of this model fits"):
        plan_jointly(graph, CLUSTER, Options(memory_limit=1e5), pipelines=PROMISING)
    with pytest.raises(Infeasible, match=PIPELINES_NOT_SEARCHED):
        plan_jointly(graph, CLUSTER, Options(), pipelines=NEVER)


@pytest.mark.parametrize(
    ("where", "large", "seconds", "recomputed", "pipelines", "searched"),
    [
        ("2x2xH100", True, 1.0, False, PROMISING, True),
        ("2x2xH100", False, 1.0, False, PROMISING, False),
        ("2x2xH100", True, 1.0, False, NEVER, False),
        ("2x2xH100", True, 1e-6, False, PROMISING, False),  # faster than computation alone: nothing to gain
        ("4xH100", True, 1.0, False, PROMISING, False),
        ("4xH100", False, 1.0, True, PROMISING, True),
    ],
)
def test_pipelines_are_searched_unasked_where_they_may_be_faster(
    graph: Graph,
    joint: Joint,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    large: bool,
    seconds: float,
    recomputed: bool,
    pipelines: str,
    searched: bool,
) -> None:
    """Of large models on several nodes, or where the plan on one mesh recomputes; the faster of both is the plan."""
    flat = plan_graph(graph, CLUSTER, QUICK)
    strategy = replace(flat.stages[0].strategy, recomputed=("blocks.0",) if recomputed else ())
    flat = replace(
        flat,
        stages=(replace(flat.stages[0], strategy=strategy),),
        prediction=replace(flat.prediction, step_seconds=seconds),
    )
    least = computing_all_the_time(joint.space.spaces[-1].pricer, CLUSTER, None, 16)

    def found(*_: object, below: float) -> Joint:
        if below < least:
            raise NothingToGain("with all devices computing all the time, it takes longer.", "")
        return joint

    monkeypatch.setattr("shardwright.planner.joint.LARGE", 0 if large else 10**12)
    monkeypatch.setattr("shardwright.planner.joint.plan_graph", lambda *_, **__: flat)
    monkeypatch.setattr("shardwright.planner.joint.find_pipelines", found)
    plan, tried = plan_jointly(graph, parse_cluster(where), Options(), pipelines=pipelines)
    assert (tried is not None) == searched == (not plan.whole)
    assert plan.prediction.step_seconds <= seconds
    assert any("computing all the time" in note for note in plan.notes) == (seconds == 1e-6)


def test_micro_batches_whose_computation_takes_too_long_are_not_searched(graph: Graph, joint: Joint) -> None:
    least = {s.size: computing_all_the_time(s.pricer, CLUSTER, None, s.microbatches) for s in joint.space.spaces}
    assert least[4] < least[1]  # fewer and larger ones compute faster
    assert least[joint.best.microbatch] < joint.best.step_seconds
    with pytest.raises(NothingToGain, match="computing all the time"):
        find_pipelines(graph, CLUSTER, QUICK, below=min(least.values()))


def normed() -> Graph:
    """A model without blocks whose batch norms need the whole batch."""
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 5))
    model = nn.Sequential(*layers)
    return capture(_Loss(model), (torch.zeros(16, 3, 8, 8),), {})


class _Loss(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()


def test_a_model_that_cannot_be_cut_into_micro_batches_says_so_and_keeps_its_plan() -> None:
    with pytest.raises(Infeasible, match="no pipeline of this model"):
        find_pipelines(normed(), CLUSTER, QUICK)
    plan, joint = plan_jointly(normed(), parse_cluster("2xH100"), QUICK)
    assert isinstance(plan, Plan) and joint is None
    assert any("no pipeline of this model" in note for note in plan.notes)


def test_batch_norms_per_piece_are_searched_and_delivered() -> None:
    """A norm and the buffers that it changes stay in one stage."""
    joint = find_pipelines(normed(), parse_cluster("2xH100"), replace(QUICK, batch_norm="per-piece"))
    several = next(plan for plan in (joint.best, *joint.others.values()) if len(plan.stages) > 1)
    plan = joint.deliver(several)
    assert plan.batch_norm == "per-piece"
    assert {name for stage in plan.stages for name in stage.operators} == {op.name for op in joint.graph.ops}


def test_a_stage_is_priced_as_its_program_is_simulated() -> None:
    """Micro-batches pay for gathers and for adding gradients up; what brings gradients home comes once a step."""
    resolved = resolve("gpt:layers=3,width=4096,heads=32,vocab=1024,seq=512", batch=8, dtype="bfloat16")
    graph, cluster = capture(resolved.model, resolved.args, resolved.kwargs), parse_cluster("2xH100")
    space = Space(Model(lambda size: microbatches(graph, 8 // size).graphs[size]), cluster, 8, 2, Conditions(), 2, 64)
    plans = {row.price.name: Timed(space, [row]).plan([Run(0, 3, 2)]) for row in space.rows if row.units == 2}
    assert {"auto", "fsdp", "data-parallel", "megatron"} <= plans.keys()
    for name, found in plans.items():
        assert found is not None
        about = {"name": name, "shape": shape_of(found), "expected": expected(found), "batch_norm": "whole"}
        plan = deliver(graph, cluster, QUICK, Composed(graph=graph, found=found, **about))
        stage = simulate_plan(plan, graph).times[0, 2]
        passes = sum(stage.events[n].seconds for kind in ("F", "B") for n in stage.passes[kind])
        closing = sum(stage.events[n].seconds for n in stage.once)
        assert found.stages[0].seconds == pytest.approx(passes, rel=0.05), name
        assert found.stages[0].closing_seconds == pytest.approx(closing, rel=0.25), name


def test_a_deep_model_is_priced_by_a_few_of_its_blocks() -> None:
    resolved = resolve("gpt:layers=16,width=128,heads=4,vocab=512,seq=64", batch=16)
    graph = capture(resolved.model, resolved.args, resolved.kwargs)
    model = _model(graph, CLUSTER, QUICK)
    assert model is not None and model.blocks == 16
    assert len(model.graph_at(4).ops) < len(graph.ops) / 3
    short, whole = (
        Space(one, CLUSTER, 16, 4, Conditions(), 2, 64)
        for one in (model, Model(lambda size: microbatches(graph, 16 // size).graphs[size]))
    )
    prices = [
        [(r.price.name, r.price.seconds, r.price.resting, r.price.wholly) for r in s.rows] for s in (short, whole)
    ]
    assert prices[0] == prices[1]
    assert short.bound() == whole.bound()


def test_a_model_of_two_runs_is_not_read_as_a_few_blocks_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwright.planner.joint.MANY_BLOCKS", 6)
    t5 = "hf:t5:num_layers=6,num_decoder_layers=6,d_model=64,d_ff=128,num_heads=2,d_kv=32,vocab_size=256"
    resolved = resolve(t5, batch=8, seq=32)
    assert _model(capture(resolved.model, resolved.args, resolved.kwargs), CLUSTER, QUICK) is None
