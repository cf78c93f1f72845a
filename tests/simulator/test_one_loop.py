"""One loop plays every step: what it says of one mesh is one run of its events, and of passes what schedulers compute."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.costs.memory import memory
from shardwright.plans import Plan
from shardwright.program.pipeline import Pipeline
from shardwright.schedules import RECIPES, Action, Schedule, known_schedule, pipeline, run
from shardwright.simulator import simulate_plan
from shardwright.simulator.engine import run as run_events
from shardwright.simulator.links import Links, Way
from shardwright.simulator.play import play
from shardwright.simulator.stages import PricedStage, processor_of
from shardwright.simulator.what_if import orders_like

PLANS = Path(__file__).resolve().parents[2] / "bench" / "predictions" / "plans"
ONE_MESH = ["recipe-fsdp", "three-axes-megatron", "cpu-megatron", "halos-images", "one-device-gpt", "inference-gpt"]


@pytest.mark.parametrize("name", ONE_MESH)
def test_one_mesh_is_one_run_of_its_events(name: str) -> None:
    plan = Plan.load(PLANS / f"{name}.json")
    timeline = simulate_plan(plan, plan.graph())
    (rank,), stage = timeline.ranks, timeline.stage()
    alone = run_events(stage.events, processor_of(stage.mesh))
    assert rank.events == stage.events
    assert (rank.starts, rank.ends, rank.issued) == (alone.starts, alone.ends, alone.issued)
    assert timeline.seconds == alone.seconds


@pytest.mark.parametrize("name", ONE_MESH)
def test_the_account_of_one_mesh_is_that_of_its_program(name: str) -> None:
    """To the byte: what is composed of passes, and what the program's own replay says."""
    plan = Plan.load(PLANS / f"{name}.json")
    timeline = simulate_plan(plan, plan.graph())
    use = memory(timeline.stage().program, timeline.stage().mesh.device)
    assert timeline.memory == (use.needed,)
    curve = timeline.memory_curve()
    assert max(size for _, size in curve) == use.peak
    assert [second for second, _ in curve] == sorted(second for second, _ in curve)
    assert curve[-1][1] == sum(storage.bytes for storage in use.storages if storage.born < 0)


def test_other_numbers_of_microbatches() -> None:
    plan = Plan.load(PLANS / "accumulation.json")
    graph = plan.graph()
    fewer = simulate_plan(plan, graph, microbatches=2)
    assert [str(one.action) for one in fewer.played.passes[0]] == ["0F0", "0B0", "0F1", "0B1", "0R2", "0U2"]
    assert simulate_plan(replace(plan, schedule=fewer.pipeline.schedule), graph).seconds == fewer.seconds
    forward = Schedule.parse("0F0 1F0 | 2F0")
    assert [str(order) for order in orders_like(forward, 2)] == ["0F0 1F0 0F1 1F1 | 2F0 2F1"]
    trained = Plan.load(PLANS / "recipe-fsdp.json")
    four = simulate_plan(trained, trained.graph(), microbatches=4)  # what divides its loss is split as moves least
    assert [one.action.kind for one in four.played.passes[0]] == [*"FBFBFBFB", "R", "U"]
    assert four.seconds > simulate_plan(trained, trained.graph()).seconds


@dataclass(frozen=True, eq=False)
class _Wires(Links):
    """A chain of stages; what a pass makes is on its way for ``hop`` seconds."""

    hop: float = 0.0

    def way(self, number: int, size: int, back: bool) -> Way:
        here, there = self.pipe.schedule.device_of[number : number + 2]
        link = None if here == there else SimpleNamespace(processor_share=0.0, processor_seconds=0.0)
        return Way(self.hop, 1, cast(Any, link))

    def ties(self, program: object) -> tuple[()]:
        return ()


def _stage(forward: float, inputs: float, weights: float) -> PricedStage:
    """Passes of one event each, and nothing after them."""
    rows = [("compute", seconds, 0.0, ()) for seconds in (forward, inputs, weights, inputs + weights)]
    passes = {kind: (number,) for number, kind in enumerate("FIWB")} | {"R": (), "U": ()}
    mesh = SimpleNamespace(device=SimpleNamespace(kind="cuda"), axes=())
    return cast(PricedStage, SimpleNamespace(rows=rows, passes=passes, mesh=mesh))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(RECIPES)), st.integers(1, 3), st.sampled_from([4, 6, 8]), st.data())
def test_passes_of_one_event_take_what_schedulers_say(name: str, groups: int, count: int, data: st.DataObject) -> None:
    """The grain of events and the grain of passes are two ways to tell the time, and they agree."""
    stages = groups * (RECIPES[name].stages_per_device or 1)
    order = known_schedule(name, stages, count, groups)
    seconds = st.floats(1.0, 3.0)
    times = [data.draw(st.tuples(seconds, seconds, seconds)) for _ in range(stages)]
    hop = data.draw(st.floats(0.0, 0.5))  # nothing waits for the link: it is shorter than any pass
    forward, inputs, weights = zip(*times, strict=True)
    expected = run(order, pipeline(order.device_of, count, forward, inputs, weights, hop))
    played = play({(s, 1): _stage(*own) for s, own in enumerate(times)}, _Wires(_pipe(order), hop=hop))
    for group, row in enumerate(played.passes):
        assert [one.start for one in row] == pytest.approx(expected.starts[group].tolist(), rel=1e-12)
        assert [one.end for one in row] == pytest.approx(expected.ends[group].tolist(), rel=1e-12)
    assert played.seconds == pytest.approx(max(float(ends[-1]) for ends in expected.ends), rel=1e-12)


def _pipe(order: Schedule) -> Pipeline:
    def crossing(action: Action, leaving: bool) -> Any:
        if action.kind == "W":
            return ()
        back = action.kind != "F"
        first = action.stage if leaving != back else action.stage - 1  # the boundary after a stage bears its number
        there = 0 <= first < order.stages - 1
        return [(first, SimpleNamespace(source=first, target=first + 1, tensor=""))] if there else []

    micro, stages = SimpleNamespace(sizes=(1,) * order.microbatches), range(order.stages)
    pipe = SimpleNamespace(schedule=order, micro=micro, stages=stages, reduces_inside=False, crossing=crossing)
    return cast(Pipeline, pipe)
