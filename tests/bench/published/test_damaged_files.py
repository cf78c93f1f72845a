"""Files of published problems, damaged: each ends in an answer or one sentence, soon and in little memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench.published.aceso import COLUMNS
from bench.published.formats import solve_file
from bench.published.rebalance import Job, rebalance
from bench.published.rebalance.sequences import deal_out
from bench.published.rebalance.traces import read_job

from fuzz.fuzzer import fuzz
from fuzz.mutations import CHANGES, changed, deepened
from fuzz.targets import Target

WAY = {"timePerSample": 2.0, "parameterSize": 1e6, "memoryUsageA": 1e6, "memoryUsageB": 1e6}
WAYS = [WAY, {**WAY, "timePerSample": 3.0, "memoryUsageA": 1e5}]
PIPER = {
    "maxDevices": 4, "maxMemoryPerDevice": 1e9, "bandwidth": 1e9, "mbsInBatch": 8,
    "nodes": [{"id": v, "TMPCs": {"1": [w | {"syncTimeFw": {}, "syncTimeBw": {}} for w in WAYS]}} for v in range(4)],
    "edges": [{"sourceId": v, "destId": v + 1, "communicationCost": 1e3} for v in range(3)],
}  # fmt: skip
STRATEGIES = [
    {"id": f"s{tp}", "tp": tp, "sp": 1, "zero": 0, "seconds_with_sync": 1.1, "seconds_without_sync": 1.0 + tp / 10,
     "memory_mb_per_stage": [9 - tp]} for tp in (1, 2)
]  # fmt: skip
GALVATRON = {
    "name": "small", "devices": 2, "global_batch": 8, "microbatches": 4, "memory_limit_mb": 30,
    "one_strategy_for_all_layers": False,
    "pipelines": [{
        "pp": 1, "layers_per_stage": [3], "strategies": STRATEGIES, "buffer_mb": {"2": 1.0},
        "ends": [{"tp": 1, "sp": 1, "zero": 0, "seconds_without_sync": [0.5], "memory_mb_per_stage": [1]}],
        "transition_seconds": [[0, 0.1], [0.1, 0]],
    }],
}  # fmt: skip
ROW = [1000.0, 2000.0, 4.0, 4.0, 1.0, 3.0, 1.0, 1.0]
ACESO = {
    "devices_per_node": 2, "memory_limit_mb": 80, "bandwidth_gb_per_s_within_node": [4.0, 5.0],
    "bandwidth_gb_per_s_between_nodes": [1.0, 2.0],
    "models": [{
        "name": "small", "layers": 2, "devices": 4, "global_batch": 4, "head_ops": ["encoder-embedding"],
        "layer_ops": ["enc-1st-layernorm", "enc-MLP-gelu"], "tail_ops": ["gpt-post-process"], "columns": list(COLUMNS),
        "profiles": [{"microbatch": 1, "tp": tp, "rows": [ROW] * 4} for tp in (1, 2)],
    }],
}  # fmt: skip
JOB = {
    "dp": 2, "microbatches_per_replica": 3, "hop_seconds_median": 0.1, "fixed_seconds": {"optimizer": 1.0},
    "forward_seconds_median": [[1.0, 1.0], [2.0, 1.0]], "backward_seconds_median": [[2.0, 2.0], [4.0, 2.0]],
    "forward_seconds": [[[[1.0, 2.0, 5.0], [1.0, 2.0, 5.0]], [[3.0, 1.0, 4.0], [3.0, 1.0, 4.0]]]],
    "backward_seconds": [[[[1.0, 2.0, 5.0], [1.0, 2.0, 5.0]], [[3.0, 1.0, 4.0], [3.0, 1.0, 4.0]]]],
}  # fmt: skip


def share_anew(path: Path) -> None:
    job = read_job(path)
    if isinstance(job, Job):
        rebalance(job, "common")
    else:
        deal_out(job)


@pytest.mark.parametrize("document", [PIPER, GALVATRON, ACESO, JOB], ids=["piper", "galvatron", "aceso", "rebalance"])
def test_damaged_files_end_in_an_answer_or_one_sentence(document: dict[str, Any], tmp_path: Path) -> None:
    solve = share_anew if document is JOB else solve_file

    def run(folder: Path, changes: Any) -> None:
        path = folder / "problem.json"
        path.write_bytes(deepened(json.dumps(changed(document, changes))))
        solve(path)

    def whole() -> None:
        """Compiles what every case needs, which is neither its time nor its files."""
        for memory in (80, 55):
            path = tmp_path / "problem.json"
            path.write_text(json.dumps({**document, "memory_limit_mb": memory}))
            solve(path)

    found = fuzz(Target("damaged", 1.0, CHANGES, run, whole), 60, seed=11)
    faults = {what: case for what, case in found.faults.items() if "/compiled/" not in what}
    assert not faults, faults
