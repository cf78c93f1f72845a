"""Parallel training code as people write it, with and without its classic mistakes: what ``shardwright check`` is judged by.

Nothing here uses Shardwright to run: plain ``torch.distributed``, ``fully_shard``, ``parallelize_module``, torch's pipelines
and tensor parallelism by hand. Every program takes its mistake as an argument (``""``: none), so that the correct
program and the faulty one share all other lines. ``PROGRAMS`` are the correct ones, ``FAULTS`` the mistakes with the
cause that should be named.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from shardwright.testing import Candidate

WIDTH, HEADS, INNER, TOKENS, BATCH, LENGTH = 8, 4, 16, 13, 8, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Feed(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(WIDTH, INNER), nn.Dropout(rate), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.inner(F.gelu(self.up(x))))


class Block(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.second, self.feed, self.drop = nn.LayerNorm(WIDTH), Feed(rate), nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.drop(self.feed(self.second(x)))


class Words(nn.Module):
    """A small GPT: two blocks, learned positions, a head tied to the table of tokens."""

    def __init__(self, rate: float = 0.0, tied: bool = True) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(rate) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return loss_of(self.logits(tokens), labels)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)


class Pictures(nn.Module):
    """A convolution, a batch norm and a classifier: its loss is a mean over rows that all count."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x))).mean((2, 3))).square().mean()


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(torch.tanh(self.norm(self.up(x)))), y)


def words(rate: float = 0.0, tied: bool = True) -> Any:
    tokens = torch.randint(TOKENS, (BATCH, LENGTH))
    return Words(rate, tied), (tokens, torch.randint(TOKENS, (BATCH, LENGTH))), {}


def untied() -> Any:
    return words(tied=False)


def forgetful() -> Any:
    return words(rate=0.25)


def pictures() -> Any:
    return Pictures(), (torch.randn(BATCH, 3, 5, 5),), {}


def perceptron() -> Any:
    return Perceptron(), (torch.randn(BATCH, 6), torch.randn(BATCH, 3)), {}


def here() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


# Data parallelism: DDP, and by hand.


def bare_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def own_share(logits: Tensor, labels: Tensor, ranks: int, group: Any = None) -> Tensor:
    """This rank's labels in the mean over the labels of all ranks, times the ranks that DDP and FSDP divide by."""
    count = (labels != -100).sum()
    dist.all_reduce(count, group=group)
    return loss_of(logits, labels, "sum") / count * ranks


class WithLogits(nn.Module):
    """DDP and FSDP look at ``forward`` only."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model.logits(tokens)


def ddp(model: nn.Module, fault: str = "", micro: int = 1) -> Candidate:
    """DDP with accumulation, a loss scale and clipping."""
    early = torch.optim.AdamW([p.detach().clone().requires_grad_() for p in model.parameters()], lr=1e-2)
    if fault == "per-rank seeds":
        torch.manual_seed(dist.get_rank())
    wrapped = DistributedDataParallel(WithLogits(model))
    optimizer = early if fault == "early optimizer" else torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    rank, ranks = here()
    scale, clip = 1024.0, 0.5

    def backward(tokens: Tensor, labels: Tensor) -> float:
        if fault != "not cleared":
            optimizer.zero_grad()
        count = (labels != -100).sum()
        dist.all_reduce(count)
        parts = list(zip(tokens.chunk(micro), labels.chunk(micro), strict=True))
        if fault == "stale micro-batch":
            parts[1] = parts[0]
        total = 0.0
        for number, (mine, theirs) in enumerate(parts, 1):
            apart = number < micro or fault == "never in step"
            with wrapped.no_sync() if apart else nullcontext():
                loss = loss_of(wrapped(mine), theirs, "sum") / count * ranks
                factor = micro if fault == "accumulation not divided" else 1
                (loss * scale * factor).backward()
                total += float(loss.detach())
            if fault == "cleared in between" and number < micro:
                optimizer.zero_grad()
        for parameter in wrapped.parameters():
            if parameter.grad is not None and fault != "scale kept":
                parameter.grad /= scale
        return total

    def update() -> None:
        nn.utils.clip_grad_norm_(wrapped.parameters(), clip)
        optimizer.step()
        if fault == "two steps":
            optimizer.step()

    return Candidate(wrapped, rows=(rank, ranks), backward=backward, optimizer=optimizer, update=update, clip=clip)


def by_hand(model: nn.Module, fault: str = "") -> Candidate:
    """Data parallelism by hand: gradients are averaged after the backward pass."""
    rank, ranks = here()

    def backward(*batch: Tensor) -> Tensor:
        model.zero_grad()
        loss = model(*batch)
        loss.backward()
        for parameter in model.parameters():
            if fault != "not averaged":
                dist.all_reduce(parameter.grad)
                parameter.grad /= 1 if fault == "summed" else ranks
        return loss.detach()

    return Candidate(model, rows=(0 if fault == "same rows" else rank, ranks), backward=backward)


def same_rows(model: nn.Module) -> Candidate:
    """Every rank's loader gives the first rows."""
    rank, ranks = here()
    wrapped = DistributedDataParallel(model)

    def backward(*batch: Tensor) -> Tensor:
        wrapped.zero_grad()
        mine = [x.clone() for x in batch]
        for x in mine:
            dist.broadcast(x, 0)
        loss = wrapped(*mine)
        loss.backward()
        return loss.detach()

    return Candidate(wrapped, rows=(rank, ranks), backward=backward)


def zero1(model: nn.Module) -> Candidate:
    """PyTorch's optimizer whose state is shared out over the ranks."""
    wrapped = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=1e-2)
    return Candidate(wrapped, rows=here(), optimizer=optimizer)


def flat_shards(model: nn.Module, fault: str = "") -> Candidate:
    """ZeRO by hand: one flat, padded buffer, of which every rank updates its part; checkpoints are parts."""
    rank, ranks = here()
    whole = torch.cat([p.detach().flatten() for p in model.parameters()])
    size = -(-len(whole) // ranks)
    whole = torch.cat([whole, whole.new_zeros(size * ranks - len(whole))])
    mine = whole[rank * size : (rank + 1) * size].clone().requires_grad_()
    optimizer = torch.optim.AdamW([mine], lr=1e-2, weight_decay=0.0)

    def gather() -> None:
        parts = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(parts, mine.detach())
        row = torch.cat(parts)
        for p in model.parameters():
            p.data.copy_(row[: p.numel()].view_as(p))
            row = row[p.numel() :]

    def backward(*batch: Tensor) -> Tensor:
        gather()
        model.zero_grad()
        loss = model(*batch)
        loss.backward()
        row = torch.cat([p.grad.flatten() for p in model.parameters()])
        row = torch.cat([row, row.new_zeros(size * ranks - len(row))])
        dist.all_reduce(row)
        mine.grad = row[rank * size : (rank + 1) * size] / ranks
        return loss.detach()

    def update() -> None:
        squares = mine.grad.square().sum()
        if fault != "local norm":
            dist.all_reduce(squares)
        mine.grad *= min(1.0, 0.01 / (float(squares.sqrt()) + 1e-6))
        optimizer.step()

    def reload() -> None:
        saved: list[Any] = [None] * ranks
        dist.all_gather_object(saved, (mine.detach(), optimizer.state_dict()))
        source = (rank + 1) % ranks
        with torch.no_grad():
            mine.copy_(saved[source if fault == "shards exchanged" else rank][0])
        state = copy.deepcopy(saved[source if fault == "state exchanged" else rank][1])
        if fault == "state lost":
            state["state"] = {}
        optimizer.load_state_dict(state)

    return Candidate(
        model,
        rows=here(),
        backward=backward,
        update=update,
        optimizer=optimizer,
        clip=0.01,
        parameters=lambda: {"shard": (mine, mine.grad)},
        reload=reload,
    )


# FSDP2, hybrid sharding, and FSDP2 with tensor parallelism.


def fsdp(model: nn.Module, shape: tuple[int, ...] = (4,), fault: str = "") -> Candidate:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    wrapped = WithLogits(model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(wrapped, mesh=mesh)
    rank, ranks = here()

    def backward(tokens: Tensor, labels: Tensor) -> Tensor:
        wrapped.zero_grad()
        loss = own_share(wrapped(tokens), labels, ranks)
        loss.backward()
        return loss.detach()

    return Candidate(wrapped, rows=(rank, ranks), backward=backward, clip=0.5)


def tensor_plan(sequence: bool) -> dict[str, Any]:
    """Megatron's cuts of a block, with or without sequence parallelism, in PyTorch's words."""
    if not sequence:
        column = {f"attention.{n}": ColwiseParallel() for n in "qkv"}
        return {
            **column,
            "attention.o": RowwiseParallel(),
            "feed.up": ColwiseParallel(),
            "feed.down": RowwiseParallel(),
        }
    column = {f"attention.{n}": ColwiseParallel() for n in "qkv"}
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    return {
        "first": SequenceParallel(),
        "second": SequenceParallel(),
        "attention": whole,
        "feed": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        **column,
        "attention.o": RowwiseParallel(output_layouts=Shard(1)),
        "feed.up": ColwiseParallel(),
        "feed.down": RowwiseParallel(output_layouts=Shard(1)),
    }


def tensor_parallel(model: nn.Module, sequence: bool = False, data: int = 1) -> Candidate:
    mesh = init_device_mesh("cpu", (data, dist.get_world_size() // data), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], tensor_plan(sequence))
    if sequence:
        layouts = {
            "table": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "places": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], layouts)
    wrapped = WithLogits(model)
    if data > 1:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(wrapped, mesh=mesh["dp"])

    def backward(tokens: Tensor, labels: Tensor) -> Tensor:
        wrapped.zero_grad()
        loss = own_share(wrapped(tokens), labels, data, mesh["dp"].get_group())
        loss.backward()
        return loss.detach()

    return Candidate(wrapped, rows=mesh["dp"], backward=backward)


# Tensor and sequence parallelism by hand, as Megatron-LM describes it.


class Copied(torch.autograd.Function):
    """Forward nothing, backward a sum: in front of a column-parallel layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Summed(torch.autograd.Function):
    """Forward a sum, backward nothing: behind a row-parallel layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Gathered(torch.autograd.Function):
    """Forward all positions, backward the sum of this rank's: from sequence- to tensor-parallel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size(), 1)[dist.get_rank()]


class Scattered(torch.autograd.Function):
    """Forward the sum of this rank's positions, backward all: from tensor- to sequence-parallel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x.chunk(dist.get_world_size(), 1)[dist.get_rank()]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, gradient.contiguous())
        return torch.cat(parts, 1)


def cut(linear: nn.Linear, dim: int, rank: int, ranks: int) -> None:
    linear.weight = nn.Parameter(linear.weight.detach().chunk(ranks, dim)[rank].clone())
    if dim == 0 and linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias.detach().chunk(ranks)[rank].clone())


class Column(nn.Module):
    """Several linear layers of one input, each rank its share of all of them, fused into one weight."""

    def __init__(self, *linears: nn.Linear, enter: Callable[[Tensor], Tensor], rank: int) -> None:
        super().__init__()
        ranks = dist.get_world_size()
        for linear in linears:
            cut(linear, 0, rank, ranks)
        self.weight = nn.Parameter(torch.cat([linear.weight.detach() for linear in linears]))
        self.bias = nn.Parameter(torch.cat([linear.bias.detach() for linear in linears]))
        self.enter = enter

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.enter(x), self.weight, self.bias)


class Row(nn.Module):
    def __init__(self, linear: nn.Linear, leave: Callable[[Tensor], Tensor], bias_first: bool) -> None:
        super().__init__()
        cut(linear, 1, *here())
        self.weight, self.bias, self.leave, self.bias_first = linear.weight, linear.bias, leave, bias_first

    def forward(self, x: Tensor) -> Tensor:
        if self.bias_first:
            return self.leave(F.linear(x, self.weight, self.bias))
        return self.leave(F.linear(x, self.weight)) + self.bias


class MegatronAttention(nn.Module):
    def __init__(self, whole: Attention, enter: Any, leave: Any, fault: str) -> None:
        super().__init__()
        self.qkv = Column(whole.q, whole.k, whole.v, enter=enter, rank=dist.get_rank())
        self.o = Row(whole.o, leave, fault == "bias first")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MegatronFeed(nn.Module):
    def __init__(self, whole: Feed, enter: Any, leave: Any, fault: str) -> None:
        super().__init__()
        rank, ranks = here()
        self.up = Column(whole.up, enter=enter, rank=(rank + 1) % ranks if fault == "other shard" else rank)
        self.inner, self.down = whole.inner, Row(whole.down, leave, False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.inner(F.gelu(self.up(x))))


def identity(x: Tensor) -> Tensor:
    return x


def megatron(model: nn.Module, sequence: bool = False, fault: str = "") -> Candidate:
    """Tensor parallelism by hand, fused projections; with sequence parallelism between the layers; its own clipping."""
    enter: Any = Gathered.apply if sequence else Copied.apply
    leave: Any = Scattered.apply if sequence else Summed.apply
    for number, block in enumerate(model.blocks):
        odd = fault if number else ""
        block.attention = MegatronAttention(block.attention, enter, leave, odd)
        entered = identity if odd == "no backward sum" else enter
        block.feed = MegatronFeed(block.feed, entered, identity if odd == "no forward sum" else leave, odd)
    shared = [p for name, p in model.named_parameters() if "norm" in name or ".first." in name or ".second." in name]
    shared += [m.bias for m in model.modules() if isinstance(m, Row)]
    cut_ones = [p for m in model.modules() if isinstance(m, Column) for p in (m.weight, m.bias)]
    cut_ones += [m.weight for m in model.modules() if isinstance(m, Row)]

    def logits(tokens: Tensor) -> Tensor:
        x = model.table(tokens) + model.places(torch.arange(tokens.shape[1]))
        if sequence:
            x = Split.apply(x)
        for block in model.blocks:
            x = block(x)
        x = model.norm(x)
        return model.head(Joined.apply(x) if sequence else x)

    def backward(tokens: Tensor, labels: Tensor) -> Tensor:
        model.zero_grad()
        loss = loss_of(logits(tokens), labels)
        loss.backward()
        if sequence and fault != "norms not summed":
            for parameter in shared:
                dist.all_reduce(parameter.grad)
        return loss.detach()

    def update() -> None:
        own = sum(p.grad.square().sum() for p in cut_ones)
        others = sum(p.grad.square().sum() for p in model.parameters() if all(p is not q for q in cut_ones))
        if fault == "all norms summed":
            own = own + others
            others = others * 0
        if fault != "local norm":
            dist.all_reduce(own)
        share = min(1.0, 0.1 / (float((own + others).sqrt()) + 1e-6))
        for p in model.parameters():
            p.grad *= share
        optimizer.step()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Candidate(model, backward=backward, update=update, optimizer=optimizer, clip=0.1)


class Split(torch.autograd.Function):
    """Forward this rank's positions, backward those of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return Scattered.backward(ctx, gradient)


class Joined(torch.autograd.Function):
    """Forward all positions, backward this rank's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Gathered.forward(ctx, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.chunk(dist.get_world_size(), 1)[dist.get_rank()]


# Dropout under tensor parallelism by hand: one seed for what is replicated, one per rank for what is cut.


class Seeded(nn.Module):
    """A dropout with a generator state of its own."""

    def __init__(self, drop: nn.Dropout, seed: int) -> None:
        super().__init__()
        self.drop = drop
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.state = torch.get_rng_state()

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.state)
            x = self.drop(x)
            self.state = torch.get_rng_state()
        return x


def seeded(model: nn.Module, fault: str = "") -> Candidate:
    rank = dist.get_rank()
    made = megatron(model)
    for number, block in enumerate(model.blocks):
        block.feed.inner = Seeded(block.feed.inner, number if fault == "one seed" else 1000 * (rank + 1) + number)
        block.drop = Seeded(block.drop, 100 + number + (rank if fault == "seed per rank" else 0))
    return made


# A pipeline of PyTorch's, two stages on two ranks, 1F1B, the table of tokens tied to the head of the last stage.


class First(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.table, self.places, self.blocks = model.table, model.places, model.blocks[:1]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x


class Last(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = model.blocks[1:], model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def pipeline(model: nn.Module, fault: str = "", micro: int = 4) -> Candidate:
    rank, _ = here()
    module: Any = Last(model) if rank else First(model)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    counted = torch.ones(1)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return loss_of(logits, labels, "sum") / counted

    schedule = Schedule1F1B(stage, micro, loss_fn=loss, scale_grads=fault == "scaled twice")

    def backward(tokens: Tensor, labels: Tensor) -> Tensor | None:
        module.zero_grad()
        counted.fill_(float((labels != -100).sum()))
        losses: list[Tensor] = []
        if rank:
            schedule.step(target=labels, losses=losses)
        else:
            schedule.step(tokens)
        tied = module.head.weight if rank else module.table.weight
        if fault != "tied":
            dist.all_reduce(tied.grad)
        return torch.stack(losses).sum().detach() if rank else None

    return Candidate(module, backward=backward)


class Program(NamedTuple):
    """A model, the parallel program, how many processes, and the cause to be named (empty: nothing is wrong)."""

    model: Callable[[], Any]
    build: Callable[[nn.Module], Any]
    processes: int = 4
    cause: str = ""


P = functools.partial

PROGRAMS: dict[str, Program] = {
    "DDP": Program(perceptron, bare_ddp),
    "DDP, uneven labels, 2 micro-batches, clipping": Program(words, P(ddp, micro=2)),
    "DDP with dropout": Program(forgetful, P(ddp, fault="per-rank seeds")),
    "data parallelism by hand": Program(perceptron, by_hand),
    "ZeroRedundancyOptimizer": Program(perceptron, zero1),
    "ZeRO by hand, flat shards, a checkpoint": Program(perceptron, flat_shards),
    "FSDP2": Program(words, fsdp),
    "hybrid shard": Program(words, P(fsdp, shape=(2, 2))),
    "tensor parallelism": Program(words, tensor_parallel),
    "tensor and sequence parallelism": Program(untied, P(tensor_parallel, sequence=True)),
    "FSDP2 and tensor parallelism": Program(words, P(tensor_parallel, data=2)),
    "Megatron by hand": Program(words, megatron),
    "Megatron by hand, sequence parallelism": Program(words, P(megatron, sequence=True)),
    "Megatron by hand, dropout": Program(forgetful, seeded),
    "1F1B with tied weights": Program(words, pipeline, 2),
}

FAULTS: dict[str, Program] = {
    "loss averaged over ranks with uneven labels": Program(words, bare_ddp, 4, "labels averaged per part"),
    "batch norm of own rows": Program(pictures, bare_ddp, 4, "batch-norm statistics local"),
    "accumulation not divided": Program(
        words, P(ddp, fault="accumulation not divided", micro=2), 4, "accumulation not divided"
    ),
    "loss scale not taken back": Program(words, P(ddp, fault="scale kept"), 4, "loss scale not taken back"),
    "never synchronised": Program(words, P(ddp, fault="never in step", micro=2), 4, "gradients not averaged over ranks"),
    "stale micro-batch": Program(words, P(ddp, fault="stale micro-batch", micro=2), 4, "stale micro-batch"),
    "gradients cleared between micro-batches": Program(
        words, P(ddp, fault="cleared in between", micro=2), 4, "micro-batches lost"
    ),
    "gradients of the step before": Program(words, P(ddp, fault="not cleared"), 4, "gradients not cleared"),
    "optimizer of the tensors before wrapping": Program(words, P(ddp, fault="early optimizer"), 4, "not updated"),
    "gradients summed over data-parallel ranks": Program(
        perceptron, P(by_hand, fault="summed"), 4, "summed over data-parallel ranks"
    ),
    "every rank reads the same rows": Program(perceptron, same_rows, 4, "same rows on every rank"),
    "clipping by the local norm": Program(words, P(megatron, fault="local norm"), 4, "clipped by the local norm"),
    "replicated gradients counted by every rank in the norm": Program(
        words, P(megatron, fault="all norms summed"), 4, "replicated gradients counted repeatedly in the norm"
    ),
    "shards exchanged by a checkpoint": Program(
        perceptron, P(flat_shards, fault="shards exchanged"), 4, "shards exchanged by the checkpoint"
    ),
    "optimizer state of another shard": Program(
        perceptron, P(flat_shards, fault="state exchanged"), 4, "optimizer state of another shard"
    ),
    "optimizer state lost by a checkpoint": Program(
        perceptron, P(flat_shards, fault="state lost"), 4, "optimizer state lost"
    ),
    "bias of a row-parallel layer on every rank": Program(
        words, P(megatron, fault="bias first"), 4, "bias added on every rank"
    ),
    "no sum behind a row-parallel layer": Program(
        words, P(megatron, fault="no forward sum"), 4, "partial sums not reduced"
    ),
    "no sum on the way back through a column-parallel layer": Program(
        words, P(megatron, fault="no backward sum"), 4, "backward sum missing"
    ),
    "one weight's shards in another order": Program(words, P(megatron, fault="other shard"), 4, "shards in another order"),
    "norms not reduced under sequence parallelism": Program(
        words, P(megatron, sequence=True, fault="norms not summed"), 4, "sequence-parallel gradients not added up"
    ),
    "dropout alike on tensor-parallel ranks": Program(
        forgetful, P(seeded, fault="one seed"), 4, "dropout alike on different parts"
    ),
    "dropout differing where replicated": Program(
        forgetful, P(seeded, fault="seed per rank"), 4, "dropout differs where replicated"
    ),
    "tied weights in a pipeline": Program(words, P(pipeline, fault="tied"), 2, "tied weights not added up"),
    "pipeline's gradients scaled twice": Program(words, P(pipeline, fault="scaled twice"), 2, "accumulation divided twice"),
}  # fmt: skip
