"""Device time of a measured step: kernels, each once; annotations that span them are none."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace as Row

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwright.frontend import capture
from shardwright.frontend.replay import replay
from shardwright.zoo.reference import resolve

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from accuracy_cases import kernels_of
from drawn import device_error, kernel_seconds, table
from eager_attention import as_eager_runs_it

AVERAGES = [
    Row(key="aten::mul", device_type="DeviceType.CPU", is_user_annotation=False, self_device_time_total=7.0),
    Row(key="mul_kernel", device_type="DeviceType.CUDA", is_user_annotation=False, self_device_time_total=7.0),
    Row(key="marked", device_type="DeviceType.CUDA", is_user_annotation=True, self_device_time_total=40.0),
    Row(key="Optimizer.step#AdamW.step", device_type="DeviceType.CUDA", self_device_time_total=90.0),
]
KERNELS = [{"name": "aten::mul", "device": 2.0}, {"name": "Optimizer.step#AdamW.step", "device": 3.0}]


def test_spans_over_kernels_are_not_counted_as_kernels() -> None:
    """The optimizer's step once counted twice: as its kernels, and as the span from the first to the last of them."""
    assert [row.key for row in kernels_of(AVERAGES)] == ["mul_kernel"]
    assert kernel_seconds({"device_seconds": 5.0, "kernels": KERNELS}) == 2.0
    assert kernel_seconds({"device_seconds": 2.0, "kernels": KERNELS, "kernel_count": 1}) == 2.0


def test_prices_are_compared_with_kernels_alone_and_in_a_queue() -> None:
    row = {"reference": "gpt", "batch": 1, "seq": 8, "dtype": "float32", "device_seconds": 2.0, "kernels": KERNELS}
    row |= {"kernel_count": 4, "gap": 0.125, "predicted_device_seconds": 2.5, "repeats": [(3.0, 1.0)]}
    row |= {"step_error": 0.0, "fastest_error": 0.0, "peak_bytes": 2**30, "memory_error": 0.0}
    assert device_error(row, gaps=False) == pytest.approx(0.25)
    assert device_error(row, gaps=True) == pytest.approx(0.0)
    assert device_error({k: v for k, v in row.items() if k != "gap"}, gaps=True) is None
    assert "| +25.0 % | +0.0 % |" in table({"seed": 1, "rows": [row], "refused": []})


class Biased(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(5, 5, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            x, x, x, self.bias.permute(2, 0, 1).unsqueeze(0), scale=0.7
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_eager_attention_computes_for_a_strided_bias(dtype: torch.dtype) -> None:
    """Predictions of eager PyTorch are made from these operators: the same numbers, forward and back."""
    torch.manual_seed(0)
    model, x = Biased().to(dtype), torch.randn(3, 2, 5, 4, dtype=dtype, requires_grad=True)
    with as_eager_runs_it():
        graph = capture(model, (x,))
    assert not any("attention" in op.target for op in graph.ops)
    with sdpa_kernel(SDPBackend.MATH):
        outputs = replay(graph, model, (x,)), model(x)
    ours, theirs = ((out, *torch.autograd.grad(out.square().sum(), (x, model.bias))) for out in outputs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other)


class FewKeys(torch.nn.Module):
    def forward(self, x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, keys, keys, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize(("dtype", "fused"), [(torch.float32, False), (torch.bfloat16, True)])
def test_float32_with_fewer_keys_than_queries_runs_no_fused_kernel(dtype: torch.dtype, fused: bool) -> None:
    torch.manual_seed(0)
    x, keys = torch.randn(3, 4, 5, 8, dtype=dtype), torch.randn(3, 2, 5, 8, dtype=dtype)
    with as_eager_runs_it():
        graph = capture(FewKeys(), (x, keys))
    assert any("attention" in op.target for op in graph.ops) is fused
    torch.testing.assert_close(replay(graph, FewKeys(), (x, keys)), FewKeys()(x, keys))


def test_a_mask_that_an_eager_call_leaves_out_is_not_there() -> None:
    """While it is traced Hugging Face makes causal masks, for which slower kernels run."""
    found = resolve("hf:gpt2:n_layer=1,n_embd=64,n_head=2,vocab_size=64,dropout=0", batch=2, seq=16, device="meta")
    with as_eager_runs_it():
        graph = capture(found.model.train(), found.args, found.kwargs)
    attention = next(op for op in graph.ops if "attention" in op.target)
    assert len(attention.inputs) == 3
    assert True in attention.args or attention.kwarg("is_causal")
