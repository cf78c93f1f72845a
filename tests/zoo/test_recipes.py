"""The language in which the table of Hugging Face types says what an input looks like."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from shardwright.errors import ModelError
from shardwright.zoo.hf_types import made

CONFIG = SimpleNamespace(vocab_size=50, image_token_id=49, vision=SimpleNamespace(size=6))
KNOWN = {"rows": 2, "length": 4}


@pytest.mark.parametrize(
    ("recipe", "shape", "dtype"),
    [
        ("normal(rows, 3, vision.size // 2)", (2, 3, 3), torch.float32),
        ("ones(rows * 2, length - 1)", (4, 3), torch.int64),
        ("true(rows)", (2,), torch.bool),
        ("each([[0, 1], [2, 3]])", (2, 2, 2), torch.int64),
        ("0 * tokens(rows, length) + 1", (2, 4), torch.int64),
    ],
)
def test_shapes_and_kinds(recipe: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = made(recipe, CONFIG, KNOWN)
    assert found.shape == shape and found.dtype == dtype


def test_text_has_its_placeholders_in_every_row_and_nowhere_else() -> None:
    found = made("text(length, image_token_id, 3)", CONFIG, KNOWN)
    assert found.shape == (2, 7)
    assert (found == 49).tolist() == [[False, True, True, True, False, False, False]] * 2


def test_padding_is_of_several_lengths() -> None:
    assert made("padded(8)", CONFIG, KNOWN).sum(1).tolist() == [8, 6]


@pytest.mark.parametrize("recipe", ["open('x')", "rows.__class__", "[x for x in rows]", "vision.sise", "lambda: 1"])
def test_anything_else_is_refused_with_the_recipe(recipe: str) -> None:
    with pytest.raises(ModelError) as refused:
        made(recipe, CONFIG, KNOWN)
    assert repr(recipe) in refused.value.message
