"""Our pipeline beside torch's: the same cut of a GPT, the same 1F1B order, two gloo processes, alternating in one run.

Run: ``torchrun --standalone --nproc-per-node 2 bench/pipeline_runtime.py``. Times are wall-clock of a step (forward,
backward, gradients) on rank 0, medians over rounds in which both runtimes take turns, so that what else the machine does
hits both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from shardwright.cluster import parse_cluster
from shardwright.frontend import capture
from shardwright.planner import Pipelining, plan_pipeline
from shardwright.runtime import parallelize


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Half(nn.Module):
    """One half of the model: embedding and blocks, or blocks and head."""

    def __init__(self, first: bool, layers: int, width: int, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width) if first else None
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = None if first else nn.Linear(width, vocab)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x if self.embed is None else self.embed(x))
        return x if self.head is None else self.head(x)


class Whole(nn.Module):
    def __init__(self, first: Half, second: Half) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return loss_of(self.second(self.first(tokens)), labels)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def halves(layers: int, width: int, vocab: int) -> tuple[Half, Half]:
    torch.manual_seed(0)
    return Half(True, layers, width, vocab), Half(False, layers, width, vocab)


def timed(step: Callable[[], None]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("layers", 2), ("width", 256), ("vocab", 1000), ("batch", 16), ("seq", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), asked.microbatches
    tokens, labels = (torch.randint(asked.vocab, (asked.batch, asked.seq)) for _ in range(2))
    dist.broadcast(tokens, 0), dist.broadcast(labels, 0)
    theirs = halves(asked.layers, asked.width, asked.vocab)[rank]
    order = Schedule1F1B(PipelineStage(theirs, rank, 2, torch.device("cpu")), count, loss_fn=loss_of)

    def torch_step() -> None:
        theirs.zero_grad()
        order.step(tokens) if rank == 0 else order.step(target=labels)

    model = Whole(*halves(asked.layers, asked.width, asked.vocab))
    graph = capture(model, (tokens, labels))
    plan = plan_pipeline(graph, parse_cluster("local:2"), Pipelining(2, count, "1f1b", ["second"]))
    ours = parallelize(model, plan, (tokens, labels), graph=graph)

    def our_step() -> None:
        ours.zero_grad()
        ours(tokens, labels).backward()

    for _ in range(5):
        torch_step(), our_step()
    # Labels are all counted and micro-batches equal, so torch's mean of means is right here too.
    prefix = "first." if rank == 0 else "second."
    for name, parameter in theirs.named_parameters():
        mine = ours.get_parameter(prefix + name).grad.to_local()
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-4, atol=1e-6)
    pairs = [(timed(our_step), timed(torch_step)) for _ in range(asked.rounds)]
    if rank == 0:
        us, them = (statistics.median(pair[i] for pair in pairs) for i in range(2))
        ratio = statistics.median(a / b for a, b in pairs)
        print(json.dumps({"ours_seconds": us, "torch_seconds": them, "median_ratio": ratio, **vars(asked)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
