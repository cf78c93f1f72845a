"""The usual ways to train a model on a cluster, as configurations, and what else each of them could say.

Every way and every change is a :class:`~shardwright.exchange.Configuration`, so that it is split, priced and replayed as
another engine's file would be: nothing here knows a formula of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import gcd
from typing import Any

from shardwright.cluster import Cluster
from shardwright.exchange.configuration import (
    BLOCKS,
    GRADIENTS,
    LIGHT,
    NOTHING,
    OPTIMIZER,
    PARAMETERS,
    Configuration,
    ConfigurationError,
)

ONE = "one device"
HALVES = ("bfloat16", "float16")
MASTERS = "adamw-float32"


def _way(name: str, **decisions: Any) -> Configuration:
    return Configuration(name, **decisions)


def _tensor(cluster: Cluster, batch: int) -> dict[str, Any]:
    """Degrees of tensor parallelism as wide as a node, the batch over the rest."""
    inside = min(node.devices for node in cluster.nodes)
    return {"tensor": inside, "replicate": cluster.size // inside, "sequence": True}


def _both(cluster: Cluster, batch: int) -> dict[str, Any]:
    """Tensor parallelism over half a node, parameters divided over the rest."""
    inside = max(min(node.devices for node in cluster.nodes) // 2, 1)
    return {"tensor": inside, "shard": cluster.size // inside, "sequence": True}


def _divided(sharding: str) -> Callable[[Cluster, int], dict[str, Any]]:
    return lambda cluster, batch: {
        "shard": cluster.size,
        "sharding": sharding,
        "reshard": sharding == PARAMETERS,
    }


WAYS: dict[str, Callable[[Cluster, int], dict[str, Any]]] = {
    "data-parallel": lambda cluster, batch: {"replicate": cluster.size},
    "zero-1": _divided(OPTIMIZER),
    "zero-2": _divided(GRADIENTS),
    "fsdp": _divided(PARAMETERS),
    "megatron": _tensor,
    "fsdp+tensor": _both,
}
"""From a cluster and rows to degrees, by the name that people know a way by."""


def usual_ways(cluster: Cluster, batch: int, optimizer: str) -> dict[str, Configuration]:
    """The ways that a table shows; on one device there is one.

    >>> from shardwright.cluster import parse_cluster
    >>> list(usual_ways(parse_cluster("1xH100"), 8, "adamw")), len(usual_ways(parse_cluster("8xH100"), 8, "adamw"))
    (['one device'], 6)
    """
    if cluster.size == 1:
        return {ONE: _way(ONE, optimizer=optimizer)}
    found = {name: _way(name, optimizer=optimizer, **degrees(cluster, batch)) for name, degrees in WAYS.items()}
    return {name: c for name, c in found.items() if name != "fsdp+tensor" or (c.tensor or 1) > 1}


def in_mixed_precision(c: Configuration) -> Configuration:
    """Another engine's half precision keeps float32 parameters and optimizer state: torchtitan, DeepSpeed, Megatron-LM and
    accelerate all do.

    >>> in_mixed_precision(Configuration("torchtitan", precision="bfloat16")).optimizer
    'adamw-float32'
    """
    return replace(c, optimizer=MASTERS) if c.precision in HALVES and c.optimizer == "adamw" else c


def compiled_way(c: Configuration) -> Configuration:
    """The same step with its regions compiled. What those keep for passes back is the least cut through what they compute
    (:mod:`shardwright.runtime.computed_again`): about what a step keeps that computes again what is cheap.

    >>> [compiled_way(Configuration("fsdp", recompute=way)).recompute for way in ("none", "blocks")]
    ['light', 'blocks']
    """
    return replace(c, recompute=LIGHT) if c.recompute == NOTHING else c


def single_changes(c: Configuration, cluster: Cluster) -> Iterator[tuple[str, Configuration]]:
    """What a settled configuration could say otherwise to take less memory, a step of each kind, in words."""
    ways = {NOTHING: (LIGHT, BLOCKS), LIGHT: (BLOCKS,), BLOCKS: ()}[c.recompute]
    if c.recompute == BLOCKS and c.recomputed_share < 1:
        ways = (BLOCKS,)
    for way in ways:
        what = "recompute what is cheap of every block" if way == LIGHT else "recompute whole blocks"
        yield what, replace(c, recompute=way, recomputed_share=1.0)
    data, rows = c.data, c.microbatch or 1
    divided = [(OPTIMIZER, "ZeRO-1"), (GRADIENTS, "ZeRO-2"), (PARAMETERS, "ZeRO-3 (fsdp)")]
    reached = -1 if (c.shard or 1) < data else [name for name, _ in divided].index(c.sharding)
    for number, (sharding, name) in enumerate(divided):
        if data > 1 and number > reached:
            reshard = sharding == PARAMETERS
            yield name, replace(c, replicate=1, shard=data, sharding=sharding, reshard=reshard)
    if data > 1 and reached == 2 and not c.reshard:
        yield "gather parameters again in backward", replace(c, reshard=True)
    if (c.tensor or 1) > 1 and not c.sequence:
        yield "cut norms along the sequence", replace(c, sequence=True)
    for factor in (2, 4, 8):
        wider = _wider(c, cluster, factor)
        if wider is not None:
            yield f"tensor parallelism over {wider.tensor}", wider
    for factor in (2, 4, 8, 16):
        if rows % factor == 0:
            count = factor * (c.microbatches or 1)
            what = f"{count} micro-batches of {rows // factor}"
            yield what, replace(c, microbatches=count, microbatch=rows // factor)


def _wider(c: Configuration, cluster: Cluster, factor: int) -> Configuration | None:
    """So many times the tensor parallelism, taken from the ranks that share the batch, within a node."""
    inside = min(node.devices for node in cluster.nodes)
    tensor = (c.tensor or 1) * factor
    if tensor > inside or inside % tensor or c.data % factor:
        return None
    from_shard = gcd(c.shard or 1, factor)
    from_replicas = factor // from_shard
    degrees: dict[str, Any] = {
        "tensor": tensor,
        "shard": (c.shard or 1) // from_shard,
        "replicate": (c.replicate or 1) // from_replicas,
        "microbatch": (c.microbatch or 1) * factor,
    }
    return replace(c, sequence=True, **degrees)


def named_way(name: str, cluster: Cluster, batch: int, optimizer: str) -> Configuration:
    """A way by its name.

    Raises
    ------
    ConfigurationError
        When there is none.
    """
    ways = usual_ways(cluster, batch, optimizer)
    if name in ways:
        return ways[name]
    if name in WAYS and ONE in ways:
        return ways[ONE]  # on one device every name means the same
    raise ConfigurationError(f"There is no way {name!r} to ask about.", f"Known: {', '.join(WAYS)}.")
