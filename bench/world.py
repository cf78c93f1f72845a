"""Predictions against what the world measured: training runs put in order, collectives, matrix products.

    python bench/world.py            # the fitting half's tables, from the stored raw output
    python bench/world.py --judge    # the judged half's too; not while anything is being fitted
    python bench/world.py --run      # predict everything again and store it, bench/measured/world/
    python bench/world.py --engines  # predict again what engines' profiles say: a minute
    python bench/world.py --write    # the judged half's tables into docs/benchmarks/world.md

Training runs are those of :mod:`world_runs`, predicted twice: as their engine runs them (:mod:`world_engines`) and as ours
would (:mod:`world_prices`). Per source and half: the error of predicted
seconds as they are and with one constant per engine (the median ratio of the fitting half's groups); the share of pairs of
a group, more than 3 % apart, that are put in the right order; the rank correlation inside groups; and the *regret*: by how
much the configuration that the predictions would have picked is slower than the best one measured in its group. Memory is
judged where a source tells it; runs that ran out of memory must be predicted not to fit. Collectives and products are
priced by the tables of primitives and by the shipped presets. Nothing is fitted here but the constants named; the halves
are those of a hash.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from world_runs import ROOT, WORLD, fitting, runs

WRITTEN = ROOT / "bench" / "measured" / "world"
PAGE = ROOT / "docs" / "benchmarks" / "world.md"
BEGIN, END = "<!-- python bench/world.py --write -->", "<!-- end -->"
APART = 0.03
"""Two measured runs closer than this are not in an order."""
LARGE = 2**20
"""Bytes above which the worst collective is judged."""
SYSTEMS = {"a100_sxm": "A100-80GB", "h100_sxm": "H100", "h200_sxm": "H200", "b200_sxm": "B200"}
WAYS = {"engine's": "As their engines run them", "ours": "As ours would run them"}
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


def predict(say: Callable[[str], None], known: Sequence[Line] = ()) -> list[Line]:
    """Every run with what is predicted of it: as its engine runs it, and as ours would (``known``: as it was stored)."""
    from shardwright.errors import ShardwrightError
    from world_engines import as_run
    from world_prices import cluster_of, predicted

    lines = []
    for number, published in enumerate(runs()):
        line: Line = {"source": published.source, "group": published.group, "run": published.name}
        line |= {"engine": published.engine, "half": "fit" if published.fitting else "judge"}
        line |= {"batch": published.batch, "measured": None if published.out_of_memory else published.seconds}
        line |= {"measured_bytes": published.memory or None, "out_of_memory": published.out_of_memory}
        if published.left_out:
            line["left_out"] = published.left_out
        elif known and "left_out" in known[number]:
            line["left_out"] = known[number]["left_out"]
        else:
            try:
                ours = known[number]["ours"] if known else predicted(published)
                line["ours"], line["engine's"] = tuple(ours), as_run(published)
                line["usable_bytes"] = cluster_of(published).device.usable_memory
            except ShardwrightError as error:
                line["left_out"] = f"refused: {error.message}"
        lines.append(line)
        say(f"{len(lines)} {published.source} {published.group} {published.name}")
    return lines


def both_ways(lines: Sequence[Line]) -> Line:
    """Of pairs of one group, more than 3 % apart, the shares put in the right order by both prices, by one, by none."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        if "ours" in line and line["measured"] is not None:
            groups.setdefault(line["group"], []).append(line)
    pairs = [pair for group in groups.values() for pair in combinations(group, 2) if _apart(*map(_per_row, pair))]

    def right(pair: tuple[Line, Line], way: str) -> bool:
        a, b = (line[way][0] / line["batch"] for line in pair)
        return (a < b) == (_per_row(pair[0]) < _per_row(pair[1]))

    found = [(right(pair, "engine's"), right(pair, "ours")) for pair in pairs]
    names = {"by both": (True, True), "as their engine runs them alone": (True, False)}
    names |= {"as ours would alone": (False, True), "by neither": (False, False)}
    return {"pairs": len(found)} | {name: found.count(kind) / max(len(found), 1) for name, kind in names.items()}


def _per_row(line: Line) -> float:
    return float(line["measured"] / line["batch"])


def seen(lines: Iterable[Line], way: str) -> list[Line]:
    """The lines as one of :data:`WAYS` predicts them."""
    return [
        line | ({"predicted": line[way][0], "predicted_bytes": line[way][1]} if way in line else {}) for line in lines
    ]


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
    """Every measured collective of a system that is a preset, as its table and as the preset prices it."""
    from shardwright.cluster import mesh_of, parse_cluster
    from shardwright.cluster.primitives import primitives
    from shardwright.costs.collectives import SECONDS

    with (WORLD / "nvidia_nccl_collectives.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["system"] in SYSTEMS]
    lines = []
    for row in rows:
        device, gpus, amount = SYSTEMS[row["system"]], int(row["gpus"]), float(row["bytes"])
        table = primitives(device)
        assert table is not None
        kind = {"alltoall": "all_to_all"}.get(row["collective"], row["collective"])
        shape = f"{kind},{row['gpus']},{row['bytes']}"
        line: Line = {"system": row["system"], "shape": shape, "half": "fit" if fitting(shape) else "judge"}
        line |= {"bytes": amount, "measured": float(row["microseconds"]) * 1e-6}
        line["engine's"] = table.collective(kind, gpus, amount)
        line["ours"] = float(SECONDS[kind](amount, mesh_of(parse_cluster(f"{gpus}x{device}")).axes[0]))
        lines.append(line)
    return lines


def products() -> list[Line]:
    """Every measured matrix product, as the device's table and as the preset prices it."""
    from shardwright.cluster import preset
    from shardwright.cluster.primitives import primitives
    from shardwright.costs.compute import kernel_seconds
    from shardwright.operators.work import product

    with (WORLD / "nvidia_gemm_bf16.csv").open() as file:
        rows = list(csv.DictReader(file))
    lines = []
    for row in rows:
        device = SYSTEMS[row["system"]]
        table = primitives(device)
        assert table is not None and table.products is not None
        m, n, k = (np.array([float(row[key])]) for key in "mnk")
        work = product("bfloat16", m, n, k, np.ones(1), "matmul/forward")
        shape = f"{row['m']},{row['n']},{row['k']}"
        line: Line = {"system": row["system"], "shape": shape, "half": "fit" if fitting(shape) else "judge"}
        line["measured"] = float(row["microseconds"]) * 1e-6
        line["engine's"] = float(table.products.seconds(work.features)[0])
        line["ours"] = float(kernel_seconds(work, preset(device)[0].device)[0])
        lines.append(line)
    return lines


def primitives(lines: Sequence[Line]) -> Line:
    """Errors of the device's table, and beside them of the preset's price."""
    found: Line = {"rows": len(lines)}
    large = np.array([line.get("bytes", LARGE) >= LARGE for line in lines])
    for way, name in (("engine's", "by the table"), ("ours", "by the preset")):
        errors = np.array([abs(line[way] / line["measured"] - 1) for line in lines])
        found |= {f"median, {name}": float(np.median(errors)), f"worst, {name}": _most(errors[large])}
    return found


TWINS = ("h100_sxm", "h200_sxm")
"""Systems whose chips, links and switches are alike: they differ in memory, and a little in clocks."""
BOUND = 400.0
"""Operations per byte from which a product waits for arithmetic on both."""


def twins(lines: Sequence[Line]) -> Line:
    """By how much the same measurement differs between the twins, where memory does not decide: all rows, of both halves,
    for this is about the source and no prediction."""
    seconds: dict[str, dict[str, float]] = {}
    for line in lines:
        if line["system"] in TWINS and (line.get("bytes", 0.0) >= LARGE or _busy(line["shape"]) >= BOUND):
            seconds.setdefault(line["shape"], {})[line["system"]] = line["measured"]
    apart = np.array([max(both.values()) / min(both.values()) - 1 for both in seconds.values() if len(both) == 2])
    found: Line = {"rows": len(apart), "median": float(np.median(apart))}
    return found | {"one in a hundred": float(np.quantile(apart, 0.99)), "worst": float(apart.max())}


def _busy(shape: str) -> float:
    """Operations per byte of a product (m,n,k); none of a collective."""
    sizes = shape.split(",")
    if not sizes[0].isdigit():
        return 0.0
    m, n, k = map(float, sizes)
    return m * n * k / (m * k + n * k + m * n)


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


def stored(name: str) -> list[Line]:
    """The raw output of that name in ``bench/measured/world``."""
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
    runs_stored, parts = stored("runs.jsonl"), []
    for way, title in WAYS.items():
        lines = seen(runs_stored, way)
        factors = constants(lines)
        told = ", ".join(f"{engine} {factor:.2f}" for engine, factor in factors.items())
        parts.append(f"{title} (constants, measured over predicted seconds, medians of the fitting half: {told}):")
        parts.append(table(halves(lines, "source", partial(judged, factors=factors), half)))
    shares = halves(runs_stored, "source", both_ways, half)
    parts.append("Pairs put in the right order by the one price and by the other:")
    parts.append(table({source: row for source, row in shares.items() if row["pairs"] > 1}))
    for name in ("collectives", "products"):
        parts += [f"{name.capitalize()}:", table(halves(stored(f"{name}.jsonl"), "system", primitives, half))]
    apart = {name: twins(stored(f"{name}.jsonl")) for name in ("collectives", "products")}
    parts += [
        "How far the source itself is apart, H100 against H200 where memory does not decide (all rows):",
        table(apart),
    ]
    return "\n\n".join(parts)


def worst(half: str, count: int) -> str:
    """The runs of a half that are furthest off, as their engines run them."""
    timed = [line for line in seen(stored("runs.jsonl"), "engine's") if _timed(line) and line["half"] == half]
    timed.sort(key=lambda line: -abs(np.log(line["predicted"] / line["measured"])))
    return "\n".join(
        f"- {x['source']}, {x['group']}, {x['run']}: {x['predicted']:.4g} s, measured {x['measured']:.4g}"
        for x in timed[:count]
    )


WORST = 8
"""Runs that the page names."""


def page() -> str:
    """What the page shows of the judged half."""
    return f"{BEGIN}\n{tables('judge')}\n\nFurthest off in the judged half:\n\n{worst('judge', WORST)}\n{END}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="predict again, and store what was predicted")
    parser.add_argument("--judge", action="store_true", help="print the judged half too: once, when all is fitted")
    parser.add_argument("--write", action="store_true", help=f"the judged half's tables into {PAGE.relative_to(ROOT)}")
    parser.add_argument("--worst", type=int, default=0, help="so many of the worst runs by name")
    parser.add_argument("--engines", action="store_true", help="predict again as engines run them, and store that")
    asked = parser.parse_args()
    if asked.run or asked.engines:
        _write("collectives.jsonl", collectives())
        _write("products.jsonl", products())
        known = () if asked.run else stored("runs.jsonl")
        _write("runs.jsonl", predict(lambda text: print(text, file=sys.stderr), known))
    for half in ("fit", "judge") if asked.judge else ("fit",):
        print(f"Half: {half}\n\n{tables(half)}\n\n{worst(half, asked.worst)}")
    if asked.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{page()}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
