"""A thin wrap of torchrun: a plan knows how many nodes and processes it needs, and the script finds it by itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from shardwright._torch_compat import listen_on_loopback
from shardwright.errors import PlanError, RunError
from shardwright.loopback import ADDRESS
from shardwright.plans import Plan
from shardwright.runtime.job import JobProcess, task_of
from shardwright.runtime.replanning import ELASTIC_VARIABLE

PLAN_VARIABLE = "SHARDWRIGHT_PLAN"
# Otherwise the processes of a restarted job find the addresses of the dead ones in the store and cannot connect.
FRESH_STORE = ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


def torchrun_arguments(
    plan: Plan,
    script: list[str],
    *,
    nproc_per_node: int | None = None,
    nnodes: str | None = None,
    node_rank: int | None = None,
    rdzv_endpoint: str | None = None,
    max_restarts: int = 0,
    elastic: bool = False,
) -> list[str]:
    """The command line torchrun is given; ``elastic``: a range of nodes, ``1:2``, the plan being for the most of them."""
    devices, planned_nodes = plan.devices, len(plan.cluster.nodes)
    nodes = planned_nodes if nnodes is None else _node_count(nnodes, most=elastic)
    if devices % nodes:
        raise RunError(f"{devices} processes do not divide over {nodes} nodes.", "Give --nnodes that divides them.")
    each = devices // nodes if nproc_per_node is None else nproc_per_node
    if each * nodes != devices:
        raise RunError(
            f"{nodes} nodes with {each} processes make {each * nodes}; the plan is for {devices}.",
            f"Start {devices // nodes} processes on each node.",
        )
    wanted = nnodes if elastic and nnodes is not None else str(nodes)
    arguments = [f"--nproc-per-node={each}", f"--nnodes={wanted}", f"--max-restarts={max_restarts}"]
    if nodes == 1 and rdzv_endpoint is None:  # all on this machine, whose loopback interface is enough for them
        arguments += ["--standalone", f"--local-addr={ADDRESS}"]
    elif rdzv_endpoint is None:
        raise RunError(
            f"The plan runs on {nodes} nodes, which must find each other.",
            "Give --rdzv-endpoint host:port of the first node, the same on every node.",
        )
    else:
        arguments += ["--rdzv-backend=c10d", f"--rdzv-endpoint={rdzv_endpoint}"]
    if node_rank is not None:
        arguments.append(f"--node-rank={node_rank}")
    return [*arguments, *script]


def _node_count(text: str, most: bool = False) -> int:
    """The number of nodes in ``4`` or torchrun's ``4:8``, the least or the most."""
    digits = text.split(":")[-1 if most else 0]
    if not (digits.isascii() and digits.isdigit() and 1 <= len(digits) <= 6 and int(digits) > 0):
        raise RunError(f"--nnodes {text!r} is no number of nodes.", "Give a whole number, such as 2.")
    return int(digits)


def node_options(task: JobProcess, plan: Plan) -> dict[str, object]:
    """What torchrun is told where a launcher started one task on every node."""
    if plan.devices % task.count:
        raise RunError(
            f"{task.launcher} started {task.count} tasks; the plan is for {plan.devices} processes.",
            f"Start {plan.devices} tasks (srun --ntasks {plan.devices}), or one on every node "
            "(srun --ntasks-per-node 1).",
        )
    return {"nnodes": str(task.count), "node_rank": task.rank, "rdzv_endpoint": f"{task.address}:{task.port}"}


def elastic_options(environment: Mapping[str, str]) -> dict[str, object]:
    """What Kubernetes' training operator tells torchrun by environment variables (``PET_…``), which ours overrule.

    >>> elastic_options({"PET_RDZV_ENDPOINT": "job-worker-0:23456", "PET_NNODES": "2"})
    {'nnodes': '2', 'rdzv_endpoint': 'job-worker-0:23456'}
    """
    names = {"nnodes": "PET_NNODES", "rdzv_endpoint": "PET_RDZV_ENDPOINT"}
    return {option: environment[name] for option, name in names.items() if environment.get(name)}


def start(plan_file: Path, script: list[str], **options: object) -> None:
    """Run a script under a plan in this process (torchrun's agent); returns when all its processes are done."""
    plan = Plan.load(plan_file)
    if not script or not Path(script[0]).is_file():
        named = script[0] if script else "nothing"
        raise RunError(f"There is no script {named!r}.", "Write: shardwright run plan.json -- script.py arguments")
    task = task_of(os.environ)
    if options.get("elastic"):
        os.environ[ELASTIC_VARIABLE] = "1"
    os.environ[PLAN_VARIABLE] = str(plan_file.resolve())
    if task is not None and task.count == plan.devices:  # one task for every process: this is one of them
        os.environ.update(task.variables())
        os.execv(sys.executable, [sys.executable, *script])
    told = elastic_options(os.environ) if task is None else node_options(task, plan)
    options = {**told, **{name: value for name, value in options.items() if value is not None}}
    if task is not None:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # of pods; those of processes are torchrun's to set
            os.environ.pop(name, None)
    arguments = torchrun_arguments(plan, script, **options)  # type: ignore[arg-type]  # checked by the command's types
    if "--standalone" in arguments:
        listen_on_loopback()
        arguments = [*arguments[: len(arguments) - len(script)], "-m", "shardwright.loopback", *script]
    os.environ.setdefault(*FRESH_STORE)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // plan.devices)))
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    try:
        main(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise RunError(
            f"Rank {rank} failed first (exit code {failure.exitcode}).",
            "Its own output above says why; --max-restarts with a checkpoint lets a job go on after a lost rank.",
        ) from None


def plan_of_job() -> Plan:
    """The plan that ``shardwright run`` started this process with."""
    path = os.environ.get(PLAN_VARIABLE)
    if path is None:
        raise PlanError(
            "No plan was given, and this process was not started by `shardwright run`.",
            "Pass a plan to parallelize(), or start with: shardwright run plan.json -- script.py",
        )
    return Plan.load(path)
