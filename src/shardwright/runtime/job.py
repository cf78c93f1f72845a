"""Who started this process, and as which of how many: Slurm, MPI, Kubernetes, torchrun, or nobody.

Launchers say so in environment variables. Where there is one task for every process of the plan, the script runs in this
very process, with what ``torch.distributed`` reads set for it (https://docs.pytorch.org/docs/stable/distributed.html, "env://");
where there is one task for every node, torchrun runs here and starts the node's processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.cluster.slurm import job_hosts
from shardwright.errors import RunError

PORTS = range(20_000, 40_000)
"""Below those that systems hand out by themselves; jobs on one node take different ones, by their number."""


@dataclass(frozen=True)
class JobProcess:
    """Process ``rank`` of ``count``, ``local`` on its node; ``address`` and ``port`` are where all meet."""

    launcher: str
    rank: int
    count: int
    local: int
    address: str
    port: int

    def variables(self) -> dict[str, str]:
        """What ``torch.distributed.init_process_group()`` looks for."""
        found = {"RANK": self.rank, "WORLD_SIZE": self.count, "LOCAL_RANK": self.local}
        return {name: str(value) for name, value in found.items()} | {
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


_MPI = (
    (
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def task_of(environment: Mapping[str, str]) -> JobProcess | None:
    """The task that this process is, or nothing where a person started it.

    ``torchrun`` and Kubernetes' PyTorchJob set RANK and WORLD_SIZE (of processes the one, of pods the other); inside of an
    ``srun`` or ``mpirun`` their own variables tell.

    >>> task_of({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "a[1-2]",
    ...          "SLURM_JOB_ID": "7"})
    JobProcess(launcher='Slurm', rank=5, count=8, local=1, address='a1', port=20007)
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        launcher = "torchrun" if "LOCAL_RANK" in environment else "Kubernetes"
        rank, count = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
        local = _number(environment, "LOCAL_RANK", 0)
        return JobProcess(launcher, rank, count, local, *_rendezvous(environment, launcher, alone=count == 1))
    for launcher, rank_name, size, local_rank, local_size in _MPI:
        if rank_name in environment and size in environment:
            rank, count = _number(environment, rank_name), _number(environment, size)
            alone = count == 1 or _number(environment, local_size, 0) == count
            return JobProcess(
                launcher, rank, count, _number(environment, local_rank, 0), *_rendezvous(environment, launcher, alone)
            )
    if "SLURM_STEP_ID" in environment or "SLURM_STEP_NODELIST" in environment:  # not in the batch script itself
        rank, count = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_NTASKS")
        port = PORTS[_number(environment, "SLURM_JOB_ID", 0) % len(PORTS)]
        given = environment.get("MASTER_ADDR", job_hosts(environment)[0])
        local = _number(environment, "SLURM_LOCALID", 0)
        return JobProcess("Slurm", rank, count, local, given, _number(environment, "MASTER_PORT", port))
    return None


def _rendezvous(environment: Mapping[str, str], launcher: str, alone: bool) -> tuple[str, int]:
    address = environment.get("MASTER_ADDR", "127.0.0.1" if alone else None)
    if address is None:
        raise RunError(
            f"{launcher} started processes on several nodes and does not say where they meet.",
            "Set MASTER_ADDR to the first host on all of them: mpirun -x MASTER_ADDR=host0 … (Open MPI), "
            "mpiexec -genv MASTER_ADDR host0 … (MPICH).",
        )
    return address, _number(environment, "MASTER_PORT", 29_400)


def _number(environment: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    text = environment.get(name)
    if text is None and otherwise is not None:
        return otherwise
    if text is None or not text.isdecimal() or len(text) > 12:
        raise RunError(
            f"The environment says {name}={text!r}, which is no number.", "Unset it, or start the job again."
        )
    return int(text)
