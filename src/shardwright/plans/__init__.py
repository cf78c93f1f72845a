"""The ``Plan``: what was decided, what it will cost, how good it provably is. Save, load, compare, explain."""

from shardwright.plans.plan import Candidate, Plan, Prediction, Proof, Serving
from shardwright.plans.serial import from_json, to_json
from shardwright.plans.stages import Stage, StagePrediction

__all__ = ["Candidate", "Plan", "Prediction", "Proof", "Serving", "Stage", "StagePrediction", "from_json", "to_json"]
