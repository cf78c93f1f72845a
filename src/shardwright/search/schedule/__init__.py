"""Orders of the passes of a pipeline under memory limits: list scheduling, local search, CP-SAT, always with a lower
bound.
"""

from shardwright.search.schedule.bounds import lower_bound
from shardwright.search.schedule.solve import OBJECTIVES, find_schedule

__all__ = ["OBJECTIVES", "find_schedule", "lower_bound"]
