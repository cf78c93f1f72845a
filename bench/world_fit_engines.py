"""Fits the constants of engines' profiles to the fitting half of published runs, and writes them into the package.

    python bench/world_fit_engines.py [ENGINE…]

Which constants are free is stated per engine: few where few runs are in the fitting half. They are found by the simplex of
:mod:`world_fit_primitives` from what the profile says now, on the mean absolute logarithm of predicted over measured
seconds.
The judged half is never priced here.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from shardwright.cluster.engine import Engine, Pace, engine
from world_engines import as_run
from world_fit_primitives import simplex
from world_runs import ROOT, Run, runs

MEGATRON = ("A100.products", "A100.memory", "forward_issue", "backward_issue", "meeting", "sending")
FSDP = tuple(f"{device}.{what}" for device in ("A100", "H100") for what in ("products", "memory", "attention"))
FREE = {
    "megatron-2021": MEGATRON,
    "megatron-deepspeed-2022": ("A100.products", "forward_issue", "network"),
    "megatron-2022": ("A100.products", "A100.memory"),
    "fsdp-torch-2.1": (*FSDP, "forward_issue", "contention", "network", "hop", "microbatch"),
    "torchtitan-compiled": ("H100.products",),
}
ISSUED_ALIKE = {"backward_issue": "forward_issue"}
FOLLOW = {"megatron-deepspeed-2022": ISSUED_ALIKE, "fsdp-torch-2.1": ISSUED_ALIKE}
"""Constants that are taken to be the same as another, where runs do not tell them apart."""
MOST = {"products": 1.0, "memory": 0.92, "attention": 0.75, "contention": 1.0, "network": 1.0}


ENOUGH = 200
"""Runs to fit a handful of constants to; of more, every so many-th is taken."""


def of_fitting_half(name: str) -> list[Run]:
    found = [run for run in runs() if run.engine == name and run.fitting]
    found = [run for run in found if not run.left_out and not run.out_of_memory]
    return found[:: -(-len(found) // ENOUGH)]


def _value(profile: Engine, key: str) -> float:
    device, _, what = key.rpartition(".")
    return float(getattr(dict(profile.paces)[device] if device else profile, what))


def changed(profile: Engine, figures: dict[str, float]) -> Engine:
    """The profile with these constants (``DEVICE.constant`` is one of a pace)."""
    paces: dict[str, Pace] = dict(profile.paces)
    for key, value in figures.items():
        device, _, what = key.rpartition(".")
        if device:
            paces[device] = replace(paces[device], **{what: value})
    plain = {key: value for key, value in figures.items() if "." not in key}
    return replace(profile, paces=tuple(paces.items()), **plain)


def fitted(name: str) -> tuple[Engine, dict[str, float], str]:
    """The profile that comes nearest to its fitting half, what was changed in it, and how near it comes."""
    profile, mine, keys = engine(name), of_fitting_half(name), FREE[name]
    measured = np.log([run.seconds for run in mine])

    def figures(logs: np.ndarray) -> dict[str, float]:
        free = {
            key: min(math.exp(x), MOST.get(key.rpartition(".")[2], math.inf)) for key, x in zip(keys, logs, strict=True)
        }
        return free | {key: free[other] for key, other in FOLLOW.get(name, {}).items()}

    def errors(logs: np.ndarray) -> np.ndarray:
        tried = changed(profile, figures(logs))
        return np.log([as_run(run, tried)[0] for run in mine]) - measured

    best = np.log([max(_value(profile, key), 1e-7) for key in keys])
    for _ in range(2):
        best = simplex(lambda logs: float(np.abs(errors(logs)).mean()), best, calls=40 * len(keys))
    off = np.abs(np.expm1(errors(best)))
    told = f"{', '.join(figures(best))}: to {len(mine)} runs of the fitting half (bench/data/world), "
    told += f"mean error {100 * off.mean():.1f} %, worst {100 * off.max():.0f} %"
    rounded = {key: float(f"{value:.3g}") for key, value in figures(best).items()}
    return changed(profile, rounded), rounded, told


def written(text: str, key: str, value: str) -> str:
    """A profile's text with another value of one constant."""
    device, _, what = key.rpartition(".")
    head, mark, rest = text.partition(f"[pace.{device}]\n") if device else ("", "", text)
    return head + mark + re.sub(rf"^{what} = .*$", lambda _: f"{what} = {value}", rest, count=1, flags=re.MULTILINE)


def main() -> None:
    for name in sys.argv[1:] or FREE:
        _, figures, told = fitted(name)
        print(name, figures, told, flush=True)
        path = ROOT / "src" / "shardwright" / "cluster" / "engines" / f"{name}.toml"
        text = written(path.read_text(), "fitted", f'"{told}"')
        for key, value in figures.items():
            text = written(text, key, repr(value))
        path.write_text(text)


if __name__ == "__main__":
    main()
