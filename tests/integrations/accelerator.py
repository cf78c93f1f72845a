"""Accelerate's loop with a parallelized model: the numbers of one process, evaluation, states, resuming."""

from __future__ import annotations

import copy
import functools
from typing import Any

import accelerate
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from runtime.features import found, same_weights
from runtime.workers import captured
from shardwright.errors import RunError
from shardwright.runtime import parallelize


class Deep(torch.nn.Module):
    """Four feed-forward layers, so that every one of four stages has parameters, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(12) for _ in range(4))
        self.ups = torch.nn.ModuleList(torch.nn.Linear(12, 18) for _ in range(4))
        self.downs = torch.nn.ModuleList(torch.nn.Linear(18, 12) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(torch.nn.functional.gelu(up(norm(x))))
        return x.square().mean()


@functools.cache
def example() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Deep().double()
    return model, captured(model, (torch.randn(8, 12, dtype=torch.float64),))


def loader(rows: int, seed: int, shuffle: bool = False) -> Any:
    """Whole batches of eight and a smaller last one."""
    data = torch.randn(rows, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(data), batch_size=8, shuffle=shuffle, generator=torch.Generator().manual_seed(7))


def loop(accelerator: Any, model: Any, folder: str | None = None, resume: bool = False) -> list[float]:
    """Accumulation over two batches, clipping, a schedule, evaluation after every epoch; resuming after the first."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, train, test, schedule = accelerator.prepare(
        model, optimizer, loader(28, 0, shuffle=True), loader(11, 1), schedule
    )
    found = []
    for epoch in range(2):
        if resume and epoch == 0:
            accelerator.load_state(folder)
            list(train)  # the order of the first epoch has been drawn
            continue
        for (x,) in train:
            with accelerator.accumulate(model):
                loss = model(x)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.01)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
        model.eval()
        with torch.no_grad():
            losses = [accelerator.gather_for_metrics(model(x).reshape(1)) for (x,) in test]
        found.append(float(torch.cat(losses).mean()))
        model.train()
        if folder is not None and not resume and epoch == 0:
            accelerator.save_state(folder)
    return found


def split(kind: str) -> Any:
    """The example as the planner splits it over all processes."""
    model, graph = example()
    return parallelize(model, found(kind, graph), keep=True)


def accelerates(rank: int, kind: str, folder: str) -> None:
    from shardwright.integrations.accelerator import Accelerator
    from shardwright.integrations.one_process import one_process

    model = example()[0]
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    try:
        theirs = copy.deepcopy(model)
        with one_process():
            expected = loop(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2), theirs)
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        for resume in (False, True):
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            assert accelerator.is_main_process == (rank == 0) and accelerator.num_processes == 1
            ours = split(kind)
            found = loop(accelerator, ours, folder, resume)
            assert found == pytest.approx(expected[-len(found) :], rel=1e-9), (resume, found, expected)
            same_weights(ours, theirs)
        whole = accelerator.get_state_dict(ours)
        torch.testing.assert_close(whole["ups.0.weight"], theirs.ups[0].weight.detach(), rtol=1e-9, atol=1e-12)
        with pytest.raises(RunError, match="is not split"):
            accelerator.prepare(Deep())
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
