"""What a size in a model's name or configuration may ask for: anything beyond is a sentence, before anything is built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwright.errors import ModelError
from shardwright.zoo.reference import resolve


@pytest.mark.parametrize(
    "reference",
    [
        "gpt:small,layers=1000000000",
        "gpt:small,layers=99999999999999999999999",
        "gpt:small,width=1000000000000000000",
        "gpt:small,width=2147483647,heads=1,vocab=2147483647,seq=2147483647",
        "gpt:small,heads=3",
        "moe:small,experts=1000000000",
        "rnn:small,seq=1000000000",
        "inception:small,width=1e300",
        "hf:gpt2:small,n_layer=1000000000",
        "hf:gpt2:small,n_embd=99999999999999999999",
    ],
)
def test_sizes_nobody_means_are_one_sentence(reference: str) -> None:
    with pytest.raises(ModelError) as refused:
        resolve(reference)
    assert "\n" not in refused.value.message and refused.value.remedy


@pytest.mark.parametrize("field", [{"n_layer": 10**9}, {"n_embd": 10**30}, {"task": [{"num_layers": 10**9}]}])
def test_a_configuration_asks_for_no_more_than_a_name_may(field: dict, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, **field}))
    with pytest.raises(ModelError, match="not possible"):
        resolve(f"hf:{path}")


def test_a_configuration_nested_without_end_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match="too deeply"):
        resolve(f"hf:{tmp_path}/config.json")
