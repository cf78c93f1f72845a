"""The same random numbers for one process and for many: those that the plan drew, or those of one call, written down.

A plan draws the numbers of a cut tensor piece by piece, so a model with dropout, a VAE or a GAN computes other numbers than
one process does, and rightly so. To compare them, one process is given what the plan's processes drew in the very same pass
(:mod:`shardwright.verification.shown`): each of its calls for random numbers gets the next tensor of them, ``dropout``
multiplies by its mask, ``randn`` gives its tensor. Where the model's calls and the operators of its graph do not correspond
one to one, every draw of one call is written down (:func:`written_down`), and from then on all processes are given
these. What cannot be given either way (dropout inside a fused attention or between the layers of an ``nn.LSTM``, layers
skipped at random) is switched off, and said. Checkpointed blocks of the model are not computed again meanwhile: that would
ask for their numbers a second time, in the backward pass, when nobody hands any out. Whether a plan's draws are what they
should be is another question, answered by :mod:`shardwright.verification.streams`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from shardwright._torch_compat import without_checkpointing
from shardwright.errors import RunError, ShardwrightError
from shardwright.frontend.diagnose import explain_own_failure
from shardwright.graph import Graph, Op
from shardwright.operators import analyse
from shardwright.operators.record import draws as draws_numbers
from shardwright.operators.record import record, records
from shardwright.program.pieces import describe

MASKS = "one fixed mask for every dropout"
NUMBERS = "random numbers drawn once, the same for all"


class Draws:
    """The numbers that one forward call draws, in order. ``notes`` counts, in words, what else was changed.

    ``rates`` are, for those that were written down, that of a dropout or ``None``. ``final``: a mask says what is kept;
    otherwise it holds numbers between zero and one, and what is below the rate is dropped.
    """

    def __init__(self, values: Sequence[Tensor] = (), final: bool = False) -> None:
        self.values, self.final = list(values), final
        self.rates: list[float | None] = []
        self.notes: dict[str, int] = {}
        self._recording, self._next = False, 0

    @contextmanager
    def handed_out(self, recording: bool = False) -> Iterator[None]:
        """Inside, the calls of one forward pass get their numbers from here (or, while ``recording``, leave them here)."""
        self._recording, self._next = recording, 0
        functional, self_ = nn.functional, self
        with without_checkpointing(), ExitStack() as stack:

            def patch(owner: Any, name: str, make: Callable[..., Any]) -> None:
                original = getattr(owner, name)
                changed = functools.wraps(original)(functools.partial(make, self_, original))
                if isinstance(owner, type):
                    changed = _as_method(changed)
                stack.enter_context(mock.patch.object(owner, name, changed))

            ways: dict[str, tuple[tuple[Any, ...], Callable[..., Any]]] = {
                "created": ((torch,), Draws._created),
                "filled": ((Tensor,), Draws._filled),
                "chosen": ((torch, Tensor), Draws._bernoulli),
                "picked": ((torch, Tensor), Draws._picked),
                "dropped": ((functional, torch), functools.partial(Draws._dropped, features=False)),
                "features": ((functional,), functools.partial(Draws._dropped, features=True)),
                "attention": ((functional,), Draws._attention),
            }
            for name, how in (call for known in records().values() for call in known.python.items()):
                for owner in ways[how][0]:
                    patch(owner, name, ways[how][1])
            yield

    def _drawn(self, draw: Callable[[], Tensor], rate: float | None = None) -> Tensor:
        if self._recording:
            self.rates.append(rate)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1 + len(self.values))
                value = draw().detach().clone()
                self.values.append(value.double() if value.is_floating_point() else value)  # for either precision
        self._next += 1
        return self.values[self._next - 1]

    def _created(self, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if _is_number(args, kwargs):  # a decision, not data: capture lets it pass or refuses it
            return original(*args, **kwargs)
        value = self._drawn(lambda: original(*args, **{**kwargs, "requires_grad": False, "device": "cpu"}))
        return value.to(_dtype(args, kwargs)).clone() if value.is_floating_point() else value.clone()

    def _filled(self, original: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        drawn = self._drawn(lambda: original(torch.empty(tensor.shape, dtype=tensor.dtype), *args, **kwargs))
        return tensor.copy_(drawn.to(tensor.dtype))

    def _bernoulli(self, original: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        chance = args[0] if args and isinstance(args[0], float) else kwargs.get("p", x)
        value = self._uniform(x.shape)
        return value.to(x.dtype) if self.final else (value.to(x.dtype) < chance).to(x.dtype)

    def _picked(self, original: Callable[..., Tensor], weights: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._drawn(lambda: original(weights.detach(), *args, **kwargs)).clone()

    def _dropped(
        self,
        original: Callable[..., Tensor],
        x: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        *,
        features: bool,
        train: bool = True,
    ) -> Tensor:
        if not (training and train) or p == 0.0:
            return x
        shape = (*x.shape[:2], *(1 for _ in x.shape[2:])) if features else x.shape
        value = self._uniform(shape, p)
        mask = (value != 0 if self.final else value >= p).to(x.dtype) * (0.0 if p == 1.0 else 1.0 / (1.0 - p))
        self.note(MASKS)
        return x.mul_(mask) if inplace else x * mask

    def _attention(self, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        given = [*args]
        if len(given) > 4 and given[4]:
            given[4] = 0.0
            self.note("no dropout inside of fused attention")
        elif kwargs.get("dropout_p"):
            kwargs["dropout_p"] = 0.0
            self.note("no dropout inside of fused attention")
        return original(*given, **kwargs)

    def _uniform(self, shape: Any, rate: float | None = None) -> Tensor:
        return self._drawn(functools.partial(_RAND, tuple(shape), dtype=torch.float64), rate)

    def note(self, text: str) -> None:
        self.notes[text] = self.notes.get(text, 0) + 1


_RAND = torch.rand


def _as_method(function: Callable[..., Any]) -> Any:
    def method(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return method


def _is_number(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    size = args[0] if args and isinstance(args[0], tuple | list) else kwargs.get("size", args)
    return len(size) == 0


def _dtype(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.dtype:
    """The floating dtype that a call asks for, in words or by its first tensor."""
    if isinstance(kwargs.get("dtype"), torch.dtype):
        return kwargs["dtype"]
    like = next((value for value in args if isinstance(value, Tensor)), None)
    return like.dtype if like is not None else torch.get_default_dtype()


def drawing(graph: Graph) -> list[Op]:
    """The operators of a graph that draw random numbers."""
    return [op for op in graph.ops if draws_numbers(op, analyse(op, graph.tensors).kind) and op.outputs[0] is not None]


def without_fused_dropout(graph: Graph) -> Graph:
    """The graph with the dropout inside of fused operators at a rate of zero: the same operators."""
    fused = {op.name for op in drawing(graph) if (how := record(op.target).draws) and not how.dropout}
    return replace(graph, ops=tuple(_at_no_rate(op) if op.name in fused else op for op in graph.ops))


def quiet(graph: Graph) -> tuple[Graph, list[str]]:
    """The graph with every dropout at a rate of zero: the same operators, so that a plan for it still fits; and a note."""
    random = drawing(graph)
    for op in random:
        if record(op.target).draws is None:
            raise RunError(
                f"The model draws random numbers ({describe(op)}), and its calls for them cannot be told apart.",
                "Verify the model without --plan: its draws are then fixed for all processes alike.",
            )
    names = {op.name for op in random}
    ops = tuple(_at_no_rate(op) if op.name in names else op for op in graph.ops)
    notes = [f"no dropout, as the plan is given and draws its own ({len(random)} operators)"] if random else []
    return replace(graph, ops=ops), notes


def _at_no_rate(op: Op) -> Op:
    rates = [place for place, value in enumerate(op.args) if isinstance(value, float)]
    args = tuple(0.0 if place in rates[:1] else value for place, value in enumerate(op.args))
    return replace(op, args=args, kwargs=tuple((k, 0.0 if k == "dropout_p" else value) for k, value in op.kwargs))


def changed_by(draws: Draws) -> list[str]:
    """What is changed about a model that is given these numbers, in words."""
    others = len(draws.values) - draws.notes.get(MASKS, 0)
    drawn = [f"{NUMBERS} ({others} tensors)"] if others else []
    return [f"{text} ({count})" for text, count in draws.notes.items()] + drawn


def written_down(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Draws:
    """The numbers that one forward call draws; what decides at random which layers run is switched off first."""
    draws = Draws()
    for module in model.modules():
        skip_nothing(module, draws)
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    try:
        with torch.no_grad(), draws.handed_out(recording=True):
            model(*args, **kwargs)
    except ShardwrightError:
        raise
    except Exception as error:
        raise explain_own_failure(error, model) from error
    with torch.no_grad():
        for name, buffer in model.named_buffers():  # this call was not one of the training's
            buffer.copy_(buffers[name])
    return draws


def handing_out(model: nn.Module, draws: Draws) -> nn.Module:
    """The model itself, with a class whose ``forward`` hands these numbers out; parameters, names and signature stay."""
    if "_shardwright_draws" not in model.__dict__:
        model.__class__ = _handing_out(type(model))  # type: ignore[arg-type]  # classes can be hashed
    model.__dict__["_shardwright_draws"] = draws
    return model


def skip_nothing(module: nn.Module, draws: Draws) -> None:
    """Switch off what decides at random which layers run, and dropout inside of fused recurrent layers."""
    for holder in (module, getattr(module, "config", None)):
        for name, value in list(getattr(holder, "__dict__", {}).items()):
            if ("layerdrop" in name or "layer_drop" in name) and isinstance(value, float) and value:
                setattr(holder, name, 0.0)
                draws.note("no layers skipped at random")
    if isinstance(module, nn.RNNBase) and module.dropout:
        module.dropout = 0.0
        draws.note("no dropout between fused recurrent layers")


@functools.lru_cache
def _handing_out(kind: type) -> type:
    @functools.wraps(kind.forward)  # type: ignore[attr-defined]  # every module has one
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.__dict__["_shardwright_draws"].handed_out():
            return kind.forward(self, *args, **kwargs)  # type: ignore[attr-defined]

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
