"""Exported code runs on plain PyTorch, where shardwright cannot be imported, with the numbers of one process."""

from __future__ import annotations

import ast

import pytest
from bench.exported import PLANS, differences, exported, run_blocked

QUICK = ("ddp, accumulated", "hybrid shard", "2-D with sequence", "1f1b and fsdp", "gpipe, tied over stages")


def check(names, folder):
    for number, name in enumerate(names):
        found = differences(name, number, folder)
        # Transformers takes norms and losses in float32 whatever the model is in.
        close = 1e-5 if "transformers" in name else 1e-9
        assert max(found["losses"], found["gradients"], found["updated"]) < close, (name, found)
        assert found["missing"] == 0, name


def test_exported_code_has_the_numbers_of_one_process(tmp_path):
    run_blocked(QUICK, tmp_path, 300)
    check(QUICK, tmp_path)


@pytest.mark.long
def test_every_plan_exported_has_the_numbers_of_one_process(tmp_path):
    run_blocked(tuple(PLANS), tmp_path, 1200)
    check(tuple(PLANS), tmp_path)


@pytest.mark.parametrize("name", [name for name in PLANS if "transformers" not in name])
def test_exported_code_is_short_and_whole(name):
    text = exported(name).text
    tree = ast.parse(text)
    assert len(text.splitlines()) < 260 and max(map(len, text.splitlines())) <= 120
    imported = {
        a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names
    }
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    assert imported <= used and not any("shardwright" in name for name in imported)
