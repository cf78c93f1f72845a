"""An overflow is everybody's: where the gradients of one stage of a pipeline are not finite, those of all stages become so.

``GradScaler`` looks at the gradients that its process holds, skips the update and lowers its scale if one is infinite. The
stages of a pipeline hold different parameters: each would decide alone, and the model would be half updated. One number is
exchanged, on the device, without waiting for it on the host.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright._torch_compat import local_of


def share_overflow(gradients: Iterable[Tensor], device: torch.device) -> None:
    """Every rank calls this with its own gradients; if any of any rank is not finite, one of each rank becomes NaN."""
    local = [part for part in map(local_of, gradients) if part.numel()]
    found = torch.zeros((), dtype=torch.float32, device=device)  # on every rank, whatever its default
    if local:
        found = (~torch.nn.utils.get_total_norm(local, float("inf")).isfinite()).to(torch.float32)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    if local:
        local[0].mul_(torch.where(found > 0, torch.nan, 1.0).to(local[0].dtype))
