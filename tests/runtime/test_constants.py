"""Tensors that are written into a model's code are cut from their bytes; one without elements has none (Qwen4)."""

from __future__ import annotations

import pytest
import torch

from shardwright.frontend.replay import value_of
from shardwright.graph import Constant, Graph, Tensor


@pytest.mark.parametrize("value", [torch.arange(6.0).reshape(2, 3), torch.empty(0, 3), torch.tensor(7)])
def test_a_constant_is_read_from_its_bytes(value: torch.Tensor) -> None:
    data = value.numpy().tobytes()
    tensor = Tensor("c", tuple(value.shape), str(value.dtype).removeprefix("torch."))
    found = value_of(Constant("c", data), Graph({"c": tensor}, (), constants=(Constant("c", data),)))
    assert found.dtype == value.dtype and torch.equal(found, value)
