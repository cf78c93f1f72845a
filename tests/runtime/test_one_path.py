"""One mesh and a pipeline go one path: every function that only one of them executes is listed here, with its reason.

Of 800 functions that planning, simulating, drawing, training and evaluating a model executes, these few are entered by one
kind of plan alone. Most say what has no meaning on one mesh: messages, cuts, an order of passes. A function that is added
here needs a reason of that kind; one that both enter by now is struck off.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench" / "one_path.py"

MOST = 46
"""The aim was 20. Messages alone are 13: they are cut, sent, received and priced, and one mesh has none."""

ONLY_ONE_MESH = {
    "runtime/performer:Eager.going_back": "its backward passes wait for the gradient of the loss; 1F1B goes back before",
}

MESSAGES = {
    "program/pipeline:Pipeline._messages": "who sends which parcel of a micro-batch to whom",
    "program/transfers:BoundaryTensor.parcels": "a tensor that crosses, and its gradient the other way",
    "program/transfers:Holding.regions": "which rank of a mesh has which part",
    "program/transfers:_parcels": "parts that two meshes have in common",
    "program/transfers:boundary_tensor": "how a tensor lies on both sides",
    "program/transfers:parcels": "who sends what to whom",
    "program/transfers:unreduced_layout": "how its maker leaves a tensor",
    "runtime/deferred_results:ResultBroadcast.tell": "the loss, from the ranks that have it to those that do not",
    "runtime/point_to_point:PointToPoint.receive": "parcels become a tensor",
    "runtime/point_to_point:PointToPoint.send": "a part of a tensor leaves",
    "simulator/engine:Streams.place": "a message on its link; a pass's own events are issued all at once",
    "simulator/links:Links.way": "what crossing takes",
    "simulator/links:link_between": "the link between two groups of ranks",
}

CUTS = {
    "planner/cutting:Line.even": "where the slowest stage is fastest",
    "planner/cutting:Line.of": "seconds before every place, on one device",
    "planner/cutting:Line.operators": "a stage between two places",
    "planner/delivering:_simulated": "all stages together; the search of one mesh has simulated its answer",
    "simulator/alike:doing": "which stages do the same, and are priced once",
    "simulator/alike:_part": "a stage up to names",
    "simulator/alike:_placed": "an argument up to names",
    "planner/cutting:complete": "operators that the graph of a micro-batch lacks",
    "planner/pipelines:_proposed": "the stages of one number of micro-batches, each searched as a mesh of its own",
    "planner/pipelines:_strategy": "one stage, by the search of one mesh",
    "planner/pipelines:plan_pipeline": "the fastest number of micro-batches",
    "planner/proposals:LaidOut.laid": "stages that are known from the start; on one mesh the search's answer is laid out",
    "planner/proposals:Proposal.note": "nothing; on one mesh, what is recomputed",
    "program/mean_losses:origin": "parts of an operator go where it goes",
    "program/stages:_light": "what every stage may compute for itself",
    "program/stages:_with_light": "a stage's operators with those",
    "program/stages:_part": "the graph of a stage; that of one is the graph",
}

ORDER = {
    "planner/cutting:microbatch_counts": "numbers of micro-batches to try",
    "planner/pipelines:_order": "which device has which stage",
    "planner/pipelines:_scheduled": "the order of the passes",
    "program/microbatches:Microbatches.region": "the rows of a micro-batch",
    "program/passes:split_backward": "the halves, whose order a scheduler may choose",
    "program/pieces:_refused": "another number of micro-batches, whose rows are too few to be split",
    "program/pieces:describe": "the operator that cannot be",
    "simulator/what_if:not_so_many": "why another number of micro-batches is refused",
    "simulator/stages:PricedStage.least": "the same of all passes",
    "simulator/stages:work_of": "a step as schedulers see it",
}

SUMS = {
    "runtime/performer:Eager.reduce": "passes of 1F1B keep gradients back; on one mesh they reduce them as they go",
    "runtime/norms:StageGradient.__torch_function__": "a gradient of one of several stages",
    "runtime/norms:_inherit": "what optimizers make of one",
    "runtime/norms:belongs_to": "a gradient becomes one",
    "runtime/stages:Stages.workers": "the ranks that tell each other what they do: all that have stages",
}


def test_what_only_one_mesh_or_only_a_pipeline_executes_has_a_reason() -> None:
    # In a process of its own: what other tests left in caches would decide who is the first to compute something.
    ran = subprocess.run([sys.executable, str(BENCH), "--json"], capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr
    only = json.loads(ran.stdout)
    assert only.pop("both") > 650
    assert only["one mesh"] == sorted(ONLY_ONE_MESH)
    listed = {**MESSAGES, **CUTS, **ORDER, **SUMS}
    assert sorted(set(only["1F1B"]) ^ set(listed)) == []
    assert len(listed) + len(ONLY_ONE_MESH) <= MOST
