"""``nn.Module`` → ``Graph`` with ``torch.export`` (meta tensors, nothing materialised)."""

from shardwright.frontend.capture import capture
from shardwright.frontend.replay import replay

__all__ = ["capture", "replay"]
