"""Memory limits in words: which one binds, by how much it is missed and what would help; and the problem of using least.

Two limits may hold: the device's usable memory and the one a user asks for; the smaller binds and is the one to name. What
needs least is found exactly as what takes least seconds is: over the same options, with bytes in the place of seconds.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardwright.cluster import Device
from shardwright.errors import Infeasible, ShardwrightError
from shardwright.search.choose import Edge, Problem
from shardwright.units import bytes_text

TIME_SHARE = 1e-3
"""When bytes are minimised: the share of the least bytes that the whole step's seconds are worth (they break ties)."""


def by_memory(problem: Problem) -> Problem:
    """The same options with the bytes in use as cost; of equally small choices the faster one is the cheaper.

    Adds up all usages, which is exact where all of them overlap. In the problems of ``formulate`` activations and gradients
    do not; there the sum stands for the larger of two moments, and the exact curve decides.
    """
    bytes_of = [np.zeros(len(cost)) for cost in problem.costs]
    for usage in problem.usages:
        bytes_of[usage.node] = bytes_of[usage.node] + usage.amounts
    least = sum(float(amounts.min()) for amounts in bytes_of) or 1.0
    seconds = sum(float(cost.min()) for cost in problem.costs) or 1.0
    weight = TIME_SHARE * least / seconds
    return replace(
        problem,
        costs=[amounts + weight * cost for amounts, cost in zip(bytes_of, problem.costs, strict=True)],
        edges=[Edge(first, second, weight * matrix) for first, second, matrix in problem.edges],
        usages=(),
        usage_limit=None,
    )


def check_limits(memory_limit: float | None, time_limit: float) -> None:
    """Refuse limits that are none: zero, negative, or not a number."""
    if memory_limit is not None and not 0 < memory_limit < float("inf"):
        raise ShardwrightError(
            f"A memory limit of {memory_limit} bytes is none.", "Give a number above 0, or no limit."
        )
    if not 0 <= time_limit < float("inf"):
        raise ShardwrightError(f"A time limit of {time_limit} s is none.", "Give a number of seconds.")


def limit_of(device: Device, asked: float | None, ignore_device: bool = False) -> float:
    """Bytes per device that a plan may use: the smaller of the device's and what was asked for."""
    return min(float("inf") if asked is None else asked, float("inf") if ignore_device else float(device.usable_memory))


def too_much(problem: Problem, name: str) -> Infeasible | None:
    """The refusal of a problem whose smallest usage exceeds its limit; nothing where that is not so."""
    limit = problem.usage_limit
    moments = {usage.start for usage in problem.usages}
    at = [[float(u.amounts.min()) for u in problem.usages if u.start <= moment < u.stop] for moment in moments]
    least = max(map(sum, at), default=0.0)
    if limit is None or least <= limit:
        return None
    return Infeasible(
        f"parameters, optimizer state and saved activations of every {name} strategy take at least "
        f"{bytes_text(least)} per device, more than the {bytes_text(limit)} allowed.",
        "Use more devices, a smaller batch or devices with more memory (where a limit was asked for: a higher one).",
    )


def more_room(device: Device, limit: float, needed: float) -> str:
    """What to do where a plan needs more bytes than it may use: raise the limit where the device has more."""
    if limit < device.usable_memory and needed <= device.usable_memory:
        return (
            f"Raise the limit above {bytes_text(needed)} (the device has {bytes_text(device.usable_memory)}), or use "
            "more devices or a smaller batch."
        )
    return "Use more devices, a smaller batch, or a cluster with more memory."


def shortage(search: str, where: str, device: Device, limit: float, smallest: float, recompute: str) -> Infeasible:
    """What to tell a user for whom nothing fits: the limit that binds, the smallest peak found, and the way out."""
    asked = limit < device.usable_memory
    held = f"the memory limit of {bytes_text(limit)}" if asked else f"the {bytes_text(limit)} of one {device.name}"
    remedy = more_room(device, limit, smallest)
    if recompute == "none":
        remedy += " Recomputing blocks (recompute=auto) would also save memory."
    return Infeasible(
        f"No {search} strategy of this model fits {where}: the smallest found needs {bytes_text(smallest)} per device, "
        f"more than {held}.",
        remedy,
    )


def no_blocks(training: bool) -> ShardwrightError:
    """Recomputation was asked for where there is nothing to recompute."""
    if not training:
        return ShardwrightError(
            "There is nothing to recompute: the model is captured in evaluation mode, without a backward pass.",
            "Leave recompute at auto, or call model.train() before planning.",
        )
    return ShardwrightError(
        "There is nothing to recompute: no repeated block of at least four operators was found in a numbered module.",
        "Leave recompute at auto or none; blocks are found in what nn.ModuleList or nn.Sequential repeats.",
    )
