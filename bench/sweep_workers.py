"""What the workers of :mod:`bench.model_sweep` do with one model: capture it and replay the graph, or plan and verify it.

Every function gives a row that says how far the model came (``stage``) and why not further, and what that took of the
worker: processor seconds, and megabytes at the peak. A :class:`ShardwrightError` is a refusal with its sentence; any other
exception of ours is a ``traceback``, which must not happen.
"""

from __future__ import annotations

import functools
import importlib
import logging
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BATCH, STEPS, TOLERANCE = 2, 3, 1e-4
OWN = "tests.frontend.various:"
"""References to the models that are not Hugging Face's: ``tests.frontend.various:unet``."""


class TimeLimit(BaseException):
    """No ``except Exception`` of a model may go on beyond it."""


def measured(work: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Ends ``work`` after so many processor seconds of this process, and writes into its row what it took."""

    @functools.wraps(work)
    def run(rank: int, limit: float, *args: Any) -> dict[str, Any]:
        def over(*_: Any) -> None:
            raise TimeLimit(f"{limit:.0f} processor seconds are over")

        before = signal.signal(signal.SIGPROF, over)
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        started = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, limit)
        try:
            row = work(rank, *args)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)
        return row | {"cpu_seconds": round(time.process_time() - started, 2), "peak_mb": _megabytes("VmHWM")}

    return run


def _megabytes(what: str) -> int:
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) // 1024 if found else 0


def build(reference: str, rows: int = BATCH) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A model and its inputs, alike in every process; models of our own have their own number of rows."""
    from shardwright.zoo.reference import resolve

    if reference.startswith(OWN):
        import torch

        torch.manual_seed(0)
        return importlib.import_module(OWN.rstrip(":")).build(reference.removeprefix(OWN))
    found = resolve(reference, batch=rows, device="cpu")
    return found.model, found.args, found.kwargs


MEDIA = (
    "pixel",
    "input_features",
    "input_values",
    "image_patches",
    "flattened_patches",
    "visual_feats",
    "visual_embeds",
)
"""Arguments with such words are pictures, videos or sound."""


@measured
def call_one(rank: int, reference: str) -> dict[str, Any]:
    """Built and called once, forward and backward, and which of what it reads it was given."""
    import inspect

    import torch

    row: dict[str, Any] = {"stage": "build"}
    with _reported(row):
        model, args, kwargs = build(reference)
        accepted = [name for name in inspect.signature(model.forward).parameters if any(word in name for word in MEDIA)]
        row |= {
            "stage": "eager",
            "class": type(model).__name__,
            "inputs": {name: list(value.shape) for name, value in kwargs.items() if isinstance(value, torch.Tensor)},
            # Sound may come as numbers of codes, and a picture's patches under names of their own.
            "text alone": bool(accepted) and not set(accepted) & set(kwargs) and set(kwargs) <= TEXT,
        }
        loss, grads = _step(model, lambda: model(*args, **kwargs), {n: b.clone() for n, b in model.named_buffers()})
        if not torch.isfinite(loss).all():
            raise ArithmeticError(f"the eager loss is {loss}")
        row |= {"gradients": len(grads), "stage": "called"}
    return row


TEXT = {"input_ids", "attention_mask", "token_type_ids", "labels", "use_cache", "return_loss", "decoder_input_ids"}


@measured
def capture_one(rank: int, reference: str) -> dict[str, Any]:
    """Eagerly, captured, replayed: the loss and all gradients must be the same."""
    import torch

    from shardwright.frontend import capture
    from shardwright.frontend.replay import replay

    row: dict[str, Any] = {"stage": "build"}
    with _reported(row):
        model, args, kwargs = build(reference)
        row |= {
            "stage": "eager",
            "class": type(model).__name__,
            "parameters": sum(p.numel() for p in model.parameters()),
        }
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        loss, grads = _step(model, lambda: model(*args, **kwargs), before)
        if not torch.isfinite(loss):
            raise ArithmeticError(f"the eager loss is {loss.item()}")
        again, _ = _step(model, lambda: model(*args, **kwargs), before)
        row["random"] = bool(again != loss)
        _restore(model, before)
        row["stage"] = "capture"
        started = time.process_time()
        graph = capture(model, args, kwargs)
        row |= {
            "cpu_seconds_captured": round(time.process_time() - started, 2),
            "ops": len(graph.ops),
            "notes": list(graph.notes),
        }
        row["stage"] = "replay"
        found, others = _step(model, lambda: replay(graph, model, args, kwargs), before)
        row["difference"] = _difference(loss, grads, found, others)
        row["stage"] = "captured" if row["difference"] < TOLERANCE or row["random"] else "differs"
    return row


@measured
def verify_one(rank: int, reference: str, ways: tuple[str, ...], rows: int = BATCH) -> dict[str, Any]:
    """Planned in every way and trained for three steps in float64 on all workers, against the eager model on rank 0.

    The model is built once for all ways on every rank, and captured once for all ranks.
    """
    from shardwright.verification.judging import truth_of
    from shardwright.verification.prepare import subject
    from shardwright.verification.recorded import training_of

    row: dict[str, Any] = {"stage": "capture in float64"}
    started = time.process_time()
    with _reported(row):
        it = subject(
            functools.partial(build, reference, rows), True, captured=functools.partial(_from_first, rank, send=True)
        )
        row |= {"cpu_seconds_captured": round(time.process_time() - started, 2), "stage": "one process in float64"}
        truth = _from_first(rank, lambda: truth_of(it.model, it.steps(STEPS), training_of(it.graph)))
        parts = {way: _verified(rank, way, it, truth) for way in ways}
        row |= {"stage": "verified", "searches": parts}
        for way, part in parts.items():
            if part["stage"] != "agrees" and (row["stage"] == "verified" or part.get("traceback")):
                row |= {**part, "why": f"{way}: {part.get('why', 'other numbers')}"}
    return row


IN_PIECES = {"two stages": ("megatron", 2), "four micro-batches": ("fsdp", 1)}
"""Ways that are no search alone: by what is searched for in every stage, and how many stages pass on the pieces."""
PIECES = 4


def _planned(way: str, graph: Any, devices: int) -> Any:
    """The plan of a way: of one mesh, a strategy; with micro-batches, a plan."""
    from shardwright.cluster import parse_cluster
    from shardwright.planner import Options, plan_graph
    from shardwright.planner.pipelines import Pipelining, plan_pipeline

    search, stages = IN_PIECES.get(way, (way, 0))
    options = Options(search=search, baselines=(), fewer_devices=False, time_limit=20.0)
    cluster = parse_cluster(f"local:{devices}")
    if not stages:
        return plan_graph(graph, cluster, options).stages[0].strategy
    return plan_pipeline(graph, cluster, Pipelining(stages, PIECES, "gpipe" if stages == 1 else "1f1b"), options)


def _verified(rank: int, way: str, it: Any, truth: Any) -> dict[str, Any]:
    import torch.distributed as dist

    from shardwright.verification.verify import check

    part: dict[str, Any] = {"stage": "plan"}
    started = time.process_time()
    with _reported(part):
        plan = _from_first(rank, lambda: _planned(way, it.graph, dist.get_world_size()), send=True)
        part |= {"stage": "run", "cpu_seconds_planned": round(time.process_time() - started, 2)}
        answer = check(
            it.model,
            it.args,
            it.kwargs,
            plan,
            steps=it.steps(STEPS),
            graph=it.graph,
            truth=truth,
            shown=it.shown,
        )
        part["stage"] = "agrees"  # the first rank says so for all
        if answer is not None:
            closest = answer.closest()
            part |= {"stage": "agrees" if answer.agrees else "differs", "closest": f"{closest.what} {closest.name}"}
            part["of_allowed"] = closest.difference / (closest.allowed or 1e-300)  # a gradient of zeros has no size
            if not answer.agrees:
                part["why"] = f"other numbers: {part['closest']} by {closest.difference:.1e} of {closest.size:.1e}"
    return part


def _from_first(rank: int, make: Callable[[], Any], send: bool = False) -> Any:
    """What rank 0 makes, on every rank if it is to be sent; where rank 0 fails, all do, and none waits for it."""
    import torch.distributed as dist

    made: Any = None
    problem: Exception | None = None
    if rank == 0:
        try:
            made = make()
        except Exception as error:
            problem = error
    box = [made if send else None, problem is None]
    dist.broadcast_object_list(box)
    if not box[1]:
        raise problem or RuntimeError("the first rank failed")
    return made if rank == 0 or not send else box[0]


@contextmanager
def _reported(row: dict[str, Any]) -> Iterator[None]:
    """Write whatever is raised inside into the row."""
    from shardwright.errors import ShardwrightError

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    try:
        yield
    except TimeLimit as error:
        row |= {"why": f"{error} (at {row['stage']})", "stage": "time limit"}
    except ShardwrightError as error:
        row["why"] = f"{error.message} {error.remedy}"
    except Exception as error:
        frames = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
        said = str(error).replace(f"{sys.prefix}/", "")[:300]  # not where this machine keeps them
        row["why"] = f"{type(error).__name__}: {said} ({frames[-1]})"
        row["traceback"] = row["stage"] not in ("build", "eager", "one process in float64")
        if row["traceback"]:
            row["where"] = frames[-12:]


def _restore(model: Any, buffers: dict[str, Any]) -> None:
    for name, buffer in model.named_buffers():
        buffer.data.copy_(buffers[name])


def _step(model: Any, run: Any, buffers: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    import torch

    from shardwright.frontend.containers import register_containers
    from shardwright.frontend.guards import one_process
    from shardwright.verification.recorded import loss_of

    _restore(model, buffers)
    model.zero_grad()
    torch.manual_seed(0)
    with one_process():
        output = run()
    register_containers(output)  # so that what a cache holds counts before the first capture too
    loss = loss_of(output)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def _difference(loss: Any, grads: dict[str, Any], other_loss: Any, other_grads: dict[str, Any]) -> float:
    """The largest difference relative to the size of what is compared; a gradient only one of them has counts as 1."""
    worst = (loss - other_loss).abs().item() / max(1.0, loss.abs().item())
    scale = max((grad.abs().max().item() for grad in grads.values() if grad.numel()), default=1.0) or 1.0
    for name in {*grads, *other_grads}:
        one, other = grads.get(name), other_grads.get(name)
        if one is None or other is None:
            present = one if other is None else other
            worst = max(worst, 1.0 if present.any() else 0.0)
        elif one.numel():
            worst = max(worst, (one - other).abs().max().item() / scale)
    return worst
