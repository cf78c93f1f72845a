"""Private PyTorch interfaces stand behind ``_torch_compat.py`` and nowhere else: a new release is one file's work."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[1] / "src" / "shardwright"
FILES = sorted(path for path in SOURCES.rglob("*.py") if path.name != "_torch_compat.py")


OF_TENSORS = {"_version", "_local_tensor", "_base", "_is_view", "_typed_storage"}


def private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines that import, or reach into, something of torch whose name begins with an underscore."""
    known = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    known.add((alias.asname or alias.name).split(".")[0])
                    if private(alias.name):
                        yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                known.add(alias.asname or alias.name)
                if private(f"{node.module}.{alias.name}"):
                    yield node.lineno, f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute) and private(node.attr) and _root(node) in known and not _of_operators(node)
        ) or (isinstance(node, ast.Attribute) and node.attr in OF_TENSORS):
            yield node.lineno, ast.unparse(node)
        elif (
            isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr") and len(node.args) > 1
        ):
            name = node.args[1]
            if _root(node.args[0]) in known and isinstance(name, ast.Constant) and private(str(name.value)):
                yield node.lineno, ast.unparse(node)


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _of_operators(node: ast.Attribute) -> bool:
    """``torch.ops.aten._softmax`` is an operator's name, of which graphs are made."""
    return ast.unparse(node).startswith("torch.ops.")


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import torch\ntorch._C.foo()", 1),
        ("from torch.utils import _pytree", 1),
        ("from torch._subclasses import FakeTensor", 1),
        ("import torch\ngetattr(torch, '_grouped_mm', None)", 1),
        ("from torch import nn\nnn.modules.dropout._DropoutNd", 1),
        ("x._version", 1),
        ("import torch\ntorch.ops.aten._softmax(x)\ntorch.__version__\nself._x", 0),
    ],
)
def test_what_counts(code, found):
    assert len(list(uses(ast.parse(code)))) >= found and bool(list(uses(ast.parse(code)))) == bool(found)


def test_nobody_else_touches_an_underscore_of_torch():
    found = [
        f"{path.relative_to(SOURCES)}:{line}: {what}"
        for path in FILES
        for line, what in uses(ast.parse(path.read_text()))
    ]
    assert not found, "\n".join(found)
