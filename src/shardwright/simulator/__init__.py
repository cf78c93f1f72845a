"""A discrete-event run of a plan: timeline, overlap, exposed communication, memory over time."""

from shardwright.simulator.pipelines import PipelineTimeline, simulate_plan_pipeline
from shardwright.simulator.timeline import Timeline, simulate, simulate_plan, simulate_program
from shardwright.simulator.what_if import WhatIf

__all__ = [
    "PipelineTimeline",
    "Timeline",
    "WhatIf",
    "simulate",
    "simulate_plan",
    "simulate_plan_pipeline",
    "simulate_program",
]
