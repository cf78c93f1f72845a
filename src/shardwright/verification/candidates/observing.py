"""What one rank does: its part of every weight, gradient and buffer, what its modules return, and where it drops.

Nothing here compares: a rank tells what it saw as plain arrays, and one process judges all ranks together
(:mod:`~shardwright.verification.candidates.checking`). While numbers are compared nothing is dropped; afterwards one more
pass with dropout shows which rank drops what (:mod:`~shardwright.verification.candidates.masks` judges that).
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from shardwright._torch_compat import flatten_tree, going_back, map_tree
from shardwright.errors import RunError, ShardwrightError
from shardwright.verification.batches import Batch, Steps
from shardwright.verification.candidates.protocol import Candidate, completed, own_rows
from shardwright.verification.candidates.recognising import Model, Numbers, Places, flat
from shardwright.verification.prepare import all_double

MOST_NUMBERS = 2**24
"""Of what modules return, a rank keeps so many numbers: then it looks at the first modules only."""
WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class Held(NamedTuple):
    """One tensor of a rank that holds numbers of the model: under which name, in which places, and its values over time.

    ``gradients`` are those after every backward pass, ``handed`` those that every update was given (``None``: there were
    none, or nobody could look). ``whole_is`` says whether a ``DTensor``, put together by PyTorch, is a tensor of the model.
    """

    name: str
    places: Places
    before: list[Numbers]
    gradients: list[Numbers | None]
    handed: list[Numbers | None]
    whole_is: bool | None


class Dropped(NamedTuple):
    """One call of a dropout: what came in, and what of it was kept."""

    data: Numbers
    kept: NDArray[np.bool_]


@dataclass
class Seen:
    """What a rank saw. ``before`` of what it holds has one entry more than there are steps: the last ones are those after
    the last update; ``reloaded`` are the numbers after the checkpoint was loaded, by name."""

    rank: int
    rows: tuple[int, int]
    losses: list[float | None] = field(default_factory=list)
    held: dict[str, Held] = field(default_factory=dict)
    buffers: dict[str, NDArray[Any]] = field(default_factory=dict)
    outputs: dict[str, Numbers] = field(default_factory=dict)
    extents: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dropped: dict[str, Dropped] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    reloaded: dict[str, Numbers] | None = None
    calls: int = 1
    averages: bool = False
    optimizer: type[torch.optim.Optimizer] | None = None
    options: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    clip: float | None = None
    losses_are: str = "mean"


class Asked(NamedTuple):
    """What a rank is asked to do: ``build`` is theirs, ``batches`` are those of every step."""

    build: Callable[[nn.Module], Any]
    steps: Steps
    drops: bool
    watch: str | None = None
    seconds: float = 0.0


def observed(model: nn.Module, asked: Asked) -> Seen:
    """Build somebody's parallel module of ``model`` on this rank, train it, and tell."""
    watch = Watch(asked.watch, asked.seconds)
    known = Model(dict(model.named_parameters()))
    owners = _owners(model)
    torch.manual_seed(0)
    with all_double():
        with Dropouts(on=False), watch.doing("build"):
            candidate = completed(theirs("build", asked.build, model))
        assert isinstance(candidate.rows, tuple)
        seen = Seen(dist.get_rank(), candidate.rows, clip=candidate.clip, losses_are=candidate.losses)
        recorder = _Recorder(candidate, known, owners, seen)
        with Dropouts(on=False):
            _train(candidate, asked.steps, recorder, watch)
        if asked.drops:
            with watch.doing("a pass with dropout"):
                seen.dropped, notes = _dropping(candidate, asked.steps[0][0], recorder)
                seen.notes += notes
    watch.done()
    return seen


def theirs(where: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call of somebody else's code, whose failures show the line that they wrote."""
    try:
        return function(*args, **kwargs)
    except ShardwrightError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if _is_theirs(f.filename)] or [frames[-1]]
        place = own[-1]
        what = " ".join(str(error).split())[:300]
        raise RunError(
            f"{type(error).__name__} in {where} at {place.filename}:{place.lineno}: `{place.line}`: {what}",
            "Run the file by itself under torchrun to see all of it.",
        ) from error


def _is_theirs(path: str) -> bool:
    parts = Path(path).parts
    library = "site-packages" in parts or "dist-packages" in parts or f"{os.sep}lib{os.sep}python" in path
    return not (library or "shardwright" in parts[-4:-1] or path.startswith("<"))


class Watch:
    """Where a rank stands that has not finished when time is nearly over, written where the parent can read it."""

    def __init__(self, folder: str | None, seconds: float) -> None:
        self._folder, self._phase, self._ended = folder, "start", threading.Event()
        if folder is not None:
            threading.Thread(target=self._tell, args=(seconds, threading.main_thread().ident), daemon=True).start()

    @contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        self._phase = phase
        yield

    def done(self) -> None:
        self._ended.set()

    def _tell(self, seconds: float, thread: int | None) -> None:
        if self._ended.wait(seconds) or self._folder is None:
            return
        frame: FrameType | None = sys._current_frames().get(thread or 0)
        while frame is not None and not _is_theirs(frame.f_code.co_filename):
            frame = frame.f_back
        text = f"in {self._phase}"
        if frame is not None:
            path, line = frame.f_code.co_filename, frame.f_lineno
            text += f", at {Path(path).name}:{line}: `{linecache.getline(path, line).strip()}`"
        (Path(self._folder) / str(dist.get_rank())).write_text(text)


class Dropouts(TorchFunctionMode):
    """Switches dropout off, or writes down what each dropout was given and kept, under the module that called it."""

    def __init__(self, on: bool) -> None:
        super().__init__()
        self.on, self.module = on, ""
        self.found: dict[str, Dropped] = {}
        self.notes: list[str] = []
        self._counts: dict[str, int] = {}

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function in _FUSED:
            return function(*args, **(kwargs if self.on else _without_dropout(kwargs)))
        if function not in _DROPOUTS:
            return function(*args, **kwargs)
        if not self.on:
            return args[0]
        data = args[0]
        before = None if isinstance(data, DTensor) else flat(data)
        made = function(*args, **kwargs)
        if before is None:
            self.notes.append(f"Dropout on DTensors ({self.module}) is PyTorch's own to seed, and was not looked at.")
        elif not going_back():
            number = self._counts[self.module] = self._counts.get(self.module, 0) + 1
            self.found[f"{self.module} (call {number})"] = Dropped(before, flat(made) != 0)
        return made


_DROPOUTS = {
    nn.functional.dropout,
    nn.functional.dropout1d,
    nn.functional.dropout2d,
    nn.functional.dropout3d,
    nn.functional.alpha_dropout,
    nn.functional.feature_alpha_dropout,
    torch.dropout,
}
_FUSED = {nn.functional.scaled_dot_product_attention, nn.functional.multi_head_attention_forward}


def _without_dropout(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: 0.0 if name == "dropout_p" else value for name, value in kwargs.items()}


class _Recorder:
    """Keeps what a comparison needs, in the model's places."""

    def __init__(self, candidate: Candidate, known: Model, owners: Mapping[str, str], seen: Seen) -> None:
        self.candidate, self.known, self.seen = candidate, known, seen
        self.places: dict[str, Places] = {}
        for name, (tensor, _) in self.tensors().items():
            local = _local(tensor)
            if local.dtype != torch.float64:
                raise RunError(
                    f"{name!r} is {local.dtype} in the parallel module, and the model is float64.",
                    "Leave out mixed precision in build(): numbers are compared in float64.",
                )
            places = known.places(flat(local))
            self.places[name] = places
            held = Held(name, places, [flat(local)], [], [], self._whole_is(tensor, places))
            seen.held[name] = held
        self.modules = _corresponding(candidate.module, known, self.places, owners)
        seen.averages = any(type(m).__name__ in ("DistributedDataParallel",) for m in candidate.module.modules())
        optimizer = candidate.optimizer
        inner = getattr(optimizer, "optim", getattr(optimizer, "optimizer", optimizer))
        seen.optimizer = type(inner) if isinstance(inner, torch.optim.Optimizer) else None
        self._inner = inner
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.register_step_pre_hook(self._handed)

    def tensors(self) -> Mapping[str, tuple[Tensor, Tensor | None]]:
        assert self.candidate.parameters is not None
        return self.candidate.parameters()

    def numbers(self, into: str) -> None:
        """What all tensors hold now."""
        for name, (tensor, gradient) in self.tensors().items():
            if name not in self.seen.held:
                raise RunError(f"{name!r} was no parameter when training began.", "Give the same names every time.")
            getattr(self.seen.held[name], into).append(
                flat(_local(tensor)) if into == "before" else _gradient(name, tensor, gradient)
            )

    def options(self) -> None:
        """The options of the optimizer for every tensor of the model, as they are for the next update."""
        groups = self._inner.param_groups if isinstance(self._inner, torch.optim.Optimizer) else []
        names = {id(tensor): name for name, (tensor, _) in self.tensors().items()}
        found: dict[str, dict[str, Any]] = {}
        for group in groups:
            plain = {key: value for key, value in group.items() if isinstance(value, int | float | bool | tuple)}
            for parameter in group["params"]:
                name = names.get(id(parameter))
                held = self.known.names(self.places[name]) if name is not None else [""]
                found.update(dict.fromkeys(held, plain))
        self.seen.options.append(found)

    def _handed(self, *_: Any) -> None:
        for name, (tensor, gradient) in self.tensors().items():
            handed = self.seen.held[name].handed
            if len(handed) < len(self.seen.held[name].gradients):
                handed.append(_gradient(name, tensor, gradient))

    def _whole_is(self, tensor: Tensor, places: Places) -> bool | None:
        if not isinstance(tensor, DTensor):
            return None
        whole = flat(tensor.full_tensor())
        found = self.known.places(whole)
        expected = np.arange(len(whole)) + (found.min() if len(found) else 0)
        return bool(np.array_equal(found, expected)) if len(whole) and found.min() >= 0 else None


def _train(candidate: Candidate, steps: Steps, recorder: _Recorder, watch: Watch) -> None:
    assert candidate.backward is not None and candidate.update is not None and isinstance(candidate.rows, tuple)
    seen = recorder.seen
    for number, (batch, *_) in enumerate(steps, 1):
        args, kwargs = _batch(batch, candidate.rows)
        with watch.doing(f"step {number}, forward and backward"):
            with _listening(recorder) if number == 1 else nullcontext():
                loss = theirs(f"step {number} (forward and backward)", candidate.backward, *args, **kwargs)
            seen.losses.append(None if loss is None else float(_local(loss) if isinstance(loss, Tensor) else loss))
            recorder.numbers("gradients")
        recorder.options()
        with watch.doing(f"step {number}, update"):
            theirs(f"step {number} (update)", candidate.update)
        recorder.numbers("before")
        for held in seen.held.values():
            held.handed.extend([None] * (number - len(held.handed)))
        if number == 1 and candidate.reload is not None:
            with watch.doing("the checkpoint"):
                theirs("reload", candidate.reload)
            seen.reloaded = {name: flat(_local(tensor)) for name, (tensor, _) in recorder.tensors().items()}
    for name, buffer in candidate.module.named_buffers():
        path, _, own = name.rpartition(".")
        mapped = recorder.modules.get(path, stripped(path))
        seen.buffers[f"{mapped}.{own}".lstrip(".")] = _local(buffer).detach().cpu().numpy().copy()


def _batch(batch: Batch, rows: tuple[int, int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    own = own_rows(batch.args, batch.kwargs, *rows)
    args, kwargs = map_tree(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, own)
    return args, kwargs


@contextmanager
def _listening(recorder: _Recorder, dropouts: Dropouts | None = None) -> Iterator[None]:
    """Inside, what modules return is kept, under the names that they have in the model."""
    seen, kept = recorder.seen, dict[str, list[Tensor]]()
    room = MOST_NUMBERS

    def told(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            nonlocal room
            if dropouts is not None:
                dropouts.module = ""
            tensors = [
                leaf for leaf in flatten_tree(output)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()
            ]
            # Pipelines try shapes out without gradients before they begin.
            if going_back() or not tensors or dropouts is not None or not torch.is_grad_enabled():
                return
            local = _local(tensors[0]).detach()
            room -= local.numel()
            if room >= 0:
                kept.setdefault(path, []).append(local.clone())

        return hook

    def entered(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if dropouts is not None:
                dropouts.module = path

        return hook

    with ExitStack() as stack:
        for path, module in recorder.candidate.module.named_modules():
            mapped = recorder.modules.get(path)
            if mapped is not None:
                stack.enter_context(_handle(module.register_forward_hook(told(path))))
            if dropouts is not None:
                where = mapped if mapped is not None else stripped(path)
                stack.enter_context(_handle(module.register_forward_pre_hook(entered(where))))
        yield
    if dropouts is None:
        for path, tensors in kept.items():
            seen.extents[recorder.modules[path]] = tuple(tensors[0].shape)
            seen.outputs[recorder.modules[path]] = np.concatenate([flat(tensor) for tensor in tensors])
        seen.calls = max(map(len, kept.values()), default=1)


@contextmanager
def _handle(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def _dropping(candidate: Candidate, batch: Batch, recorder: _Recorder) -> tuple[dict[str, Dropped], list[str]]:
    assert candidate.backward is not None and isinstance(candidate.rows, tuple)
    args, kwargs = _batch(batch, candidate.rows)
    with Dropouts(on=True) as dropouts, _listening(recorder, dropouts):
        theirs("a pass with dropout", candidate.backward, *args, **kwargs)
    return dropouts.found, list(dict.fromkeys(dropouts.notes))


def stripped(path: str) -> str:
    """A module's path without the names of usual wrappers."""
    return ".".join(part for part in path.split(".") if part and part not in WRAPPERS)


def _owners(model: nn.Module) -> dict[str, str]:
    """By parameter of the model, the path of the module that holds it; then every path of a module by itself."""
    found = {name: name.rpartition(".")[0] for name, _ in model.named_parameters()}
    return found | {f"{path}.": path for path, _ in model.named_modules()}


def _corresponding(
    module: nn.Module, known: Model, places: Mapping[str, Places], owners: Mapping[str, str]
) -> dict[str, str]:
    """Modules of the candidate by path, and which of the model's they are: those that hold the same weights, or are
    called alike."""
    found: dict[str, str] = {}
    paths = {path for key, path in owners.items() if key.endswith(".")}
    for path, _ in module.named_modules():
        own = [name for name in places if name.rpartition(".")[0] == path]
        mapped = {owners[name] for tensor in own for name in known.names(places[tensor])}
        if len(mapped) == 1:
            found[path] = mapped.pop()
    for path, mapped_path in list(found.items()):  # what holds a module holds it here too, as long as names agree
        while path and mapped_path and path.rpartition(".")[2] == mapped_path.rpartition(".")[2]:
            path, mapped_path = path.rpartition(".")[0], mapped_path.rpartition(".")[0]
            found.setdefault(path, mapped_path)
    for path, _ in module.named_modules():
        if path not in found and not any(name.rpartition(".")[0] == path for name in places):
            above = next((p for p in _above(path) if p in found), None)
            meant = stripped(path) if above is None else f"{found[above]}{path[len(above) :]}".lstrip(".")
            if meant in paths:
                found[path] = meant
    return found


def _above(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


def _gradient(name: str, tensor: Tensor, gradient: Tensor | None) -> Numbers | None:
    if gradient is None:
        return None
    if isinstance(gradient, DTensor) and isinstance(tensor, DTensor) and gradient.placements != tensor.placements:
        gradient = gradient.redistribute(placements=tensor.placements)
    local = _local(gradient)
    if local.shape != _local(tensor).shape:
        raise RunError(
            f"The gradient of {name!r} has the shape {tuple(local.shape)}, its weights {tuple(_local(tensor).shape)}.",
            "Give pairs of equal shape by Candidate(parameters=…).",
        )
    return flat(local)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
