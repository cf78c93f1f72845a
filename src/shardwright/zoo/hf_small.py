"""Tiny versions of any Hugging Face configuration: the same architecture with sizes a test can afford.

Configurations name the same few quantities in many ways. The patterns below list the names; a field that matches none
of them keeps its default. Only independent fields are set, so a configuration derives the rest (head widths, layer
types).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardwright.zoo.hf_types import particulars

WIDTH, INNER, LAYERS, HEADS, HEAD_WIDTH = 64, 96, 2, 4, 16
VOCABULARY = 503  # a prime: no number of devices divides it
IMAGE = 64
MOST_STAGES = 4
"""Lists of more entries than this, as many as there are layers, say something of each layer; shorter ones, of stages."""


def _names(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns))


PART = "(encoder_|decoder_|text_|vision_|audio_|projector_|output_|out_)?"
WIDTHS = _names(
    PART + "(hidden_size|hidden_dim|embed_dim|d_model)",
    "n_embd|dim|emb_dim|embedding_size|d_embed|word_embed_proj_dim|projection_dim|proj_dim|output_dim|lru_width|d_latents",
)
INNERS = _names(
    PART + "(intermediate_size|ffn_dim|feedforward_dim)",
    "(moe|shared|shared_expert|moe_shared_expert|dense|ffn)_intermediate_size|intermediate_size_mlp",
    "d_ff|d_inner|inner_dim|mlp_dim|ffn_hidden_size|expert_ffn_hidden_size|mlp_hidden_size|dim_feedforward",
)
LAYER_COUNTS = _names(
    "(num_)?" + PART + "(num_)?(hidden_|transformer_)?layers|n_layers?|(decoder_)?depth",
)
HEAD_COUNTS = _names(PART + "(num_)?attention_heads|n_heads?|num_heads|num_(self|cross)_attention_heads")
KEY_VALUE_HEADS = _names(PART + "num_key_value_heads|num_kv_heads|n_head_kv")
HEAD_WIDTHS = _names("head_dim|d_kv|d_head|attention_head_dim|v_head_dim|qk_nope_head_dim|kv_channels|head_size")
EXPERT_COUNTS = _names("(moe_)?num_(local_|routed_)?experts|n_routed_experts")
EXPERTS_PER_TOKEN = _names("num_experts_per_tok(en)?|moe_k|moe_topk|top_k_experts")
POSITIONS = _names(
    "max_(position_embeddings|(source_|target_|text_)positions|seq_len|seq(uence)?_length)|n_positions|n_ctx"
)
STAGE_WIDTHS = _names(PART + "hidden_sizes|embed_dims|conv_dim|tdnn_dim|embedding_hidden_sizes|neck_hidden_sizes")
MAY_FOLLOW = {
    "head_dim": HEAD_WIDTH,
    "num_key_value_heads": HEADS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
}
SPECIALS = {
    "rotary_dim": 8,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "entity_vocab_size": VOCABULARY,
    "pronunciation_vocab_size": VOCABULARY,
    "shape_vocab_size": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "state_size": 8,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
}


def small_sizes(config: Any) -> dict[str, Any]:
    """Arguments that make a tiny configuration of the class of ``config``, its sub-configurations included."""
    own = particulars(config.model_type)
    sizes: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name in own.keep or own.keep == ("*",):
            continue
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            sizes[name] = _own_fields(value) | small_sizes(value)
            for derived in ("layer_types", "per_layer_config", "_name_or_path", "transformers_version"):
                if derived not in particulars(value.model_type).sizes:
                    sizes[name].pop(derived, None)
        elif value is None and name in MAY_FOLLOW:
            sizes[name] = MAY_FOLLOW[name]  # most configurations derive it, some forget to or leave it to be given
        elif name == "attention_types":
            sizes[name] = [[kinds, 1] for kinds, _ in value]
        elif name == "per_layer_config" and isinstance(value, dict):
            sizes[name] = {layer: fields for layer, fields in value.items() if int(layer) < _enough_layers(config)}
        elif isinstance(value, bool):
            continue
        elif isinstance(value, int):
            sizes |= _small_number(config, name, value)
        elif _is_per_layer(config, value):
            sizes[name] = list(value)[: _enough_layers(config)]
        elif isinstance(value, list | tuple) and value and all(isinstance(item, int) for item in value):
            sizes |= _small_list(name, list(value))
        elif isinstance(value, float) and is_dropout(name):
            sizes[name] = 0.0
        elif name == "rope_parameters" and isinstance(value, dict) and _has_three_axes(config, value):
            sizes[name] = {**value, "mrope_section": _sections(value)}
    return _merged(sizes | _token_ids(config) | _stages(config), own.sizes)


def _own_fields(config: Any) -> dict[str, Any]:
    """What a sub-configuration was given: the rest it derives, from smaller sizes otherwise."""
    fields = config.to_dict()
    try:
        usual = type(config)().to_dict()
    except Exception:  # some cannot be made without arguments, each for reasons of its own
        return fields
    kept = {name: value for name, value in fields.items() if name not in usual or usual[name] != value}
    if {"out_features", "out_indices"} & set(kept):  # they stand for each other
        kept |= {name: fields[name] for name in ("out_features", "out_indices") if name in fields}
    return kept | {"model_type": config.model_type}


def _is_per_layer(config: Any, value: Any) -> bool:
    """Whether a list has one entry for each of many layers."""
    layers = _first_number(config, LAYER_COUNTS)
    return isinstance(value, list | tuple) and len(value) == layers > MOST_STAGES and not _named_layers(config, value)


def _named_layers(config: Any, value: Any) -> bool:
    return value is getattr(config, "layer_types", None)  # derived from what says how often a type comes


def _stages(config: Any) -> dict[str, Any]:
    """The layers whose outputs a backbone hands on, as many as before, among the few that are left."""
    features, stages = getattr(config, "out_features", None), getattr(config, "stage_names", None)
    layers = _first_number(config, LAYER_COUNTS)
    if not features or not stages or len(stages) != layers + 1 or layers <= _enough_layers(config):
        return {}
    few = _enough_layers(config)
    last = [few - len(features) + 1 + place for place in range(len(features))]
    return {"out_features": [f"stage{number}" for number in last], "out_indices": last}


def _merged(sizes: dict[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """``others`` over ``sizes``, in sub-configurations field by field."""
    merged = dict(sizes)
    for name, value in others.items():
        inner = merged.get(name)
        if isinstance(inner, dict) and isinstance(value, Mapping):
            same = inner.get("model_type") == value.get("model_type", inner.get("model_type"))
            merged[name] = _merged(inner, value) if same else value
        else:
            merged[name] = value
    return merged


def is_dropout(name: str) -> bool:
    """Whether a field is the probability of dropping something during training.

    >>> is_dropout("attn_pdrop"), is_dropout("encoder_layerdrop"), is_dropout("drop_path_rate")
    (True, True, True)
    """
    words = (
        "dropout",
        "pdrop",
        "layerdrop",
        "drop_path",
        "drop_rate",
        "drop_prob",
        "mask_time_prob",
        "mask_feature_prob",
    )
    return any(word in name for word in words)


def without_dropout(config: Any, probability: float = 0.0) -> None:
    """Set every dropout of ``config`` and its sub-configurations to ``probability``, in place."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            without_dropout(value, probability)
        elif isinstance(value, int | float) and not isinstance(value, bool) and is_dropout(name):
            setattr(config, name, 0 if isinstance(value, int) and not probability else float(probability))


def _small_number(config: Any, name: str, value: int) -> dict[str, Any]:
    if hasattr(config, "width_coefficient") or name in _derived(config):
        return {}
    if name == "embed_dim" and isinstance(getattr(config, "num_heads", None), list | tuple):
        return {name: 8 * config.num_heads[0]}
    if WIDTHS.fullmatch(name):
        return {name: WIDTH}
    if INNERS.fullmatch(name):
        return {name: INNER if value != _width(config) else WIDTH}
    if LAYER_COUNTS.fullmatch(name):
        return {name: min(value, _enough_layers(config))}
    if name == "num_heads" and hasattr(config, "expand"):  # a state-space model's heads fill its expanded width
        return {name: config.expand * WIDTH // HEAD_WIDTH}
    if HEAD_COUNTS.fullmatch(name):
        return {name: min(value, HEADS)}
    if KEY_VALUE_HEADS.fullmatch(name):
        return {name: _small_key_value_heads(config, value)}
    if HEAD_WIDTHS.fullmatch(name):
        return {name: HEAD_WIDTH}
    if EXPERT_COUNTS.fullmatch(name):
        return {name: min(value, 4)}
    if EXPERTS_PER_TOKEN.fullmatch(name):
        return {name: min(value, 2)}
    if POSITIONS.fullmatch(name):
        return {name: min(value, 128)}
    if name == "vocab_size":
        return {name: min(value, VOCABULARY)}
    if name == "image_size" and not hasattr(config, "window_size"):
        return {name: min(value, IMAGE)}
    if name in SPECIALS and value:
        return {name: min(value, SPECIALS[name])}
    return {}


def _has_three_axes(config: Any, rope: dict[str, Any]) -> bool:
    """Vision-language models rotate by time, height and width; some state the shares, others have them in their code."""
    return "mrope_section" in rope or any(word in config.model_type for word in ("vl", "glm", "omni", "ocr"))


def _sections(rope: dict[str, Any]) -> list[int]:
    """How the rotated features of a small head are shared by time, height and width."""
    pairs = int(HEAD_WIDTH * rope.get("partial_rotary_factor", 1.0)) // 2
    share = pairs // 3
    return [pairs - 2 * share, share, share]


def _derived(config: Any) -> set[str]:
    """Fields a configuration computes from others, against which a value of our own could stand."""
    fields = {"head_dim"} if hasattr(config, "qk_rope_head_dim") else set()
    return fields | ({"hidden_size", "hidden_dim"} if hasattr(config, "depths") else set())


def _enough_layers(config: Any) -> int:
    """Two layers, or as many as it takes to have one of each type; all where others are picked out by number."""
    if any(
        isinstance(getattr(config, name, None), list) for name in ("backbone_out_indices", "deepstack_visual_indexes")
    ):
        return 64
    types = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None) or []
    stages = len(getattr(config, "out_features", None) or ())
    return max([LAYERS, stages, *(types.index(kind) + 1 for kind in set(types))])


def _small_list(name: str, values: list[int]) -> dict[str, Any]:
    if name == "depths":
        return {name: [1] * len(values)}
    if STAGE_WIDTHS.fullmatch(name):
        largest = max(values)
        # Keep the proportions of the stages and stay divisible by the usual numbers of heads and groups.
        return {name: [max(32, 32 * round(4 * value / largest)) for value in values]}
    if name == "image_size":
        return {name: [min(value, IMAGE) for value in values]}
    return {}


def _small_key_value_heads(config: Any, value: int) -> int:
    if value == 1:
        return 1
    return HEADS if value >= _heads(config) else HEADS // 2


def _heads(config: Any) -> int:
    return _first_number(config, HEAD_COUNTS) or 1


def _width(config: Any) -> int:
    return _first_number(config, WIDTHS)


def _first_number(config: Any, names: re.Pattern[str]) -> int:
    values = (value for name, value in vars(config).items() if names.fullmatch(name) and isinstance(value, int))
    return next(values, 0)


def _token_ids(config: Any) -> dict[str, Any]:
    """Special tokens beyond the small vocabulary get numbers at its end, each its own."""
    vocabulary = getattr(config, "vocab_size", None)
    limit = min(vocabulary, VOCABULARY) if isinstance(vocabulary, int) else VOCABULARY
    moved: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= limit:
            moved[name] = limit - 1 - len(moved)
        elif name.endswith("_token_id") and isinstance(value, list) and any(item >= limit for item in value):
            moved[name] = [limit - 1 - len(moved)]
    return moved
