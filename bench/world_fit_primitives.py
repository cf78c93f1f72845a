"""Fits a device's tables of primitives to the fitting half of what was measured, and writes them into the package.

    python bench/world_fit_primitives.py

The collectives' rows of that half are the table; sizes that it lacks are filled in from all others (:mod:`world_likeness`).
The constants of products are found by Nelder and Mead's simplex from one
fixed start, on the logarithms of predicted over measured seconds: the mean of their sizes
and, so that no shape is far off, of their squares. Rows of the judged half are never looked at.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from shardwright.cluster import preset
from shardwright.cluster.primitives import Products
from world_likeness import Filled
from world_runs import ROOT, WORLD, fitting

SYSTEMS = {"a100_sxm": "A100-80GB", "h100_sxm": "H100", "h200_sxm": "H200", "b200_sxm": "B200"}
MULTIPROCESSORS = {"A100-80GB": 108, "H100": 132, "H200": 132}
CACHES = {"A100-80GB": 40e6, "H100": 50e6, "H200": 50e6}
"""Bytes of the second-level cache (NVIDIA's whitepapers of both architectures)."""
SIZES = [2**power for power in range(9, 30)]
"""Bytes of a message, from the smallest that was measured to the largest."""
KINDS = {"alltoall": "all_to_all"}
FREE = ("start", "large", "half", "fall", "prologue", "epilogue", "memory", "resident", "spill", "cache", "rounding")
START = (2.5e-6, 0.8, 0.75, 0.4, 1e-6, 1e-7, 0.8, 2.0, 1.0, 3.0, 0.7)
MOST = {"large": 1.0, "half": 1.0, "rounding": 1.0}


def simplex(loss: Callable[[np.ndarray], float], start: np.ndarray, step: float = 0.2, calls: int = 1000) -> np.ndarray:
    """The lowest point that Nelder and Mead's simplex finds (coefficients adapted to dimensions: Gao and Han, 2012)."""
    n = len(start)
    points = np.array([start, *(start + step * unit for unit in np.eye(n))])
    values = np.array([loss(point) for point in points])
    grow, shrink, less, done = 1 + 2 / n, 1 - 1 / n, 0.75 - 0.5 / n, 0
    while done < calls:
        order = np.argsort(values, kind="stable")
        points, values = points[order], values[order]
        centre = points[:-1].mean(axis=0)
        mirrored = 2 * centre - points[-1]
        value, done = loss(mirrored), done + 1
        if value < values[0]:
            further = centre + grow * (mirrored - centre)
            reached, done = loss(further), done + 1
            points[-1], values[-1] = (further, reached) if reached < value else (mirrored, value)
        elif value < values[-2]:
            points[-1], values[-1] = mirrored, value
        else:
            nearer = centre + less * ((mirrored if value < values[-1] else points[-1]) - centre)
            reached, done = loss(nearer), done + 1
            if reached < min(value, values[-1]):
                points[-1], values[-1] = nearer, reached
            else:
                points[1:] = points[0] + shrink * (points[1:] - points[0])
                values[1:] = [loss(point) for point in points[1:]]
                done += n
    return points[values.argmin()]


def _rows(name: str) -> list[dict[str, str]]:
    with (WORLD / name).open() as file:
        return list(csv.DictReader(file))


def collectives() -> dict[str, dict[tuple[str, int], list[tuple[float, float]]]]:
    """By device, kind and number of devices: the fitting half's (bytes, seconds)."""
    found: dict[str, dict[tuple[str, int], list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in _rows("nvidia_nccl_collectives.csv"):
        kind = KINDS.get(row["collective"], row["collective"])
        if row["system"] in SYSTEMS and fitting(f"{kind},{row['gpus']},{row['bytes']}"):
            pair = float(row["bytes"]), float(row["microseconds"]) * 1e-6
            found[SYSTEMS[row["system"]]][kind, int(row["gpus"])].append(pair)
    return found


def products(device: str) -> Products:
    """The constants that come nearest to the fitting half's products."""
    system = next(name for name, preset_name in SYSTEMS.items() if preset_name == device)
    rows = [row for row in _rows("nvidia_gemm_bf16.csv") if row["system"] == system]
    rows = [row for row in rows if fitting(f"{row['m']},{row['n']},{row['k']}")]
    sizes = np.array([[float(row["m"]), float(row["n"]), float(row["k"]), 1.0] for row in rows])
    measured = np.array([float(row["microseconds"]) * 1e-6 for row in rows])
    sheet = preset(device)[0].device

    facts = sheet.peak("bfloat16"), sheet.bandwidth, MULTIPROCESSORS[device], CACHES[device]

    def made(logs: np.ndarray, source: str = "") -> Products:
        free = {name: min(float(np.exp(x)), MOST.get(name, np.inf)) for name, x in zip(FREE, logs, strict=True)}
        return Products(*facts, **free, source=source)

    def loss(logs: np.ndarray) -> float:
        errors = np.log(made(logs).seconds(sizes) / measured)
        return float(np.abs(errors).mean() + (errors**2).mean())

    best = np.log(np.array(START))
    for _ in range(4):
        best = simplex(loss, best, calls=800)
    errors = np.abs(made(best).seconds(sizes) / measured - 1)
    told = f"fitted to {len(rows)} products of ai-dynamo/aiconfigurator 095f58a51 (bench/data/world): "
    told += f"median error {100 * np.median(errors):.1f} %, worst {100 * errors.max():.0f} %"
    print(device, told)
    return made(best, told)


Table = dict[tuple[str, int], list[tuple[float, float]]]


def filled(tables: dict[str, Table]) -> dict[str, Table]:
    """The sizes that a device's table lacks, with the seconds that all measured rows together say."""
    measured = [
        (device, *key, amount, taken)
        for device, table in tables.items()
        for key, pairs in table.items()
        for amount, taken in pairs
    ]
    known = Filled([row[:4] for row in measured], np.array([row[4] for row in measured]), simplex)
    errors = np.abs(np.expm1(known.without))
    large = np.array([row[3] >= 2**20 for row in measured])
    print(f"collectives, each said from all others: median error {100 * np.median(errors):.1f} %, from 1 MB on worst "
          f"{100 * errors[large].max():.0f} %")  # fmt: skip
    found: dict[str, Table] = {}
    for device, table in tables.items():
        for key, pairs in table.items():
            missing = sorted({*SIZES} - {round(amount) for amount, _ in pairs})
            said = known.seconds([(device, *key, amount) for amount in missing])
            found.setdefault(device, {})[key] = list(zip(missing, said, strict=True))
    return found


def _lines(title: str, table: Table) -> list[str]:
    lines = []
    for kind in dict.fromkeys(kind for kind, _ in sorted(table)):
        lines.append(f"[{title}.{kind}]")
        for size in sorted(size for name, size in table if name == kind):
            pairs = ", ".join(f"[{amount:.0f}, {taken:.5g}]" for amount, taken in sorted(table[kind, size]))
            lines.append(f"{size} = [{pairs}]")
        lines.append("")
    return lines


def main() -> None:
    known = collectives()
    between = filled(known)
    for device, tables in known.items():
        lines = [f"# What was measured of the {device} by others; written by bench/world_fit_primitives.py."]
        count = sum(map(len, tables.values()))
        source = f"{count} rows of nccl-tests in ai-dynamo/aiconfigurator 095f58a51, Apache-2.0 (bench/data/world)"
        lines.append(f'source = "{source}"\n')
        if device in MULTIPROCESSORS:
            fitted = products(device)
            lines.append("[products]")
            for name in fitted.__dataclass_fields__:
                value = getattr(fitted, name)
                lines.append(f"{name} = {json.dumps(value) if isinstance(value, str) else format(value, '.5g')}")
            lines.append("")
        lines += _lines("collectives", tables)
        lines.append(
            "# Sizes that nobody measured, or that are kept aside, from all rows together: bench/world_likeness.py."
        )
        lines += _lines("filled", between[device])
        path = ROOT / "src" / "shardwright" / "cluster" / "primitives" / f"{device.lower()}.toml"
        path.write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
