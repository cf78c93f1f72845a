"""Every kind of calibration case builds and runs at its smallest size, and its gradients reach what they should."""

from __future__ import annotations

import pytest
import torch

from shardwright.cluster import cases, cases_memory
from shardwright.cluster.cases import Case, Maker

MAKE = Maker(torch.device("cpu"))


def _smallest() -> list[Case]:
    everything = [
        *cases.matmuls(MAKE, "float32", 1e7),
        *cases.odd_matmuls(MAKE, "float32", 1e9),
        *cases.batched(MAKE, "float32", 1e8),
        *cases.convolutions(MAKE, "float32", 1e9, (1,)),
        *cases.attentions(MAKE, "float32", 1e8),
        *cases.recurrences(MAKE, "float32", 1e9),
        *cases_memory.memory_kernels(MAKE, "float32", (2**11,)),
        *cases_memory.memory_kernels(MAKE, "bfloat16", (2**11,)),
    ]
    best: dict[tuple[str, str, str], Case] = {}
    for case in everything:
        key = (case.kernel, case.step, case.dtype)
        if key not in best or case.flops + case.bytes < best[key].flops + best[key].bytes:
            best[key] = case
    return list(best.values())


SMALLEST = _smallest()


@pytest.mark.parametrize("case", SMALLEST, ids=lambda c: f"{c.kernel}-{c.step}-{c.dtype}")
def test_runs(case: Case) -> None:
    result = case.build()()
    for tensor in result if isinstance(result, tuple) else (result,):
        for leaf in tensor if isinstance(tensor, tuple) else (tensor,):
            assert leaf.numel() > 0


def test_every_pass_is_covered() -> None:
    names = {(c.kernel, c.step) for c in SMALLEST}
    assert {("matmul", s) for s in ("forward", "input", "weight")} <= names
    assert {("convolution", s) for s in ("forward", "input", "weight")} <= names
    assert {(k, s) for k in ("attention", "attention_causal", "lstm", "gelu") for s in ("forward", "backward")} <= names


def test_bytes_are_those_of_inputs_and_outputs() -> None:
    (case,) = [c for c in cases_memory.memory_kernels(MAKE, "float32", (2**12,)) if c.kernel == "add"]
    assert case.bytes == 3 * 4 * 2**12
