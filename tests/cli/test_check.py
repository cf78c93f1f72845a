"""``shardwright check`` as a user calls it, with the programs of its page."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from cli.test_commands import run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checking.md"
OWN = """
import torch, torch.distributed as dist
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), (torch.randn(8, 4),), {}

def summed(model):
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: 3 * gradient)
    return model

def hangs(model):
    if dist.get_rank():
        dist.barrier()  # nobody else comes
    return nn.parallel.DistributedDataParallel(model)

def fails(model):
    return model.nothing  # their own line

def nothing(model):
    pass

def rounded(model):
    for module in (model[0], model[2]):
        module.weight = nn.Parameter(torch.from_numpy(module.weight.detach().numpy().astype("float32")))
    return model

def dies(model):
    import os
    os._exit(3)

def random():
    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(x + torch.randn(8, 4))
    return Noisy(4, 2), (torch.randn(8, 4),), {}
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "their_code.py"
    path.write_text(OWN)
    yield path
    sys.modules.pop("their_code", None)


def check(monkeypatch, file, candidate, *arguments, model="model"):
    given = ("--model", f"{file}:{model}", "--candidate", f"{file}:{candidate}", "-n", "2")
    return run(monkeypatch, "check", *given, *arguments)


def test_the_cause_as_a_table_and_as_json(monkeypatch, capsys, file):
    assert check(monkeypatch, file, "summed", "--steps", "1") == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "DIFFER" in said and "All gradients are 3 times those of one process" in said
    assert check(monkeypatch, file, "summed", "--steps", "1", "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert document["agrees"] is False and document["findings"][0]["cause"] == "gradients scaled"
    assert {item["what"] for item in document["disagreeing"]} >= {"gradient"}


@pytest.mark.parametrize(
    ("candidate", "words"),
    [
        ("hangs", ("had not finished", "rank 1 in build", "`dist.barrier()  # nobody else comes`")),
        ("fails", ("AttributeError in build", "their_code.py:19", "`return model.nothing  # their own line`")),
        ("nothing", ("returned NoneType",)),
        ("rounded", ("'0.weight' is torch.float32",)),
        ("dies", ("died without a word",)),
        ("missing", ("has no function 'missing'",)),
    ],
)
def test_what_cannot_be_checked_is_one_sentence_and_a_remedy(monkeypatch, capsys, file, candidate, words):
    assert check(monkeypatch, file, candidate, "--seconds", "9" if candidate == "hangs" else "120") == 2
    message = capsys.readouterr().err.strip()
    assert message.startswith("shardwright: ") and len(message.splitlines()) == 2 and "Traceback" not in message
    for word in words:
        assert word in message, message


def test_models_that_draw_and_names_without_a_function_are_refused(monkeypatch, capsys, file):
    assert check(monkeypatch, file, "summed", model="random") == 2
    assert "draws random numbers itself" in capsys.readouterr().err
    assert run(monkeypatch, "check", "--model", "gpt:small", "--candidate", "train.py") == 2
    assert "names no function of a file" in capsys.readouterr().err


def programs() -> str:
    """The code of the page, but for the test that it shows."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return "\n\n".join(block for block in blocks if "assert_same" not in block)


BUILDERS = re.findall(r"^def (with_\w+)", programs(), re.MULTILINE)


@pytest.mark.parametrize("builder", BUILDERS)
def test_the_programs_of_the_page_are_right(tmp_path, monkeypatch, capsys, builder):
    assert len(BUILDERS) == 5
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "train.py"
    path.write_text(programs())
    given = ("--model", f"{path}:model", "--candidate", f"{path}:{builder}", "--steps", "2")
    status = run(monkeypatch, "check", *given, "-n", "4" if "tensor" in builder else "2", "--json")
    sys.modules.pop("train", None)
    assert status == 0, capsys.readouterr().out
    assert json.loads(capsys.readouterr().out)["agrees"] is True
