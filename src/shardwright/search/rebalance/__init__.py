"""Work shared anew after measurement: micro-batches between replicas, layers between the stages of a pipeline."""

from shardwright.search.rebalance.bounds import possible
from shardwright.search.rebalance.decide import rebalance
from shardwright.search.rebalance.job import Balance, Job, as_run
from shardwright.search.rebalance.replay import step_seconds

__all__ = ["Balance", "Job", "as_run", "possible", "rebalance", "step_seconds"]
