"""Hugging Face's ``Accelerator`` with a parallelized module.

As for the ``Trainer``, every rank runs the loop of one process on the same batches, and only the model is split. So
``prepare`` deals nothing out, ``gather_for_metrics`` has nothing to gather, and a loss is that of the whole batch. What
differs is what touches the disk or needs all ranks: states are written as shards that any plan can read, waiting is
waiting for all, and gradients of accumulated passes travel once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState

from shardwright.errors import RunError
from shardwright.integrations.one_process import one_process
from shardwright.runtime import ParallelModule
from shardwright.runtime.checkpoint import load_checkpoint, save_checkpoint
from shardwright.runtime.whole_state import whole_state

SHARDS = "shards"


class Accelerator(accelerate.Accelerator):
    """``accelerate.Accelerator`` for what :func:`shardwright.parallelize` gives; the same on every rank.

    Examples
    --------
    >>> accelerator = Accelerator(gradient_accumulation_steps=4)                                # doctest: +SKIP
    >>> model = shardwright.parallelize(model, plan)                                            # doctest: +SKIP
    >>> optimizer = torch.optim.AdamW(model.parameters())                                       # doctest: +SKIP
    >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)                # doctest: +SKIP
    """

    _models: list[Any]
    _optimizers: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not dist.is_initialized():
            raise RunError(
                "torch.distributed is not initialised.",
                "Start with torchrun (or `shardwright run`) and call torch.distributed.init_process_group() first.",
            )
        if PartialState._shared_state.get("num_processes", 1) > 1:
            raise RunError(
                "Accelerate has been told of several processes already, and would deal out batches itself.",
                "Make this Accelerator before any other, and before PartialState().",
            )
        with one_process():
            super().__init__(*args, **kwargs)
        if self.mixed_precision != "no":
            raise RunError(
                f"mixed_precision={self.mixed_precision!r} is autocast, which a parallelized module refuses.",
                "Leave it out and give parallelize(model, plan, compute_dtype=torch.bfloat16).",
            )
        local = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
        places = {"process_index": dist.get_rank(), "local_process_index": local}
        PartialState._shared_state.update(places)
        AcceleratorState._shared_state.update(places)
        self.state.__dict__.update(places)

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        if not isinstance(model, ParallelModule):
            raise RunError(
                f"This Accelerator is given a {type(model).__name__}, which is not split.",
                "Call model = shardwright.parallelize(model, plan) first, and make the optimizer of its parameters.",
            )
        self._models.append(model)
        return model

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        with model.no_sync():
            yield

    def wait_for_everyone(self) -> None:
        dist.barrier()

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Any]:
        """The whole weights, on every rank."""
        return whole_state(model.state_dict())

    def save_state(self, output_dir: Any = None, **kwargs: Any) -> Any:
        """Weights and optimizers as shards in the folder ``shards``, everything else as Accelerate does it."""
        with self._without_tensors():
            folder = super().save_state(output_dir, **kwargs)
        save_checkpoint(Path(str(folder)) / SHARDS, 0, *self._pair(), keep=1)
        return folder

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        with self._without_tensors():
            super().load_state(input_dir, *args, **kwargs)
        folder = self._folder(input_dir)
        if load_checkpoint(folder / SHARDS, *self._pair()) is None:
            raise RunError(f"{str(folder)!r} holds no state of this Accelerator.", "Give a folder that it wrote.")

    def _folder(self, input_dir: Any) -> Path:
        if input_dir is not None:
            return Path(str(input_dir))
        folders = (Path(str(self.project_dir)) / "checkpoints").iterdir()
        return max(folders, key=lambda folder: int(folder.name.rpartition("_")[2]))

    def _pair(self) -> tuple[Any, torch.optim.Optimizer | None]:
        optimizers = [optimizer.optimizer for optimizer in self._optimizers]
        if len(self._models) != 1 or len(optimizers) > 1:
            raise RunError(
                f"{len(self._models)} models with {len(optimizers)} optimizers have been prepared.",
                "States are stored for one of each; store others with shardwright.runtime.checkpoint.save_checkpoint().",
            )
        return self._models[0], optimizers[0] if optimizers else None

    @contextmanager
    def _without_tensors(self) -> Iterator[None]:
        """Meanwhile Accelerate knows no models and optimizers: their tensors are shards."""
        before = self._models, self._optimizers
        self._models, self._optimizers = [], []
        try:
            yield
        finally:
            self._models, self._optimizers = before
