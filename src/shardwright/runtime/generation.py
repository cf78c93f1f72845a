"""``generate`` of a parallelized Hugging Face model: the library's own loop, every step computed by the split model.

The loop is asked to do without its cache: each step computes the whole sequence so far and takes the last token's logits.
Sequences are padded on the right to a few lengths (powers of two), so that a handful of programs serves all steps; what a
causal model says about a token does not depend on what comes after it. Exact, and simple rather than fast: the work of a
token grows with the length of its text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import RunError
from shardwright.runtime.parts import Standing, as_original, original_of

SHORTEST = 16
_ALONG_THE_TEXT = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "cache_position")


def generate(parallel: Standing, *args: Any, **kwargs: Any) -> Any:
    """What ``generate`` of the model's class gives for its parallelized module.

    Every rank calls it alike; where tokens are sampled, with the same seed (``torch.manual_seed``).
    """
    kind, attributes = original_of(parallel)
    config = attributes.get("config")
    if getattr(config, "is_encoder_decoder", False):
        raise RunError(
            f"generate() of {kind.__name__} runs its encoder by itself, and parts of a split model do not run alone.",
            "Call the parallelized module with decoder_input_ids and choose tokens from its logits.",
        )
    standing = as_original(parallel, functools.partial(_last_token, parallel, _longest(config)))
    return standing.generate(*args, **kwargs | {"use_cache": False})


def _longest(config: Any) -> int | None:
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        if isinstance(getattr(config, name, None), int):
            return int(getattr(config, name))
    return None


def padded_length(length: int, longest: int | None = None) -> int:
    """The length that a text of this length is padded to.

    >>> [padded_length(n) for n in (3, 16, 17, 100)], padded_length(17, longest=24)
    ([16, 16, 32, 128], 24)
    """
    wanted = max(SHORTEST, 1 << (length - 1).bit_length())
    return max(length, min(wanted, longest)) if longest is not None else wanted


def _last_token(model: Callable[..., Any], longest: int | None, tokens: Any = None, **given: Any) -> Any:
    tokens = given["input_ids"] = given.get("input_ids", tokens)
    if tokens is None or given.get("inputs_embeds") is not None:
        raise RunError("generate() of a parallelized module works on tokens.", "Give input_ids, not inputs_embeds.")
    length = tokens.shape[1]
    missing = padded_length(length, longest) - length
    call = {name: value for name, value in given.items() if value is not None and name != "logits_to_keep"}
    for name in _ALONG_THE_TEXT:
        value = call.get(name)
        if isinstance(value, Tensor) and value.shape[-1] == length:
            call[name] = torch.nn.functional.pad(value, (0, missing))
    output = model(**call)
    output.logits = output.logits[:, length - 1 : length]
    return output
