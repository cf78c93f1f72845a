"""What each operator computes, and from it every way to split it.

``analyse`` gives an operator's loops and what cutting each needs, ``piece`` how one rank computes its part, ``describe``
lets users add operators of their own.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.graph import Op, Tensor
from shardwright.operators.deriving import analyse, derived
from shardwright.operators.extending import describe
from shardwright.operators.pieces import Call, Kernel, Piece, Ranges, build
from shardwright.operators.record import record

__all__ = ["Call", "Kernel", "Piece", "Ranges", "analyse", "derived", "describe", "piece", "record"]


def piece(op: Op, tensors: Mapping[str, Tensor], ranges: Ranges) -> Piece:
    """How one rank computes its part of ``op``: ``ranges`` holds its piece of every cut loop.

    >>> from shardwright.graph import Op, Ref, Tensor
    >>> shapes = {"x": Tensor("x", (4, 6), "float32"), "y": Tensor("y", (2, 2, 6), "float32")}
    >>> view = Op("v", "aten.view.default", (Ref("x"), (2, 2, 6)), (), ("y",))
    >>> piece(view, shapes, {"i0": (0, 1)}).op.args[1]
    (1, 2, 6)
    """
    return build(Call(op, tensors, analyse(op, tensors), ranges))
