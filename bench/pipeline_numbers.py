"""Pipelines against one process: loss and every gradient, in float64, for every known schedule.

Each model in its small size, cut into equal runs of operators, runs every schedule in four ways: stages on two processes, on
four, and on two times two, where every stage is cut along the batch or along its weights. The batch is odd where that is
possible, so that micro-batches are unequal, and labels to be ignored lie unevenly in it; two more plans freeze the first
half of the parameters. The figure of a case is the largest difference on any rank, relative to the largest value of its
tensor (of the model's gradients, where a gradient is zero in theory); it agrees where that is at most 1e-9.

    python -m bench.pipeline_numbers [MODEL ...] [--again]   # runs what the results lack, or everything
    python -m bench.pipeline_numbers --table                 # the results as a table

Every case is a line of ``bench/measured/pipeline_numbers/MODEL.jsonl`` as soon as it is done, with the commit it was run at
and a digest of the sources; cases that agree are not run again unless asked for.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))  # last: the tests have a folder of the same name as this one

import torch  # noqa: E402 - after the path of the tests' helpers
from torch.distributed.tensor import DTensor  # noqa: E402

from bench.runtime_verify import commit, recorded, sources  # noqa: E402
from runtime.pipelines import halves, pipeline_plan  # noqa: E402
from runtime.pool import Pool, WorkerError  # noqa: E402
from shardwright.schedules import RECIPES  # noqa: E402

RESULTS = ROOT / "bench" / "measured" / "pipeline_numbers"
OWN = "bench/pipeline_models.py"
MODELS = ["gpt:small", "moe:small", f"{OWN}:unet", f"{OWN}:two_towers"]
MODELS += [f"hf:{name}:small" for name in ("gpt2", "llama", "bert", "t5", "vit", "mixtral", "CLIPModel")]
LIMIT = 1e-9


@dataclass(frozen=True)
class Case:
    """A plan for a model: ``inside`` says how the ranks of a stage share it."""

    processes: int
    schedule: str
    stages: int
    microbatches: int
    inside: str = "alone"
    frozen: bool = False

    @property
    def batch(self) -> int:
        """Odd where micro-batches need not be cut any further."""
        return 7 if self.inside == "alone" else 8


def cases() -> Iterator[Case]:
    for name, recipe in RECIPES.items():
        each = 1 if recipe.stages_per_device == 1 else 2
        yield Case(2, name, 2 * each, 3)
        yield Case(4, name, 4 * each, 4 if each == 2 else 3)
        yield Case(4, name, 2 * each, 2, "data")
        yield Case(4, name, 2 * each, 2, "tensor")
    for name in ("1f1b", "zb-h1"):
        yield Case(4, name, 4, 3, "alone", frozen=True)


@functools.lru_cache(maxsize=2)
def subject(reference: str, batch: int, frozen: bool) -> tuple[Any, ...]:
    """A model in double precision with its batch, its graph, and what one process makes of them."""
    from shardwright.frontend import capture
    from shardwright.verification.ignored import with_ignored_labels
    from shardwright.verification.prepare import all_double, widened, without_dropout
    from shardwright.verification.recorded import loss_of
    from shardwright.zoo.reference import resolve

    torch.manual_seed(0)
    found = resolve(reference, batch=batch, device="cpu")
    model, args, kwargs = widened(without_dropout(found.model), found.args, found.kwargs)
    parameters = list(model.parameters())
    for parameter in parameters[: len(parameters) // 2] if frozen else ():
        parameter.requires_grad_(False)
    with all_double(True):
        graph = capture(model, args, kwargs)
        args, kwargs, _ = with_ignored_labels(graph, args, kwargs)
        alone = copy.deepcopy(model)
        loss = loss_of(alone(*args, **kwargs))
    loss.backward()
    gradients = {name: p.grad for name, p in alone.named_parameters(remove_duplicate=False)}
    return model, args, kwargs, graph, loss.detach(), gradients


def difference(rank: int, reference: str, case: Case) -> float:
    """The largest difference on this rank."""
    from shardwright.runtime import parallelize
    from shardwright.verification.recorded import loss_of

    torch.set_default_dtype(torch.float32)
    model, args, kwargs, graph, loss, gradients = subject(reference, case.batch, case.frozen)
    ranks = 1 if case.inside == "alone" else 2
    plan = pipeline_plan(
        graph,
        halves(graph, case.stages),
        case.microbatches,
        case.schedule,
        ranks,
        inside=case.inside,
        devices=case.processes // ranks,
    )
    parallel = parallelize(copy.deepcopy(model), plan, args, kwargs, graph=graph)
    mine = loss_of(parallel(*args, **kwargs))
    mine.backward()
    largest = max(g.abs().max().item() for g in gradients.values() if g is not None)
    worst = (mine - loss).abs().item() / loss.abs().item()
    for name, parameter in parallel.named_parameters():
        wanted = gradients[name]
        if wanted is None:
            assert parameter.grad is None, f"{name} is frozen and has a gradient"
            continue
        given = parameter.grad
        given = given.full_tensor() if isinstance(given, DTensor) else given
        apart = (given - wanted).abs().max().item()
        size = wanted.abs().max().item()
        worst = max(worst, apart / (size if size > 1e-12 * largest else largest))
    return worst


def path_of(model: str) -> Path:
    return RESULTS / (re.sub(r"[^A-Za-z0-9]+", "_", model.removeprefix(f"{OWN}:").removesuffix(":small")) + ".jsonl")


def case_of(row: dict[str, Any]) -> Case:
    return Case(**{field.name: row[field.name] for field in fields(Case)})


def run(models: list[str], again: bool) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    about = {"commit": commit(), "sources": sources()}
    for processes in (2, 4):
        pool = Pool(processes)
        for model in models:
            path = path_of(model)
            done = set() if again else {case_of(row) for row in recorded(path) if row["agrees"]}
            for case in cases():
                row: dict[str, Any] = {"model": model, **asdict(case)}
                if case.processes != processes or case in done:
                    continue
                try:
                    worst = max(pool.run(difference, model, case, seconds=240))
                    row |= {"difference": worst, "agrees": worst <= LIMIT}
                except WorkerError as error:
                    row |= {"agrees": False, "failed": _last_line(str(error))}
                print(json.dumps(row), flush=True)
                with path.open("a") as file:
                    file.write(json.dumps(row | about) + "\n")
        pool.close()


def _last_line(text: str) -> str:
    return next((line for line in text.splitlines() if "Error" in line), text.splitlines()[0])[:300]


def table() -> None:
    """The last row of every case, model by model."""
    print("| model | 2 processes | 4 processes | 2 × 2, data | 2 × 2, tensor | frozen | worst |")
    print("|---|---|---|---|---|---|---|")
    for model in MODELS:
        rows = {case_of(row): row for row in recorded(path_of(model))}
        cells: dict[str, list[bool]] = {}
        for case, row in rows.items():
            column = "frozen" if case.frozen else case.inside if case.inside != "alone" else str(case.processes)
            cells.setdefault(column, []).append(row["agrees"])
        shown = [f"{sum(c)}/{len(c)}" for c in (cells.get(k, []) for k in ("2", "4", "data", "tensor", "frozen"))]
        worst = max((row.get("difference", float("inf")) for row in rows.values()), default=float("nan"))
        print(f"| {model.removeprefix(f'{OWN}:')} | {' | '.join(shown)} | {worst:.0e} |")


def main() -> None:
    names = [name for name in sys.argv[1:] if not name.startswith("--")]
    if "--table" not in sys.argv:
        run(names or MODELS, "--again" in sys.argv)
    table()


if __name__ == "__main__":
    main()
