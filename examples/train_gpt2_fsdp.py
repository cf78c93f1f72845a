"""The same training as train_gpt2.py, split by hand with PyTorch's fully_shard: which blocks to wrap, which rows to load.

torchrun --nproc-per-node 2 examples/train_gpt2_fsdp.py
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from train_gpt2 import batch, build


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (size,))
    model = build()
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(given.steps):
        inputs = batch(step)
        inputs = {k: v.chunk(size)[rank] if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)  # each rank sees the loss of its own rows
        if step % 10 == 0 and rank == 0:
            print(f"step {step:4d}  loss {mean.item() / size:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
