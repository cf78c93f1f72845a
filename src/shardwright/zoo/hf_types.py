"""What is particular about a type of Hugging Face model: its usual class, its tiny sizes, its processor's inputs.

``hf_types.toml`` is the table; names of model types are its keys. Sizes hold wherever a configuration of that type stands,
also as a part of another. Inputs are written in the language of :mod:`shardwright.zoo.hf_recipes`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - Python 3.10
    import tomli as tomllib

TABLE = Path(__file__).parent / "hf_types.toml"


@dataclass(frozen=True)
class Particulars:
    """Of one type of model.

    ``head``: the class that is meant by the bare type. ``sizes``: fields of the tiny configuration; ``keep``: fields that
    stay as they are. ``inputs``: recipes by argument; an empty one leaves the argument out. ``called_before``: the first
    call is unlike all others (it sets buffers from its data), and training goes on from a model that was called.
    """

    head: str = ""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    keep: tuple[str, ...] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)
    called_before: bool = False


@functools.cache
def _table() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text())


def particulars(model_type: str) -> Particulars:
    """What the table says of a type; nothing, for most.

    >>> particulars("gpt2")
    Particulars(head='', sizes={}, keep=(), inputs={}, called_before=False)
    """
    row = dict(_table()["types"].get(model_type, {}))
    if "as" in row:  # the same as another type, but for what is said here
        base = particulars(row.pop("as"))
        inputs = {**base.inputs, **row.get("inputs", {})}
        sizes = {**base.sizes, **row.get("sizes", {})}
        base = replace(base, sizes=sizes, inputs=inputs)
        return replace(base, head=row.get("head", base.head), keep=tuple(row.get("keep", base.keep)))
    row["keep"] = tuple(row.get("keep", ()))
    return Particulars(**row)


def usual_recipes() -> Mapping[str, str]:
    """Recipes by argument for arguments that a model cannot do without."""
    return _table()["arguments"]


def usual_companions(kind: str) -> Mapping[str, str]:
    """Recipes by argument for what processors give beside images (or audio): grids, sizes, masks."""
    return _table()[kind]
