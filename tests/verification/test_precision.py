"""What a model asks for in single precision is computed in double."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright import plan
from shardwright.errors import PlanError
from shardwright.verification.prepare import all_double, subject
from shardwright.verification.verify import _given


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this PyTorch has no grouped_mm")
def test_grouped_products_have_a_double_form():
    torch.manual_seed(0)
    rows, weight, ends = torch.randn(24, 8), torch.randn(4, 8, 16), torch.tensor([7, 7, 15, 24], dtype=torch.int32)
    with all_double():
        double = F.grouped_mm(rows.double(), weight.double(), offs=ends)
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), F.grouped_mm(rows, weight, offs=ends))


def linear() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.ones(2, 4),), {}


def test_a_plan_of_a_model_s_own_precision_is_verified_in_double_precision_alone() -> None:
    model, args, kwargs = linear()
    own = plan(model, args, kwargs, cluster="2xH100", baselines=())
    double = subject(linear, True, True).graph
    assert set(_given(own, linear, {True: double})) == {True}
    with pytest.raises(PlanError, match="another model"):
        _given(plan(nn.Linear(4, 4), args, cluster="2xH100", baselines=()), linear, {True: double})
