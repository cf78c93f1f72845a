"""What the product predicts of a published run: seconds of its step and bytes of its fullest device.

Pipelines and tensor parallelism: stages of equal runs of blocks, each on a mesh of ``data`` × ``tensor`` devices with the
recipe's splits, priced as the joint search prices them (:mod:`shardwright.search.joint.blocks`) and timed in the run's
schedule. FSDP without either: the recipe's plan of the model with three and with four blocks, simulated; what the fourth
adds is added for every further one. No constant is fitted here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from shardwright.cluster import Cluster, Mesh, mesh_of, parse_cluster, part_of
from shardwright.frontend import capture
from shardwright.graph import Graph
from shardwright.planner import Options, plan_graph
from shardwright.schedules import known_schedule, pipeline, run
from shardwright.search.joint.blocks import NEVER, BlockPricer
from shardwright.search.joint.chain import even_cuts
from shardwright.zoo.reference import resolve
from world_runs import Model, Run


def zoo_name(model: Model, blocks: int) -> str:
    """The model as the zoo knows it, with so many of its blocks: the others are alike."""
    sizes = f"layers={blocks},width={model.hidden},heads={model.heads},inner={model.inner},vocab={model.vocabulary}"
    if model.kv_heads:
        return f"llama:{sizes},kv_heads={model.kv_heads},seq={model.sequence}"
    return f"gpt:{sizes},seq={model.sequence}"


def graph_of(model: Model, blocks: int, batch: int, precision: str = "bfloat16") -> Graph:
    resolved = resolve(zoo_name(model, blocks), batch=batch, dtype=precision)
    return capture(resolved.model, resolved.args, resolved.kwargs)


def cluster_of(published: Run) -> Cluster:
    nodes = f"{published.nodes}x" if published.nodes > 1 else ""
    return parse_cluster(f"{nodes}{published.devices_per_node}x{published.device}")


def stage_mesh(cluster: Cluster, data: int, tensor: int) -> Mesh:
    """``data`` × ``tensor`` devices, the tensor axis last, inside nodes."""
    part = part_of(cluster, range(data * tensor))
    inside = part.nodes[0].devices
    if len(part.nodes) == 1 and data > 1 and tensor > 1:
        mesh = mesh_of(part, tuple(sorted((data, tensor))))
        one, other = mesh.axes
        return replace(mesh, axes=(replace(one, size=data), replace(other, size=tensor)))
    if len(part.nodes) == 1 or tensor in (1, inside):
        return mesh_of(part)
    mesh = mesh_of(part, (len(part.nodes), *sorted((inside // tensor, tensor))))
    outer, one, other = mesh.axes
    return replace(mesh, axes=(outer, replace(one, size=inside // tensor), replace(other, size=tensor)))


@cache
def _pricer(model: Model, batch: int, precision: str) -> BlockPricer:
    return BlockPricer(graph_of(model, 4, batch, precision))


def _recipe(published: Run) -> str:
    if published.tensor > 1:
        return "megatron"
    return {"none": "data-parallel"}.get(published.sharding, published.sharding) if published.data > 1 else "auto"


def staged(published: Run) -> tuple[float, float]:
    """Seconds and bytes of a run in stages (one of them where it has no pipeline)."""
    cluster, count = cluster_of(published), published.microbatches
    pricer = _pricer(published.model, published.data * published.microbatch, published.precision)
    mesh = stage_mesh(cluster, published.data, published.tensor)
    name = _recipe(published)
    price = next(p for p in pricer.prices(mesh, count, (name,)) if p.name == name)
    again = {"blocks": price.wholly, "light": price.lightly, "none": NEVER}[published.recompute]
    devices, stages = published.pipeline, published.pipeline * published.virtual
    cuts = even_cuts(published.model.layers, stages)
    blocks, number = np.diff(cuts), np.arange(stages)
    first, last = number == 0, number == stages - 1
    link = cluster.nodes[0].link if published.nodes == 1 else cluster.network
    link = link.per_device(cluster.nodes[0].devices)
    hop = link.latency + pricer.boundary_bytes / mesh.devices / link.bandwidth
    seconds = price.seconds.of(blocks, first, last) + blocks * again.seconds
    closing = price.closing.of(blocks, first, last)
    schedule = known_schedule("1f1b" if published.virtual == 1 else "interleaved-1f1b", stages, count, devices)
    forward = (seconds - blocks * again.seconds) / 3
    chain = pipeline(
        schedule.device_of,
        count,
        forward=forward,
        inputs=seconds - forward,
        weights=0.0,
        hop=hop if devices > 1 else 0.0,
    )
    timing = run(schedule, chain)
    held = price.held.of(blocks, first, last) - blocks * again.saves
    resting = price.resting.of(blocks, first, last)
    needed = np.zeros(devices)
    steps = np.zeros(devices)
    for device in range(devices):
        mine = [stage for stage in range(stages) if schedule.device_of[stage] == device]
        flying = min(devices - device + (published.virtual - 1) * devices, count * published.virtual)
        needed[device] = resting[mine].sum() + held[mine].mean() * flying
        needed[device] += price.held.block if again is price.wholly else 0.0  # of the block that is computed again
        steps[device] = float(timing.ends[device][-1]) + closing[mine].sum()
    return float(steps.max()), float(needed.max())


@cache
def _flat(model: Model, blocks: int, batch: int, cluster: Cluster, precision: str, recompute: str) -> tuple[float, ...]:
    options = Options(search="fsdp", baselines=(), recompute=recompute, ignore_device_memory=True, fewer_devices=False)
    told = plan_graph(graph_of(model, blocks, batch, precision), cluster, options).prediction
    return told.step_seconds, told.memory_bytes


def flat(published: Run) -> tuple[float, float]:
    """Seconds and bytes of FSDP on all devices; every micro-batch gathers and reduces anew, as FSDP does by default."""
    sizes = (published.model, published.data * published.microbatch, cluster_of(published), published.precision)
    three, four = (np.array(_flat(sizes[0], n, *sizes[1:], published.recompute)) for n in (3, 4))
    seconds, needed = four + (published.model.layers - 4) * (four - three)
    return float(seconds) * published.microbatches, float(needed)


def predicted(published: Run) -> tuple[float, float]:
    """Seconds of a step and bytes of the fullest device, by the product's prices alone."""
    alone = published.pipeline == 1 and published.tensor == 1 and published.sharding == "fsdp"
    return flat(published) if alone else staged(published)
