"""Example inputs, labels included, for a Hugging Face model, read off its configuration and its ``forward``.

Token numbers avoid every special token of the configuration, because models look for those (padding, end of sentence,
image placeholders). Values are random on a real device and shapes only on meta.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import ModelError

DEFAULT_BATCH = 4
LONGEST_DEFAULT = 1024
AUDIO_SAMPLES = 16_000


def example_inputs(model: nn.Module, *, batch: int | None = None, seq: int | None = None) -> dict[str, Any]:
    """Keyword arguments with which ``model`` computes a loss, or its outputs where it has none of its own.

    Without ``seq``, sequences are as long as the model can take, up to 1024.
    """
    config: Any = model.config
    accepted = inspect.signature(model.forward).parameters
    text = config.get_text_config()
    rows = batch or DEFAULT_BATCH
    main = getattr(model, "main_input_name", "input_ids")
    inputs: dict[str, Any] = {}
    if "input_ids" in accepted and main not in ("pixel_values", "input_values", "input_features"):
        length = seq or _length(text)
        inputs["input_ids"] = _tokens(config, text, rows, length)
        if "bbox" in accepted:
            inputs["bbox"] = torch.zeros(rows, length, 4, dtype=torch.long)
        if "return_loss" in accepted and "pixel_values" in accepted:
            inputs["pixel_values"] = _images(model, config, rows)
    elif "pixel_values" in accepted and main == "pixel_values":
        inputs["pixel_values"] = _images(model, config, rows)
        for name in ("input_ids", "qformer_input_ids"):
            if name in accepted and accepted[name].default is inspect.Parameter.empty:
                inputs[name] = _tokens(config, text, rows, seq or min(32, _length(text)))
    elif main == "input_values":
        picture = [getattr(config, name, None) for name in ("max_length", "num_mel_bins")]
        # Some see a spectrogram as a picture, the others samples.
        shape = [size for size in picture if isinstance(size, int)] if None not in picture else [AUDIO_SAMPLES]
        inputs["input_values"] = torch.randn(rows, *shape)
    elif main == "input_features":
        inputs["input_features"] = _spectrogram(config, rows)
    else:
        raise ModelError(
            f"{type(model).__name__} takes {main!r}, for which no example inputs can be made.",
            "Write a function that returns (model, args, kwargs) and give path/to/file.py:function.",
        )
    inputs |= _labels(model, config, text, inputs, accepted, rows, seq)
    return inputs


def _length(text: Any) -> int:
    known = (getattr(text, name, None) for name in ("max_position_embeddings", "n_positions", "max_source_positions"))
    longest = min((value for value in known if isinstance(value, int) and value > 0), default=LONGEST_DEFAULT)
    # Some models start counting positions after the padding token, so the last few of an odd number are out of reach.
    return max(1, min(LONGEST_DEFAULT, longest // 8 * 8))


def _tokens(config: Any, text: Any, *shape: int) -> Tensor:
    vocabulary = getattr(text, "vocab_size", None) or getattr(config, "vocab_size", None) or 256
    special = {-1, vocabulary}
    for owner in (config, text):
        for name, value in vars(owner).items():
            if name.endswith(("_token_id", "_token_index")):
                special |= {item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)}
    bounds = sorted(item for item in special if -1 <= item <= vocabulary)
    low, high = max(itertools.pairwise(bounds), key=lambda gap: gap[1] - gap[0])
    return torch.randint(low + 1, max(high, low + 2), shape)


def _images(model: nn.Module, config: Any, batch: int) -> Tensor:
    vision = getattr(config, "vision_config", None) or getattr(config, "encoder", None) or config
    size = getattr(vision, "image_size", None) or getattr(config, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else tuple(size)[:2]
    channels = getattr(vision, "num_channels", None) or 3
    frames = getattr(vision, "num_frames", None)
    if frames and "Video" in type(model).__name__:
        return torch.randn(batch, frames, channels, height, width)
    return torch.randn(batch, channels, height, width)


def _spectrogram(config: Any, batch: int) -> Tensor:
    """Whisper wants exactly twice its source positions of mel frames, features first; the others frames first."""
    owners = [config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))]
    fields = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feature_size")
    found = (getattr(owner, field, None) for owner in owners for field in fields)
    bins = next((value for value in found if isinstance(value, int)), 80)
    positions = getattr(config, "max_source_positions", None)
    if config.model_type == "whisper":
        return torch.randn(batch, bins, 2 * (positions or 1500))
    return torch.randn(batch, min(128, 2 * (positions or 64)), bins)


def _labels(
    model: nn.Module, config: Any, text: Any, inputs: dict[str, Any], accepted: Any, batch: int, seq: int | None
) -> dict[str, Any]:
    name = type(model).__name__
    if "start_positions" in accepted:
        positions = inputs["input_ids"].shape[1] if "input_ids" in inputs else 1
        return {key: torch.randint(0, positions, (batch,)) for key in ("start_positions", "end_positions")}
    if "return_loss" in accepted:  # two towers compared with each other
        return {"return_loss": True}
    if "labels" not in accepted or "ObjectDetection" in name or "DepthEstimation" in name:
        return {}  # the training loop computes the loss
    if "Classification" in name and "Token" not in name:
        return {"labels": torch.randint(0, config.num_labels, (batch,))}
    if "TokenClassification" in name:
        return {"labels": torch.randint(0, config.num_labels, inputs["input_ids"].shape)}
    if "SemanticSegmentation" in name:
        return {"labels": torch.randint(0, config.num_labels, (batch, *inputs["pixel_values"].shape[-2:]))}
    if "CTC" in name:
        return {"labels": _tokens(config, text, batch, 8)}
    if "NextSentence" in name:
        return {"labels": torch.randint(0, 2, (batch,))}
    length = inputs["input_ids"].shape[1] if "input_ids" in inputs else min(seq or 32, _length(text))
    found = {"labels": _tokens(config, text, batch, length)}
    if "next_sentence_label" in accepted:
        found["next_sentence_label"] = torch.randint(0, 2, (batch,))
    return found
