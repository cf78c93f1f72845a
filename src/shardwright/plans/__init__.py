"""The ``Plan``: what was decided, what it will cost, how good it provably is. Save, load, compare, explain."""

from shardwright.plans.plan import Candidate, Plan, Prediction, Serving
from shardwright.plans.proof import Bound, Dropped, Proof
from shardwright.plans.serial import from_json, to_json
from shardwright.plans.spaces import SearchSpace
from shardwright.plans.stages import Stage, StagePrediction

__all__ = [
    "Bound",
    "Candidate",
    "Dropped",
    "Plan",
    "Prediction",
    "Proof",
    "SearchSpace",
    "Serving",
    "Stage",
    "StagePrediction",
    "from_json",
    "to_json",
]
