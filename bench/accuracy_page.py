"""Renders ``docs/accuracy.md``, the one page on how wrong predictions are: ``python bench/accuracy_page.py``.

Every number comes from rows that are stored: published runs, collectives and products from ``bench/measured/world``, bytes
of single ranks from ``bench/measured/device_models``, and what was measured on our own H200 from the tables that other
programs render (``docs/benchmarks/accuracy.md`` and the latest draw of ``docs/benchmarks/drawn.md``); the words are in
``accuracy_page.md``. Nothing is predicted here and no row is left out; what has no prediction is counted beside what has
one. A test holds the page to this program.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

import world
from shardwright.cluster import toml_text

ROOT = Path(__file__).resolve().parents[1]
TEXT = Path(__file__).with_suffix(".md")
PAGE = ROOT / "docs" / "accuracy.md"
OWN = ROOT / "docs" / "benchmarks" / "accuracy.md"
DRAWN = ROOT / "docs" / "benchmarks" / "drawn.md"
RANKS = ROOT / "bench" / "measured" / "device_models"
ENGINES = ROOT / "src" / "shardwright" / "cluster" / "engines"

SOURCES = {
    "bloom": "BLOOM's sweep, 176 to 206 B parameters on 384 A100",
    "mpt": "MPT under FSDP, 8 to 512 A100 and H100",
    "torchtitan": "torchtitan, Llama 3.1 on H100",
    "korthikanti": "Megatron with sequence parallelism, A100",
    "megatron-a100": "Megatron of 2021 on 2 to 8 A100 †",
}


@dataclass(frozen=True)
class Errors:
    """Relative errors of predictions (signed), each with the name of what was predicted."""

    what: str
    rows: list[tuple[str, float]]
    without: int = 0
    """Rows that have no prediction or no measurement."""

    def cells(self) -> str:
        sizes = np.array([abs(error) for _, error in self.rows])
        name, worst = max(self.rows, key=lambda row: abs(row[1]))
        count = f"{len(sizes)} of {len(sizes) + self.without}" if self.without else str(len(sizes))
        return (
            f"| {self.what} | {count} | {100 * np.median(sizes):.1f} % | {100 * sizes.mean():.1f} % "
            f"| {100 * worst:+.1f} % | {name} |"
        )


def errors_table(rows: Iterable[Errors]) -> str:
    """One line for each set of rows, the worst one by name."""
    head = "| predicted | rows | median | mean | worst | the worst one |\n|---|--:|--:|--:|--:|---|"
    return "\n".join([head, *(row.cells() for row in rows)])


def table_rows(text: str, heading: str) -> Iterator[list[str]]:
    """Cells of the first table under a heading of a Markdown page, its head left out.

    >>> list(table_rows("# Page\\n\\n## Sizes\\n\\n| a | b |\\n|---|---|\\n| x | 1 |\\n| y | 2 |\\n\\nMore.", "## Sizes"))
    [['x', '1'], ['y', '2']]
    """
    lines = iter(text[text.index(f"\n{heading}") :].splitlines())
    for line in lines:
        if line.startswith("|--"):
            break
    for line in lines:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def _share(cell: str) -> float:
    return float(cell.split()[0]) / 100


def _own(heading: str, name: Sequence[int], column: int, what: str, page: Path = OWN) -> Errors:
    """Errors in one column of a rendered table; rows that say why they are not compared count as left out."""
    found, without = [], 0
    for cells in table_rows(page.read_text(), heading):
        if len(cells) > column and cells[column].endswith("%"):
            found.append((", ".join(cells[i] for i in name), _share(cells[column])))
        else:
            without += 1
    return Errors(what, found, without)


def _world(way: str, source: str, memory: bool = False) -> Errors:
    """Errors of one source's judged half, ``way`` it is priced."""
    found, without = [], 0
    for line in world.seen(world.stored("runs.jsonl"), way):
        if line["source"] != source or line["half"] != "judge" or line["out_of_memory"]:
            continue
        measured = line["measured_bytes" if memory else "measured"]
        if measured is None:
            continue
        if "predicted" not in line:
            without += 1
            continue
        name = f"{line['group']}, {line['run']}"
        found.append((name, line["predicted_bytes" if memory else "predicted"] / measured - 1))
    return Errors(SOURCES[source], found, without)


def _primitives(name: str, way: str, what: str, least: int = 0) -> Errors:
    """Errors of the judged half of collectives or products, all devices together."""
    rows = [
        (f"{line['system']}, {line['shape']}", line[way] / line["measured"] - 1)
        for line in world.stored(f"{name}.jsonl")
        if line["half"] == "judge" and line.get("bytes", least) >= least
    ]
    return Errors(what, rows)


def _rank_bytes(modes: Sequence[str], measured: str, what: str) -> Errors:
    """Bytes that one rank of eight took on the H200, latest row of every model and mode."""
    latest: dict[tuple[str, str], float] = {}
    for path in sorted(RANKS.glob("*.jsonl")):
        for text in path.read_text().splitlines():
            row = json.loads(text)
            if row.get("mode") in modes and row.get("predicted_bytes") and row.get(measured):
                latest[row["model"], row["mode"]] = row["predicted_bytes"] / row[measured] - 1
    return Errors(what, [(f"{model}, {mode}", error) for (model, mode), error in latest.items()])


def _draws() -> dict[str, str]:
    """Headings of the draws by their seeds: down to the latest that was measured whole, which others may stand before."""
    found: dict[str, str] = {}
    for line in DRAWN.read_text().splitlines():
        if line.startswith("## "):
            found[line.split("seed ")[1].split(",")[0] + (", half of it" if "cut short" in line else "")] = line
            if "cut short" not in line:
                break
    return found


def seconds() -> list[Errors]:
    """All errors of predicted seconds that the page shows."""
    drawn = [
        _own(heading, (0, 3), column, what.format(seed), DRAWN)
        for seed, heading in _draws().items()
        for column, what in (
            (5, "our H200: kernels of models drawn at random (seed {})"),
            (6, "the same models: with the gaps between kernels"),
            (8, "the same models: the eager step, host included"),
        )
    ]
    return [
        *(_world("engine's", source) for source in SOURCES),
        _primitives("collectives", "engine's", "NCCL collectives from 1 MB on, 2 to 8 devices of a node", world.LARGE),
        _primitives("products", "engine's", "bf16 matrix products, A100, H100, H200"),
        _own("## One device", (0,), 5, "our H200: eager steps of 18 models of our choice"),
        _own("## One rank of eight", (0, 1), 7, "our H200: replayed steps of one rank of eight, no communication"),
        *drawn,
        _own("## Two local processes", (0, 1), 6, "two processes on a CPU, gloo: the median step"),
    ]


def as_ours() -> list[Errors]:
    """The same judged half by the prices that the planner uses."""
    return [
        *(_world("ours", source) for source in SOURCES),
        _primitives("collectives", "ours", "NCCL collectives from 1 MB on", world.LARGE),
        _primitives("products", "ours", "bf16 matrix products"),
    ]


def memory() -> list[Errors]:
    """All errors of predicted peaks that the page shows."""
    return [
        _world("engine's", "bloom", memory=True),
        _world("engine's", "torchtitan", memory=True),
        _own("## One device", (0,), 9, "our H200: eager steps of 18 models of our choice"),
        _own("## One rank of eight", (0, 1), 11, "our H200: one rank of eight, plans of our choice"),
        *(
            _own(heading, (0, 3), 10, f"our H200: models drawn at random (seed {seed})", DRAWN)
            for seed, heading in _draws().items()
        ),
        _rank_bytes(("fsdp-eager", "dp-eager"), "allocated_bytes", "our H200: one rank of eight, allocated, eager"),
        _rank_bytes(("fsdp", "dp"), "reserved_bytes", "the same, reserved, recorded as CUDA graphs"),
        _rank_bytes(("fsdp-compiled", "dp-compiled"), "reserved_bytes", "the same, reserved, compiled and recorded"),
    ]


def order_table() -> str:
    """Pairs put in the right order and regret in the judged half, by both ways of pricing."""
    lines = [
        "| published runs | pairs | right | regret: median | worst | by the planner's prices: right | median | worst |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for source, what in SOURCES.items():
        pairs, cells = _pairs("ours", source)[1], []
        for figures in (_figures(way, source) for way in world.WAYS):
            if pairs:
                cells.append(f"{100 * figures['right order'] / pairs:.0f} %")
                cells += [f"{100 * figures[name]:.1f} %" for name in ("regret, median", "regret, worst")]
        if cells:
            lines.append(f"| {what} | {pairs} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def fitted_table() -> str:
    """The constants of every engine's profile, and the runs they were fitted to."""
    lines = ["| engine's profile | constants | fitted to |", "|---|---|---|"]
    for path in sorted(ENGINES.glob("*.toml")):
        said = toml_text.loads(path.read_text()).get("fitted", "")
        constants, _, rows = said.partition(": to ")
        count = len(constants.split(", ")) if said else 0
        lines.append(f"| {path.stem} | {count}: {constants} | {rows.split(' (')[0] or '–'} |")
    return "\n".join(lines)


def page() -> str:
    """The page."""
    return Template(TEXT.read_text()).substitute(
        in_short=_in_short(),
        seconds=errors_table(seconds()),
        left_out=_left_out(),
        as_ours=errors_table(as_ours()),
        order=order_table(),
        memory=errors_table(memory()),
        out_of_memory=_out_of_memory(),
        fitted=fitted_table(),
    )


MANY_PAIRS = 30
"""Pairs from which a source says something of the order."""


def _in_short() -> str:
    """What the tables say, in three sentences."""
    means = [np.mean([abs(error) for _, error in _world("engine's", name).rows]) for name in SOURCES]
    known, ours = (_right(way) for way in world.WAYS)
    own = [np.median([abs(error) for _, error in row.rows]) for row in memory()[2:]]
    return (
        f"**In short:** where we know the engine that runs a job, published steps are predicted within "
        f"{_between(means)} in\nthe mean and {_between(known, 0)} of the pairs of configurations are ordered rightly. "
        f"By the planner's own prices,\nwhich know nothing of that engine, {_between(ours, 0)} of them are. "
        f"Peak memory on our own H200 is within\n{_between(own)} in the median, compiled steps worst."
    )


def _between(shares: Sequence[float], digits: int = 1) -> str:
    return f"{100 * min(shares):.{digits}f} to {100 * max(shares):.{digits}f} %"


def _right(way: str) -> list[float]:
    """Shares of pairs put in the right order, of sources that have many."""
    return [right / pairs for right, pairs in (_pairs(way, name) for name in SOURCES) if pairs >= MANY_PAIRS]


def _pairs(way: str, source: str) -> tuple[int, int]:
    figures = _figures(way, source)
    return figures["right order"], figures["of pairs"]


def _figures(way: str, source: str) -> world.Line:
    """What :mod:`world` says of one source's judged half."""
    lines = world.seen(world.stored("runs.jsonl"), way)
    mine = [line for line in lines if line["source"] == source and line["half"] == "judge"]
    return world.judged(mine, world.constants(lines))


def _left_out() -> str:
    """Judged runs that have no prediction, by reason."""
    lines = [line for line in world.stored("runs.jsonl") if line["half"] == "judge" and "left_out" in line]
    return "; ".join(f"{many} ({reason})" for reason, many in Counter(line["left_out"] for line in lines).items())


def _out_of_memory() -> str:
    gone = [
        line
        for line in world.seen(world.stored("runs.jsonl"), "engine's")
        if line["half"] == "judge" and line["out_of_memory"] and "predicted_bytes" in line
    ]
    return f"{sum(x['predicted_bytes'] > x['usable_bytes'] for x in gone)} of {len(gone)} are predicted not to fit"


if __name__ == "__main__":
    PAGE.write_text(page())
