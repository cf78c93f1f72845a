"""Plans for inference: no backward pass, no optimizer; for the seconds of one call or for rows a second.

Latency is what every plan is judged by: the simulated seconds of one call, on as few devices as that takes. Throughput is
of a stream of calls that wait: a device that has nothing to gain from sharing one call may serve another one, so the plan
may take several waiting calls together (1, 2, 4 … up to one for every device), and the fewest seconds per row win. Serving
whole calls side by side is then the case in which the first mesh axis cuts rows alone, and everything between that and
one call cut over all devices competes (device placement, NeurIPS 2020, states both objectives for a pipeline).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardwright.cluster import Cluster
from shardwright.errors import Infeasible, ShardwrightError
from shardwright.graph import Graph
from shardwright.planner.options import Options, Progress
from shardwright.planner.planning import plan_graph
from shardwright.plans import Plan, Serving

OBJECTIVES = ("latency", "throughput")


def plan_serving(
    capture_at: Callable[[int], Graph],
    cluster: Cluster,
    options: Options | None = None,
    *,
    objective: str = "latency",
    cache: int = 0,
    progress: Progress | None = None,
    reference: str = "",
) -> Plan:
    """The plan for serving calls: ``capture_at(n)`` is the graph, in evaluation mode, of ``n`` calls taken together.

    >>> plan = plan_serving(lambda calls: capture(model.eval(), (x[: 8 * calls],)), cluster)     # doctest: +SKIP
    >>> plan.serving.calls, plan.prediction.step_seconds                                         # doctest: +SKIP
    """
    if objective not in OBJECTIVES:
        raise ShardwrightError(f"There is no objective {objective!r}.", f"Known: {', '.join(OBJECTIVES)}.")
    say, chosen = progress or (lambda text: None), options or Options()
    best: Plan | None = None
    refusal: Infeasible | None = None
    for calls in counts(cluster.size) if objective == "throughput" else [1]:
        graph = capture_at(calls)
        if graph.training:
            raise ShardwrightError("The model is in training mode.", "Capture it after model.eval().")
        if calls > 1:
            say(f"{calls} calls at once")
        try:
            found = plan_graph(graph, cluster, chosen, progress=say, reference=reference)
        except Infeasible as error:  # more calls need more memory
            refusal = refusal or error
            break
        found = replace(found, serving=Serving(objective, cache, calls))
        if best is None or seconds_per_call(found) < seconds_per_call(best):
            best = found
    if best is None:
        assert refusal is not None
        raise refusal
    return best


def seconds_per_call(plan: Plan) -> float:
    """Predicted seconds of a step over the calls that it serves."""
    return plan.prediction.step_seconds / (plan.serving.calls if plan.serving else 1)


def counts(devices: int) -> list[int]:
    """How many calls may be taken together on so many devices.

    >>> counts(6), counts(8)
    ([1, 2, 4, 6], [1, 2, 4, 8])
    """
    doubling = [1 << k for k in range(devices.bit_length()) if 1 << k <= devices]
    return sorted({*doubling, devices})
