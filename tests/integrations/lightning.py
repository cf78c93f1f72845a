"""Lightning's Trainer with a parallelized model: the losses of one process, evaluation, checkpoints, resuming."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from integrations.accelerator import example, loader, split
from runtime.features import same_weights


class Module(pl.LightningModule):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.losses = model, []

    def training_step(self, batch: Any, number: int) -> Any:
        loss = self.model(batch[0])
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("eval_loss", self.model(batch[0]), batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def fitted(folder: str, model: Any, epochs: int = 2, resume: str | None = None, **kwargs: Any) -> tuple[Any, Module]:
    module = Module(model)
    common: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
    common |= {"enable_model_summary": False, "gradient_clip_val": 0.01, "accumulate_grad_batches": 2}
    saving = pl.callbacks.ModelCheckpoint(folder, "last", save_top_k=1, monitor=None)
    trainer = pl.Trainer(max_epochs=epochs, callbacks=[saving], **common | kwargs)
    trainer.fit(module, loader(28, 0), loader(11, 1), ckpt_path=resume)
    return trainer, module


def lightning(rank: int, kind: str, folder: str) -> None:
    from shardwright.integrations.lightning import ShardwrightStrategy
    from shardwright.integrations.one_process import one_process

    warnings.simplefilter("ignore")
    model = example()[0]
    theirs = copy.deepcopy(model)
    with one_process():
        alone, expected = fitted(f"{folder}/theirs{rank}", theirs)

        def ours(epochs: int, resume: str | None = None) -> tuple[Any, Module, Any]:
            model = split(kind)
            return *fitted(f"{folder}/ours{epochs}", model, epochs, resume, strategy=ShardwrightStrategy()), model

        _, begun, _ = ours(1)
        trainer, module, shared = ours(2, f"{folder}/ours1/last.ckpt")
    found = begun.losses + module.losses
    assert found == pytest.approx(expected.losses, rel=1e-9), (found, expected.losses)
    assert float(trainer.callback_metrics["eval_loss"]) == pytest.approx(
        float(alone.callback_metrics["eval_loss"]), rel=1e-9
    )
    same_weights(shared, theirs)
    assert trainer.is_global_zero == (rank == 0)
    written = torch.load(f"{folder}/ours2/last.ckpt", weights_only=False)["state_dict"]  # what Lightning alone reads
    torch.testing.assert_close(written["model.ups.0.weight"], theirs.ups[0].weight.detach(), rtol=1e-9, atol=1e-12)
