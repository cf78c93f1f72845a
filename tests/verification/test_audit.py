"""Whole against pieces: every described operator with uneven sizes; ``shardwright ops --check`` tries the others too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.operators.deriving import derived
from shardwright.operators.record import records
from shardwright.verification.auditing import audit_call, audit_sample, samples_of
from shardwright.verification.samples import UNEVEN, calls, elementwise_targets, sampled

WITHOUT_SAMPLE = {
    # content that nobody can compare
    *(f"aten.{n}" for n in ("empty.memory_format", "new_empty.default", "rand.default", "randn.default")),
    *(
        f"aten.{n}"
        for n in ("randint.default", "randint.low", "feature_dropout.default", "feature_alpha_dropout.default")
    ),
    # the same description as a sibling, which has samples
    *(f"aten.{n}" for n in ("_prelu_kernel.default", "_weight_norm.default", "nll_loss2d_forward.default")),
    *(
        f"aten.{n}"
        for n in ("linalg_cholesky.default", "cholesky.default", "logdet.default", "linalg_eigvalsh.default")
    ),
    *(f"aten.{n}" for n in ("linalg_eigh.default", "linalg_svd.default", "max_pool1d_with_indices.default")),
    # tested below, or only on an accelerator
    "transformers.grouped_mm_fallback.default",
    "aten._grouped_mm.default",
}


def test_every_description_has_a_sample():
    assert {t for t, known in records().items() if known.function is not None} - sampled() <= WITHOUT_SAMPLE


def test_every_kernel_belongs_to_a_description():
    assert all(known.function is not None for known in records().values() if known.piece is not None)


@pytest.mark.parametrize("target", sorted(sampled()))
def test_pieces_agree_with_the_whole(target):
    runs = 0
    for sample in samples_of(target, (UNEVEN,)):
        assert derived(sample.op, sample.tensors).origin != "probed", target
        found = audit_sample(sample, pieces=(3,))
        assert found.disagreement is None, str(found.disagreement)
        runs += found.runs
    assert runs > 0 or target in ("aten.scalar_tensor.default", "aten.trace.default", "aten.prod.default")


def test_elementwise_operators_agree():
    checked = 0
    for target in elementwise_targets():
        for sample in calls(target, UNEVEN):
            found = audit_sample(sample, pieces=(2,), pairs=False)
            assert found.disagreement is None, str(found.disagreement)
            checked += found.runs
    assert checked > 500


HARD = [
    "aten.linear.default",
    "aten.view.default",
    "aten.conv2d.default",
    "aten.softmax.int",
    "aten.layer_norm.default",
    "aten.cross_entropy_loss.default",
    "aten.embedding.default",
    "aten.scaled_dot_product_attention.default",
    "aten._native_batch_norm_legit_functional.default",
    "aten.avg_pool2d.default",
    "aten.lstm.input",
    "aten.slice.Tensor",
    "aten.einsum.default",
    "aten.repeat_interleave.self_int",
]


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(HARD), st.lists(st.integers(2, 9), min_size=6, max_size=6), st.integers(2, 4), st.data())
def test_random_shapes(target, sizes, pieces, data):
    samples = list(calls(target, tuple(sizes), seed=sum(sizes)))
    sample = data.draw(st.sampled_from(range(len(samples))))
    found = audit_sample(samples[sample], pieces=(pieces,))
    assert found.disagreement is None, str(found.disagreement)


@pytest.mark.parametrize("pieces", [2, 4])
def test_grouped_products_of_experts(pieces):
    pytest.importorskip("transformers.integrations.moe")
    offs = torch.tensor([2, 2, 5, 9, 15, 20, 21, 24], dtype=torch.int32)
    x, weight = torch.randn(24, 12), torch.randn(8, 12, 10)
    found = audit_call("transformers::grouped_mm_fallback", x, weight, offs, pieces=(pieces,))
    assert found.disagreement is None and found.rules == 4
