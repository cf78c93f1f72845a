"""A model as it is served: in evaluation mode, without labels, with a cache of given length where it decodes.

A cache is what the model itself hands out after a first call on that many tokens (on meta it costs nothing), so that any
Hugging Face decoder has one of its own kind.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from shardwright.errors import ModelError

_LABELS = ("labels", "next_sentence_label", "start_positions", "end_positions", "return_loss", "mc_labels")


def without_labels(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments less those that only a loss needs, where the model can do without.

    >>> class Model(nn.Module):
    ...     def forward(self, x, labels=None): ...
    >>> without_labels(Model(), {"x": 1, "labels": 2})
    {'x': 1}
    """
    accepted = inspect.signature(model.forward).parameters
    optional = {name for name in _LABELS if name in accepted and accepted[name].default is not inspect.Parameter.empty}
    return {name: value for name, value in kwargs.items() if name not in optional}


def with_cache(model: nn.Module, kwargs: dict[str, Any], new: int) -> dict[str, Any]:
    """The call that decodes the last ``new`` tokens of ``input_ids``, all before them being in the cache.

    >>> with_cache(gpt2, {"input_ids": tokens}, 1)["input_ids"].shape                            # doctest: +SKIP
    torch.Size([4, 1])
    """
    tokens = kwargs.get("input_ids")
    if tokens is None or getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ModelError(
            f"{type(model).__name__} does not decode input_ids alone, so that no cache can be made for it.",
            "Give a decoder (hf:gpt2), or write a function that returns (model, args, kwargs) with the cache in kwargs.",
        )
    with torch.no_grad():
        output = model(input_ids=tokens[:, :-new], use_cache=True)
    cache = getattr(output, "past_key_values", None)
    if cache is None:
        raise ModelError(f"{type(model).__name__} hands out no cache.", "Leave out --cache.")
    return {"input_ids": tokens[:, -new:], "past_key_values": cache}
