"""Seconds and bytes: of an operator, a collective, a change of layout, a stage; memory over time."""

from shardwright.costs.compute import op_times
from shardwright.costs.host import dispatch_seconds
from shardwright.costs.layouts import dual
from shardwright.costs.optimizer import OPTIMIZERS, Optimizer, optimizer, state_bytes, step_seconds
from shardwright.costs.redistribute import Conversion, conversion, conversion_matrix

__all__ = [
    "OPTIMIZERS",
    "Conversion",
    "Optimizer",
    "conversion",
    "conversion_matrix",
    "dispatch_seconds",
    "dual",
    "op_times",
    "optimizer",
    "state_bytes",
    "step_seconds",
]
