"""A strategy for PyTorch Lightning's ``Trainer`` whose ``LightningModule`` holds a parallelized module.

Every rank runs the ``Trainer`` of one device on the same batches, and only the module inside is split, so that loops,
callbacks and metrics hold as they stand. Checkpoints are those of one device too: whole tensors, written by the first rank,
so that Lightning without this strategy reads them; each rank takes its part of them again. (They pass through host memory
whole: for models that do not fit there, ``shardwright.runtime.checkpoint`` writes shards.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning.strategies import SingleDeviceStrategy
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch.distributed.tensor import DTensor

from shardwright.errors import RunError
from shardwright.runtime.shards import cut_like, whole_tensors


class ShardwrightStrategy(SingleDeviceStrategy):
    """For ``Trainer(strategy=ShardwrightStrategy(), accelerator="cpu", devices=1)``, the same on every rank.

    The process group is initialised and the model parallelized before the ``Trainer`` is made; shuffled data needs the same
    seed on every rank (``seed_everything``).

    Examples
    --------
    >>> module = MyLightningModule(shardwright.parallelize(model, plan))                        # doctest: +SKIP
    >>> Trainer(strategy=ShardwrightStrategy("cuda:0"), devices=1).fit(module, loader)          # doctest: +SKIP
    """

    strategy_name = "shardwright"

    def __init__(self, device: Any = "cpu", **kwargs: Any) -> None:
        if not dist.is_initialized():
            raise RunError(
                "torch.distributed is not initialised.",
                "Start with torchrun (or `shardwright run`) and call torch.distributed.init_process_group() first.",
            )
        super().__init__(device, **kwargs)
        self.global_rank = dist.get_rank()
        rank_zero_only.rank = self.global_rank  # where Lightning keeps it

    @property
    def is_global_zero(self) -> bool:
        return bool(self.global_rank == 0)

    def model_to_device(self) -> None:
        """It is where it belongs."""

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return dict(whole_tensors(dict(super().lightning_module_state_dict())))

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return dict(whole_tensors(super().optimizer_state(optimizer)))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        dist.barrier()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict()
        found = {name: _as(value, own.get(name)) for name, value in checkpoint["state_dict"].items()}
        self.lightning_module.load_state_dict(found, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                state.update({name: _as(value, parameter) for name, value in state.items()})


def _as(value: Any, own: Any) -> Any:
    """A whole tensor as this rank's part, where the tensor it belongs to is one of parts."""
    whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    return cut_like(value, own) if whole and isinstance(own, DTensor) and value.shape == own.shape else value
