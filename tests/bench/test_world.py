"""The judge of predictions: its figures by hand, its data read whole, its halves made of groups."""

from __future__ import annotations

import sys
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import world  # noqa: E402
import world_fit_primitives  # noqa: E402
from shardwright.cluster import parse_cluster  # noqa: E402
from shardwright.cluster.engine import engine  # noqa: E402
from shardwright.cluster.primitives import primitives  # noqa: E402
from world_engines import as_run  # noqa: E402
from world_fit_engines import changed, written  # noqa: E402
from world_likeness import Filled  # noqa: E402
from world_prices import predicted, stage_mesh  # noqa: E402
from world_runs import SOURCES, grouped, runs  # noqa: E402

ROWS = {"bloom": 46, "mpt": 138, "torchtitan": 32, "korthikanti": 8, "megatron-a100": 1440}


def test_every_published_row_is_read_and_halves_are_made_of_whole_groups() -> None:
    found = runs()
    assert {source: sum(run.source == source for run in found) for source in ROWS} == ROWS
    assert len(SOURCES) == len(ROWS)
    for group in grouped(found).values():
        assert len({run.fitting for run in group}) == 1
    for run in found:
        assert run.batch % (run.data * run.microbatch) == 0, run
        if not run.left_out:
            assert run.devices == run.tensor * run.pipeline * run.data, run
    assert sum(run.out_of_memory for run in found) == 2


def test_order_counts_pairs_of_a_group_that_are_apart() -> None:
    assert world.order([100.0, 102.0, 110.0], [3.0, 1.0, 2.0]) == (1, 2)  # the first two are too close to call
    assert world.order([1.0, 2.0], [2.0, 2.0]) == (0, 1)  # a draw is not an order
    assert world.regret([100.0, 102.0, 110.0], [3.0, 2.0, 1.0]) == pytest.approx(0.1)


def _line(group: str, half: str, measured: float, predicted: float) -> dict[str, object]:
    line = {"source": "s", "group": group, "run": "r", "engine": "e", "half": half, "batch": 4, "measured": measured}
    return line | {"measured_bytes": None, "out_of_memory": False, "predicted": predicted, "predicted_bytes": 5.0}


def test_constants_come_from_the_fitting_half_alone() -> None:
    lines = [_line("a", "fit", 2.0, 1.0), _line("b", "judge", 9.0, 1.0)]
    assert world.constants(lines) == {"e": 2.0}
    told = world.judged(lines[1:], {"e": 2.0})
    assert told["mean, one constant"] == pytest.approx(7 / 9)
    assert told["mean error"] == pytest.approx(8 / 9)


def test_runs_out_of_memory_must_be_said_not_to_fit() -> None:
    gone = _line("a", "judge", 1.0, 1.0) | {"measured": None, "out_of_memory": True, "usable_bytes": 4.0}
    fits = {**gone, "usable_bytes": 6.0}
    told = world.judged([gone, fits, _line("a", "judge", 1.0, 1.0)], {"e": 1.0})
    assert (told["out of memory"], told["of them said not to fit"], told["runs"]) == (2, 1, 1)


def test_the_tensor_axis_is_the_last_one() -> None:
    assert stage_mesh(parse_cluster("8xA100-80GB"), 4, 2).sizes == (4, 2)
    assert stage_mesh(parse_cluster("4x8xA100-80GB"), 16, 2).sizes == (4, 4, 2)
    assert stage_mesh(parse_cluster("4x8xA100-80GB"), 4, 8).sizes == (4, 8)


def test_a_small_run_is_predicted_from_the_model_alone() -> None:
    small = [r for r in runs(["megatron"]) if (r.tensor, r.pipeline, r.data) == (1, 2, 1) and r.model.hidden == 1024]
    shallow, deep = (sorted(small, key=lambda run: (run.model.layers, run.batch))[place] for place in (0, -1))
    (quick, little), (slow, much) = predicted(shallow), predicted(deep)
    assert 0 < quick < slow < inf and 0 < little < much


def test_engines_price_every_run_that_is_not_left_out_and_more_work_takes_longer() -> None:
    some = [run for run in runs() if not run.left_out][::97]
    assert {run.source for run in some} >= {"bloom", "mpt", "megatron-a100"}
    for published in some:
        seconds, needed = as_run(published)
        deeper = replace(published, model=replace(published.model, layers=2 * published.model.layers))
        slower, more = as_run(deeper)
        assert 0 < seconds < slower < inf and 0 < needed < more


def test_what_an_engine_does_is_felt_in_its_runs() -> None:
    published = next(run for run in runs(["bloom"]) if not run.left_out and run.tensor == 8)
    profile = engine(published.engine)
    usual = as_run(published)[0]
    for other in (replace(profile, blocking=False), replace(profile, dropout=False), replace(profile, network=1.0)):
        assert as_run(published, other)[0] < usual
    slower = changed(profile, {"A100.products": dict(profile.paces)["A100"].products / 2})
    assert 1.3 < as_run(published, slower)[0] / usual < 2


def test_constants_are_fitted_by_a_simplex_and_written_where_they_stand() -> None:
    found = world_fit_primitives.simplex(lambda at: float(((at - [1, -2, 3]) ** 2).sum()), np.zeros(3), calls=400)
    assert found == pytest.approx([1, -2, 3], abs=1e-2)
    text = "hop = 1.0\n\n[pace.A100]\nproducts = 0.5\n\n[pace.H100]\nproducts = 0.6\n"
    text = written(written(text, "H100.products", "0.7"), "hop", "2.0")
    assert text == "hop = 2.0\n\n[pace.A100]\nproducts = 0.5\n\n[pace.H100]\nproducts = 0.7\n"


def test_tables_of_primitives_hold_the_fitting_half_alone_and_miss_it_by_what_they_say() -> None:
    for device, kept in world_fit_primitives.collectives().items():
        table = primitives(device)
        assert table is not None
        assert table.collectives.keys() == kept.keys()
        for key, rows in kept.items():
            measured = {round(amount): taken for amount, taken in rows}
            held = {round(amount): taken for amount, taken in table.collectives[key]}
            assert [*held] == sorted({*world_fit_primitives.SIZES, *measured})  # what nobody measured is filled in
            assert {amount: held[amount] for amount in measured} == pytest.approx(measured, rel=1e-3)
    for line in (line for line in world.stored("products.jsonl") if line["half"] == "fit"):
        assert 0.5 < line["engine's"] / line["measured"] < 2


def test_a_collective_that_nobody_measured_is_said_by_those_that_somebody_did() -> None:
    """Two systems alike, the one without its large messages: they follow from the other's, at its own rate."""
    sizes = [2.0**power for power in range(10, 29, 2)]
    rows = [(name, kind, count, size) for name in ("one", "other") for kind in ("all_gather", "all_reduce")
            for count in (2, 8) for size in sizes]  # fmt: skip
    seconds = np.array([1e-5 * (1 + (name == "other")) + size / 2e11 * (1 + (kind == "all_reduce")) * (1 - 1 / count)
                        for name, kind, count, size in rows])  # fmt: skip
    hidden = np.array([row[0] == "other" and row[1] == "all_reduce" and row[2] == 8 and row[3] > 2**22 for row in rows])
    known = [row for row, gone in zip(rows, hidden, strict=True) if not gone]
    found = Filled(known, seconds[~hidden], world_fit_primitives.simplex)
    said = found.seconds([row for row, gone in zip(rows, hidden, strict=True) if gone])
    assert said == pytest.approx(seconds[hidden], rel=0.1)
    assert np.abs(found.without).max() < 0.15


def test_pairs_are_counted_by_which_price_puts_them_right() -> None:
    def line(measured: float, theirs: float, ours: float) -> dict[str, object]:
        return {"group": "g", "batch": 1, "measured": measured, "engine's": (theirs, 0.0), "ours": (ours, 0.0)}

    found = world.both_ways([line(1.0, 1.0, 2.0), line(2.0, 2.0, 1.0), line(2.02, 3.0, 3.0)])  # the last two are alike
    assert found["pairs"] == 2 and found["by both"] == 0.5 and found["as their engine runs them alone"] == 0.5


def test_the_source_itself_is_apart_by_so_much() -> None:
    lines = [{"system": name, "shape": "4096,4096,4096", "measured": taken} for name, taken in
             (("h100_sxm", 1.0), ("h200_sxm", 1.2), ("a100_sxm", 9.0))]  # fmt: skip
    lines += [{"system": name, "shape": "16,4096,4096", "measured": taken} for name, taken in
              (("h100_sxm", 1.0), ("h200_sxm", 3.0))]  # fmt: skip
    found = world.twins(lines)  # the second product waits for memory, which they have another of
    assert found["rows"] == 1 and found["worst"] == pytest.approx(0.2)


def test_the_page_shows_what_is_stored() -> None:
    assert len(world.stored("runs.jsonl")) == sum(ROWS.values())
    assert world.page() in world.PAGE.read_text(), "bench/world.py --write"
