"""The one function that walks the whole way: capture a model, search plans on one mesh and pipelines, the fastest wins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwright.cluster import Cluster, parse_cluster
from shardwright.planner.also import captured_calls, with_calls
from shardwright.planner.joint import NEVER, PROMISING, plan_jointly
from shardwright.planner.options import Options, Progress
from shardwright.plans import Plan


def plan(
    model: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    cluster: Cluster | str,
    progress: Progress | None = None,
    reference: str = "",
    also: Sequence[Any] = (),
    pipelines: str = PROMISING,
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
        (:func:`~shardwright.planner.plan_jointly`).
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
    cluster = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    say("capturing the model")
    graph, others = capture(model, args, kwargs), captured_calls(model, also)
    stages = NEVER if others else pipelines
    found, _ = plan_jointly(graph, cluster, chosen, progress=say, reference=reference, pipelines=stages)
    return with_calls(found, others, chosen.memory_limit)
