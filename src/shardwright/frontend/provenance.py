"""Where in the model a node of an exported graph comes from."""

from __future__ import annotations

import re

from torch.fx import Node

from shardwright.frontend.diagnose import short_path

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def module_of(node: Node) -> str:
    """The path of the innermost module: ``decoder.layers.3.attention``."""
    stack = node.meta.get("nn_module_stack")
    return list(stack.values())[-1][0] if stack else ""


def source_of(node: Node) -> str:
    """The innermost line of the model's own code: ``package/file.py:line``."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    outside = [f for f in frames if "/torch/" not in f[0] and not f[0].startswith("<")] or frames
    return f"{short_path(outside[-1][0])}:{outside[-1][1]}" if outside else ""
