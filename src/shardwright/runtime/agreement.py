"""Do all ranks agree on what they are about to do? Asked at start-up, answered with the names of those that differ.

Ranks that run different models, plans or batches would hang in their first collective, or worse, train on nonsense. Each
rank therefore writes a digest of what it has into the job's key-value store and reads the others' within a bounded time;
a rank that does not answer is named, and so is one whose answer differs from the majority's.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright._torch_compat import default_store
from shardwright.errors import RunError, ShardwrightError
from shardwright.graph import Graph, fingerprint, from_json, to_json
from shardwright.graph.computation import computation

SECONDS = 120.0
REMEDY = (
    "Every rank makes every call of a parallelized module and every clipping, in the same order: take the model out of "
    "`if rank == 0:` and leave only printing and writing in it."
)
_SAMPLE = 256
_rounds = itertools.count()
_CAPTURED = "captured model"


def agree(about: Mapping[str, str], seconds: float = SECONDS) -> None:
    """Every rank calls this with its digests; an error on every rank names what differs and where.

    Raises
    ------
    RunError
        When a rank does not answer in time or differs from the majority.
    """
    mine = "\n".join(f"{what}\t{digest}" for what, digest in about.items())
    said = exchanged(mine, " and ".join(about), seconds)
    answers = [dict(line.split("\t", 1) for line in text.splitlines()) for text in said]
    for what in about:
        refuse_odd(what, {r: answer.get(what, "") for r, answer in enumerate(answers)})


def exchanged(text: str, about: str, seconds: float = SECONDS) -> list[str]:
    """What every rank says ``about`` something, by rank; one that does not answer in time, or speaks of something else
    because it makes another call, is named in an error."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return [text]
    rank, size, number = dist.get_rank(), dist.get_world_size(), next(_rounds)
    store = default_store()
    round_ = f"shardwright/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{number}"  # stores outlive restarts
    store.set(f"{round_}/{rank}", f"{about}\n{text}")
    answers: list[str] = []
    for other in range(size):
        key = f"{round_}/{other}"
        try:
            store.wait([key], timedelta(seconds=seconds))
        except Exception:  # the store's timeout differs in type between versions
            raise RunError(
                f"Rank {other} has not arrived after {seconds:.0f} s; rank {rank} gives up waiting for it.",
                f"Look at the output of rank {other}: it failed, is still loading its model, or makes another call "
                "(every rank makes every call of a parallelized module, also in evaluation).",
            ) from None
        theirs, _, said = store.get(key).decode().partition("\n")
        if theirs != about:
            raise RunError(
                f"The ranks make different calls: rank {rank} {_doing(about)}, and rank {other} {_doing(theirs)}.",
                REMEDY,
            )
        answers.append(said)
    return answers


def _doing(about: str) -> str:
    """What a rank does that speaks about something."""
    first, new = "makes its first call", "captures the model for a call of a new kind, or in parallelize()"
    return {"batch": first, _CAPTURED: new, "call": new}.get(about, f"compares its {about}")


@contextmanager
def together(about: str) -> Iterator[None]:
    """What fails inside on one rank fails on all of them: nobody waits for a rank that has stopped. All ranks call this."""
    try:
        yield
    except Exception as error:
        exchanged(f"no {error.message if isinstance(error, ShardwrightError) else type(error).__name__}", about)
        raise
    for rank, answer in enumerate(exchanged("yes", about)):
        if answer != "yes":
            raise RunError(f"Rank {rank} cannot go on: {answer.removeprefix('no ')}", "See what that rank says.")


def common_graph(graph: Graph) -> Graph:
    """One graph for all ranks, where theirs differ in the order of operators alone: that of rank 0.

    Models that walk through a set of names are traced in another order in every process
    (:mod:`shardwright.graph.computation`); splits go by the numbers of one of them. Graphs that compute different things
    are left for :func:`agree` to name.
    """
    if (
        len(set(exchanged(fingerprint(graph), _CAPTURED))) == 1
        or len(set(exchanged(computation(graph), _CAPTURED))) > 1
    ):
        return graph
    return from_json(exchanged(to_json(graph) if dist.get_rank() == 0 else "", _CAPTURED)[0])


def refuse_odd(what: str, digests: Mapping[int, object]) -> None:
    """An error that names the ranks whose digest is not that of the majority."""
    if len(set(digests.values())) > 1:
        common = Counter(digests.values()).most_common(1)[0][0]
        odd = [str(rank) for rank, digest in digests.items() if digest != common]
        ranks = f"rank {odd[0]} differs" if len(odd) == 1 else f"ranks {', '.join(odd)} differ"
        raise RunError(f"The ranks do not agree on the {what}: {ranks} from the others.", _REMEDIES.get(what, ""))


_REMEDIES = {
    "plan": "Give every rank the same plan file.",
    "model": "Build the model alike on every rank (same code, same sizes, same inputs).",
    "weights": "Call torch.manual_seed() with the same number on every rank before the model is built.",
    "batch": "Give the whole batch to every rank, in the same order; each takes its own part of it.",
    "random state": "Call torch.manual_seed() with the same number on every rank: dropout of whole tensors must agree.",
}


def digest(parts: Iterable[str | bytes]) -> str:
    """A short fingerprint of some texts."""
    total = hashlib.sha256()
    for part in parts:
        total.update(part.encode() if isinstance(part, str) else part)
        total.update(b"\0")
    return total.hexdigest()[:16]


def sample(tensor: Tensor) -> bytes:
    """Some elements of a tensor, evenly spread, as bytes: enough to tell other seeds apart, cheap for any size."""
    tensor = tensor.detach()
    if tensor.device.type == "meta":
        return b"meta"
    flat = tensor.reshape(-1)
    chosen = flat[:: max(1, flat.numel() // _SAMPLE)][:_SAMPLE].contiguous().cpu()
    return bytes(chosen.view(torch.uint8).tolist()) if chosen.numel() else b""


def contents(tensor: Tensor) -> bytes:
    """Shape, dtype and every byte of a batch."""
    if tensor.device.type == "meta":
        return b"meta"
    whole = tensor.detach().contiguous().cpu()
    hashed = hashlib.sha256(whole.view(torch.uint8).numpy().tobytes() if whole.ndim else str(whole.item()).encode())
    return f"{tuple(whole.shape)}{whole.dtype}".encode() + hashed.digest()


def check_finite(named: Iterable[tuple[str, Tensor]], what: str = "gradient") -> None:
    """An error on every rank, naming rank and tensor, when any rank holds a NaN or an infinity.

    >>> check_finite((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)    # doctest: +SKIP
    """
    from shardwright._torch_compat import local_of

    names, bad = [], []
    for name, tensor in named:
        names.append(name)
        bad.append(~torch.isfinite(local_of(tensor)).all())
    if not names:
        return
    flags = torch.stack(bad).to(torch.int64) * (dist.get_rank() + 1)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    if bool(flags.any()):
        first = int(flags.nonzero()[0])
        raise RunError(
            f"The {what} of {names[first]} is not finite on rank {int(flags[first]) - 1}.",
            "Lower the learning rate, clip gradients, or compute in a wider dtype.",
        )
