"""Any Hugging Face model from its class name, its model type or a configuration file; nothing is downloaded.

``gpt2`` and ``llama`` are model types, ``GPT2LMHeadModel`` a class, ``path/config.json`` a file as the hub stores it.
The head is the one the file or the class names; for a bare model type, the one of its usual pre-training task.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from shardwright.errors import ModelError
from shardwright.files import read_json
from shardwright.records import shown
from shardwright.zoo.hf_inputs import example_inputs
from shardwright.zoo.hf_small import small_sizes, without_dropout
from shardwright.zoo.hf_types import particulars
from shardwright.zoo.sizes import most_of, nearest, parse_sizes

SMALL_LENGTH = 16

# In the order in which a bare model type is tried: what the model is usually pre-trained for comes first.
ENCODER_DECODER_HEADS = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
HEADS = (
    "MASKED_LM",
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "CTC",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "SEMANTIC_SEGMENTATION",
    "SEQUENCE_CLASSIFICATION",
    "TOKEN_CLASSIFICATION",
    "QUESTION_ANSWERING",
    "PRETRAINING",
)
OTHER_HEADS = (
    "MODEL_FOR_DEPTH_ESTIMATION_MAPPING",
    "MODEL_FOR_OBJECT_DETECTION_MAPPING",
    "MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING",
    "MODEL_FOR_BACKBONE_MAPPING",
    "MODEL_FOR_TIME_SERIES_PREDICTION_MAPPING",
)


def build_hugging_face(
    rest: str, reference: str, *, batch: int | None = None, seq: int | None = None
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Build what follows ``hf:`` on the ambient device, with example inputs: ``(model, (), kwargs)``."""
    transformers = import_transformers()
    source, _, tail = rest.partition(".json:") if ".json:" in rest else rest.partition(":")
    if ".json:" in rest:
        source += ".json"
    small, sizes = parse_sizes(tail, reference)
    config_class, given, model_class = _find(transformers, source, reference)
    config = _configure(config_class, given, small, sizes, reference)
    model_class = model_class or _usual_head(transformers, config, reference)
    try:
        model = model_class._from_config(config)
    except ModelError:
        raise
    except Exception as error:
        missing = isinstance(error, ImportError)
        raise ModelError(
            f"{model_class.__name__} cannot be built from {reference!r}: {_first_line(error)}.",
            "Install the package that it names."
            if missing
            else "Check the sizes against each other: widths must be multiples of the numbers of heads.",
        ) from error
    inputs = example_inputs(model, batch=batch, seq=seq or (SMALL_LENGTH if small else None))
    model.train()
    if particulars(config.model_type).called_before and model.device.type != "meta":
        with torch.no_grad():
            model(**inputs)
    return model, (), inputs


def import_transformers() -> ModuleType:
    """The optional dependency, or an error that says how to get it."""
    try:
        import transformers
    except ImportError:
        raise ModelError(
            "Hugging Face models need the package `transformers`, which is not installed.",
            "Install it with `pip install 'shardwright[hf]'`.",
        ) from None
    transformers.logging.set_verbosity_error()
    return transformers


def _find(transformers: ModuleType, source: str, reference: str) -> tuple[Any, dict[str, Any], Any]:
    """The configuration class, the fields a file gives it, and the model class if one is named."""
    if source.endswith(".json"):
        fields = _read(Path(source), reference)
        model_type = fields.pop("model_type", None)
        if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
            raise ModelError(
                f"{source} has the model type {shown(model_type)}, which this transformers does not know.",
                "Check the file's `model_type`, or install a newer transformers.",
            )
        names = fields.get("architectures") or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ModelError(f"{source}: architectures is {shown(names)}.", "Give a list of names of model classes.")
        named = [getattr(transformers, name, None) for name in names]
        heads = [head for head in named if getattr(head, "config_class", None) is not None]
        return transformers.CONFIG_MAPPING[model_type], fields, heads[0] if heads else None
    if source in transformers.CONFIG_MAPPING:
        return transformers.CONFIG_MAPPING[source], {}, None
    model_class = getattr(transformers, source, None) if source.isidentifier() else None
    config_class = getattr(model_class, "config_class", None)
    if config_class is not None:
        return config_class, {}, model_class
    known = [*transformers.CONFIG_MAPPING, *(name for name in dir(transformers) if "For" in name or "Head" in name)]
    raise ModelError(
        f"Hugging Face has no model {source!r}{nearest(source, known)}.",
        "Give a model type (hf:gpt2), a class (hf:GPT2LMHeadModel) or a configuration file (hf:config.json).",
    )


def _read(path: Path, reference: str) -> dict[str, Any]:
    try:
        fields = read_json(path, ModelError)
    except ModelError as error:
        raise ModelError(f"{error.message} {reference!r} names it.", "Give a Hugging Face config.json.") from None
    if not isinstance(fields, dict):
        raise ModelError(f"{path} holds no JSON object.", "Give a Hugging Face config.json.")
    return fields


def _configure(config_class: Any, given: dict[str, Any], small: bool, sizes: dict[str, Any], reference: str) -> Any:
    sizes = dict(sizes)
    _check_extents({**given, **sizes}, reference)
    try:
        config = config_class.from_dict(given) if given else config_class()
        dropout = None
        if "dropout" in sizes:
            dropout = sizes.pop("dropout")
        _check_fields(config, sizes, reference)
        if small:
            config = config_class(**{**given, **small_sizes(config), **_nested(config, sizes, small=True)})
        elif sizes:
            config = config_class(**{**given, **_nested(config, sizes, small=False)})
        if small or dropout is not None:
            without_dropout(config, dropout or 0.0)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{config_class.__name__} does not accept {reference!r}: {_first_line(error)}.",
            "Check the names and values of the sizes.",
        ) from error
    if config.is_encoder_decoder:
        for name in ("decoder_start_token_id", "pad_token_id"):  # the hub's files carry them, some defaults do not
            if getattr(config, name, None) is None:
                setattr(config, name, 0)
    return config


def _check_extents(fields: Any, reference: str, name: str = "") -> None:
    """No number, however deep in a configuration, may ask for more than anybody builds."""
    if isinstance(fields, dict):
        for key, value in fields.items():
            _check_extents(value, reference, str(key))
    elif isinstance(fields, list):
        for value in fields:
            _check_extents(value, reference, name)
    elif (
        isinstance(fields, int) and abs(fields) > most_of(name) and "id" not in name.split("_")
    ):  # token ids count nothing
        raise ModelError(f"{name}={shown(fields)} in {reference!r} is not possible.", f"Give at most {most_of(name)}.")


def _check_fields(config: Any, sizes: dict[str, Any], reference: str) -> None:
    known = {**config.to_dict(), **config.get_text_config().to_dict(), **dict.fromkeys(config.attribute_map)}
    for name in sizes:
        if name not in known:
            raise ModelError(
                f"{type(config).__name__} has no field {name!r}{nearest(name, known)}, asked for by {reference!r}.",
                "Use the names of the configuration's own fields.",
            )


def _nested(config: Any, sizes: dict[str, Any], *, small: bool) -> dict[str, Any]:
    """``sizes`` as arguments: those only the text sub-configuration has go there."""
    text = config.get_text_config()
    own = set(config.to_dict()) | set(config.attribute_map)
    inner = {name: value for name, value in sizes.items() if name not in own}
    arguments = {config.attribute_map.get(name, name): value for name, value in sizes.items() if name in own}
    if inner and text is not config:
        place = next(name for name, value in vars(config).items() if value is text)
        base = small_sizes(config)[place] if small else text.to_dict()
        arguments[place] = base | inner
    return arguments


def _usual_head(transformers: ModuleType, config: Any, reference: str) -> Any:
    if named := particulars(config.model_type).head:
        modeling = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
        return getattr(modeling, named)
    heads = (*ENCODER_DECODER_HEADS, *HEADS) if config.is_encoder_decoder else HEADS
    for head in heads:
        mapping = getattr(transformers, f"MODEL_FOR_{head}_MAPPING", None)
        if mapping is not None and type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    # Without a head that computes a loss from labels: its other task, or the bare model; a training loop has the loss.
    for name in (*OTHER_HEADS, "MODEL_MAPPING"):
        mapping = getattr(transformers, name, None)
        if mapping is not None and type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise ModelError(
        f"{reference!r} ({config.model_type}) is a part of other models and has no model class of its own.",
        "Name a class, such as hf:BertForMaskedLM.",
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__).rstrip(".")
