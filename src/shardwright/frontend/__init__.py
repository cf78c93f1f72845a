"""``nn.Module`` → ``Graph`` with ``torch.export`` (meta tensors, nothing materialised)."""

from shardwright.frontend.capture import capture

__all__ = ["capture"]
