"""Searches that can be ended: they run in a process of their own, which says what it has found whenever that is better.

Compiled loops and integer programs cannot be asked to stop, a process can. What it said last, with its bound, is the
answer when time is up.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from shardwright.errors import ShardwrightError, TooLarge
from shardwright.search.solution import Solution

Report = Callable[[Solution[Any]], None]
Solver = Callable[[Any, Report], Solution[Any]]


def nobody(found: Solution[Any]) -> None:
    """The report that goes to nobody."""


def within(seconds: float | None, solver: Solver, problem: Any) -> Solution[Any]:
    """What ``solver(problem, report)`` returns, or has reported last when time is up; without a limit in this process."""
    if seconds is None:
        return solver(problem, nobody)
    began = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_solve, args=(there, solver, problem), daemon=True)
    process.start()
    there.close()
    best: Solution[Any] | None = None
    try:
        while (left := seconds - (time.perf_counter() - began)) > 0 and here.poll(left):
            kind, content = here.recv()
            if kind == "failed":
                raise content if isinstance(content, ShardwrightError) else RuntimeError(content)
            best = content
            if kind == "done":
                break
    except EOFError:  # it was killed, by the system for want of memory as a rule
        pass
    finally:
        process.kill()
        process.join()
        here.close()
    if best is None:
        raise TooLarge(f"nothing was found in {seconds:g} s.", "Allow more time.")
    return Solution(best.answer, best.cost, best.lower_bound, best.optimal, time.perf_counter() - began)


def _solve(there: Connection, solver: Solver, problem: Any) -> None:
    try:
        there.send(("done", solver(problem, lambda found: there.send(("found", found)))))
    except ShardwrightError as error:
        there.send(("failed", error))
    except Exception:
        there.send(("failed", traceback.format_exc()))
