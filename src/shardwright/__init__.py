"""Shardwright: automatic model parallelism for PyTorch.

Hand over an unmodified model and a description of a cluster; get the fastest split, the proof of how good it is, and a
module that runs it on ``torch.distributed`` with the same numbers as on one device.

>>> import torch, shardwright
>>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
>>> plan = shardwright.plan(model, (torch.ones(16, 64),), cluster="8xH200")
>>> plan.save("plan.json")                                       # doctest: +SKIP
>>> model = shardwright.parallelize(model, plan)                 # under torchrun        # doctest: +SKIP

Everything a user needs is here, by name; what lies below may move. Three names are modules: ``language``, the words in
which operators are described, ``schedules``, the orders of a pipeline's passes, and ``placement``, operators on devices.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardwright.version import __version__

if TYPE_CHECKING:
    from shardwright import schedules, testing
    from shardwright.cluster import Cluster, Device, Link, Node, parse_cluster
    from shardwright.errors import Infeasible, ShardwrightError
    from shardwright.exchange.exporting import export
    from shardwright.fitting import fits
    from shardwright.frontend import capture
    from shardwright.integrations.accelerator import Accelerator
    from shardwright.integrations.lightning import ShardwrightStrategy
    from shardwright.integrations.trainer import Trainer
    from shardwright.operators import describe, language
    from shardwright.planner import Options, Pipelining
    from shardwright.planner.advising import Advice, advise
    from shardwright.planner.whole_way import by_devices, frontier, largest_batch, plan, serve
    from shardwright.plans import Plan
    from shardwright.reports.api import report, simulate
    from shardwright.reports.explaining import explain
    from shardwright.runtime.agreement import check_finite
    from shardwright.runtime.assistant import assist
    from shardwright.runtime.assistant.watching import Rule
    from shardwright.runtime.checkpoint import load_checkpoint, load_weights, save_checkpoint
    from shardwright.runtime.clipping import clip_gradients
    from shardwright.runtime.materialise import parameters_on_meta
    from shardwright.runtime.moving import move
    from shardwright.runtime.parallelize import parallelize
    from shardwright.runtime.rows import sampler
    from shardwright.runtime.whole_state import whole_state
    from shardwright.runtime.whole_updates import update_whole
    from shardwright.schedules import known_schedule
    from shardwright.search import place as placement
    from shardwright.search.schedule import find_schedule
    from shardwright.verification.auditing import audit_call
    from shardwright.verification.verify import verify

__all__ = [
    "Accelerator",
    "Advice",
    "Cluster",
    "Device",
    "Infeasible",
    "Link",
    "Node",
    "Options",
    "Pipelining",
    "Plan",
    "Rule",
    "ShardwrightError",
    "ShardwrightStrategy",
    "Trainer",
    "__version__",
    "advise",
    "assist",
    "audit_call",
    "by_devices",
    "capture",
    "check_finite",
    "clip_gradients",
    "describe",
    "explain",
    "export",
    "find_schedule",
    "fits",
    "frontier",
    "known_schedule",
    "language",
    "largest_batch",
    "load_checkpoint",
    "load_weights",
    "move",
    "parallelize",
    "parameters_on_meta",
    "parse_cluster",
    "placement",
    "plan",
    "report",
    "sampler",
    "save_checkpoint",
    "schedules",
    "serve",
    "simulate",
    "testing",
    "update_whole",
    "verify",
    "whole_state",
]

_HOME = {
    "Advice": "shardwright.planner.advising",
    "Accelerator": "shardwright.integrations.accelerator",
    "Cluster": "shardwright.cluster",
    "Device": "shardwright.cluster",
    "Infeasible": "shardwright.errors",
    "Link": "shardwright.cluster",
    "Node": "shardwright.cluster",
    "Options": "shardwright.planner",
    "Pipelining": "shardwright.planner",
    "Plan": "shardwright.plans",
    "Rule": "shardwright.runtime.assistant.watching",
    "ShardwrightError": "shardwright.errors",
    "ShardwrightStrategy": "shardwright.integrations.lightning",
    "Trainer": "shardwright.integrations.trainer",
    "advise": "shardwright.planner.advising",
    "assist": "shardwright.runtime.assistant",
    "audit_call": "shardwright.verification.auditing",
    "by_devices": "shardwright.planner.whole_way",
    "capture": "shardwright.frontend",
    "check_finite": "shardwright.runtime.agreement",
    "clip_gradients": "shardwright.runtime.clipping",
    "describe": "shardwright.operators",
    "explain": "shardwright.reports.explaining",
    "export": "shardwright.exchange.exporting",
    "find_schedule": "shardwright.search.schedule",
    "fits": "shardwright.fitting",
    "frontier": "shardwright.planner.whole_way",
    "known_schedule": "shardwright.schedules",
    "largest_batch": "shardwright.planner.whole_way",
    "load_checkpoint": "shardwright.runtime.checkpoint",
    "load_weights": "shardwright.runtime.checkpoint",
    "move": "shardwright.runtime.moving",
    "parallelize": "shardwright.runtime.parallelize",
    "parameters_on_meta": "shardwright.runtime.materialise",
    "parse_cluster": "shardwright.cluster",
    "plan": "shardwright.planner.whole_way",
    "report": "shardwright.reports.api",
    "sampler": "shardwright.runtime.rows",
    "save_checkpoint": "shardwright.runtime.checkpoint",
    "serve": "shardwright.planner.whole_way",
    "simulate": "shardwright.reports.api",
    "update_whole": "shardwright.runtime.whole_updates",
    "verify": "shardwright.verification.verify",
    "whole_state": "shardwright.runtime.whole_state",
}
_MODULES = {
    "language": "shardwright.operators.language",
    "placement": "shardwright.search.place",
    "schedules": "shardwright.schedules",
    "testing": "shardwright.testing",
}


def __getattr__(name: str) -> Any:
    """Names are imported when first used, so that importing the package is quick and running a plan loads no solver."""
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'shardwright' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
