"""The joint search on published problems: Piper, Galvatron, Aceso proved, Sailor's measurements predicted.

    python -m bench.joint_published [piper] [galvatron] [aceso] [sailor]

The problems lie in ``tests/data/joint`` with their sources and licences. Seconds are CPU seconds
of one solve; where kernels are compiled for the first time, run it twice. Nothing is fitted.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.published.aceso import check, read_aceso, solve_aceso
from bench.published.galvatron import read_galvatron, solve_galvatron
from bench.published.piper import read_piper, solve_piper
from bench.published.sailor import mean_error, predict, read_plans, read_profiles
from shardwright.errors import Infeasible

DATA = Path(__file__).resolve().parents[1] / "tests" / "data" / "joint"
GIB = 2**30
BERT = {  # time per sample: memory in GiB → by devices
    2: {8: None, 32: 0.0665495, 64: 0.0320301, 128: 0.0151464, 512: 0.00366753},
    8: {8: 0.1658558, 32: 0.0415155, 64: 0.0202006, 128: 0.0101209, 512: 0.00256113},
    80: {8: 0.1220073, 32: 0.0308440, 64: 0.0156502, 128: 0.0080532, 512: 0.00227252},
}
RESNET = {4: 73.493286, 8: 63.433537, 16: 58.557710}
ACESO = {"gpt-1.3B": 12.87365, "gpt-2.6B": 20.06465, "gpt-6.7B": 39.79164}


def timed(solve: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    return solve(), time.process_time() - began


def piper() -> int:
    print(
        "| problem | GiB per device | devices | time per sample | listed | proved | CPU s |\n|---|---|---|---|---|---|---|"
    )
    worse = 0
    cases = [("bert32a100", m, d, listed) for m, row in BERT.items() for d, listed in row.items()]
    cases += [("piper_resnet50", m, 8, listed) for m, listed in RESNET.items()]
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
    data = read_galvatron(DATA / "galvatron_llama28.json")
    found = solve_galvatron(data)
    rate = data["global_batch"] / found.cost
    print(f"Galvatron: {rate:.10f} samples/s (listed 2.5246283459), {found.answer.strategy}, pp {found.answer.pipeline}, "
          f"all choices tried in {found.seconds:.4f} s")  # fmt: skip
    return int(abs(rate / 2.5246283459 - 1) > 1e-9)


def aceso() -> int:
    print("| model | seconds per step | Aceso's plan by the same rules | ratio | bound | gap | CPU s (Aceso: 200 s) |")
    print("|---|---|---|---|---|---|---|")
    worse = 0
    data = json.loads((DATA / "aceso_l4.json").read_text())
    for name, theirs in ACESO.items():
        problem = read_aceso(data, name)
        found, seconds = timed(lambda problem=problem: solve_aceso(problem))
        _, memory = check(problem, found.answer)
        worse += found.cost > theirs or found.gap > 0.05 or max(memory) > problem.memory_mb
        print(f"| {name} | {found.cost:.5f} | {theirs} | {found.cost / theirs:.4f} | {found.lower_bound:.5f} | "
              f"{100 * found.gap:.2f} % | {seconds:.1f} |", flush=True)  # fmt: skip
    return worse


def sailor() -> int:
    plans, profiles = read_plans(DATA / "sailor_plans.csv"), read_profiles(DATA / "sailor_profiles.json")
    print("| plan | measured s | predicted s | error | Sailor's rule |\n|---|---|---|---|---|")
    for plan in plans:
        seconds = predict(plan, profiles)
        note = " (in doubt, not counted)" if plan.doubt else ""
        print(f"| {plan.name.split('-')[-1]}{note} | {plan.measured_seconds:.4f} | {seconds:.4f} | "
              f"{100 * (seconds / plan.measured_seconds - 1):+.1f} % | "
              f"{100 * (plan.rule_seconds / plan.measured_seconds - 1):+.1f} % |")  # fmt: skip
    ours, theirs = mean_error(plans, profiles)
    print(f"mean error {100 * ours:.2f} %, Sailor's own rule {100 * theirs:.2f} %, nothing fitted")
    return int(ours > 0.08)


def main() -> int:
    known = {"piper": piper, "galvatron": galvatron, "aceso": aceso, "sailor": sailor}
    return sum(known[name]() for name in sys.argv[1:] or known)


if __name__ == "__main__":
    sys.exit(main())
