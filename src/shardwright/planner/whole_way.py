"""From a model to a plan, in one call: ``plan``; and to the plans that answer questions about a whole job.

``plan`` captures the model, searches plans on one mesh and pipelines, and the fastest wins. ``frontier``, ``by_devices``,
``largest_batch`` and ``serve`` plan several times: for less memory, for more devices, for larger batches, for served calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Union

from shardwright.cluster import Cluster, parse_cluster
from shardwright.errors import ShardwrightError
from shardwright.graph import Graph
from shardwright.planner import frontier as curve
from shardwright.planner import sizing
from shardwright.planner.also import captured_calls, with_calls
from shardwright.planner.joint import NEVER, PROMISING, beside_one_mesh, plan_jointly
from shardwright.planner.options import Options, Progress
from shardwright.planner.pipelines import Pipelining, plan_pipeline
from shardwright.planner.serving import plan_serving
from shardwright.plans import Plan

Build = Callable[[int], tuple[Any, ...]]
"""From a number of rows, or of calls, to ``(model, args)`` or ``(model, args, kwargs)``."""


def plan(
    model: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: Cluster | str,
    progress: Progress | None = None,
    reference: str = "",
    also: Sequence[Any] = (),
    pipelines: Union[str, Pipelining] = PROMISING,
    **options: Any,
) -> Plan:
    """Find the fastest split of ``model`` over ``cluster``.

    Parameters
    ----------
    model, args, kwargs
        The unmodified module and example inputs (on the meta device if it is large).
    cluster
        A :class:`Cluster` or its name: ``"8xH200"``, ``"4x8xA100-80GB"``, ``"local:2"``, a TOML file.
    also
        Other calls that will come, ``(args, kwargs)`` or ``(args, kwargs, training)``: each must fit under the plan, and is
        prepared for, so that the job does not stop when it first comes. Such plans have no stages.
    pipelines
        Search plans with stages too ``always``, ``never``, or where they are ``promising``
        (:func:`~shardwright.planner.plan_jointly`); or just one kind: ``Pipelining(stages=4, microbatches=16)``.
    options
        The fields of :class:`Options`: ``search="auto"`` searches everything, a baseline's name restricts the search to
        strategies of that kind; ``baselines`` are priced beside the plan found.

    Raises
    ------
    Infeasible
        When no strategy fits into the devices' memory.

    Examples
    --------
    >>> import torch
    >>> with torch.device("meta"):
    ...     model, x = torch.nn.Linear(1024, 1024), torch.empty(64, 1024)
    >>> plan(model, (x,), cluster="2xH100").prediction.fits
    True
    """
    from shardwright.frontend import capture

    say = progress or (lambda text: None)
    chosen = Options(**options)
    if isinstance(pipelines, Pipelining) and also:
        raise ShardwrightError(
            "Other calls are prepared for plans on one mesh only.", "Leave out also=, or pipelines=."
        )
    cluster = _named(cluster)
    say("capturing the model")
    graph, others = capture(model, args, kwargs), captured_calls(model, also)
    if isinstance(pipelines, Pipelining):
        found = plan_pipeline(graph, cluster, pipelines, chosen, progress=say, reference=reference)
        return beside_one_mesh(found, cluster, chosen, graph=graph, progress=say)
    stages = NEVER if others else pipelines
    found, _ = plan_jointly(graph, cluster, chosen, progress=say, reference=reference, pipelines=stages)
    return with_calls(found, others, chosen.memory_limit)


def frontier(
    model: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: Cluster | str,
    steps: int = 8,
    **options: Any,
) -> list[Plan]:
    """At most ``steps`` plans on one mesh, the fastest first; every further one uses less memory and takes longer.

    >>> [plan.prediction.memory_bytes for plan in frontier(model, (x,), cluster="8xH100")]           # doctest: +SKIP
    """
    from shardwright.frontend import capture

    return curve.frontier(capture(model, args, kwargs), _named(cluster), Options(**options), steps=steps)


def by_devices(
    model: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: Cluster | str,
    devices: Sequence[int],
    **options: Any,
) -> list[sizing.Row]:
    """The best plan for each of these numbers of devices like those of ``cluster``: how much faster more of them are.

    >>> [(row.devices, row.seconds) for row in by_devices(model, (x,), cluster="8xH100", devices=[8, 16])]  # doctest: +SKIP
    """
    from shardwright.frontend import capture

    return sizing.by_devices(capture(model, args, kwargs), _named(cluster), devices, Options(**options))


def largest_batch(build: Build, *, cluster: Cluster | str, start: int = 1, **options: Any) -> Plan | None:
    """The plan for the largest batch that fits, to within an eighth; ``None`` where not even one row does.

    ``build(rows)`` gives the model and inputs of so many rows.

    >>> largest_batch(lambda rows: (model, (x[:rows],)), cluster="8xH100").batch                     # doctest: +SKIP
    """
    rows = sizing.by_batch(_captured(build), _named(cluster), Options(**options), start=start)
    best = max((row for row in rows if row.plan is not None), key=lambda row: row.batch, default=None)
    return None if best is None or best.plan is None else replace(best.plan, batch=best.batch)


def serve(build: Build, *, cluster: Cluster | str, objective: str = "latency", cache: int = 0, **options: Any) -> Plan:
    """The plan for calls in evaluation mode: the quickest call, or the most rows a second (``objective="throughput"``).

    ``build(calls)`` gives the model, after ``eval()``, and the inputs of so many calls taken together; ``cache`` says how
    many positions a decoder's cache holds already.

    >>> serve(lambda calls: (model.eval(), (x.repeat(calls, 1),)), cluster="2xH100").serving.calls   # doctest: +SKIP
    1
    """
    return plan_serving(_captured(build), _named(cluster), Options(**options), objective=objective, cache=cache)


def _named(cluster: Cluster | str) -> Cluster:
    return parse_cluster(cluster) if isinstance(cluster, str) else cluster


def _captured(build: Build) -> Callable[[int], Graph]:
    from shardwright.frontend import capture

    return lambda count: capture(*build(count))
