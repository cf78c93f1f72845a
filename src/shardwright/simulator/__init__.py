"""A discrete-event run of a plan: timeline, overlap, exposed communication, memory over time."""

from shardwright.simulator.timeline import Timeline, simulate, simulate_walk

__all__ = ["Timeline", "simulate", "simulate_walk"]
