"""The captured graph inside a plan file: JSON, compressed, as one line of text.

With it a plan can be explained, simulated, drawn and planned again without its model, so that nobody has to run somebody
else's Python to look at a plan. What such a graph may make this process do is limited: pricing runs PyTorch's own operators
on small or on no data, so only operators that compute tensors from tensors are let in from a file. A custom
``autograd.Function`` (found by importing what the graph names), operators of other libraries, and those that read or
write files need the model itself, given by a person.
"""

from __future__ import annotations

import base64
import binascii
import zlib

from shardwright._torch_compat import schema
from shardwright.errors import GraphError, PlanError
from shardwright.frontend.unknown_extents import targets_inside
from shardwright.graph import Graph, from_json, to_json

LARGEST = 1 << 26
"""Bytes of a graph's JSON; a plan of a larger one is written without it."""

NAMESPACES = ("aten", "prims")
GROUP = "shardwright.unknown_extents.default"
OURS = ("shardwright.ctc_loss.default", "shardwright.assumed.default", GROUP)
"""Of our own operators those that do nothing but compute."""
REMEDY = "Give the model it was made for: --model MODEL."


def pack(graph: Graph) -> str | None:
    """The graph as one line of text; nothing where it is too large to be carried along."""
    text = to_json(graph).encode()
    return base64.b64encode(zlib.compress(text, 9)).decode() if len(text) <= LARGEST else None


def unpack(text: str, *, trusted: bool = False) -> Graph:
    """The graph that :func:`pack` wrote; unless it is ``trusted``, operators that could do more than compute are refused."""
    try:
        unpacked = zlib.decompressobj()
        data = unpacked.decompress(base64.b64decode(text, validate=True), LARGEST + 1)
        written = data.decode()
    except (binascii.Error, zlib.error, UnicodeDecodeError, ValueError) as error:
        raise PlanError(f"The graph inside the plan is damaged: {error}.", "Plan again.") from None
    if len(data) > LARGEST or not unpacked.eof:
        raise PlanError("The graph inside the plan is incomplete or too large.", "Plan again.")
    try:
        graph = from_json(written)
        inside = [t for op in graph.ops if op.target == GROUP for t in targets_inside(str(op.args[0]))]
    except GraphError as error:
        raise PlanError(f"The graph inside the plan is damaged: {error.message}", "Plan again.") from None
    if not trusted:
        for target in {*(op.target for op in graph.ops), *inside}:
            _check_harmless(target)
    return graph


def _check_harmless(target: str) -> None:
    """Refuse an operator that could do more than compute tensors."""
    from shardwright.frontend import ctc  # noqa: F401 - importing it registers its operator

    if target.partition(".")[0] not in NAMESPACES and target not in OURS:
        raise PlanError(
            f"The plan's graph calls {target!r}, which a plan may not bring along: it is not one of PyTorch's own.",
            REMEDY,
        )
    try:
        found = schema(target)
        arguments = [(argument.name, str(argument.type)) for argument in found.arguments]
    except (AttributeError, ValueError, RuntimeError):
        raise PlanError(f"The plan's graph calls {target!r}, which this PyTorch does not have.", REMEDY) from None
    if found.is_mutable or not found.returns or any("file" in name or "Storage" in kind for name, kind in arguments):
        raise PlanError(f"The plan's graph calls {target!r}, which may do more than compute a tensor.", REMEDY)
