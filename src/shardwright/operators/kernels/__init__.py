"""How a piece is computed where calling the operator on local inputs is not enough; one file per family."""

from shardwright.operators.kernels import (
    attention,
    convolutions,
    creation,
    embeddings,
    grouped,
    indexing,
    losses,
    normalisations,
    padding,
    pooling,
    recurrent,
    reductions,
    softmaxes,
    views,
)

__all__ = [
    "attention",
    "convolutions",
    "creation",
    "embeddings",
    "grouped",
    "indexing",
    "losses",
    "normalisations",
    "padding",
    "pooling",
    "recurrent",
    "reductions",
    "softmaxes",
    "views",
]
