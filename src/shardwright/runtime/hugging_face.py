"""``generate`` and ``save_pretrained`` of a parallelized Hugging Face model.

``generate`` is the library's own loop, every step computed by the split model. Two programs serve a text where the library
has a cache of fixed size for its model (``StaticCache``): one reads the prompt, padded on the right to a power of two, one
computes a token, and what the cache holds goes from call to call. A padded prompt leaves keys and values behind its end;
every token overwrites one of them before it is looked at. Other models do without a cache: each step computes the text so
far, padded likewise, since what a causal model says about a token does not depend on what comes after it; exact too, and
the work of a token grows with the length of its text.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.errors import RunError
from shardwright.runtime.submodules import StandIn, as_original, original_of
from shardwright.runtime.whole_state import whole_state

SHORTEST = 16
_ALONG_THE_TEXT = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "cache_position")
_OTHER_WAYS = ("past_key_values", "cache_implementation", "assistant_model", "prompt_lookup_num_tokens")
"""Options of the library's loop that come with ways of their own to treat a cache."""


def generate(parallel: StandIn, *args: Any, **kwargs: Any) -> Any:
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
    longest = _longest(config)
    prompt = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
    if isinstance(prompt, Tensor) and _has_fixed_cache(kind, config, kwargs):
        wanted = padded_length(prompt.shape[1] + (kwargs.get("max_new_tokens") or 0), longest)
        standing = as_original(parallel, functools.partial(_next_token, parallel))
        return standing.generate(*args, **kwargs, cache_implementation="static", max_cache_len=wanted)
    standing = as_original(parallel, functools.partial(_last_token, parallel, longest))
    return standing.generate(*args, **kwargs | {"use_cache": False})


def _has_fixed_cache(kind: Any, config: Any, given: Mapping[str, Any]) -> bool:
    """Whether the library runs this model with a cache of fixed size in which every layer keeps every position."""
    asked = given.get("generation_config")
    if given.get("use_cache", getattr(asked, "use_cache", None)) is False or not getattr(
        kind, "_can_compile_fullgraph", 0
    ):
        return False
    if any(given.get(name, getattr(asked, name, None)) is not None for name in _OTHER_WAYS):
        return False
    caches: Any = sys.modules.get("transformers.cache_utils")  # loaded, where the model is of that library
    if not hasattr(caches, "StaticLayer"):
        return False
    layers = caches.StaticCache(config=config.get_text_config(decoder=True), max_cache_len=SHORTEST).layers
    return all(type(layer) is caches.StaticLayer for layer in layers)


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


def _arguments(tokens: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a step; logits are computed of the whole text, and one is taken."""
    given["input_ids"] = given.get("input_ids", tokens)
    if given["input_ids"] is None or given.get("inputs_embeds") is not None:
        raise RunError("generate() of a parallelized module works on tokens.", "Give input_ids, not inputs_embeds.")
    return {name: value for name, value in given.items() if value is not None and name != "logits_to_keep"}


def _last_token(model: Callable[..., Any], longest: int | None, tokens: Any = None, **given: Any) -> Any:
    """A step without a cache: the whole text."""
    call = _arguments(tokens, given)
    length = call["input_ids"].shape[1]
    missing = padded_length(length, longest) - length
    for name in _ALONG_THE_TEXT:
        value = call.get(name)
        if isinstance(value, Tensor) and value.shape[-1] == length:
            call[name] = torch.nn.functional.pad(value, (0, missing))
    output = model(**call)
    output.logits = output.logits[:, length - 1 : length]
    return output


def _next_token(model: Callable[..., Any], tokens: Any = None, **given: Any) -> Any:
    """A step with a cache of fixed size: the prompt, or one token."""
    call = _arguments(tokens, given)
    length, cache = call["input_ids"].shape[1], call["past_key_values"]
    size = cache.layers[0].max_cache_len
    missing = min(padded_length(length), size) - length if length > 1 else 0
    if missing > 0:
        for name in _ALONG_THE_TEXT:
            masks = call.get(name) if name == "attention_mask" else None
            if isinstance(masks, dict):  # one for each kind of layer
                call[name] = {kind: _longer(mask, missing) for kind, mask in masks.items()}
            elif isinstance(call.get(name), Tensor):
                call[name] = _longer(call[name], missing)
    output = model(**call)
    output.logits = output.logits[:, length - 1 : length]
    for layer in cache.layers if missing > 0 else ():
        layer.cumulative_length = torch.full_like(layer.cumulative_length, length)
    return output


def _longer(value: Any, missing: int) -> Any:
    """Repeat the last position, of a mask [batch, heads, positions, cache] the last row: what is padded sees something."""
    if value is None:
        return None
    dim = value.ndim - 2 if value.ndim == 4 else value.ndim - 1
    return torch.cat([value, *[value.narrow(dim, value.shape[dim] - 1, 1)] * missing], dim)


def save_pretrained(parallel: StandIn, save_directory: str | Path, **kwargs: Any) -> None:
    """Write what ``from_pretrained`` reads, in the model's own class; every rank calls this and returns when it is there.

    The whole model passes through the first rank's host memory; ``save_checkpoint`` writes shards.
    """
    whole = whole_state(parallel.state_dict(), everywhere=False)
    first = dist.get_rank() == 0
    refusal = [""]
    if first:
        try:
            as_original(parallel, parallel).save_pretrained(save_directory, state_dict=whole, **kwargs)
        except Exception as error:  # said on every rank, or the others would wait
            refusal = [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(refusal)
    if refusal[0]:
        raise RunError(
            f"save_pretrained() into {str(save_directory)!r} failed on rank 0: {refusal[0]}",
            "Store shards instead: shardwright.runtime.checkpoint.save_checkpoint().",
        )
