"""Predictions against what the world measured: training runs put in order, collectives, matrix products.

    python bench/world.py            # the fitting half's tables, from the stored raw output
    python bench/world.py --judge    # the judged half's too; not while anything is being fitted
    python bench/world.py --run      # predict everything again and store it, bench/measured/world/
    python bench/world.py --write    # the judged half's tables into docs/benchmarks/world.md

Training runs are those of :mod:`world_runs`, predicted by :mod:`world_prices`. Per source and half: the error of predicted
seconds as they are and with one constant per engine (the median ratio of the fitting half's groups); the share of pairs of
a group, more than 3 % apart, that are put in the right order; the rank correlation inside groups; and the *regret*: by how
much the configuration that the predictions would have picked is slower than the best one measured in its group. Memory is
judged where a source tells it; runs that ran out of memory must be predicted not to fit. Collectives and products are
priced by the shipped presets. Nothing is fitted here but the constants named; the halves are those of a hash.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from world_runs import ROOT, SOURCES, WORLD, fitting, runs

WRITTEN = ROOT / "bench" / "measured" / "world"
PAGE = ROOT / "docs" / "benchmarks" / "world.md"
BEGIN, END = "<!-- python bench/world.py --write -->", "<!-- end -->"
APART = 0.03
"""Two measured runs closer than this are not in an order."""
LARGE = 2**20
"""Bytes above which the worst collective is judged."""
SYSTEMS = {"a100_sxm": "A100-80GB", "h100_sxm": "H100", "h200_sxm": "H200", "b200_sxm": "B200"}
Line = dict[str, Any]


def order(measured: Sequence[float], predicted: Sequence[float]) -> tuple[int, int]:
    """Pairs that are put in the right order, of those that differ by more than 3 %.

    >>> order([1.0, 2.0, 2.01], [5.0, 7.0, 6.0])
    (2, 2)
    """
    apart = [(a, b) for a, b in combinations(range(len(measured)), 2) if _apart(measured[a], measured[b])]
    right = sum((measured[a] < measured[b]) == (predicted[a] < predicted[b]) for a, b in apart)
    return right, len(apart)


def _apart(a: float, b: float) -> bool:
    return max(a, b) > (1 + APART) * min(a, b)


def regret(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """How much slower the run predicted fastest is than the fastest one.

    >>> regret([10.0, 11.0, 12.0], [3.0, 2.0, 4.0])
    0.10000000000000009
    """
    return measured[int(np.argmin(predicted))] / min(measured) - 1


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's; ties share their places.

    >>> rank_correlation([1, 2, 3], [3, 2, 1])
    -1.0
    """

    def places(values: Sequence[float]) -> np.ndarray:
        array = np.array(values)
        return np.array([(array < v).sum() + (array == v).sum() / 2 for v in values])

    x, y = places(a), places(b)
    if x.std() == 0 or y.std() == 0:
        return 0.0
    return round(float(np.corrcoef(x, y)[0, 1]), 12)


def predict(names: Iterable[str], say: Callable[[str], None]) -> list[Line]:
    """Every run of these sources with what the product predicts of it."""
    from shardwright.errors import ShardwrightError
    from world_prices import cluster_of, predicted

    lines = []
    for published in runs(names):
        line: Line = {"source": published.source, "group": published.group, "run": published.name}
        line |= {"engine": published.engine, "half": "fit" if published.fitting else "judge"}
        line |= {"batch": published.batch, "measured": None if published.out_of_memory else published.seconds}
        line |= {"measured_bytes": published.memory or None, "out_of_memory": published.out_of_memory}
        if published.left_out:
            line["left_out"] = published.left_out
        else:
            try:
                line["predicted"], line["predicted_bytes"] = predicted(published)
                line["usable_bytes"] = cluster_of(published).device.usable_memory
            except ShardwrightError as error:
                line["left_out"] = f"refused: {error.message}"
        lines.append(line)
        say(f"{len(lines)} {published.source} {published.group} {published.name}")
    return lines


def constants(lines: Iterable[Line]) -> dict[str, float]:
    """Per engine the median of measured over predicted seconds in the fitting half (1 where that has no run)."""
    ratios: dict[str, list[float]] = {}
    for line in lines:
        mine = ratios.setdefault(line["engine"], [])
        if line["half"] == "fit" and _timed(line):
            mine.append(line["measured"] / line["predicted"])
    return {engine: float(np.median(mine)) if mine else 1.0 for engine, mine in ratios.items()}


def _timed(line: Line) -> bool:
    return "predicted" in line and line["measured"] is not None


def judged(lines: Sequence[Line], factors: dict[str, float]) -> Line:
    """All figures of one source's half."""
    timed = [line for line in lines if _timed(line)]
    errors = np.array([line["predicted"] / line["measured"] - 1 for line in timed])
    scaled = np.array([factors[line["engine"]] * line["predicted"] / line["measured"] - 1 for line in timed])
    groups: dict[str, list[Line]] = {}
    for line in timed:
        groups.setdefault(line["group"], []).append(line)
    several = [group for group in groups.values() if len(group) > 1]
    times = [[[line[key] / line["batch"] for line in group] for key in ("measured", "predicted")] for group in several]
    pairs = [order(measured, ours) for measured, ours in times]
    regrets = [regret(measured, ours) for measured, ours in times]
    correlations = [rank_correlation(measured, ours) for measured, ours in times if len(measured) > 2]
    told = [line for line in timed if line["measured_bytes"]]
    memory = np.array([line["predicted_bytes"] / line["measured_bytes"] - 1 for line in told])
    gone = [line for line in lines if line["out_of_memory"] and "predicted" in line]
    return {
        "runs": len(timed),
        "left out": sum("left_out" in line for line in lines),
        "mean error": _mean(abs(errors)),
        "worst error": _most(abs(errors)),
        "mean, one constant": _mean(abs(scaled)),
        "worst, one constant": _most(abs(scaled)),
        "right order": sum(right for right, _ in pairs),
        "of pairs": sum(many for _, many in pairs),
        "rank correlation": _mean(np.array(correlations)),
        "regret, median": float(np.median(regrets)) if regrets else None,
        "regret, worst": max(regrets, default=None),
        "memory, mean": _mean(abs(memory)),
        "memory, worst": _most(abs(memory)),
        "memory, runs": len(told),
        "out of memory": len(gone),
        "of them said not to fit": sum(line["predicted_bytes"] > line["usable_bytes"] for line in gone),
    }


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def _most(values: np.ndarray) -> float | None:
    return float(values.max()) if len(values) else None


def collectives() -> list[Line]:
    """Every measured collective of a system that is a preset, with the preset's price."""
    from shardwright.cluster import mesh_of, parse_cluster
    from shardwright.costs.collectives import SECONDS

    with (WORLD / "nvidia_nccl_collectives.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["system"] in SYSTEMS]
    lines = []
    for row in rows:
        axis = mesh_of(parse_cluster(f"{row['gpus']}x{SYSTEMS[row['system']]}")).axes[0]
        kind = {"alltoall": "all_to_all"}.get(row["collective"], row["collective"])
        shape = f"{kind},{row['gpus']},{row['bytes']}"
        lines.append(
            {
                "system": row["system"],
                "shape": shape,
                "half": "fit" if fitting(shape) else "judge",
                "bytes": float(row["bytes"]),
                "measured": float(row["microseconds"]) * 1e-6,
                "predicted": float(SECONDS[kind](float(row["bytes"]), axis)),
            }
        )
    return lines


def products() -> list[Line]:
    """Every measured matrix product with the preset's price."""
    from shardwright.cluster import preset
    from shardwright.costs.compute import kernel_seconds
    from shardwright.costs.kernels_dense import product

    with (WORLD / "nvidia_gemm_bf16.csv").open() as file:
        rows = list(csv.DictReader(file))
    lines = []
    for row in rows:
        m, n, k = (np.array([float(row[key])]) for key in "mnk")
        work = product("bfloat16", m, n, k, np.ones(1), "matmul/forward")
        shape = f"{row['m']},{row['n']},{row['k']}"
        lines.append(
            {
                "system": row["system"],
                "shape": shape,
                "half": "fit" if fitting(shape) else "judge",
                "measured": float(row["microseconds"]) * 1e-6,
                "predicted": float(kernel_seconds(work, preset(SYSTEMS[row["system"]])[0].device)[0]),
            }
        )
    return lines


def primitives(lines: Sequence[Line]) -> Line:
    errors = np.array([abs(line["predicted"] / line["measured"] - 1) for line in lines])
    large = np.array([line.get("bytes", LARGE) >= LARGE for line in lines])
    return {"rows": len(lines), "median": float(np.median(errors)), "worst, large": _most(errors[large])}


def shown(value: Any, name: str) -> str:
    if value is None:
        return "–"
    if isinstance(value, int):
        return str(value)
    return f"{value:.2f}" if name == "rank correlation" else f"{100 * value:.1f} %"


def table(rows: dict[str, Line]) -> str:
    """One line a figure, one column a row of what was judged."""
    names = list(next(iter(rows.values())))
    lines = ["| | " + " | ".join(rows) + " |", "|---|" + "---|" * len(rows)]
    for name in names:
        lines.append(f"| {name} | " + " | ".join(shown(row[name], name) for row in rows.values()) + " |")
    return "\n".join(lines)


def _read(name: str) -> list[Line]:
    with (WRITTEN / name).open() as file:
        return [json.loads(line) for line in file]


def _write(name: str, lines: Iterable[Line]) -> None:
    WRITTEN.mkdir(parents=True, exist_ok=True)
    (WRITTEN / name).write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def halves(lines: Sequence[Line], key: str, figures: Callable[[list[Line]], Line], half: str) -> dict[str, Line]:
    """The figures of one half, per source or system."""
    mine = [line for line in lines if line["half"] == half]
    return {name: figures([line for line in mine if line[key] == name]) for name in dict.fromkeys(x[key] for x in mine)}


def tables(half: str) -> str:
    """All tables of one half, from the stored raw output."""
    lines = _read("runs.jsonl")
    factors = constants(lines)
    parts = [
        "Constants (measured over predicted seconds, medians of the fitting half): "
        + ", ".join(f"{engine} {factor:.2f}" for engine, factor in factors.items())
        + ".",
        table(halves(lines, "source", lambda mine: judged(mine, factors), half)),
    ]
    for name in ("collectives", "products"):
        parts += [f"{name.capitalize()}:", table(halves(_read(f"{name}.jsonl"), "system", primitives, half))]
    return "\n\n".join(parts)


def worst(half: str, count: int) -> str:
    """The runs of a half that are furthest off, constants taken in."""
    lines = _read("runs.jsonl")
    factors = constants(lines)
    timed = [line for line in lines if _timed(line) and line["half"] == half]
    timed.sort(key=lambda line: -abs(np.log(factors[line["engine"]] * line["predicted"] / line["measured"])))
    return "\n".join(
        f"{x['source']} {x['group']} {x['run']}: {x['predicted']:.4g} s, measured {x['measured']:.4g}"
        for x in timed[:count]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="predict again, and store what was predicted")
    parser.add_argument("--judge", action="store_true", help="print the judged half too: once, when all is fitted")
    parser.add_argument("--write", action="store_true", help=f"the judged half's tables into {PAGE.relative_to(ROOT)}")
    parser.add_argument("--worst", type=int, default=0, help="so many of the worst runs by name")
    asked = parser.parse_args()
    if asked.run:
        _write("collectives.jsonl", collectives())
        _write("products.jsonl", products())
        _write("runs.jsonl", predict(SOURCES, lambda text: print(text, file=sys.stderr)))
    for half in ("fit", "judge") if asked.judge else ("fit",):
        print(f"Half: {half}\n\n{tables(half)}\n\n{worst(half, asked.worst)}")
    if asked.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{tables('judge')}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
