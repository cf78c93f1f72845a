"""What is true of an operator stands in its record: no other room compares operators by name or keeps a table of them."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest
import torch

import shardwright
import shardwright.frontend.ctc
import shardwright.lowering.collectives
import shardwright.lowering.randomness

ROOT = pathlib.Path(shardwright.__file__).parent
AT_HOME = ("operators", "frontend")
"""Where names of operators stand: their records, and what reads them from PyTorch's exports."""
ALLOWED = {
    "graph/orders.py": "a tensor's mark is found when a graph is built, below the records and without torch",
    "cluster/cases_memory.py": "kernels that calibration measures",
    "cluster/pace.py": "what one model, the yardstick, consists of",
}
SCHEMAS = {schema.name for schema in torch._C._jit_get_all_schemas()}
SHORT = {name.partition("::")[2] for name in SCHEMAS if name.startswith("aten::")}
REDUCTIONS = {"sum", "max", "min", "prod", "mean", "avg", "product"}
"""How partial values are put together, in the words of ``torch.distributed``."""
READS = ("startswith", "endswith", "split", "rpartition", "partition", "removeprefix")
OPERATORS = ("op", "node", "n", "o", "maker", "this", "call")


def qualified(text: object) -> bool:
    """Whether a text names an operator with its namespace: ``aten.bmm``, ``aten::bmm``, ``shardwright.assumed.default``."""
    found = re.fullmatch(r"(\w+)(?:\.|::)(\w+)(?:\.\w+)?", text) if isinstance(text, str) else None
    return found is not None and f"{found[1]}::{found[2]}" in SCHEMAS


def names_operator(node: ast.AST) -> bool:
    """A qualified name, or ``torch.ops.aten.bmm`` (``aten.bmm``) itself."""
    if isinstance(node, ast.Constant):
        return qualified(node.value)
    text = ast.unparse(node).removeprefix("torch.ops.") if isinstance(node, ast.Attribute) else ""
    return (qualified(text) and not text.startswith("shardwright.")) or (
        text.startswith("shardwright.") and qualified(text)
    )


def bare(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in SHORT


def table_of_names(node: ast.AST) -> bool:
    """A display or a text of operators' names without their namespace."""
    if isinstance(node, ast.Dict):
        keys: list[ast.AST | None] = [*node.keys]
    elif isinstance(node, ast.Set | ast.Tuple | ast.List):
        keys = [*node.elts]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w\s]+", node.value):
        keys = [ast.Constant(word) for word in node.value.split()]
    else:
        return False
    return len(keys) > 2 and all(map(bare, keys)) and not {key.value for key in keys} <= REDUCTIONS  # type: ignore[union-attr]


def looks_at_target(node: ast.AST) -> bool:
    """``op.target`` (or what people call it), by itself or taken apart."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READS:
        return looks_at_target(node.func.value)
    if isinstance(node, ast.Subscript):
        return looks_at_target(node.value)
    owner = node.value if isinstance(node, ast.Attribute) and node.attr in ("target", "short") else None
    return isinstance(owner, ast.Name) and owner.id in OPERATORS


def offences(source: str) -> Iterator[tuple[int, str]]:
    """Lines that compare an operator's name, take it apart or keep a table by it; calling an operator by name is none."""
    tree = ast.parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value and names_operator(statement.value):
            yield statement.lineno, "a name to compare with"
    for node in ast.walk(tree):
        if id(node) in prose:
            continue
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
            same = sum(isinstance(part, ast.Attribute) and part.attr in ("target", "short") for part in parts)
            getitem = any(isinstance(part, ast.Attribute) and part.attr == "getitem" for part in parts)  # Python's own
            if same == 1 and not getitem and any(part is not None and looks_at_target(part) for part in parts):
                yield node.lineno, "compares an operator's name"
        elif isinstance(node, ast.Dict):
            parts = [*node.keys]
        elif isinstance(node, ast.Set | ast.Tuple | ast.List):
            parts = [*node.elts]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READS:
            parts = [*node.args]
            if looks_at_target(node):
                yield node.lineno, "takes an operator's name apart"
        if any(part is not None and names_operator(part) for part in parts) or table_of_names(node):
            yield node.lineno, "a table of operators' names" if not isinstance(node, ast.Compare) else "compares names"


MODULES = sorted(
    path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] not in AT_HOME
)


@pytest.mark.parametrize("module", MODULES)
def test_no_table_of_operators_outside_their_records(module):
    found = [f"{module}:{line}: {what}" for line, what in offences((ROOT / module).read_text())]
    assert bool(found) == (module in ALLOWED), "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "if op.target == WANTED: pass",
        'if op.target in ("aten.bmm.default",): pass',
        'if name == "aten::bmm": pass',
        'PRICES = {"aten.bmm": 2.0}',
        'SORT = "aten.sort.default"',
        'kind = op.target.split(".")[1]',
        "if node.target is torch.ops.aten.detach.default: pass",
        "SAME = (aten.detach.default, aten.alias.default)",
        'FAST = {"layer_norm": 1, "softmax": 2, "linear": 3}',
        'FAST = frozenset("layer_norm softmax linear".split())',
        'if op.short == "linear": pass',
    ],
)
def test_tables_and_comparisons_are_found(source):
    assert list(offences(source))


@pytest.mark.parametrize(
    "source",
    [
        'step("count", "aten.sum.default", (kept,))',
        "record(op.target).kernels",
        '@torch.library.custom_op("shardwright::keep_mask", mutates_args=())\ndef f(): pass',
        'REDUCE = {"sum": 0, "max": 1, "min": 2}',
        "if message.source != message.target: pass",
    ],
)
def test_what_is_no_table_is_left_alone(source):
    assert not list(offences(source))
