"""A discrete-event run of a plan: timeline, overlap, exposed communication, memory over time."""

from shardwright.simulator.timeline import RankTimeline, Timeline, simulate, simulate_plan
from shardwright.simulator.what_if import WhatIf

__all__ = ["RankTimeline", "Timeline", "WhatIf", "simulate", "simulate_plan"]
