"""Shardwright: automatic model parallelism for PyTorch.

Hand over an unmodified model and a description of a cluster; get the fastest split, the proof of how good it is, and a
module that runs it on ``torch.distributed`` with the same numbers as on one device.

>>> import shardwright                                                        # doctest: +SKIP
>>> plan = shardwright.plan(model, args, kwargs, cluster="8xH200")            # doctest: +SKIP
>>> plan.save("plan.json")                                                    # doctest: +SKIP
>>> model = shardwright.parallelize(model, plan)      # under torchrun        # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardwright.version import __version__

if TYPE_CHECKING:
    from shardwright.errors import ShardwrightError
    from shardwright.frontend import capture
    from shardwright.operators import describe
    from shardwright.planner import plan
    from shardwright.plans import Plan
    from shardwright.reports.explaining import explain
    from shardwright.reports.looking import report, simulate
    from shardwright.runtime.assistant import assist
    from shardwright.runtime.moving import move
    from shardwright.runtime.parallelize import parallelize
    from shardwright.runtime.rows import sampler
    from shardwright.runtime.whole_updates import update_whole
    from shardwright.verification.verify import verify

__all__ = [
    "Plan",
    "ShardwrightError",
    "__version__",
    "assist",
    "capture",
    "describe",
    "explain",
    "move",
    "parallelize",
    "plan",
    "report",
    "sampler",
    "simulate",
    "update_whole",
    "verify",
]

_HOME = {
    "Plan": "shardwright.plans",
    "ShardwrightError": "shardwright.errors",
    "assist": "shardwright.runtime.assistant",
    "capture": "shardwright.frontend",
    "describe": "shardwright.operators",
    "explain": "shardwright.reports.explaining",
    "move": "shardwright.runtime.moving",
    "parallelize": "shardwright.runtime",
    "plan": "shardwright.planner",
    "report": "shardwright.reports.looking",
    "sampler": "shardwright.runtime.rows",
    "simulate": "shardwright.reports.looking",
    "update_whole": "shardwright.runtime.whole_updates",
    "verify": "shardwright.verification",
}


def __getattr__(name: str) -> Any:
    """Names are imported when first used, so that running a plan never loads a solver."""
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'shardwright' has no attribute {name!r}")
