"""Small calls of every described operator, on which its rules are checked; one file per family."""

from shardwright.verification.samples import layers, lookups, matmuls, pointwise, reductions, transforms, views
from shardwright.verification.samples.core import EVEN, SAMPLES, UNEVEN, Sample, Spec, calls, concrete

__all__ = [
    "EVEN",
    "SAMPLES",
    "UNEVEN",
    "Sample",
    "Spec",
    "calls",
    "concrete",
    "layers",
    "lookups",
    "matmuls",
    "pointwise",
    "reductions",
    "transforms",
    "views",
]
