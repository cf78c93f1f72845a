"""How far the rules reach: the zoo, small Hugging Face models, PyTorch's core opset, and the command."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from shardwright.cli import app
from shardwright.frontend import capture
from shardwright.operators import analyse
from shardwright.operators.coverage import core_operators, cover, markdown
from shardwright.zoo import ENTRIES
from shardwright.zoo.reference import resolve

NEVER_OPAQUE = ("matmul", "convolution", "attention", "normalisation", "recurrent")


@pytest.mark.parametrize(
    "name", sorted(set(ENTRIES) - {"wresnet101", "wresnet152"})
)  # wresnet50 has all their operators
def test_the_zoo_is_covered(name):
    found = resolve(f"{name}:small")
    graph = capture(found.model, found.args, found.kwargs)
    covered = cover(name, graph)
    assert covered.share >= 0.99, covered.replicated
    for op in graph.ops:
        rules = analyse(op, graph.tensors)
        if rules.kind in NEVER_OPAQUE or "embedding" in op.target or "loss" in op.target:
            assert rules.origin == "described" and rules.loops, op.target


def test_every_core_operator_is_described_elementwise_or_has_a_reason():
    core = core_operators()
    assert len(core) > 150
    missing = [o.target for o in core if o.status == "reason" and not o.reason]
    assert not missing


def test_the_document_names_what_is_replicated():
    found = resolve("gpt:small")
    text = markdown([cover("gpt", capture(found.model, found.args, found.kwargs))], "a command")
    assert "| gpt |" in text and "core opset" in text and "aten.nonzero.default" in text


def test_the_command_lists_checks_and_fails(registry):
    runner = CliRunner()
    listed = json.loads(runner.invoke(app, ["ops", "aten.bmm", "--json"]).stdout)
    assert listed[0]["target"] == "aten.bmm.default" and listed[0]["loops"][-1] == "k: sum"
    passed = runner.invoke(app, ["ops", "--check", "aten.bmm", "--json"])
    assert passed.exit_code == 0 and json.loads(passed.stdout)["runs"] > 10

    from shardwright.operators.language import Sum
    from shardwright.operators.record import known

    def wrong(a, b):
        return lambda n, i, j: Sum(lambda k: a[n, i, k] * b[n, k, i])

    known("aten.bmm.default", function=wrong)
    failed = runner.invoke(app, ["ops", "--check", "aten.bmm", "--json"])
    assert failed.exit_code != 0


def test_the_command_writes_the_document(tmp_path):
    target = tmp_path / "operators.md"
    result = CliRunner().invoke(app, ["ops", "--coverage", "--model", "gpt:small", "--write", str(target), "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)[0]["share"] == 1.0
    assert "| gpt:small |" in target.read_text()


def test_a_word_that_matches_nothing_is_an_error(capsys):
    from shardwright.errors import ShardwrightError

    result = CliRunner().invoke(app, ["ops", "--check", "no_such_operator"])
    assert isinstance(result.exception, ShardwrightError)
