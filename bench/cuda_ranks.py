"""The runtime on a GPU with collectives that really happen: several ranks share one device, gloo between them.

    python bench/cuda_ranks.py plan                  # anywhere: makes the plans (bench/measured/cuda_ranks)
    python bench/cuda_ranks.py check -o cuda.json    # on one GPU, two minutes; torch alone suffices
    python bench/cuda_ranks.py check --device cpu    # the same on a CPU

NCCL refuses two ranks on one GPU, and a fake group computes nothing, but gloo takes CUDA tensors: what runs is the runtime's
own streams and events, gathers ahead of use, buckets and sums on their side stream. Three AdamW steps in float64 must
give the losses and parameters of one process on the same device within 1e-9.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

PLANS = Path(__file__).resolve().parent / "measured" / "cuda_ranks"
TOLERANCE = 1e-9
CASES = (  # search, cluster, model, batch, sequence
    ("data-parallel", "2xH200", "gpt:small", 8, 16),
    ("fsdp", "2xH200", "gpt:small", 8, 16),
    ("megatron", "2xH200", "gpt:small", 8, 16),
    ("zero-1", "2xH200", "gpt:small", 8, 16),
    ("data-parallel", "2x2xH200", "gpt:small", 8, 16),
    ("fsdp", "2x2xH200", "gpt:small", 8, 16),
    ("data-parallel", "2xH200", "wresnet50:small", 8, None),
)
Case = tuple[str, str, str, int, int | None]


def _file(case: Case) -> str:
    return f"{case[0]}-{case[1]}-{case[2].replace(':', '_')}.json"


def _model(case: Case, device: str) -> Any:
    from shardwright.zoo.reference import resolve

    return resolve(case[2], batch=case[3], seq=case[4], device=device, dtype="float64")


def make_plans(folder: Path) -> None:
    from shardwright.cluster import parse_cluster
    from shardwright.frontend import capture
    from shardwright.planner import Options, plan_graph

    folder.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        built = _model(case, "meta")
        graph = capture(built.model, built.args, built.kwargs)
        plan = plan_graph(graph, parse_cluster(case[1]), Options(case[0], (), fewer_devices=False))
        plan.save(folder / _file(case))
        print(f"{_file(case)}: {plan.stages[0].strategy.axes}")


def _train(model: Any, built: Any, device: str) -> list[float]:
    """Three steps and one more loss, which sees what they did to the parameters."""
    import torch

    from shardwright._torch_compat import map_tree

    def there(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    args, kwargs = map_tree(there, built.args), map_tree(there, built.kwargs)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(4):
        out = model(*args, **kwargs)
        loss = out if isinstance(out, torch.Tensor) else out[0]
        losses.append(float(loss.detach()))
        if step < 3:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return losses


def _built(case: Case) -> Any:
    import torch

    torch.manual_seed(0)
    return _model(case, "cpu")


def one_rank(case: Case, folder: Path, device: str) -> float:
    """This rank's largest deviation from a process that has the model to itself."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    from shardwright.frontend import capture
    from shardwright.plans import Plan
    from shardwright.plans.plan import Signature
    from shardwright.runtime.parallelize import parallelize

    dist.init_process_group("gloo")
    plan = Plan.load(folder / _file(case))
    alone = _built(case)
    alone.model.to(device)
    expected = _train(alone.model, alone, device)
    built = _built(case)
    graph = capture(built.model, built.args, built.kwargs)
    plan = replace(plan, signature=Signature.of(graph))
    parallel = parallelize(built.model, plan, graph=graph, device=device)
    worst = max(abs(a - b) / abs(b) for a, b in zip(_train(parallel, built, device), expected, strict=True))
    truth = dict(alone.model.named_parameters())
    for name, parameter in parallel.named_parameters():
        mine, whole = parameter.detach(), truth[name].detach()
        if isinstance(mine, DTensor):
            shape, offset = compute_local_shape_and_global_offset(mine.shape, mine.device_mesh, mine.placements)
            whole = whole[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))]
            mine = mine.to_local()
        if whole.numel():
            worst = max(worst, float((mine - whole).abs().max() / whole.abs().max()))
    dist.destroy_process_group()
    return worst


def check(folder: Path, device: str, output: Path | None) -> bool:
    """Every case in processes of its own."""
    rows = []
    for case in CASES:
        world = 1
        for part in case[1].split("x")[:-1]:
            world *= int(part)
        with tempfile.TemporaryDirectory() as scratch:
            command = [sys.executable, __file__, "one", str(folder), "--case", json.dumps(case), "--device", device]
            ranks = []
            for rank in range(world):
                there = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
                there |= {"MASTER_PORT": str(29500 + os.getpid() % 1000 + len(rows)), "OMP_NUM_THREADS": "1"}
                log = open(Path(scratch) / str(rank), "w+")  # noqa: SIM115  (read after the process has ended)
                ranks.append((subprocess.Popen(command, env=os.environ | there, stdout=log, stderr=log), log))
            said = []
            for process, log in ranks:
                try:
                    process.wait(120)
                except subprocess.TimeoutExpired:
                    process.kill()
                log.seek(0)
                said.append(log.read().strip().splitlines() or ["nothing"])
                log.close()
        found = [float(lines[-1]) if lines[-1][:1].isdigit() else None for lines in said]
        worst = None if None in found else max(x for x in found if x is not None)
        verdict = "did not run: " + " / ".join(said[found.index(None)][-4:])[-500:] if worst is None else f"{worst:.1e}"
        rows.append({"case": case, "deviation": worst, "said": verdict})
        print(f"{case[0]:14} {case[1]:9} {case[2]:16} {verdict}", flush=True)
        if output:
            output.write_text(json.dumps({"device": device, "rows": rows}))
    return all(row["deviation"] is not None and row["deviation"] <= TOLERANCE for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("plan", "check", "one"))
    parser.add_argument("folder", type=Path, nargs="?", default=PLANS)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--case", type=json.loads)
    asked = parser.parse_args()
    if asked.command == "plan":
        make_plans(asked.folder)
    elif asked.command == "one":
        print(one_rank(tuple(asked.case), asked.folder, asked.device))
    else:
        sys.exit(not check(asked.folder, asked.device, asked.output))


if __name__ == "__main__":
    main()
