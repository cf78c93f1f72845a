"""The splits the project promises, each on 2 and 4 pieces: the rule exists, and it agrees with the whole operator."""

from __future__ import annotations

import pytest

from shardwright.operators.checking import check, ranks_of
from shardwright.operators.deriving import derived
from shardwright.operators.rules import Partial, Shard, Window
from shardwright.verification.samples import EVEN, calls

CLAIMS = {
    "convolution over height, with a halo": ("aten.conv2d.default", 1, "y0"),
    "convolution over width, with a halo": ("aten.conv2d.default", 1, "y1"),
    "dilated convolution over height": ("aten.conv2d.default", 5, "y0"),
    "convolution over input channels": ("aten.conv2d.default", 0, "c"),
    "group convolution over groups": ("aten.conv2d.default", 2, "o"),
    "depthwise convolution over channels": ("aten.conv2d.default", 3, "o"),
    "depthwise convolution over height": ("aten.conv2d.default", 3, "y0"),
    "batch norm over the batch, exact statistics": ("aten._native_batch_norm_legit_functional.default", 0, "i0"),
    "batch norm over height, exact statistics": ("aten._native_batch_norm_legit_functional.default", 0, "i2"),
    "softmax over the normalised dim": ("aten.softmax.int", 0, "i2"),
    "cross entropy over classes": ("aten.cross_entropy_loss.default", 0, "c"),
    "cross entropy over the batch": ("aten.cross_entropy_loss.default", 3, "n0"),
    "cross entropy over positions": ("aten.cross_entropy_loss.default", 6, "n1"),
    "attention over heads": ("aten.scaled_dot_product_attention.default", 0, "h"),
    "attention over grouped heads": ("aten.scaled_dot_product_attention.default", 1, "h"),
    "attention over the batch": ("aten.scaled_dot_product_attention.default", 0, "b"),
    "causal attention over query positions": ("aten.scaled_dot_product_attention.default", 0, "i"),
    "masked attention over query positions": ("aten.scaled_dot_product_attention.default", 2, "i"),
    "embedding over the vocabulary": ("aten.embedding.default", 0, "v"),
    "LSTM over the batch": ("aten.lstm.input", 0, "b"),
    "LSTM over hidden units": ("aten.lstm.input", 0, "k"),
    "layer norm over features": ("aten.layer_norm.default", 0, "i2"),
    "linear over features in": ("aten.linear.default", 0, "k"),
    "max pooling over height": ("aten.max_pool2d.default", 1, "i2"),
}


@pytest.mark.parametrize("pieces", [2, 4])
@pytest.mark.parametrize("claim", CLAIMS)
def test_promised_split(claim, pieces):
    target, number, loop = CLAIMS[claim]
    sample = list(calls(target, EVEN))[number]
    rules = derived(sample.op, sample.tensors)
    assert ranks_of(rules, [(loop, pieces)]) is not None, "the split does not exist for this sample"
    assert any(isinstance(need, (Shard, Window, Partial)) for need in rules.by_name[loop].inputs)
    assert check(sample.op, sample.tensors, sample.inputs, [(loop, pieces)], rules) is None
