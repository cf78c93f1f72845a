"""The joint search on published problems: Piper, Galvatron, Aceso proved, Sailor's measurements predicted.

    python -m bench.joint_published [piper] [galvatron] [aceso] [sailor]

The problems lie in ``tests/data/joint`` with their sources and licences. Seconds are CPU seconds
of one solve; where kernels are compiled for the first time, run it twice. Nothing is fitted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.published.aceso import check, read_aceso, solve_aceso
from bench.published.anytime import within
from bench.published.galvatron import read_galvatron, solve_galvatron
from bench.published.piper import read_piper, solve_piper
from bench.published.sailor import mean_error, predict, read_plans, read_profiles
from shardwright.errors import Infeasible
from shardwright.files import read_json

DATA = Path(__file__).resolve().parents[1] / "tests" / "data" / "joint"
GIB = 2**30
BERT = {  # time per sample: memory in GiB → by devices
    2: {8: None, 32: 0.0665495, 64: 0.0320301, 128: 0.0151464, 512: 0.00366753},
    8: {8: 0.1658558, 32: 0.0415155, 64: 0.0202006, 128: 0.0101209, 512: 0.00256113},
    80: {8: 0.1220073, 32: 0.0308440, 64: 0.0156502, 128: 0.0080532, 512: 0.00227252},
}
RESNET = {
    1.5: {16: None, 32: 50.977195},
    2: {16: 76.521313, 32: 24.625899},
    4: {8: 73.493286, 16: 35.333438, 32: 17.623958},
    8: {8: 63.433537, 16: 31.634394, 32: 15.758026},
    16: {8: 58.557710, 16: 29.278856},
}
GALVATRON = {  # samples/s that Galvatron's own test asserts, and the best seconds of every pipeline degree
    "llama-28-layers-seq8192-chunks32": (
        2.6485091404,
        {1: 24.16453808822127, 2: 24.400646337673802, 4: 27.452854122361146},
    ),
    "llama-28-layers-seq8192-chunks8": (2.5246283459, {1: 25.35026595252753, 2: 30.033460973989346}),
}
ACESO = ("aceso_l4.json", "aceso_a10g.json.xz", "aceso_a100.json.xz")
ACESO_SECONDS = 200.0
"""Aceso's own search had as many."""


def timed(solve: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    return solve(), time.process_time() - began


def piper() -> int:
    print(
        "| problem | GiB per device | devices | time per sample | listed | proved | CPU s |\n|---|---|---|---|---|---|---|"
    )
    worse = 0
    cases = [("bert32a100", m, d, listed) for m, row in BERT.items() for d, listed in row.items()]
    cases += [("piper_resnet50", m, d, listed) for m, row in RESNET.items() for d, listed in row.items()]
    for name, memory, devices, listed in cases:
        problem = read_piper(DATA / f"{name}.json", devices=devices, memory=memory * GIB, bandwidth=25 * GIB)
        try:
            found, seconds = timed(lambda problem=problem: solve_piper(problem))
        except Infeasible:
            worse += listed is not None
            print(f"| {name} | {memory} | {devices} | does not fit | {listed or 'does not fit'} | yes | – |")
            continue
        worse += listed is None or found.cost > listed * (1 + 3e-6) or not found.optimal
        proved = "optimal" if found.optimal else f"gap {100 * found.gap:.2g} %"
        print(f"| {name} | {memory} | {devices} | {found.cost:.8g} | {listed} | {proved} | {seconds:.2f} |", flush=True)
    return worse


def galvatron() -> int:
    print("| problem | pp | seconds per step | listed | samples/s | listed | plan | proved | s |")
    print("|---|--:|--:|--:|--:|--:|---|---|--:|")
    worse = 0
    for name, (rate, by_degree) in GALVATRON.items():
        problem = read_galvatron(DATA / "galvatron_llama28.json", name)
        for degree, listed in by_degree.items():
            only = replace(problem, pipelines=tuple(p for p in problem.pipelines if p.pp == degree))
            found = solve_galvatron(only)
            layers = "; ".join(", ".join(f"{count} × {way}" for way, count in stage) for stage in found.answer.layers)
            plan = f"{layers}; ends tp {found.answer.ends[0]} sp {found.answer.ends[1]} zero {found.answer.ends[2]}"
            samples = problem.global_batch / found.cost
            worse += found.cost > listed * (1 + 1e-9) or not found.optimal
            print(f"| {name} | {degree} | {found.cost:.7f} | {listed:.7f} | {samples:.10f} | "
                  f"{rate if degree == 1 else '–'} | {plan} | {'optimal' if found.optimal else found.gap} | "
                  f"{found.seconds:.2f} |")  # fmt: skip
    return worse


def aceso() -> int:
    """Every model of the three files; after Aceso's own 200 s with what is known then."""
    print(
        "| file | model | devices | seconds per step | Aceso's best plan by the same rules | ratio | bound | gap | s |"
    )
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|")
    worse = 0
    for file in ACESO:
        data = read_json(DATA / file)
        for model in data["models"]:
            theirs = min(plan["predicted_ms"] for plan in model["plans"]) / 1e3
            problem = read_aceso(data, model["name"])
            found = within(ACESO_SECONDS, solve_aceso, problem)
            _, memory = check(problem, found.answer)
            worse += found.cost > theirs or max(memory) > problem.memory_mb
            print(f"| {file.split('.')[0]} | {model['name']} | {problem.devices} | {found.cost:.5f} | {theirs:.5f} | "
                  f"{found.cost / theirs:.4f} | {found.lower_bound:.5f} | {100 * found.gap:.2f} % | {found.seconds:.0f} |",
                  flush=True)  # fmt: skip
    return worse


def sailor() -> int:
    (plans, refused), profiles = read_plans(DATA / "sailor_plans.csv"), read_profiles(DATA / "sailor_profiles.json")
    for sentence in refused:
        print(f"left out: {sentence}")
    print("| plan | devices | measured s | predicted s | error | Sailor's rule |\n|---|---|--:|--:|--:|--:|")
    for plan in plans:
        seconds = predict(plan, profiles)
        note = " (in doubt, not counted)" if plan.doubt else ""
        print(f"| {plan.name}{note} | {'unlike' if plan.mixed else 'alike'} | {plan.measured_seconds:.4f} | {seconds:.4f} | "
              f"{100 * (seconds / plan.measured_seconds - 1):+.1f} % | "
              f"{100 * (plan.rule_seconds / plan.measured_seconds - 1):+.1f} % |")  # fmt: skip
    groups = {"all": plans, "alike": [p for p in plans if not p.mixed], "unlike": [p for p in plans if p.mixed]}
    for name, some in groups.items():
        ours, theirs = mean_error(some, profiles)
        count = sum(not plan.doubt for plan in some)
        print(
            f"{name}: {count} plans, mean error {100 * ours:.2f} %, Sailor's own rule {100 * theirs:.2f} %, nothing fitted"
        )
    return int(mean_error(plans, profiles)[0] > 0.085)


def main() -> int:
    known = {"piper": piper, "galvatron": galvatron, "aceso": aceso, "sailor": sailor}
    return sum(known[name]() for name in sys.argv[1:] or known)


if __name__ == "__main__":
    sys.exit(main())
