"""Every benchmark can at least be started: what it imports of ours is there."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "bench"


@pytest.mark.parametrize("path", sorted(BENCHMARKS.rglob("*.py")), ids=lambda path: path.stem)
def test_what_a_benchmark_imports_is_there(path: Path) -> None:
    """Told from its source: to import all of them would take as long as a hundred tests."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        if node.module.split(".")[0] == "bench":
            folder = BENCHMARKS.parent.joinpath(*node.module.split("."))
            source = folder.with_suffix(".py") if folder.with_suffix(".py").exists() else folder / "__init__.py"
            known = _names(source) | {p.stem for p in folder.glob("*.py")}
        elif node.module.split(".")[0] in ("runtime", "fuzz"):  # helpers of the tests
            source = BENCHMARKS.parent.joinpath("tests", *node.module.split(".")).with_suffix(".py")
            known = _names(source) if source.exists() else {p.stem for p in source.with_suffix("").glob("*.py")}
        elif node.module.split(".")[0] == "shardwright":
            module = importlib.import_module(node.module)
            known = {alias.name for alias in node.names if hasattr(module, alias.name) or _is_module(module, alias)}
        else:
            continue
        missing = [alias.name for alias in node.names if alias.name not in known]
        assert not missing, f"{path.name}: {node.module} has no {', '.join(missing)}"


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "published").rglob("*.py")), ids=lambda path: path.stem)
def test_published_problems_use_only_what_the_product_offers(path: Path) -> None:
    """No module and no name that begins with an underscore is offered."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "shardwright":
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            assert not [name for name in names if name.startswith("_")], f"{path.name}: {'.'.join(names)}"


def _names(path: Path) -> set[str]:
    """What a file defines or imports at its top level."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
    return found


def _is_module(module: object, alias: ast.alias) -> bool:
    try:
        importlib.import_module(f"{module.__name__}.{alias.name}")  # type: ignore[attr-defined]
    except ImportError:
        return False
    return True
