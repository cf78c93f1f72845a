"""A rank's program on ``torch.distributed``: parallel modules, verification against one device, checkpoints."""

from shardwright.runtime.compare import Verification
from shardwright.runtime.module import ParallelModule
from shardwright.runtime.parallelize import parallelize
from shardwright.runtime.verify import verify

__all__ = ["ParallelModule", "Verification", "parallelize", "verify"]
