"""Models of `transformers` that were refused or differed once, each for a cause of its own, captured in double precision.

What each of them does that a trace does not see has a test of its own with a few lines of code in place of the model (the
comment says where); here are the models themselves, at the settings that showed it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.frontend.faithful import targets

from shardwright.errors import CaptureError
from shardwright.verification.prepare import subject
from shardwright.zoo.reference import resolve

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 64}


def _language(head: str, length: int, **sizes: Any) -> Any:
    """A masked language model of a class and its configuration."""
    kind = getattr(transformers, head)
    model = kind._from_config(kind.config_class(**{**SIZES, **CALM, **sizes})).train()
    words = torch.randint(5, 97, (2, length))
    return model, (), {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}


def nystromformer() -> Any:
    """19 words are no multiple of four landmarks, so that the model cannot be run at all."""
    return _language("NystromformerForMaskedLM", 19, num_landmarks=4, segment_means_seq_len=16)


def deberta() -> Any:
    """Attention to places relative to each other: TorchScript functions (test_scalars.py)."""
    relative = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
    return _language("DebertaForMaskedLM", 16, **relative, type_vocab_size=0, position_biased_input=False)


def big_bird() -> Any:
    """Blocks of words look at some others, drawn with NumPy's random numbers."""
    return _language("BigBirdForMaskedLM", 48, attention_type="block_sparse", block_size=4, num_random_blocks=2)


def bigbird_pegasus() -> Any:
    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 48))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "dropout": 0.0, "d_model": 32}
    sparse = {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 2}
    model, args, given = _language("BigBirdPegasusForConditionalGeneration", 48, **sizes, **heads, **sparse)
    return model, args, {**given, "labels": given["labels"][:, :8].clone()}


def small(name: str) -> Any:
    found = resolve(f"hf:{name}:small", batch=2, device="cpu")
    return found.model, found.args, found.kwargs


CAPTURED = {
    "dbrx": small,  # strides that hang on the data (lowering/test_strides.py)
    "encodec": small,
    "ibert": small,  # the first call sets ranges that every other one moves (zoo/test_own_inputs.py)
    "qwen2_vl": small,
    "switch_transformers": small,  # a mask made outside of export only (test_refusals.py)
    "vilt": small,  # draws places without replacement (test_assumptions.py, verification/test_draws.py)
    "videomae": small,  # tensors that are plain attributes are double too (test_scalars.py)
    "autoformer": small,  # shifts by what it finds (test_assumptions.py)
    "vit_mae": small,  # an input that is only sorted (runtime/test_data_dependence.py)
    "deberta": deberta,
    "big_bird": big_bird,
    "bigbird_pegasus": bigbird_pegasus,
}


LONG = ("encodec", "ibert", "qwen2_vl", "vilt", "autoformer", "bigbird_pegasus")
"""Two seconds and more each."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] if n in LONG else []) for n in CAPTURED])
def test_once_refused(name: str) -> None:
    make = CAPTURED[name]
    it = subject(lambda: make(name) if make is small else make(), True)
    assert it.graph.outputs and targets(it.graph)
    floats = {tensor.dtype for tensor in it.graph.tensors.values() if tensor.grad}
    assert floats <= {"float64", "complex128"}


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (
            nystromformer,
            r"does not run by itself .* at transformers/.*/modeling_nystromformer.py:\d+ .*shape .* is invalid",
        ),
        (
            lambda: small("reformer"),
            r"modeling_reformer.py:\d+ the model calls .* with a module .* whose parameters get their gradients",
        ),
        (
            lambda: small("gemma3n_text"),
            r"writes into a detached tensor at transformers/models/gemma3n/modeling_gemma3n.py:\d+",
        ),
    ],
    ids=["nystromformer", "reformer", "gemma3n"],
)
def test_refused_by_the_line_of_the_model(make: Callable[[], Any], line: str) -> None:
    """Reformer's blocks take back their own inputs (test_custom_functions.py); Gemma-3n clamps a parameter in its forward
    (test_inplace.py)."""
    with pytest.raises(CaptureError, match=line):
        subject(make, True)
