"""A model of one's own: any module that torch.export takes, planned and verified without changing a line of it.

shardwright verify examples/custom_model.py:build --cluster local:2
shardwright plan examples/custom_model.py:build --cluster local:2 -o plan.json
torchrun --nproc-per-node 2 examples/custom_model.py
"""

import torch
import torch.distributed as dist
from torch import nn

import shardwright


class Recommender(nn.Module):
    """Two towers of embeddings and layers whose outputs are compared: wide tables, a small batch."""

    def __init__(self, users: int, items: int, width: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.user_tower = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.item_tower = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        scores = self.user_tower(self.users(user)) @ self.item_tower(self.items(item)).T
        right = torch.arange(user.shape[0], device=user.device)
        return nn.functional.cross_entropy(scores, right)  # each user's own item among those of the batch


def build() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], dict]:
    """What ``file.py:function`` gives: the model and example inputs."""
    model = Recommender(users=4001, items=1003, width=32)  # odd sizes: shards are uneven
    return model, (torch.randint(4001, (16,)), torch.randint(1003, (16,))), {}


def main() -> None:
    torch.manual_seed(0)
    model, args, kwargs = build()
    dist.init_process_group("gloo")
    plan = shardwright.plan(model, args, kwargs, cluster=f"local:{dist.get_world_size()}", fewer_devices=False)
    model = shardwright.parallelize(model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(20):
        optimizer.zero_grad()
        loss = model(*args)
        loss.backward()
        optimizer.step()
        if step % 5 == 0 and dist.get_rank() == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
