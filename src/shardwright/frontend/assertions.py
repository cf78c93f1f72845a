"""Removes run-time assertions, and with them the scalars that only they read.

``torch.export`` records checks of values (``_assert_scalar``), shapes and dtypes (``_assert_tensor_metadata``) and
bounds of scalars (``sym_constrain_range``). They compute nothing; a scalar that some operator does use is refused
later.
"""

from __future__ import annotations

import re

from torch.fx import Graph

_ASSERTION = re.compile(r"aten\.(_assert|sym_constrain|_functional_assert|_functional_sym_constrain)")
_SCALAR = re.compile(r"aten\.(item|_local_scalar_dense|sym_\w+)\.|<built-in function|<function sym_|torch\.sym_")


def drop_assertions(graph: Graph) -> None:
    """Erase assertions, then scalars nobody reads any more."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            target = str(node.target)
            if _ASSERTION.match(target) or _SCALAR.match(target):
                graph.erase_node(node)
