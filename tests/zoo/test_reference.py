"""What a person can write for a model, and what they are told when it is wrong."""

from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from shardwright.errors import ModelError
from shardwright.zoo.hf_small import without_dropout
from shardwright.zoo.reference import resolve
from shardwright.zoo.sizes import parse_sizes


def test_sizes_override_defaults_and_small_sizes() -> None:
    assert len(resolve("gpt:layers=3,width=96,heads=4").model.blocks) == 3
    resolved = resolve("gpt:small,layers=3", batch=5, seq=7)
    assert len(resolved.model.blocks) == 3
    assert resolved.model.tokens.weight.shape == (97, 32)
    assert resolved.args[0].shape == (5, 7)


def test_device_and_dtype() -> None:
    resolved = resolve("alexnet:small", device="cpu", dtype="bfloat16")
    assert {p.dtype for p in resolved.model.parameters()} == {torch.bfloat16}
    assert resolved.args[0].dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(ModelError, match="int8"):
        resolve("gpt:small", dtype="int8")


def test_the_same_reference_gives_the_same_numbers_whatever_the_ambient_seed() -> None:
    torch.manual_seed(1)
    first = resolve("bert:small", device="cpu")
    state = torch.random.get_rng_state()
    torch.manual_seed(2)
    second = resolve("bert:small", device="cpu")
    for left, right in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(left, right)
    assert all(torch.equal(left, right) for left, right in zip(first.args, second.args, strict=True))
    torch.manual_seed(1)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("reference", "fragment"),
    [
        ("gtp", "did you mean gpt"),
        ("gpt:12", "'12'"),
        ("gpt:layers=twelve", "layers='twelve'"),
        ("nowhere.py:build", "no file 'nowhere.py'"),
        ("hf:gpt3", "gpt2"),
        ("hf:nothing.json", "Cannot read 'nothing.json'"),
        ("hf:llama:hiden_size=64", "did you mean hidden_size"),
        ("hf:llama:hidden_size=100,num_attention_heads=7", "hf:llama"),
        ("hf:blip_text_model", "no model class of its own"),
    ],
)
def test_bad_references_are_refused_in_one_sentence(reference: str, fragment: str) -> None:
    with pytest.raises(ModelError) as refusal:
        resolve(reference)
    assert fragment in refusal.value.message
    assert refusal.value.remedy


def test_a_sequence_for_a_model_without_one_is_refused() -> None:
    with pytest.raises(ModelError, match="alexnet has no sequence"):
        resolve("alexnet", seq=128)
    with pytest.raises(ModelError, match="batch=0"):
        resolve("alexnet", batch=0)


def test_parse_sizes() -> None:
    assert parse_sizes("small, layers=3,dropout=0.1,auxiliary=True", "x") == (
        True,
        {"layers": 3, "dropout": 0.1, "auxiliary": True},
    )
    assert parse_sizes("", "x") == (False, {})


BUILDER = """
import torch
def build(batch=2):
    return torch.nn.Linear(3, 4), (torch.randn(batch, 3),), {}
def nothing():
    return None
def broken():
    raise ValueError("no such luck")
"""


def test_a_function_may_leave_out_what_goes_by_keyword(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import torch\ndef build():\n    return torch.nn.Linear(4, 2), (torch.ones(3, 4),)\n")
    found = resolve(f"{path}:build")
    assert isinstance(found.model, torch.nn.Linear) and len(found.args) == 1 and found.kwargs == {}


def test_a_function_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(BUILDER)
    resolved = resolve(f"{file}:build", batch=6)
    assert resolved.args[0].shape == (6, 3)
    assert resolved.model.weight.is_meta
    for function, fragment in (("bild", "did you mean build"), ("nothing", "NoneType"), ("broken", "no such luck")):
        with pytest.raises(ModelError, match=fragment):
            resolve(f"{file}:{function}")
    with pytest.raises(ModelError, match="takes no seq"):
        resolve(f"{file}:build", seq=3)


HUGGING_FACE = {
    "hf:gpt2": 124_439_808,
    "hf:GPT2LMHeadModel:n_layer=24,n_embd=1024,n_head=16": 354_823_168,
    "hf:bert": 109_514_298,
    "hf:llama:num_hidden_layers=80,hidden_size=8192,num_attention_heads=64,num_key_value_heads=8,intermediate_size=28672": 68_976_648_192,  # noqa: E501
}


@pytest.mark.parametrize(("reference", "count"), HUGGING_FACE.items())
def test_hugging_face_at_published_sizes(reference: str, count: int) -> None:
    pytest.importorskip("transformers")
    resolved = resolve(reference, batch=2, seq=64)
    assert resolved.parameter_count == count
    assert resolved.kwargs["input_ids"].shape == (2, 64)
    assert all(parameter.is_meta for parameter in resolved.model.parameters())


@pytest.mark.parametrize(
    ("model", "head"),
    {
        "gpt2": "GPT2LMHeadModel",
        "llama": "LlamaForCausalLM",
        "bert": "BertForMaskedLM",
        "t5": "T5ForConditionalGeneration",
        "bart": "BartForConditionalGeneration",
        "vit": "ViTForImageClassification",
        "resnet": "ResNetForImageClassification",
        "wav2vec2": "Wav2Vec2ForCTC",
        "whisper": "WhisperForConditionalGeneration",
        "mixtral": "MixtralForCausalLM",
    }.items(),
)
def test_small_hugging_face_models_compute_a_loss(model: str, head: str) -> None:
    pytest.importorskip("transformers")
    resolved = resolve(f"hf:{model}:small", batch=2, device="cpu")
    assert type(resolved.model).__name__ == head
    assert resolved.parameter_count < 1e6
    first, second = (resolved.model(**resolved.kwargs).loss for _ in range(2))
    assert torch.isfinite(first)
    assert first.item() == second.item(), "small models have no dropout"
    first.backward()


def test_small_keeps_what_the_user_asks_for() -> None:
    pytest.importorskip("transformers")
    model = resolve("hf:gpt2:small,vocab_size=50257,n_layer=3,dropout=0.1").model
    assert model.transformer.wte.weight.shape == (50257, 64)
    assert len(model.transformer.h) == 3
    assert model.config.attn_pdrop == model.config.resid_pdrop == 0.1


def test_a_configuration_file(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({"model_type": "bert", "architectures": ["BertForSequenceClassification"], "num_hidden_layers": 3})
    )
    model = resolve(f"hf:{file}").model
    assert type(model).__name__ == "BertForSequenceClassification"
    assert len(model.bert.encoder.layer) == 3
    assert len(resolve(f"hf:{file}:small,num_hidden_layers=1").model.bert.encoder.layer) == 1
    file.write_text('{"model_type": "from_the_future"}')
    with pytest.raises(ModelError, match="from_the_future"):
        resolve(f"hf:{file}")
    file.write_text("[1, 2")
    with pytest.raises(ModelError, match="is not JSON"):
        resolve(f"hf:{file}")


def test_without_transformers_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def refuse(name: str, *args: object, **kwargs: object) -> object:
        if name == "transformers":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ModelError, match="not installed") as refusal:
        resolve("hf:gpt2")
    assert "pip install" in refusal.value.remedy


def test_the_command_lists_every_model() -> None:
    import typer

    from shardwright.cli.models import models
    from shardwright.zoo import ENTRIES

    app = typer.Typer()
    app.command()(models)
    listed = json.loads(CliRunner().invoke(app, ["--json"]).stdout)
    assert [row["name"] for row in listed] == list(ENTRIES)
    assert {row["name"]: row["parameters"] for row in listed}["gpt"] == 124_439_808
    table = CliRunner().invoke(app, [])
    assert table.exit_code == 0
    assert "wresnet152" in table.stdout


def test_dropout_that_is_a_whole_number_stays_one() -> None:
    """Some configurations declare it so, and refuse 0.0."""
    config = SimpleNamespace(attn_pdrop=0, drop_path_rate=0.1)
    without_dropout(config)
    assert [type(value) for value in vars(config).values()] == [int, float]


@pytest.mark.parametrize(
    ("fields", "fragment"),
    [
        ({"model_type": ["bert"]}, "the model type"),
        ({"model_type": {}}, "the model type"),
        ({"model_type": "bert", "architectures": [3]}, "architectures"),
        ({"model_type": "bert", "architectures": {"BertModel": 1}}, "architectures"),
    ],
)
def test_what_names_no_model_class_is_one_sentence(tmp_path: Path, fields: dict[str, object], fragment: str) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=fragment):
        resolve(f"hf:{file}")


def test_a_configuration_names_model_classes_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "bert", "architectures": ["logging", "BertForMaskedLM"]}))
    assert type(resolve(f"hf:{file}:small").model).__name__ == "BertForMaskedLM"
