"""What a model asks for in single precision is computed in double."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardwright.verification.precision import all_double


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this PyTorch has no grouped_mm")
def test_grouped_products_have_a_double_form():
    torch.manual_seed(0)
    rows, weight, ends = torch.randn(24, 8), torch.randn(4, 8, 16), torch.tensor([7, 7, 15, 24], dtype=torch.int32)
    with all_double():
        double = F.grouped_mm(rows.double(), weight.double(), offs=ends)
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), F.grouped_mm(rows, weight, offs=ends))
