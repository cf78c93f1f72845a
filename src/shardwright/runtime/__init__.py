"""A rank's program on ``torch.distributed``: parallel modules, their gradients, checkpoints."""

from shardwright.runtime.module import ParallelModule
from shardwright.runtime.parallelize import parallelize

__all__ = ["ParallelModule", "parallelize"]
