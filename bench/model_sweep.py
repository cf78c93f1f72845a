"""Any model: every architecture of ``transformers``, and models that are not Hugging Face's, captured, planned, verified.

The architectures are all model types of the library that have a model class of their own, with the head of their usual
pre-training task where there is one with a loss, in their default configuration (caches on) at tiny sizes. ``capture``:
built on the CPU, run eagerly (what cannot run is no test), captured, and the graph replayed; loss and all gradients must be
the eager model's. ``verify``: those captured, planned as `megatron` and `fsdp` and trained in float64 on two processes.
``pieces``: fifty drawn at random, in four micro-batches: through a pipeline of two stages, and added up under `fsdp`.

``call``: built and called once, forward and backward, with inputs of their own kind; the cheapest answer to how many can be.

The workers stay alive from model to model; one that dies or exceeds the limit is replaced. Every row is appended to a file
as it comes, and models the file has are not run again (``--again STAGE`` runs those that ended there), so that an
interrupted sweep is simply started anew; ``--minutes`` ends it by itself, between two models.

    python -m bench.model_sweep call --minutes 20
    python -m bench.model_sweep capture
    python -m bench.model_sweep capture --again capture,differs --only gpt2,t5
    python -m bench.model_sweep verify --limit 120
    python -m bench.model_sweep pieces --minutes 20
    python -m bench.model_sweep table > docs/models.md
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import random
import time
from pathlib import Path
from typing import Any

from tests.runtime.pool import Pool, WorkerError

from bench.model_table import table
from bench.runtime_verify import commit, sources
from bench.sweep_workers import BATCH, IN_PIECES, OWN, PIECES, call_one, capture_one, verify_one

RESULTS = Path(__file__).parent / "measured" / "models.jsonl"
WAYS = {"verify": ("megatron", "fsdp"), "pieces": tuple(IN_PIECES)}
"""In which models are trained on two processes."""
DRAWN, SEED = 50, 36
"""So many types of `transformers` are trained in pieces, the first of all captured ones in an order drawn from this seed."""
FRESH_WORKERS_AFTER = 60  # models: exports leave much behind
MOST_MEGABYTES = 1500
"""A worker that has had more is replaced."""


def references() -> list[str]:
    """``hf:TYPE:small`` for every model type with a model class, and our own."""
    import transformers
    from transformers.models.auto import modeling_auto

    mappings = [
        value for name, value in vars(modeling_auto).items() if name.startswith("MODEL_") and name.endswith("_MAPPING")
    ]
    found = [
        f"hf:{model_type}:small"
        for model_type, config in transformers.CONFIG_MAPPING.items()
        if any(config in mapping for mapping in mappings)
    ]
    from tests.frontend import various

    return [*sorted(found), *(f"{OWN}{name}" for name in various.MODELS)]


def recorded(path: Path, phase: str) -> dict[str, dict[str, Any]]:
    """The last row of every model in a phase."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["model"]: row for row in map(json.loads, lines) if row["phase"] == phase}


def wanted(phase: str, path: Path, only: str, again: str) -> list[str]:
    """The models that a phase still has to do; those to be verified have been captured."""
    done = recorded(path, phase)
    models = list(recorded(path, "capture")) if phase in WAYS else references()
    if phase == "call":
        models = [model for model in models if not model.startswith(OWN)]
    if phase in WAYS:
        captured = recorded(path, "capture")
        models = [model for model in models if captured[model]["stage"] == "captured"]
        random.Random(SEED).shuffle(models)  # an interrupted sweep has seen a fair sample
    if phase == "pieces":
        models = [model for model in sorted(models) if not model.startswith(OWN)]
        random.Random(SEED).shuffle(models)
        models = models[:DRAWN]
    if only:
        names = only.split(",")
        models = [model for model in models if model in names or model.split(":")[1] in names]
    stages, since = again.split(","), str(datetime.date.today() - datetime.timedelta(days=1))

    def to_do(model: str) -> bool:
        row = done.get(model)
        older = row is not None and row.get("date", "") < since
        return row is None or "all" in stages or row["stage"] in stages or (older and "older" in stages)

    came_through = {name for name, row in done.items() if row["stage"] in ("called", "captured", "verified")}
    # What has not been through yet says most.
    return sorted(filter(to_do, models), key=lambda model: model in came_through)


def sweep(phase: str, models: list[str], limit: float, path: Path, minutes: float = math.inf) -> None:
    """Run a phase over ``models`` and append a row for each; after so many minutes none is begun any more."""
    end = time.monotonic() + 60 * minutes
    common = {"phase": phase, "commit": commit(), "sources": sources(), "date": str(datetime.date.today())}
    pool, used = Pool(2 if phase in WAYS else 1), 0
    for number, model in enumerate(models, 1):
        if time.monotonic() > end:
            break
        if used >= FRESH_WORKERS_AFTER:
            pool.close()
            used = 0
        used += 1
        started = time.monotonic()
        try:
            if phase in WAYS:
                rows = PIECES if phase == "pieces" else BATCH
                row = _joined(pool.run(verify_one, limit, model, WAYS[phase], rows, seconds=limit))
            else:
                row = pool.run(call_one if phase == "call" else capture_one, limit, model, seconds=limit)[0]
            if row["peak_mb"] > MOST_MEGABYTES or row["stage"] == "time limit":
                used = FRESH_WORKERS_AFTER
        except WorkerError as error:
            used = 0
            text = str(error)
            row = {"stage": "time limit" if "answer" in text else "crash", "why": text.strip().splitlines()[-1][:300]}
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps({"model": model, **common, **row}) + "\n")
        took = time.monotonic() - started
        print(f"{number}/{len(models)} {model}: {row['stage']} ({took:.0f} s) {row.get('why', '')[:200]}", flush=True)
    pool.close()


def _joined(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of the first rank, or that of another one that failed where the first did not; the largest costs."""
    row = rows[0] if rows[0]["stage"] != "verified" else next((r for r in rows[1:] if r.get("why")), rows[0])
    return row | {what: max(r[what] for r in rows) for what in ("cpu_seconds", "peak_mb")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=("call", "capture", *WAYS, "table"))
    parser.add_argument("--limit", type=float, default=120.0, help="processor seconds for one model (default 120)")
    parser.add_argument("--only", default="", help="model types or references, separated by commas")
    again = "stages whose models are run again, `older` for rows from before yesterday, or `all`"
    parser.add_argument("--again", default="", help=again)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no model after so long")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.phase == "table":
        print(table(*(recorded(options.results, phase) for phase in ("capture", "verify", "call", "pieces"))))
        return
    models = wanted(options.phase, options.results, options.only, options.again)
    sweep(options.phase, models, options.limit, options.results, options.minutes)


if __name__ == "__main__":
    main()
