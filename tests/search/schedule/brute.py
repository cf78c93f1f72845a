"""The brute-force twin: every order of a tiny pipeline that keeps micro-batches in order, timed by a few plain lines."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import inf

from shardwright.schedules import Pipeline

Pass = tuple[int, str, int]


def _orders(pipeline: Pipeline, device: int) -> Iterator[tuple[Pass, ...]]:
    """All orders of a device's passes in which F, I and W of each of its stages take the micro-batches in order."""
    stages, most = pipeline.stages_of(device), pipeline.microbatches
    memory = {"F": pipeline.forward_memory, "I": pipeline.inputs_memory, "W": pipeline.weights_memory}

    def extend(order: tuple[Pass, ...], held: float) -> Iterator[tuple[Pass, ...]]:
        if len(order) == 3 * most * len(stages):
            yield order
        for stage, (kind, after) in product(stages, (("F", ""), ("I", "F"), ("W", "I"))):
            i = sum(1 for s, k, _ in order if (s, k) == (stage, kind))
            if i == most or (after and (stage, after, i) not in order):
                continue
            now = held + float(memory[kind][stage, i])
            if now <= pipeline.limits[device]:
                yield from extend((*order, (stage, kind, i)), now)

    yield from extend((), 0.0)


def _needs(pipeline: Pipeline, stage: int, kind: str, i: int) -> list[tuple[Pass, float]]:
    if kind == "F":
        return [((edge.source, "F", i), edge.hop) for edge in pipeline.reads(stage)]
    if kind == "W":
        return [((stage, "I", i), 0.0)]
    return [((stage, "F", i), 0.0)] + [((edge.reader, "I", i), edge.hop) for edge in pipeline.read_by(stage)]


def best(pipeline: Pipeline, objective: str) -> float:
    """The least cost of all orders that can run."""
    seconds = {"F": pipeline.forward, "I": pipeline.inputs, "W": pipeline.weights}
    needs = {
        (stage, kind, i): _needs(pipeline, stage, kind, i)
        for stage, kind, i in product(range(pipeline.stages), "FIW", range(pipeline.microbatches))
    }
    least = inf
    for orders in product(*(list(_orders(pipeline, device)) for device in range(pipeline.devices))):
        ends: dict[Pass, float] = {}
        heads, free, first = [0] * len(orders), [0.0] * len(orders), [0.0] * len(orders)
        moved = True
        while moved:
            moved = False
            for device, order in enumerate(orders):
                while heads[device] < len(order) and all(n in ends for n, _ in needs[order[heads[device]]]):
                    stage, kind, i = done = order[heads[device]]
                    start = max([free[device], *(ends[n] + hop for n, hop in needs[done])])
                    if heads[device] == 0:
                        first[device] = start
                    free[device] = ends[done] = start + float(seconds[kind][stage, i])
                    heads[device] += 1
                    moved = True
        if len(ends) == len(needs):
            spans = [end - begin for end, begin in zip(free, first, strict=True)]
            least = min(least, max(spans) if objective == "span" else max(free) - min(first))
    return least
