"""Work shared anew after measurement: micro-batches between replicas, layers between the stages of a pipeline."""

from bench.published.rebalance.bounds import possible
from bench.published.rebalance.decide import rebalance
from bench.published.rebalance.job import Balance, Job, as_run
from bench.published.rebalance.replay import step_seconds

__all__ = ["Balance", "Job", "as_run", "possible", "rebalance", "step_seconds"]
