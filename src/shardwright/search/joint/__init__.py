"""Stages, devices, memory in flight and what each stage does, chosen together and proved: one problem, several
readers.
"""

from shardwright.search.joint.compose import compose, no_schedule_below
from shardwright.search.joint.pipelines import JointPlan, JointStage, Model, search_pipelines
from shardwright.search.joint.problem import Objective, PipelineProblem, StageTable, filled_and_drained, pack

__all__ = [
    "JointPlan",
    "JointStage",
    "Model",
    "Objective",
    "PipelineProblem",
    "StageTable",
    "compose",
    "filled_and_drained",
    "no_schedule_below",
    "pack",
    "search_pipelines",
]
