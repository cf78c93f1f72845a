"""``Graph``, ``Op``, ``Tensor``: immutable, framework-neutral, JSON in and out. Everything else reads this."""

from shardwright.graph.core import Atom, Buffer, Constant, Graph, Input, Op, Parameter, Ref, Tensor, Value, refs
from shardwright.graph.serial import fingerprint, from_json, to_json

__all__ = [
    "Atom",
    "Buffer",
    "Constant",
    "Graph",
    "Input",
    "Op",
    "Parameter",
    "Ref",
    "Tensor",
    "Value",
    "fingerprint",
    "from_json",
    "refs",
    "to_json",
]
