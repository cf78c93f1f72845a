"""``save_pretrained`` of a parallelized Hugging Face model: gathered on every rank, written by the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwright.errors import RunError
from shardwright.runtime.submodules import StandIn, as_original
from shardwright.runtime.whole_state import whole_state


def save_pretrained(parallel: StandIn, save_directory: str | Path, **kwargs: Any) -> None:
    """Write what ``from_pretrained`` reads, in the model's own class; every rank calls this and returns when it is there.

    The whole model passes through the first rank's host memory; ``save_checkpoint`` writes shards.
    """
    whole = whole_state(parallel.state_dict(), everywhere=False)
    first = dist.get_rank() == 0
    refusal = [""]
    if first:
        try:
            as_original(parallel, parallel).save_pretrained(save_directory, state_dict=whole, **kwargs)
        except Exception as error:  # said on every rank, or the others would wait
            refusal = [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(refusal)
    if refusal[0]:
        raise RunError(
            f"save_pretrained() into {str(save_directory)!r} failed on rank 0: {refusal[0]}",
            "Store shards instead: shardwright.runtime.checkpoint.save_checkpoint().",
        )
