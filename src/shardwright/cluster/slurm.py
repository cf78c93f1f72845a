"""What Slurm says about a job: its hosts, and the cluster that it has been given.

Slurm describes an allocation in environment variables (``man srun``, OUTPUT ENVIRONMENT VARIABLES): hosts as a compressed
list (``gpu[01-04,07],login1``), devices of a node as ``8``, ``h100:8`` or ``gpu:h100:8``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from shardwright.errors import ClusterError

_HOSTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_DEVICES = ("SLURM_GPUS_PER_NODE", "SLURM_JOB_GRES", "SLURM_GPUS_ON_NODE")


def host_names(text: str) -> list[str]:
    """The hosts of a compressed list, in its order.

    >>> host_names("gpu[08-10,12],login1,rack[1-2]n[1-2]")
    ['gpu08', 'gpu09', 'gpu10', 'gpu12', 'login1', 'rack1n1', 'rack1n2', 'rack2n1', 'rack2n2']
    """
    parts = re.findall(r"(?:[^,\[\]]+|\[[^\[\]]*\])+", text)
    if not parts or re.sub(r"[\[\],]", "", ",".join(parts)) != re.sub(r"[\[\],]", "", text):
        raise ClusterError(f"{text!r} is no list of hosts.", "It looks like gpu[01-04,07],login1.")
    return [host for part in parts for host in _expanded(part)]


def _expanded(part: str) -> list[str]:
    match = re.search(r"\[([^\[\]]*)\]", part)
    if match is None:
        return [part]
    before, after = part[: match.start()], part[match.end() :]
    found = []
    for piece in match.group(1).split(","):
        first, dash, last = piece.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ClusterError(f"{part!r} is no list of hosts.", "It looks like gpu[01-04,07].")
        numbers = range(int(first), int(last or first) + 1)
        found += [before + str(number).zfill(len(first)) + rest for number in numbers for rest in _expanded(after)]
    return found


def job_hosts(environment: Mapping[str, str]) -> list[str]:
    """The hosts of this step, or of the job.

    >>> job_hosts({"SLURM_JOB_NODELIST": "a[1-2]"})
    ['a1', 'a2']
    """
    text = next((environment[name] for name in _HOSTS if environment.get(name)), None)
    if text is None:
        raise ClusterError(
            "This is no Slurm job: SLURM_JOB_NODELIST is not set.",
            "Ask inside of an allocation (salloc, sbatch, srun), or name the cluster, such as 4x8xH100.",
        )
    return host_names(text)


def job_cluster(environment: Mapping[str, str], device: str = "") -> str:
    """The allocated cluster in our words; ``device`` where Slurm's configuration does not name its GPUs.

    >>> job_cluster({"SLURM_JOB_NODELIST": "a[1-4]", "SLURM_GPUS_PER_NODE": "h100:8"})
    '4x8xH100'
    >>> job_cluster({"SLURM_JOB_NODELIST": "a[1-2]", "SLURM_GPUS_ON_NODE": "4"}, "A100-80GB")
    '2x4xA100-80GB'
    """
    hosts = job_hosts(environment)
    text = next((environment[name] for name in _DEVICES if environment.get(name)), "")
    fields = text.split("(")[0].split(",")[0].split(":")
    count = fields[-1]
    kind = device or (fields[-2].upper() if len(fields) > 1 and fields[-2] != "gpu" else "")
    if not count.isdecimal() or int(count) < 1:
        raise ClusterError(
            f"Slurm names no GPUs per node ({text or 'SLURM_GPUS_PER_NODE is not set'!r}).",
            "Ask for them (--gpus-per-node), or name the cluster, such as 4x8xH100.",
        )
    if not kind:
        raise ClusterError(f"Slurm says {text!r}, not which GPUs these are.", "Say it: --cluster slurm:H100.")
    return f"{len(hosts)}x{count}x{kind}"
