"""``shardwright choose``: solve a choice problem from a file, with the interface of the 2025 contest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def choose(
    problem: Annotated[Path, typer.Argument(help="A problem in the contest's format: .json or .json.gz.")],
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds after which the best choice so far is given.")
    ] = None,
    method: Annotated[str, typer.Option(help="auto, limited, eliminate, integer, markov or brute.")] = "auto",
    seed: Annotated[int, typer.Option(help="The same seed and the same work give the same choice.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object instead.")] = False,
) -> None:
    """Choose one option for every node of PROBLEM; the last line of output is the list of their indices.

    Example: shardwright choose problem.json.gz --time-limit 60
    """
    from shardwright.cli._options import check_seconds
    from shardwright.cli._show import finite
    from shardwright.search.choose import evaluate, read_problem, solve
    from shardwright.units import gap_text

    check_seconds(zero=True, time_limit=time_limit)
    loaded = read_problem(problem)
    solution = solve(loaded, time_limit=time_limit, seed=seed, method=method, overtime=0.0)
    indices = solution.answer.tolist()
    peak = evaluate(loaded, solution.answer).peak
    if as_json:
        content = {
            "name": loaded.name,
            "cost": solution.cost,
            "lower_bound": solution.lower_bound,
            "optimal": solution.optimal,
            "gap": finite(solution.gap),
            "peak": peak,
            "usage_limit": loaded.usage_limit,
            "seconds": solution.seconds,
            "choice": indices,
        }
        print(json.dumps(content))
        return
    quality = gap_text(solution.gap, "all choices within the limit")
    print(f"cost {solution.cost:.15g}, lower bound {solution.lower_bound:.15g} ({quality})")
    if loaded.usage_limit is not None:
        print(f"peak usage {peak:.15g} of {loaded.usage_limit:.15g}")
    print(f"{solution.seconds:.3f} s")
    print(json.dumps(indices))
