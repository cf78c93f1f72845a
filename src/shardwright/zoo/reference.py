"""From what a person writes to a model: ``gpt:layers=24``, ``hf:llama:small``, ``hf:config.json``, ``file.py:function``.

Everything is built inside the wanted device and dtype with a fixed seed, so every process that resolves the same reference
has the same weights and the same inputs, and a model on meta costs no memory. A model that is served is in evaluation mode
and without labels; its cache is what it hands out itself after a first call on so many tokens (on meta that costs nothing).
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright import zoo
from shardwright.errors import ModelError
from shardwright.process_wide import in_turn
from shardwright.zoo.hugging_face import build_hugging_face
from shardwright.zoo.sizes import nearest, parse_sizes

SEED = 0
LARGEST_SIZE = 2**31 - 1
FILE_FUNCTION = re.compile(r"(?P<path>.+\.py):(?P<function>\w+)")


@dataclass(frozen=True)
class ResolvedModel:
    """A model and example inputs: ``model(*args, **kwargs)`` computes its loss."""

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def parameter_count(self) -> int:
        """How many numbers are trained; a tied weight counts once."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def resolve(
    reference: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    device: str | torch.device = "meta",
    dtype: str | torch.dtype | None = None,
    inference: bool = False,
    cache: int = 0,
) -> ResolvedModel:
    """Build the model that ``reference`` names, with inputs of ``batch`` rows and ``seq`` positions.

    ``inference``: in evaluation mode and without labels; with a ``cache`` of so many positions, the call that decodes the
    next ``seq`` (1 unless given).

    >>> len(resolve("gpt:small,layers=3", batch=2).model.blocks)
    3
    >>> resolve("hf:llama:num_hidden_layers=2,hidden_size=64")                   # doctest: +SKIP
    >>> resolve("train.py:build_model", device="cpu", dtype="bfloat16")          # doctest: +SKIP
    """
    for name, size in (("batch", batch), ("seq", seq)):
        if size is not None and not 1 <= size <= LARGEST_SIZE:
            raise ModelError(f"{name}={size} is not possible.", f"Give a whole number from 1 to {LARGEST_SIZE}.")
    if cache and not (inference and reference.startswith("hf:") and cache > 0):
        raise ModelError(
            f"{reference!r} is given a cache of {cache} positions.",
            "Caches are for Hugging Face decoders in inference: hf:gpt2 with --inference --cache 512.",
        )
    new = seq or 1
    seq = cache + new if cache else seq
    # What a model prints while it is built is for people; standard output may be for a program.
    with in_turn(), _building(torch.device(device), _as_dtype(dtype)), redirect_stdout(sys.stderr):
        if reference.startswith("hf:"):
            model, args, kwargs = build_hugging_face(reference[3:], reference, batch=batch, seq=seq)
        elif match := FILE_FUNCTION.fullmatch(reference):
            path = Path(match["path"])
            model, args, kwargs = _from_file(path, match["function"], {"batch": batch, "seq": seq})
            reference = f"{path.absolute()}:{match['function']}"  # so that it means the same from every folder
        else:
            model, args, kwargs = _from_zoo(reference, batch, seq)
        if inference:
            kwargs = without_labels(model.eval(), kwargs)
        if cache:
            kwargs = with_cache(model, kwargs, new)
    return ResolvedModel(reference, model, args, kwargs)


@contextmanager
def _building(device: torch.device, dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    devices: list[int] | None = [] if device.type in ("meta", "cpu") else None
    try:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        with torch.random.fork_rng(devices=devices), device:
            torch.manual_seed(SEED)
            yield
    finally:
        torch.set_default_dtype(before)


def _as_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if not isinstance(dtype, str):
        return dtype
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ModelError(f"{dtype!r} is no floating-point dtype.", "Use float32, bfloat16 or float16.")
    return found


def _from_zoo(reference: str, batch: int | None, seq: int | None) -> zoo.Built:
    name, _, text = reference.partition(":")
    entry = zoo.entry(name)
    small, given = parse_sizes(text, reference)
    sizes = {**(entry.small if small else {}), **given}
    if batch is not None:
        sizes["batch"] = batch
    if seq is not None:
        if "seq" not in entry.sizes:
            raise ModelError(f"{name} has no sequence to be {seq} long.", "Leave out --seq.")
        sizes["seq"] = seq
    return zoo.build(name, **sizes)


def _from_file(path: Path, function: str, sizes: dict[str, int | None]) -> zoo.Built:
    if not path.is_file():
        raise ModelError(f"There is no file {str(path)!r}.", "Give path/to/file.py:function.")
    build = _load(path, function)
    accepted = inspect.signature(build).parameters
    wanted = {name: size for name, size in sizes.items() if size is not None}
    for name, size in wanted.items():
        if name not in accepted:
            raise ModelError(
                f"{function} in {path} takes no {name}, so {name}={size} has no effect.",
                f"Add a parameter `{name}` to it, or leave out --{name}.",
            )
    try:
        built = build(**wanted)
    except Exception as error:
        raise ModelError(
            f"{function} in {path} failed: {type(error).__name__}: {error}.", "Run it by itself to see where."
        ) from error
    if isinstance(built, tuple) and len(built) == 2:
        built = (*built, {})  # nothing by keyword
    if not (
        isinstance(built, tuple)
        and len(built) == 3
        and isinstance(built[0], nn.Module)
        and isinstance(built[1], tuple | list)
        and isinstance(built[2], dict)
    ):
        raise ModelError(
            f"{function} in {path} returned {type(built).__name__}, not (model, args, kwargs).",
            "Return an nn.Module, a tuple of inputs and a dict of keyword inputs.",
        )
    model, args, kwargs = built
    return model, tuple(args), kwargs


def function_from(reference: str) -> Callable[..., Any]:
    """The function that ``file.py:function`` names.

    >>> function_from("train.py")
    Traceback (most recent call last):
    shardwright.errors.ModelError: 'train.py' names no function of a file. Write path/to/file.py:function.
    """
    match = FILE_FUNCTION.fullmatch(reference)
    if match is None:
        raise ModelError(f"{reference!r} names no function of a file.", "Write path/to/file.py:function.")
    path = Path(match["path"])
    if not path.is_file():
        raise ModelError(f"There is no file {str(path)!r}.", "Give path/to/file.py:function.")
    return _load(path, match["function"])


def _load(path: Path, function: str) -> Callable[..., Any]:
    path = path.absolute()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ModelError(f"{path} cannot be loaded as Python.", "Give path/to/file.py:function.")
    module = importlib.util.module_from_spec(spec)
    # As if the file were run: its siblings can be imported, and what it defines can be found again by its module's name
    # (pickle and torch.export look there, and so do custom autograd functions).
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    known = sys.modules.get(path.stem)
    if known is None or getattr(known, "__file__", None) == str(path):
        sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        if sys.modules.get(path.stem) is module:
            del sys.modules[path.stem]
        raise ModelError(
            f"{path} cannot be imported: {type(error).__name__}: {error}.", "Run it by itself to see where."
        ) from error
    found = getattr(module, function, None)
    if not callable(found):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise ModelError(f"{path} has no function {function!r}{nearest(function, names)}.", "Name one that it defines.")
    return found


_LABELS = ("labels", "next_sentence_label", "start_positions", "end_positions", "return_loss", "mc_labels")


def without_labels(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments less those that only a loss needs, where the model can do without.

    >>> class Model(nn.Module):
    ...     def forward(self, x, labels=None): ...
    >>> without_labels(Model(), {"x": 1, "labels": 2})
    {'x': 1}
    """
    accepted = inspect.signature(model.forward).parameters
    optional = {name for name in _LABELS if name in accepted and accepted[name].default is not inspect.Parameter.empty}
    return {name: value for name, value in kwargs.items() if name not in optional}


def with_cache(model: nn.Module, kwargs: dict[str, Any], new: int) -> dict[str, Any]:
    """The call that decodes the last ``new`` tokens of ``input_ids``, all before them being in the cache.

    >>> with_cache(gpt2, {"input_ids": tokens}, 1)["input_ids"].shape                            # doctest: +SKIP
    torch.Size([4, 1])
    """
    tokens = kwargs.get("input_ids")
    if tokens is None or getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ModelError(
            f"{type(model).__name__} does not decode input_ids alone, so that no cache can be made for it.",
            "Give a decoder (hf:gpt2), or write a function that returns (model, args, kwargs) with the cache in kwargs.",
        )
    with torch.no_grad():
        output = model(input_ids=tokens[:, :-new], use_cache=True)
    cache = getattr(output, "past_key_values", None)
    if cache is None:
        raise ModelError(f"{type(model).__name__} hands out no cache.", "Leave out --cache.")
    return {"input_ids": tokens[:, -new:], "past_key_values": cache}
