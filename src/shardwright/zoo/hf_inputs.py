"""Example inputs, labels included, for a Hugging Face model: of the kind its own processor makes.

Most are read off its configuration and its ``forward``; what is particular about a type stands in ``hf_types.toml``. Token
numbers avoid every special token of the configuration, because models look for those (padding, end of sentence, image
placeholders). Values are random on a real device and shapes only on meta.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import ModelError
from shardwright.zoo.hf_types import made, particulars, tokens, usual_companions, usual_recipes

DEFAULT_BATCH = 4
LONGEST_DEFAULT = 1024
AUDIO_SAMPLES = 16_000
MEDIA = (("pixel_values", "image"), ("input_features", "audio"), ("input_values", "audio"))


def example_inputs(model: nn.Module, *, batch: int | None = None, seq: int | None = None) -> dict[str, Any]:
    """Keyword arguments with which ``model`` computes a loss, or its outputs where it has none of its own.

    Without ``seq``, sequences are as long as the model can take, up to 1024.
    """
    config: Any = model.config
    accepted = inspect.signature(model.forward).parameters
    text = config.get_text_config()
    rows = batch or DEFAULT_BATCH
    own = particulars(config.model_type).inputs
    own = {name: recipe for name, recipe in own.items() if name in accepted}  # not those of the type's other heads
    inputs = _usual_inputs(model, config, text, accepted, rows, seq)
    known = {"rows": rows, "length": seq or _length(text)}
    if "input_ids" in inputs and "input_ids" not in own:
        inputs |= _media(model, config, accepted, own, known | inputs)
    for name, recipe in own.items():
        inputs.pop(name, None)
        if recipe:
            inputs[name] = made(recipe, config, {**known, **inputs})
    for name, parameter in accepted.items():
        if name not in inputs and name not in own and parameter.default is parameter.empty and name in usual_recipes():
            inputs[name] = made(usual_recipes()[name], config, {**known, **inputs})
    if not inputs:
        raise ModelError(
            f"{type(model).__name__} takes {model.main_input_name!r}, for which no example inputs can be made.",
            "Write a function that returns (model, args, kwargs) and give path/to/file.py:function.",
        )
    labels = _labels(model, config, text, inputs, accepted, rows, seq)
    return inputs | {name: value for name, value in labels.items() if name not in own}


def _usual_inputs(
    model: nn.Module, config: Any, text: Any, accepted: Mapping[str, Any], rows: int, seq: int | None
) -> dict[str, Any]:
    """The main input, and what goes with it in most models."""
    main = getattr(model, "main_input_name", "input_ids")
    inputs: dict[str, Any] = {}
    if "input_ids" in accepted and main not in ("pixel_values", "input_values", "input_features"):
        length = seq or _length(text)
        inputs["input_ids"] = tokens(config, rows, length)
        if "bbox" in accepted:
            inputs["bbox"] = torch.zeros(rows, length, 4, dtype=torch.long)
        if "return_loss" in accepted and "pixel_values" in accepted:
            inputs["pixel_values"] = _images(model, config, rows)
    elif "pixel_values" in accepted and main == "pixel_values":
        inputs["pixel_values"] = _images(model, config, rows)
        for name in ("input_ids", "qformer_input_ids"):
            if name in accepted and accepted[name].default is inspect.Parameter.empty:
                inputs[name] = tokens(config, rows, seq or min(32, _length(text)))
    elif main == "input_values":
        picture = [getattr(config, name, None) for name in ("max_length", "num_mel_bins")]
        # Some see a spectrogram as a picture, the others samples.
        shape = [size for size in picture if isinstance(size, int)] if None not in picture else [AUDIO_SAMPLES]
        inputs["input_values"] = torch.randn(rows, *shape)
    elif main == "input_features":
        inputs["input_features"] = _spectrogram(config, rows)
    return inputs


def _media(
    model: nn.Module, config: Any, accepted: Mapping[str, Any], own: Mapping[str, str], known: Mapping[str, Any]
) -> dict[str, Any]:
    """Pictures and sounds of models that read them among text, and the text with as many placeholders as they take.

    The model's own encoder says how many: it is run once, without gradients.
    """
    rows: int = known["rows"]
    found: dict[str, Any] = {}
    places: dict[str, int] = {}
    for argument, kind in MEDIA:
        name = f"get_{kind}_features"
        encode = getattr(getattr(model, "model", None), name, None) or getattr(model, name, None)
        token = next(
            (n for n in (f"{kind}_token_id", f"{kind}_token_index") if getattr(config, n, None) is not None), ""
        )
        if argument not in accepted or encode is None or not token or own.get(argument) == "":
            continue
        media: dict[str, Any] = {}
        for name, recipe in {**usual_companions(kind), **own}.items():
            if recipe and name in accepted and name not in known:
                media[name] = made(recipe, config, {**known, **media})
        if argument not in media:
            media[argument] = _images(model, config, rows) if kind == "image" else _spectrogram(config, rows)
        numbers = _encoded(model, encode, {**media, **known})
        places[token] = numbers // (rows * model.get_input_embeddings().weight.shape[-1])  # type: ignore[operator]  # a method
        found |= media
    if not places:
        return {}
    words = ", ".join(f"{name}, {count}" for name, count in places.items())
    found["input_ids"] = made(f"text(length, {words})", config, known)
    if "mm_token_type_ids" in accepted:
        kinds = torch.zeros_like(found["input_ids"])
        for number, token in enumerate(places, 1):
            kinds[found["input_ids"] == getattr(config, token)] = number
        found["mm_token_type_ids"] = kinds
    return found


def _encoded(model: nn.Module, encode: Callable[..., Any], media: Mapping[str, Any]) -> int:
    """How many numbers an encoder makes of images or sounds."""
    wanted = inspect.signature(inspect.unwrap(encode)).parameters
    given = {name: value for name, value in media.items() if name in wanted}
    model.eval()  # no running mean moves
    try:
        with torch.no_grad():
            return sum(part.numel() for part in _tensors(encode(**given)))
    except Exception as error:
        kinds = ", ".join(f"{name} of {tuple(v.shape)}" for name, v in given.items() if isinstance(v, Tensor))
        raise ModelError(
            f"{type(model).__name__} cannot encode {kinds}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}.",
            "Write a function that returns (model, args, kwargs) and give path/to/file.py:function.",
        ) from error
    finally:
        model.train()


def _tensors(features: Any) -> list[Tensor]:
    """The features themselves, in whatever an encoder hands them over."""
    if isinstance(features, Tensor):
        return [features]
    for name in ("pooler_output", "last_hidden_state", "image_features"):
        if getattr(features, name, None) is not None:
            return _tensors(getattr(features, name))
    return [part for item in features for part in _tensors(item)] if isinstance(features, list | tuple) else []


def _length(text: Any) -> int:
    known = (getattr(text, name, None) for name in ("max_position_embeddings", "n_positions", "max_source_positions"))
    longest = min((value for value in known if isinstance(value, int) and value > 0), default=LONGEST_DEFAULT)
    # Some models start counting positions after the padding token, so the last few of an odd number are out of reach.
    return max(1, min(LONGEST_DEFAULT, longest // 8 * 8))


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
        return {"labels": tokens(config, batch, 8)}
    if "NextSentence" in name:
        return {"labels": torch.randint(0, 2, (batch,))}
    length = inputs["input_ids"].shape[1] if "input_ids" in inputs else min(seq or 32, _length(text))
    found = {"labels": tokens(config, batch, length)}
    if "next_sentence_label" in accepted:
        found["next_sentence_label"] = torch.randint(0, 2, (batch,))
    return found
