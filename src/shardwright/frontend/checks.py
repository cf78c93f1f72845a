"""Checks of values written in plain Python: ``if labels.max() >= vocabulary: raise ValueError(...)``.

Reading the condition would stop an export, though the graph is the same whichever inputs pass. When a tensor is asked
whether it is true, the statement that asks is looked up in the model's source: an ``if`` without ``else`` whose body
only raises (or warns) is answered with False, an ``assert`` with True. Like the assertions export records itself,
these checks are dropped. Every other decision on data stays a refusal.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from shardwright.frontend.provenance import asking_frame
from shardwright.process_wide import replaced


@contextmanager
def skipped_checks() -> Iterator[None]:
    """While this lasts, checks that only raise pass without being read."""

    def answering(real: Any) -> Any:
        def answered(compared: torch.SymBool) -> bool:  # a comparison of ``x.item()``
            answer = answer_of_check()
            return real(compared) if answer is None else answer

        return answered

    with replaced(torch.SymBool, "__bool__", answering):
        yield


def answered_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is true; where only a check asks, what lets it pass."""
    answer = answer_of_check()
    return torch.Tensor.__bool__(tensor) if answer is None else answer


def answer_of_check() -> bool | None:
    """What the statement that asks wants to hear, if it only checks its data."""
    frame = asking_frame()
    if frame is None:
        return None
    for statement in _checks(frame.f_code.co_filename):
        test = statement.test
        if test.lineno <= frame.f_lineno <= (test.end_lineno or test.lineno):
            wanted = list(_wanted(test, isinstance(statement, ast.Assert)))
            if here := _place(frame):
                wanted = [(leaf, goal) for leaf, goal in wanted if _covers(leaf, here)] or wanted
            goals = {goal for _, goal in wanted}
            return goals.pop() if len(goals) == 1 else None
    return None


def _wanted(test: ast.expr, goal: bool) -> Iterator[tuple[ast.expr, bool]]:
    """The conditions a test is made of, each with the answer that lets the check pass."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _wanted(test.operand, not goal)
    elif isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _wanted(value, goal)
    else:
        yield test, goal


def _place(frame: FrameType) -> tuple[int, int] | None:
    """Line and column of the expression whose truth is asked, which Python knows from 3.11 on."""
    if not hasattr(frame.f_code, "co_positions"):
        return None
    # The jump itself is placed at the whole test; what was computed just before it is the condition.
    line, _, column, _ = list(frame.f_code.co_positions())[frame.f_lasti // 2 - 1]
    return None if line is None or column is None else (line, column)


def _covers(leaf: ast.expr, place: tuple[int, int]) -> bool:
    end = (leaf.end_lineno or leaf.lineno, leaf.end_col_offset or 0)
    return (leaf.lineno, leaf.col_offset) <= place < end


@functools.lru_cache(maxsize=256)
def _checks(filename: str) -> tuple[ast.If | ast.Assert, ...]:
    """The checks in a source file: assertions, and ``if`` statements that do nothing but raise or warn."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:
        return ()
    return tuple(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
        or (isinstance(node, ast.If) and not node.orelse and all(_only_complains(line) for line in node.body))
    )


def _only_complains(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Raise):
        return True
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    called = statement.value.func
    return isinstance(called, ast.Attribute) and called.attr in ("warn", "warning", "warning_once", "warn_once")
