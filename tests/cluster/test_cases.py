"""Every kind of calibration case builds and runs at its smallest size, and its gradients reach what they should."""

from __future__ import annotations

import pytest
import torch

from shardwright.cluster import cases, cases_convolution, cases_memory
from shardwright.cluster.cases import Case, Maker
from shardwright.cluster.timing import FASTEST_LAUNCH, QUEUE, queued_calls
from shardwright.operators.families.embeddings import SORTED

MAKE = Maker(torch.device("cpu"))


def _smallest() -> list[Case]:
    everything = [
        *cases.matmuls(MAKE, "float32", 1e7),
        *cases.odd_matmuls(MAKE, "float32", 1e9),
        *cases.batched(MAKE, "float32", 1e8),
        *cases_convolution.convolutions(MAKE, "float32", 1e9, (1,)),
        *cases_convolution.convolutions(MAKE, "float32", 1e9, (1,), shapes=cases_convolution.drawn_groups()),
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
    assert {
        (k, s) for k in ("convolution", "pointwise", "channelwise", "grouped") for s in ("forward", "input", "weight")
    } <= names
    assert {(k, s) for k in ("attention", "attention_causal", "lstm", "gelu") for s in ("forward", "backward")} <= names


def test_weights_come_from_memory() -> None:
    """As in a model, whose layers follow each other; decoding multiplies a single row."""
    weights = MAKE.weights(768, 3072, "float32")
    read = {next(weights).data_ptr() for _ in range(50)}
    assert len(read) * 768 * 3072 * 4 > 2**25 and len(read) < 50
    assert any(dict(case.features)["m"] == 1 for case in cases.matmuls(MAKE, "float32", 1e7))


def test_bytes_are_those_of_inputs_and_outputs() -> None:
    (case,) = [c for c in cases_memory.memory_kernels(MAKE, "float32", (2**12,)) if c.kernel == "add"]
    assert case.bytes == 3 * 4 * 2**12


def test_stopping_early_leaves_every_curve_its_ends() -> None:
    """Where time ran out, casts had been measured up to 98 kB, and one of 3 GB was priced at a hundred times its seconds."""
    sizes = tuple(2**e for e in range(6, 13))
    ordered = cases.ends_first(cases_memory.memory_kernels(MAKE, "float32", sizes))
    everything = list(cases_memory.memory_kernels(MAKE, "float32", sizes))
    assert sorted(c.bytes for c in ordered) == sorted(c.bytes for c in everything)

    def curve(case: Case) -> tuple:
        return (
            case.kernel,
            case.step,
            *case.features[1:],
        )  # batch norm's once had each size with one number of channels only

    curves = {curve(c): [d.bytes for d in everything if curve(d) == curve(c)] for c in ordered}
    for seen, wanted in ((1, min), (2, max)):
        for key, all_sizes in curves.items():
            assert wanted(all_sizes) in [c.bytes for c in ordered[: seen * len(curves)] if curve(c) == key]


@pytest.mark.parametrize("host", [1e-6, 2e-5, 4e-4, 4e-3])
def test_what_is_timed_at_once_fits_into_the_queue(host: float) -> None:
    """A recurrence launches hundreds of kernels a call; several calls overflow the queue, and the host was timed instead."""
    calls = queued_calls(1e-6, host)
    assert calls == 1 or calls * host / FASTEST_LAUNCH <= QUEUE
    assert queued_calls(1e-3, 1e-5) == 2


@pytest.mark.parametrize("elements", [2**10, 2**20])
def test_gradients_of_tables_are_timed_on_both_sides_of_where_a_gpu_begins_to_sort(elements: int) -> None:
    """Few rows are walked through, more are sorted: two kernels whose times have nothing to do with each other."""
    kernels = {kernel.name: kernel for kernel in cases_memory.KERNELS if kernel.only == "cuda"}
    for name, above in (("embedding_sorted", True), ("embedding_few", False)):
        indices, table = kernels[name].make(MAKE, elements, "float32")
        assert (len(indices) > SORTED) is above
        kernels[name].apply(indices, table.requires_grad_()).sum().backward()
        assert table.grad is not None


def test_convolutions_are_drawn_over_lines_and_with_round_numbers_of_channels() -> None:
    """Libraries have faster kernels for multiples of 64, which most models have: of 327 dense shapes one had two of them."""
    shapes = cases_convolution.drawn_convolutions(240)
    dense = [shape for shape in shapes if shape.groups == 1 and shape.channels > 3 and not shape.rows]
    round_ones = [shape for shape in dense if shape.channels % 64 == 0 and shape.out % 64 == 0]
    assert len(round_ones) > len(dense) / 5
    lines = [shape for shape in shapes if shape.rows == 1]
    assert {shape.family for shape in lines} == {"convolution", "pointwise", "channelwise"}
    assert any(shape.channels == 1 for shape in lines)


def test_many_convolutions_are_each_timed_once() -> None:
    shapes = cases_convolution.drawn_convolutions(24)
    found = [
        *cases_convolution.convolutions(MAKE, "float32", 1e15, (2, 8, 32), shapes=shapes, spread=True),
    ]
    assert len(found) == 3 * len(shapes)
