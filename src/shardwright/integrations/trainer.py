"""Hugging Face's ``Trainer`` with a parallelized module.

Every rank runs the ``Trainer`` of one process: it reads the same batches (the same seed), and its model happens to be split.
So everything the library does for one process holds as it stands: the last smaller batch, accumulation, evaluation, metrics,
schedulers, callbacks. ``per_device_train_batch_size`` is therefore the batch of the whole job. What differs is what touches
tensors or the disk: the first rank writes, gathering and reading are done by all. Accelerate is told of one process, or it
would wrap the model in DDP and deal out batches.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers.trainer import SCHEDULER_NAME, TRAINING_ARGS_NAME, can_return_loss, find_labels

from shardwright.errors import RunError
from shardwright.integrations.one_process import one_process
from shardwright.runtime import ParallelModule
from shardwright.runtime.checkpoint import latest, load_checkpoint, load_weights, save_checkpoint
from shardwright.runtime.submodules import original_of

SHARDS = "shards"
"""The folder of a checkpoint that holds parameters and optimizer state as every plan can read them."""


class Trainer(transformers.Trainer):
    """``transformers.Trainer`` for what :func:`shardwright.parallelize` gives; the same on every rank.

    Examples
    --------
    >>> model = shardwright.parallelize(model, plan)                                            # doctest: +SKIP
    >>> trainer = Trainer(model=model, args=arguments, train_dataset=texts)                     # doctest: +SKIP
    >>> trainer.train(resume_from_checkpoint=True)                                              # doctest: +SKIP
    """

    model: Any
    lr_scheduler: Any
    _signature_columns: Any

    def __init__(self, model: Any = None, args: Any = None, **kwargs: Any) -> None:
        if not isinstance(model, ParallelModule):
            raise RunError(
                f"This Trainer is given a {type(model).__name__}, which is not split.",
                "Give it what shardwright.parallelize(model, plan) returns, or use transformers.Trainer.",
            )
        if args is None:
            with one_process():
                args = transformers.TrainingArguments()
        as_one_process(args)
        kind = original_of(model)[0]
        if args.label_names is None:
            args.label_names = find_labels(kind)
        with one_process():
            super().__init__(model=model, args=args, **kwargs)
        self.can_return_loss = can_return_loss(kind)
        parameters = inspect.signature(kind.forward).parameters  # type: ignore[attr-defined]  # a module's class
        self._accepted = [name for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD]
        if not hasattr(kind, "accepts_loss_kwargs"):
            self.model_accepts_loss_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = [*self._accepted, *{"label", "label_ids", *self.label_names}]

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """It is where it belongs."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self._save(output_dir)
        if self.args.push_to_hub and not _internal_call and self.args.should_save:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(str(output_dir or self.args.output_dir))
        model = self.accelerator.unwrap_model(self.model)
        if hasattr(original_of(model)[0], "save_pretrained"):
            model.save_pretrained(folder)
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            beside = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if beside is not None:
                beside.save_pretrained(folder)
            torch.save(self.args, folder / TRAINING_ARGS_NAME)
        dist.barrier()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        dist.barrier()

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # the same on every rank
            super()._save_rng_state(output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_checkpoint(Path(output_dir) / SHARDS, self.state.global_step, self.model, _plain(self.optimizer), keep=1)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_weights(self.model, _shards(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        load_weights(self.model, _shards(self.state.best_model_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        load_checkpoint(_shards(checkpoint).parent, self.model, _plain(self.optimizer))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside of Accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)


def _shards(checkpoint: Any) -> Path:
    found = latest(Path(str(checkpoint)) / SHARDS)
    if found is None:
        raise RunError(
            f"The checkpoint {str(checkpoint)!r} has no {SHARDS!r} of parameters and optimizer state.",
            "Resume from one that this Trainer wrote (save_only_model=False); weights alone are read by "
            "parallelize(model, plan, weights=...).",
        )
    return found


def as_one_process(args: Any) -> None:
    """Let training arguments, whenever they were made, speak of one process; the first rank stays the one that writes."""
    vars(args).pop("_setup_devices", None)
    with one_process():
        args._setup_devices  # noqa: B018  # asking sets it up
    args._n_gpu = min(args._n_gpu, 1)
    args.distributed_state.process_index = dist.get_rank()
    args.distributed_state.local_process_index = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
