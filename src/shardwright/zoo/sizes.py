"""Sizes as people write them, ``layers=12,width=768``: parsing, checking against defaults, helpful errors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from shardwright.errors import ModelError
from shardwright.records import shown

MOST = 2**31 - 1
"""Of any size; beyond it lie the extents that kernels count with 32 bits."""
MOST_REPEATS = 1_000
"""Of sizes that say how often something is built: the deepest published transformers have as many layers (DeepNet 2022)."""
REPEATED = ("layer", "block", "depth", "stage", "expert", "group", "repeat", "hop", "codebook", "level")
"""What such sizes have in their names, in the zoo and in configurations of Hugging Face."""

WORDS = {"true": True, "false": False, "none": None}


def nearest(name: str, known: Iterable[str]) -> str:
    """A clause that names what ``name`` may have meant: ``' (did you mean bert?)'``; empty when nothing is close."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def parse_sizes(text: str, reference: str) -> tuple[bool, dict[str, Any]]:
    """Split ``small,layers=3`` into (whether small sizes are wanted, the sizes given).

    >>> parse_sizes("small,layers=3,dropout=0.1", "gpt:small,layers=3,dropout=0.1")
    (True, {'layers': 3, 'dropout': 0.1})
    """
    small, sizes = False, {}
    for piece in (piece.strip() for piece in text.split(",")):
        name, equals, value = piece.partition("=")
        if piece == "small":
            small = True
        elif equals and name.strip() and value.strip():
            sizes[name.strip()] = _value(value.strip())
        elif piece:
            raise ModelError(
                f"{piece!r} in {reference!r} is neither `small` nor a size.", "Write sizes as name=value, name=value."
            )
    return small, sizes


def _value(text: str) -> Any:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def most_of(name: str) -> int:
    """The largest whole number that a size of this name may be.

    >>> most_of("num_hidden_layers"), most_of("width")
    (1000, 2147483647)
    """
    return MOST_REPEATS if any(word in name.lower() for word in REPEATED) else MOST


def checked_sizes(model: str, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """``defaults`` overridden by ``given``, each of the right kind and range, or a :class:`ModelError`."""
    for name, value in given.items():
        if name not in defaults:
            raise ModelError(
                f"{model} has no size {name!r}{nearest(name, defaults)}.", f"Its sizes are {', '.join(defaults)}."
            )
        _check(model, name, value, defaults[name])
    return {**defaults, **given}


def _check(model: str, name: str, value: Any, default: Any) -> None:
    """Whole numbers stay whole and positive; fractions (a dropout, a width factor) may not be negative."""
    if isinstance(default, bool):
        good, wanted = isinstance(value, bool), "true or false"
    elif isinstance(default, float):
        limit = 1.0 if name == "dropout" else MOST
        good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < limit
        wanted = "a number from 0 up to 1" if name == "dropout" else f"a number from 0 to {MOST}"
    else:
        most = most_of(name)
        good = (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most) or (
            default is None and value is None
        )
        wanted = f"a whole number from 1 to {most}"
    if not good:
        raise ModelError(f"{model}: {name}={shown(value)} is not possible.", f"Give {wanted}.")
