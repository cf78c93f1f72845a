"""A plain loop with a DataLoader, evaluation and resuming, split by a plan: the lines marked ``# +`` are all that was added.

    python examples/plain_loop.py --plan plan.json             # once: plan for two local processes
    shardwright run plan.json -- examples/plain_loop.py        # train; run it again to resume where it was stopped

With ``--alone`` the same script trains on one process, with the same losses; the last batch of an epoch has four rows.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardwright

ROWS = 16


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def points(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, :3] ** 2).argmax(1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--checkpoints", default="")
    parser.add_argument("--plan", help="only write a plan for two local processes to this file")
    parser.add_argument("--alone", action="store_true", help="one process, nothing split")
    given = parser.parse_args()

    torch.manual_seed(0)
    model, criterion = Classifier(), nn.CrossEntropyLoss()
    if given.plan:
        plan = shardwright.plan(model, (torch.zeros(ROWS, 8),), cluster="local:2", search="data-parallel")
        plan.save(given.plan)
        return
    training, evaluation = points(100, 0), points(40, 1)
    first = True
    if not given.alone:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")  # +
        model = shardwright.parallelize(model)  # +
        first = dist.get_rank() == 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    resumed = shardwright.load_checkpoint(given.checkpoints, model, optimizer) if given.checkpoints else None
    for epoch in range(resumed["step"] if resumed else 0, given.epochs):
        order = torch.Generator().manual_seed(epoch)
        model.train()
        for x, y in DataLoader(training, ROWS, shuffle=True, generator=order):
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        schedule.step()
        model.eval()
        with torch.no_grad():
            right = sum(int((model(x).argmax(1) == y).sum()) for x, y in DataLoader(evaluation, ROWS))
        if first:
            print(f"epoch {epoch}  loss {loss.item():.6f}  right {right} of {len(evaluation)}", flush=True)
        if given.checkpoints:
            shardwright.save_checkpoint(given.checkpoints, epoch + 1, model, optimizer)


if __name__ == "__main__":
    main()
