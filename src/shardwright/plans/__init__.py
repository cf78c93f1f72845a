"""The ``Plan``: what was decided, what it will cost, how good it provably is. Save, load, compare, explain."""

from shardwright.plans.plan import Candidate, Plan, Prediction, Proof
from shardwright.plans.serial import from_json, to_json

__all__ = ["Candidate", "Plan", "Prediction", "Proof", "from_json", "to_json"]
