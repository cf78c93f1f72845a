"""Two plans side by side: differences add up, the decisions that matter are named, other models are refused."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.reports.conftest import Planned, planned

from shardwright.cli import main
from shardwright.errors import PlanError
from shardwright.reports.attribution import costs, total
from shardwright.reports.diff import HOST, ISSUING, RESTING, UPDATE, compare, family
from shardwright.reports.diff_page import diff_page, headline, signed
from shardwright.reports.steps import PlanStep

MODEL, CLUSTER = "gpt:layers=3,width=512,heads=8,vocab=1000", "4xH200"


@pytest.fixture(scope="module")
def found() -> Planned:
    return planned(MODEL, CLUSTER, batch=16, search="data-parallel", baselines=(), fewer_devices=False)


@pytest.fixture(scope="module")
def megatron(found: Planned) -> Planned:
    return planned(MODEL, CLUSTER, batch=16, search="megatron", baselines=(), fewer_devices=False)


@pytest.mark.parametrize("which", ["gpt", "on_processors"])
def test_computing_exposed_and_idle_seconds_add_up_to_the_step(which: str, request: pytest.FixtureRequest) -> None:
    case: Planned = request.getfixturevalue(which)
    (rank,) = PlanStep.of(case.plan, case.graph).timeline.ranks
    each, gaps = costs(rank)
    together, idle = total(each), sum(gap.seconds for gap in gaps)
    assert together.seconds + idle == pytest.approx(rank.seconds, rel=1e-9)
    assert together.exposed == pytest.approx(rank.exposed(), rel=1e-9)
    stretched = together.computing / rank.load["compute"]  # where sending takes a share of the processor
    assert stretched == pytest.approx(1.0, rel=1e-9) if which == "gpt" else stretched > 1.0


def test_what_both_plans_split_alike_costs_about_as_much_in_both(found: Planned) -> None:
    """Its share of what decides the step changes with everything around it; what it computes does not."""
    other = planned(MODEL, CLUSTER, batch=16, search="fsdp", baselines=(), fewer_devices=False)
    decisions = {d.what: d for d in compare(found.plan, other.plan, found.graph).decisions}
    alike = [abs(d.difference) for what, d in decisions.items() if what not in (RESTING, UPDATE)]
    assert not any(d.differs for what, d in decisions.items() if what not in (RESTING, UPDATE))
    assert max(alike) < 0.5 * abs(
        decisions[RESTING].difference
    )  # less than a parameter gathered beside it stretches it


def test_differences_add_up_and_name_what_makes_them(found: Planned, megatron: Planned) -> None:
    compared = compare(found.plan, megatron.plan, found.graph)
    assert sum(d.difference for d in compared.decisions) == pytest.approx(compared.seconds, rel=1e-9, abs=1e-12)
    assert compared.seconds == pytest.approx(
        megatron.plan.prediction.step_seconds - found.plan.prediction.step_seconds, rel=1e-9
    )
    by_name = {d.what: d for d in compared.decisions}
    for module in ("blocks.*.attention", "blocks.*.feed"):
        decision = by_name[module]
        assert decision.differs and "batch" in decision.first and "features" in decision.second
        # Megatron completes one sum of activations forward and one backward in each.
        assert decision.parts["activations all-reduce"] > 0.5 * decision.difference > 0
    assert by_name[UPDATE].difference < 0  # each rank updates a part of the parameters only
    telling = [d.what for d in compared.decisions if d.differs][:3]
    said = headline(compared)
    assert len(telling) == 3 and all(what in said for what in telling)
    rest = compared.seconds - sum(d.difference for d in compared.decisions if d.what in telling)
    assert f"everything else {signed(rest)}; together {signed(compared.seconds)}." in said


def test_where_the_host_decides_its_seconds_belong_to_what_it_issues(gpt: Planned) -> None:
    """So small a model waits for the host alone; Megatron's further collectives have to be issued too."""
    other = planned("gpt:small", "2x2xH100", search="megatron", baselines=(), fewer_devices=False)
    compared = compare(gpt.plan, other.plan, gpt.graph)
    assert sum(d.difference for d in compared.decisions) == pytest.approx(compared.seconds, rel=1e-9, abs=1e-12)
    by_name = {d.what: d for d in compared.decisions}
    assert HOST not in by_name
    assert by_name["blocks.*.attention"].parts[ISSUING] != 0
    said = headline(compared)
    telling = [d.difference for d in compared.decisions if d.differs][:3]
    assert len(telling) == 3 and "everything else" in said
    assert abs(compared.seconds - sum(telling)) < max(map(abs, telling))  # what is named is most of it


def test_a_decision_taken_over_alone_is_simulated(found: Planned) -> None:
    other = planned(MODEL, CLUSTER, batch=16, search="fsdp", baselines=(), fewer_devices=False)
    compared = compare(found.plan, other.plan, found.graph)
    by_name = {d.what: d for d in compared.decisions}
    resting = by_name[RESTING]
    assert resting.differs and resting.alone is not None
    # Data parallelism and FSDP split every operator alike: the whole difference is where parameters rest.
    assert resting.alone == pytest.approx(compared.steps[0].timeline.seconds, rel=1e-9)


def test_a_plan_does_not_differ_from_itself(found: Planned) -> None:
    compared = compare(found.plan, found.plan, found.graph)
    assert compared.seconds == 0 and not any(d.differs or d.difference for d in compared.decisions)
    assert headline(compared) == "Both plans decide the same."


def test_plans_of_other_models_are_refused(found: Planned, gpt: Planned) -> None:
    with pytest.raises(PlanError, match="different models"):
        compare(found.plan, gpt.plan, found.graph)


def test_families_of_modules() -> None:
    assert family("model.layers.7.self_attn.q_proj") == "model.layers.*.self_attn"
    assert family("layers.3") == "layers.*" and family("0.weight") == "*.weight"


def test_the_command_speaks_tables_json_and_pages(
    found: Planned,
    megatron: Planned,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, case in (("found", found), ("megatron", megatron)):
        replace(case.plan, model="").save(tmp_path / f"{name}.json")
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["shardwright", "diff", *words])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert not stopped.value.code
        return capsys.readouterr().out

    said = json.loads(run("found.json", "megatron.json", "--json", "--html", "diff.html"))
    assert said["difference_seconds"] == pytest.approx(sum(d["difference"] for d in said["decisions"]))
    assert "What differs" in (tmp_path / "diff.html").read_text()
    assert "The decisions that make the difference" in " ".join(run("found.json", "megatron.json").split())


def test_the_page_of_a_comparison(found: Planned, megatron: Planned, opened: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    compared = compare(found.plan, megatron.plan, found.graph)
    view = opened(diff_page(compared, ("found", "megatron")), 1280, "dark")
    page = view.page
    groups = page.evaluate("shardwright.timeline.groups.map((g) => g.title)")
    assert groups == ["found", "megatron"] and view.said == []
    totals = page.evaluate("shardwright.runs.map((run) => run.total)")
    assert totals == pytest.approx([step.timeline.seconds for step in compared.steps], rel=1e-9)
    assert not axe.Axe().run(page).response["violations"]
