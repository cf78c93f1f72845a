"""A rank's program on ``torch.distributed``: parallel modules, verification against one device, checkpoints."""

from shardwright.runtime.module import ParallelModule
from shardwright.runtime.parallelize import parallelize

__all__ = ["ParallelModule", "parallelize"]
