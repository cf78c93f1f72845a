"""Hugging Face models are called with inputs of their own kind: patches, pictures among words, sound, series."""

from __future__ import annotations

import pytest
import torch

from shardwright.errors import ModelError
from shardwright.zoo.hf_types import _table, particulars
from shardwright.zoo.reference import resolve

transformers = pytest.importorskip("transformers")

INPUTS = {
    "qwen2_vl": {"input_ids": (2, 20), "pixel_values": (32, 1176), "image_grid_thw": (2, 3)},
    "llava": {"pixel_values": (2, 3, 64, 64), "input_ids": (2, 32)},
    "time_series_transformer": {"past_values": (2, 19), "future_values": (2, 8)},
    "encodec": {"input_values": (2, 1, 3200)},
    "vilt": {"input_ids": (2, 16), "pixel_values": (2, 3, 64, 64), "pixel_mask": (2, 64, 64)},
    "sam": {"pixel_values": (2, 3, 64, 64), "input_points": (2, 1, 2, 2)},
}


@pytest.mark.parametrize(("model_type", "shapes"), INPUTS.items())
def test_types_are_called_with_inputs_of_their_own_kind(model_type: str, shapes: dict[str, tuple[int, ...]]) -> None:
    resolved = resolve(f"hf:{model_type}:small", batch=2, device="cpu")
    found = {name: tuple(value.shape) for name, value in resolved.kwargs.items() if name in shapes}
    assert found == shapes
    with torch.no_grad():
        resolved.model(**resolved.kwargs)


def test_inputs_have_the_same_shapes_on_meta() -> None:
    for model_type in ("qwen2_vl", "llava"):
        real, meta = (resolve(f"hf:{model_type}:small", batch=2, device=device).kwargs for device in ("cpu", "meta"))
        assert {name: value.shape for name, value in real.items()} == {n: value.shape for n, value in meta.items()}


def test_images_have_as_many_placeholders_as_the_encoder_makes_of_them() -> None:
    resolved = resolve("hf:llava:small", batch=2, device="cpu")
    placeholders = resolved.kwargs["input_ids"] == resolved.model.config.image_token_id
    assert placeholders.sum(1).tolist() == [16, 16]


def test_sizes_of_a_type_hold_where_it_is_a_part() -> None:
    assert resolve("hf:qwen3_vl:small", batch=2).model.config.vision_config.depth == 3


def test_an_encoder_that_cannot_take_its_images_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_table()["types"], "llava", {"inputs": {"pixel_values": "normal(rows, 5, 64, 64)"}})
    with pytest.raises(ModelError, match=r"cannot encode pixel_values of \(2, 5, 64, 64\)"):
        resolve("hf:llava:small", batch=2)


def test_the_table_names_types_that_there_are() -> None:
    rows = _table()["types"]
    known = set(transformers.CONFIG_MAPPING)
    assert [name for name in rows if not name.startswith("_") and name not in known] == []
    for name, row in rows.items():
        assert set(row) <= {"as", "head", "sizes", "keep", "inputs", "called_before"}, name
        assert "as" not in row or row["as"] in rows, name
        assert all(isinstance(recipe, str) for recipe in particulars(name).inputs.values()), name


def test_a_model_whose_first_call_is_unlike_all_others_was_called_before() -> None:
    model = resolve("hf:ibert:small", batch=2, device="cpu").model
    assert model.ibert.embeddings.embeddings_act1.x_max > 0.1
