"""What users import: everything is at the root, typed, and documents and examples use nothing else."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = {"Accelerator", "ShardwrightStrategy", "Trainer"}
"""Come with transformers, accelerate and Lightning, which take seconds to import; tests/integrations uses them."""
IMPORT = re.compile(r"(?:from|import) shardwright\.(\w+)|`shardwright\.(\w+)\.\w+")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*")])
INSIDE = {"CONTRIBUTING.md", "glossary.md"}
"""For people who work on what lies below, or want to find it."""


def typed() -> set[str]:
    """The names that type checkers see."""
    tree = ast.parse(Path(shardwright.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.asname or alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }


def test_what_is_offered_is_typed_and_there() -> None:
    assert typed() == {*shardwright._HOME, *shardwright._MODULES} == {*shardwright.__all__} - {"__version__"}
    assert {*shardwright.__all__} <= {*dir(shardwright)}
    for name in {*shardwright.__all__} - LIBRARIES:
        assert getattr(shardwright, name).__doc__ or name == "__version__", name
    for name in LIBRARIES:
        home = importlib.util.find_spec(shardwright._HOME[name])
        assert home is not None and f"class {name}(" in Path(home.origin or "").read_text()
    with pytest.raises(AttributeError, match="no attribute 'plans_of'"):
        shardwright.plans_of  # noqa: B018


@pytest.mark.parametrize(
    "path", [p for p in DOCUMENTS if p.suffix in (".md", ".py") and p.name not in INSIDE], ids=lambda path: path.name
)
def test_documents_import_nothing_from_below_the_root(path: Path) -> None:
    named = {a or b for a, b in IMPORT.findall(path.read_text())}
    assert not named - {*shardwright._MODULES}


def wide() -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(2048, 8192), nn.ReLU(), nn.Linear(8192, 2048)), torch.empty(64, 2048)


def test_a_pipeline_can_be_asked_for() -> None:
    model, x = wide()
    asked = shardwright.Pipelining(stages=2, microbatches=4, schedule="1f1b")
    plan = shardwright.plan(model, (x,), cluster="2xH100", pipelines=asked)
    assert (len(plan.stages), plan.microbatches) == (2, 4)
    with pytest.raises(shardwright.ShardwrightError, match="one mesh only"):
        shardwright.plan(model, (x,), cluster="2xH100", pipelines=asked, also=[((x[:8],), {})])


def test_questions_about_a_whole_job() -> None:
    model, x = wide()
    plans = shardwright.frontier(model, (x,), cluster="4xA100-80GB", steps=3)
    bytes_used = [plan.prediction.memory_bytes for plan in plans]
    assert bytes_used == sorted(bytes_used, reverse=True)
    assert len(bytes_used) > 1
    rows = shardwright.by_devices(model, (x,), cluster="8xH100", devices=[1, 2])
    assert [row.devices for row in rows] == [1, 2]
    assert rows[1].seconds <= rows[0].seconds

    def build(rows: int) -> tuple:
        with torch.device("meta"):
            return model, (torch.empty(rows, 2048),)

    one = shardwright.plan(model, (x[:1],), cluster="1xH100").prediction.memory_bytes
    best = shardwright.largest_batch(build, cluster="1xH100", memory_limit=1.1 * one)
    assert best is not None and best.batch is not None and best.batch > 8
    assert best.prediction.memory_bytes <= 1.1 * one
    assert shardwright.largest_batch(build, cluster="1xH100", memory_limit=1000.0) is None
    model.eval()
    served = shardwright.serve(lambda calls: build(4 * calls), cluster="2xH100", objective="throughput").serving
    assert served is not None
    assert served.calls == 2
