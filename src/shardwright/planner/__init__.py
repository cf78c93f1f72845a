"""From a model to the simulated winner: search on every mesh, try out, correct, compare; the trade-off curve."""

from shardwright.planner.joint import beside_one_mesh, plan_jointly
from shardwright.planner.options import DEFAULT_BASELINES, Options, Progress
from shardwright.planner.pipelines import Pipelining, plan_pipeline
from shardwright.planner.planning import plan_graph
from shardwright.planner.serving import plan_serving
from shardwright.planner.trials import predict
from shardwright.planner.whole_way import plan
from shardwright.search.formulate import describe_graph

__all__ = [
    "DEFAULT_BASELINES",
    "Options",
    "Pipelining",
    "Progress",
    "beside_one_mesh",
    "describe_graph",
    "plan",
    "plan_graph",
    "plan_jointly",
    "plan_pipeline",
    "plan_serving",
    "predict",
]
