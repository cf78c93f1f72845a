"""One small file per family of operators; importing this package registers all of them."""

from shardwright.operators.descriptions import (
    attention,
    convolutions,
    creation,
    embeddings,
    joining,
    losses,
    matmuls,
    normalisations,
    pooling,
    reductions,
    softmaxes,
    triangles,
    views,
)

__all__ = [
    "attention",
    "convolutions",
    "creation",
    "embeddings",
    "joining",
    "losses",
    "matmuls",
    "normalisations",
    "pooling",
    "reductions",
    "softmaxes",
    "triangles",
    "views",
]
