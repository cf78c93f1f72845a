"""A published run priced as its engine runs it: seconds of the step and bytes of the fullest device.

A decoder's block is the list of its kernels on one device: matrix products by the device's table, attention fused or as
batched products, softmax and dropout over all scores, pointwise kernels by the bytes they move; collectives of tensor
parallelism by the device's table of messages; the host beside them. Blocks make stages, timed in the run's schedule, or one
program under FSDP. What an engine does and at what pace is its profile (:mod:`shardwright.cluster.engine`); nothing here is
fitted, and no figure belongs to a run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from shardwright.cluster import Cluster, parse_cluster
from shardwright.cluster.engine import Engine, engine
from shardwright.cluster.primitives import Primitives, primitives
from shardwright.costs.engines import attention_seconds, moved_seconds
from shardwright.schedules import known_schedule, pipeline, run
from world_runs import Run

HALF, FULL = 2, 4
"""Bytes of a number in half and in full precision."""
NETWORKS = {"bloom": 50e9}
"""Bytes per second of a node where it is not the preset's: Jean Zay's nodes have four Omni-Path adapters of 100 Gbit/s."""
LOSS_FORWARD, LOSS_BACKWARD = 30, 14
"""Bytes per logit of a cross entropy in full precision: cast, maximum, difference, exponential, sum, and the gradient."""
LOGITS = HALF + 3 * FULL
"""Bytes per logit that are held at once: itself, its copy in full precision, its logarithm's and the gradient's."""
MASTER = FULL
"""Bytes per parameter of gradients in full precision, or of what an optimizer unpacks, that it reads in its step."""
FORWARD_KERNELS, BACKWARD_KERNELS = 16, 30
"""Kernels of a block that the host issues."""


@dataclass(frozen=True)
class Block:
    """Seconds of one block and micro-batch, and its parameters on a device."""

    forward: float
    backward: float
    parameters: float


@cache
def cluster_of(published: Run) -> Cluster:
    nodes = f"{published.nodes}x" if published.nodes > 1 else ""
    return parse_cluster(f"{nodes}{published.devices_per_node}x{published.device}")


@cache
def _products(device: str, sizes: tuple[tuple[float, ...], ...]) -> float:
    """Seconds of several products of (m, n, k) by the table: kept, since fitting asks for the same ones at other paces."""
    table = _tables(device).products
    assert table is not None
    return float(table.seconds(np.array([(*size, 1.0) for size in sizes])).sum())


def _tables(device: str) -> Primitives:
    found = primitives(device)
    assert found is not None
    return found


_schedule = cache(known_schedule)


@cache
def _collective(device: str, kind: str, devices: int, amount: float) -> float:
    return _tables(device).collective(kind, devices, amount)


class Priced:
    """One run's prices under one engine."""

    def __init__(self, published: Run, engine: Engine) -> None:
        self.run, self.engine = published, engine
        self.cluster = cluster_of(published)
        self.device = replace(self.cluster.device, engine=engine)
        self.rows = published.microbatch * published.model.sequence
        network = NETWORKS.get(published.source, self.cluster.network.bandwidth)
        self.network = network * engine.network
        self.spread = engine.sequence_parallel and published.recompute == "light"

    def products(self, *sizes: tuple[float, ...]) -> float:
        return _products(self.device.name, sizes) / self.engine.pace(self.device.name).products

    def moved(self, *amounts: float) -> float:
        """Seconds of kernels that move so many bytes each."""
        return float(moved_seconds(self.device, np.array(amounts)).sum())

    def across(self, kind: str, amount: float) -> float:
        """A collective over all devices: inside nodes by the table, between them at their adapters' rate."""
        nodes, inside = self.run.nodes, self.run.devices_per_node
        own = _collective(self.device.name, kind, inside, amount)
        if nodes == 1:
            return own
        return max(own, amount * (nodes - 1) / nodes / self.network) + self.engine.hop * self.run.devices

    def summed(self, amount: float) -> float:
        """A gradient reduction over the replicas of one stage's tensor rank; all ranks of a node share its adapters."""
        replicas, nodes = self.run.data, self.run.nodes
        if nodes == 1:
            return _collective(self.device.name, "all_reduce", replicas, amount)
        return 2 * amount * (replicas - 1) / replicas / (self.network / self.run.devices_per_node)

    def attention(self, backward: bool) -> float:
        """Seconds of attention."""
        model = self.run.model
        heads = self.run.microbatch * model.heads / self.run.tensor
        features = np.array([[heads, model.sequence, model.sequence, model.hidden / model.heads]])
        return float(attention_seconds(self.device, features, HALF, True, backward)[0])

    @property
    def meeting(self) -> float:
        """What ranks of tensor parallelism lose each time they wait for each other."""
        return self.engine.meeting * (self.run.tensor - 1)

    @property
    def joined(self) -> float:
        """Seconds of the collective that sums a product cut by tensor parallelism."""
        amount = self.rows * self.run.model.hidden * HALF
        if self.spread:
            kinds = ("reduce_scatter", "all_gather")
            return sum(_collective(self.device.name, kind, self.run.tensor, amount) for kind in kinds)
        return _collective(self.device.name, "all_reduce", self.run.tensor, amount)

    def block(self) -> Block:
        """One block on one device: device, collectives and host together."""
        model, tensor, engine, rows = self.run.model, self.run.tensor, self.engine, self.rows
        hidden, inner = model.hidden, model.inner / tensor
        width, gated = hidden // model.heads, bool(model.kv_heads)
        projected = (model.heads + 2 * (model.kv_heads or model.heads)) * width / tensor
        weights = [(projected, hidden), (hidden, hidden / tensor), *[(inner, hidden)] * (1 + gated), (hidden, inner)]
        line, wide = rows * hidden * HALF * engine.pointwise, rows * inner * HALF * engine.pointwise
        whole = line / tensor if self.spread else line
        attended, attended_back = self.attention(False), self.attention(True)
        forward = self.products(*((rows, n, k) for n, k in weights)) + attended
        forward += self.moved(2 * whole, 2 * whole, 3.5 * whole, 3.5 * whole, (2 + gated) * wide)
        backward = self.products(*((rows, k, n) for n, k in weights), *((n, k, rows) for n, k in weights))
        backward += attended_back
        backward += self.moved(4 * whole, 4 * whole, 2.5 * whole, 2.5 * whole, (3 + 2 * gated) * wide, 2 * whole)
        parameters = float(sum(n * k for n, k in weights))
        backward += self.moved(parameters * (HALF + 2 * engine.accumulation))
        calls = 2 * self.meeting if tensor > 1 else 0.0
        forward = engine.together(forward + 2 * self.joined, FORWARD_KERNELS * engine.forward_issue + calls)
        backward = engine.together(backward + 2 * self.joined, BACKWARD_KERNELS * engine.backward_issue + calls)
        if self.run.recompute == "blocks":
            backward += forward
        elif self.run.recompute == "light":
            backward += attended if engine.selective == "attention" else (forward - attended) / 2
        return Block(forward, backward, parameters)

    def head(self) -> tuple[float, float]:
        """Forward and backward seconds of the logits and their loss."""
        model, tensor, rows = self.run.model, self.run.tensor, self.rows
        words, hidden = -(-model.vocabulary // tensor), model.hidden
        joined = _collective(self.device.name, "all_reduce", tensor, float(rows * FULL))
        forward = self.products((rows, words, hidden)) + self.moved(rows * words * LOSS_FORWARD) + 3 * joined
        backward = self.products((rows, hidden, words), (words, hidden, rows)) + self.joined
        return forward, backward + self.moved(
            rows * words * LOSS_BACKWARD, words * hidden * (HALF + 2 * self.engine.accumulation)
        )

    def embedding(self) -> float:
        """Seconds of looking words up, either way."""
        return self.moved(4 * self.rows * self.run.model.hidden * HALF) + (self.joined if self.run.tensor > 1 else 0.0)

    @property
    def update(self) -> float:
        """Seconds of the optimizer's step per parameter."""
        moved = 2 * self.engine.state + MASTER
        return moved / (self.device.bandwidth * self.engine.pace(self.device.name).memory)

    def staged(self) -> tuple[float, float]:
        """Seconds and bytes of a run in stages (one of them where it has no pipeline)."""
        asked, engine, model = self.run, self.engine, self.run.model
        devices, stages, count = asked.pipeline, asked.pipeline * asked.virtual, asked.microbatches
        blocks = model.layers / stages
        block, (there, back), words = self.block(), self.head(), self.embedding()
        forward, backward = np.full(stages, blocks * block.forward), np.full(stages, blocks * block.backward)
        forward[0] += words
        backward[0] += words
        forward[-1] += there
        backward[-1] += back
        hop = 0.0
        if devices > 1:
            value = self.rows * model.hidden * HALF
            link = self.cluster.nodes[0].link.bandwidth
            rate = link if asked.nodes == 1 else self.network / asked.devices_per_node * asked.tensor
            hop = value / rate + engine.sending
            forward[:-1] += hop  # a rank waits until what it sends has left
            backward[1:] += hop
        schedule = _schedule("1f1b" if asked.virtual == 1 else "interleaved-1f1b", stages, count, devices)
        chain = pipeline(schedule.device_of, count, forward=forward, inputs=backward, weights=0.0, hop=hop)
        ends = np.array([own[-1] for own in run(schedule, chain).ends])
        parameters = np.full(devices, asked.virtual * blocks * block.parameters)
        table = model.vocabulary * model.hidden / asked.tensor
        parameters[0] += table
        if devices > 1:
            parameters[-1] += table
        sums = np.zeros(devices)
        if asked.data > 1:
            sums = np.array([self.summed(float(amount) * engine.reduction) for amount in parameters])
            if engine.overlap:
                sums = np.maximum(sums - blocks * block.backward, sums / model.layers)
        own = parameters / (asked.data if asked.sharding == "zero-1" else 1)
        closing = sums + own * self.update
        tied = self.summed(table * engine.reduction) if devices > 1 else 0.0
        needed = self.held(parameters[0], asked.virtual * blocks, block)
        return float((ends + closing).max()) + tied + count * engine.microbatch, needed

    def held(self, parameters: float, blocks: float, block: Block) -> float:
        """Bytes of the first stage: parameters, gradients and states, what is kept of every micro-batch in flight."""
        asked, engine, model = self.run, self.engine, self.run.model
        line = self.rows * model.hidden * HALF
        tensor, shards = asked.tensor, asked.data if asked.sharding == "zero-1" else 1
        scores = self.run.microbatch * model.heads / tensor * model.sequence**2
        lines = line * ((17 / tensor) if self.spread else (5 + 12 / tensor))
        inside = lines + (0 if engine.fused_attention else scores * (2 * HALF + 1))
        kept = {"blocks": line, "light": lines}.get(asked.recompute, inside)
        flying = min(asked.pipeline * asked.virtual, asked.microbatches) * blocks * kept
        return parameters * (engine.held + engine.state / shards) + flying + inside

    def sharded(self) -> tuple[float, float]:
        """Seconds and bytes of FSDP over all devices; every micro-batch gathers and reduces anew."""
        asked, engine, model = self.run, self.engine, self.run.model
        block, (there, back), words = self.block(), self.head(), self.embedding()
        table = float(model.vocabulary * model.hidden)
        tables = 2 if model.kv_heads else 1  # a Llama's head is a matrix of its own
        gathered, summed = (
            (
                (self.across("all_gather", size * HALF), self.across("reduce_scatter", size * engine.reduction))
                for size in (block.parameters, table)
            )
            if asked.devices > 1
            else ((0.0, 0.0), (0.0, 0.0))
        )
        forward = max(block.forward + engine.contention * gathered[0], gathered[0])
        sent = sum(gathered)
        backward = max(block.backward + engine.contention * sent, sent)
        step = model.layers * (forward + backward) + there + back + 2 * words + tables * sum(summed)
        parameters = model.layers * block.parameters + tables * table
        update = parameters / asked.devices * self.update
        seconds = asked.microbatches * (step + engine.microbatch) + update
        line = self.rows * model.hidden * HALF
        inside = line * (9 + 6 * model.inner / model.hidden)
        made = (
            3
            + 2 * (model.kv_heads or model.heads) / model.heads
            + (1 + bool(model.kv_heads)) * model.inner / model.hidden
        )
        kept = {"blocks": line, "light": line * (2 + made / 2)}.get(asked.recompute, inside)
        logits = self.rows * model.vocabulary * LOGITS
        states = parameters / asked.devices * (engine.held + engine.state)
        return seconds, states + model.layers * kept + inside + logits + 2 * block.parameters * HALF


def as_run(published: Run, profile: Engine | None = None) -> tuple[float, float]:
    """Seconds of a step and bytes of the fullest device, as the run's engine runs it."""
    priced = Priced(published, profile or engine(published.engine))
    alone = published.pipeline == 1 and published.tensor == 1 and published.sharding == "fsdp"
    return priced.sharded() if alone else priced.staged()
