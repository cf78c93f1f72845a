"""What is particular about a type of Hugging Face model: its usual class, its tiny sizes, its processor's inputs.

``hf_types.toml`` is the table; names of model types are its keys. Sizes hold wherever a configuration of that type stands,
also as a part of another. Inputs are written in a small language: ``normal(rows, 3, vision_config.image_size)`` makes
pixels, ``text(length, image_token_id, 4)`` tokens with four placeholders of an image. A name is ``rows``, ``length``, an
input made before, or a field of the configuration, dotted where it lies in a sub-configuration; numbers add, subtract and
multiply, ``//`` and ``%`` divide. Nothing else is evaluated, so that a table is data.
"""

from __future__ import annotations

import ast
import functools
import itertools
import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import ModelError

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


_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def made(recipe: str, config: Any, known: Mapping[str, Any]) -> Any:
    """What ``recipe`` says, for a configuration and the ``known`` numbers and inputs.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(vision=SimpleNamespace(size=6, channels=3), vocab_size=99)
    >>> made("zeros(rows, vision.channels, vision.size // 2)", config, {"rows": 2}).shape
    torch.Size([2, 3, 3])
    """
    try:
        return _Evaluation(config, known).of(ast.parse(recipe, mode="eval").body)
    except ModelError as error:
        raise ModelError(f"{error.message} It stands in {recipe!r}.", error.remedy) from None


def tokens(config: Any, *shape: int) -> Tensor:
    """Random token numbers of ``shape`` that avoid every special token: models look for those."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(text, "vocab_size", None) or getattr(config, "vocab_size", None) or 256
    special = {-1, vocabulary}
    for owner in (config, text):
        for name, value in vars(owner).items():
            if name.endswith(("_token_id", "_token_index")):
                special |= {item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)}
    bounds = sorted(item for item in special if -1 <= item <= vocabulary)
    low, high = max(itertools.pairwise(bounds), key=lambda gap: gap[1] - gap[0])
    return torch.randint(low + 1, max(high, low + 2), shape)


class _Evaluation:
    def __init__(self, config: Any, known: Mapping[str, Any]) -> None:
        self.config, self.known = config, known
        self.functions: dict[str, Callable[..., Any]] = {
            "normal": lambda *shape: torch.randn(*shape),
            "uniform": lambda *shape: torch.rand(*shape),
            "zeros": lambda *shape: torch.zeros(*shape),
            "ones": lambda *shape: torch.ones(shape, dtype=torch.long),
            "true": lambda *shape: torch.ones(shape, dtype=torch.bool),
            "false": lambda *shape: torch.zeros(shape, dtype=torch.bool),
            "integers": lambda low, high, *shape: torch.randint(low, high, shape),
            "whole": lambda values: torch.tensor(values, dtype=torch.long),
            "numbers": lambda values: torch.tensor(values, dtype=torch.get_default_dtype()),
            "repeated": lambda values, times: torch.tensor(values).repeat(
                times, *[1] * (torch.tensor(values).dim() - 1)
            ),
            "each": self.each,
            "first": lambda count, size: torch.arange(size).expand(self.known["rows"], size) < count,
            "tokens": lambda *shape: tokens(self.config, *shape),
            "text": self.text,
            "padded": self.padded,
            "like": lambda value: torch.randn_like(value),
            "listed": lambda value: list(value.unbind()),
            "lists": lambda value: value.tolist(),
        }

    def each(self, values: Any) -> Tensor:
        """The same values in every row."""
        row = torch.tensor(values)
        return row.expand(self.known["rows"], *row.shape).clone()

    def text(self, length: int, *placeholders: int) -> Tensor:
        """Tokens, and in every row, after the first token, so many of each placeholder: ``text(length, token, count)``."""
        rows = self.known["rows"]
        pairs = zip(placeholders[::2], placeholders[1::2], strict=True)
        inside = [torch.full((rows, count), token) for token, count in pairs]
        one = tokens(self.config, rows, 1)
        return torch.cat([one, *inside, tokens(self.config, rows, max(1, length - 1))], dim=1)

    def padded(self, size: int) -> Tensor:
        """A mask of rows of several lengths: every second one is a quarter shorter, padded on the right."""
        lengths = torch.tensor([size - (row % 2) * (size // 4) for row in range(self.known["rows"])])
        return (torch.arange(size)[None] < lengths[:, None]).long()

    def field(self, path: str) -> Any:
        """A known name, or a field of the configuration."""
        first, *rest = path.split(".")
        if first in self.known:
            value = self.known[first]
        elif hasattr(self.config, first):
            value = getattr(self.config, first)
        else:
            raise ModelError(f"{type(self.config).__name__} has no field {path!r}.", "Check the recipe of the input.")
        for name in rest:
            if name.startswith("_") or not hasattr(value, name):
                raise ModelError(
                    f"{type(self.config).__name__} has no field {path!r}.", "Check the recipe of the input."
                )
            value = getattr(value, name)
        return value

    def of(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name | ast.Attribute):
            return self.field(ast.unparse(node))
        if isinstance(node, ast.List):
            return [self.of(item) for item in node.elts]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self.of(node.operand)
        if isinstance(node, ast.Subscript):
            return self.of(node.value)[self.of(node.slice)]
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return _ARITHMETIC[type(node.op)](self.of(node.left), self.of(node.right))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self.functions:
            keywords = {word.arg: self.of(word.value) for word in node.keywords if word.arg}
            return self.functions[node.func.id](*map(self.of, node.args), **keywords)
        raise ModelError(
            f"{ast.unparse(node)!r} is not in the language of inputs.", f"Use {', '.join(self.functions)}."
        )
