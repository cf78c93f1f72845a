"""Dropout: which elements are kept can be drawn apart from what they are of; its mask is a byte per element on CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwright.graph import Op, Tensor
from shardwright.operators.record import Draws, known

aten = torch.ops.aten


def _dropout_cuda(x: Any, p: float, train: bool) -> Any:
    return aten.native_dropout.default(x, p, True)[0] if train and 0 < p < 1 else aten.dropout.default(x, p, train)


_MASK = "aten.native_dropout.default"
known(
    "aten.dropout",
    draws=Draws(lambda op: bool(op.args[1]) and bool(op.args[2]), with_mask=_MASK),
    on_device={"cuda": _dropout_cuda},
)
known("aten.native_dropout", draws=Draws(lambda op: bool(op.args[1]) and op.args[2] is not False, with_mask=_MASK))


def _drops_nothing(op: Op, tensors: Sequence[Tensor], output: Tensor | None) -> bool:
    rate = op.args[1] if len(op.args) > 1 else op.kwarg("p", 0.5)
    return rate == 0 or (op.args[2] if len(op.args) > 2 else op.kwarg("train", True)) is False


known("aten.dropout", hands_on=_drops_nothing)
known("aten.native_dropout", measured="dropout")
known("aten.dropout", python={"dropout": "dropped"})
known("aten.feature_dropout", python={"dropout1d": "features", "dropout2d": "features", "dropout3d": "features"})


known("shardwright.keep_mask", early=True, draws=Draws(lambda op: True))
