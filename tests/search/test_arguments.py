"""What travels together is a record: no function of the search or the planner takes more than eight arguments."""

from __future__ import annotations

import ast
from pathlib import Path

import shardwright

MOST = 8
ROOT = Path(shardwright.__file__).parent


def arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many there are, ``self`` aside."""
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len([one for one in every if one.arg not in ("self", "cls")])


def test_functions_take_at_most_eight_arguments() -> None:
    found, seen = [], 0
    for path in sorted([*(ROOT / "search").rglob("*.py"), *(ROOT / "planner").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                seen += 1
                if arguments(node) > MOST:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} takes {arguments(node)}")
    assert seen > 500 and not found, "\n".join(found)
