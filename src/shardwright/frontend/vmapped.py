"""``torch.vmap`` inside a model: traced by itself into the batched operators it stands for.

Export records how ``vmap`` enters and leaves its levels, and operators on tensors that lack their batched dim; nothing of
that has a meaning outside of ``vmap``. While a model is captured, each outermost call is first traced alone
(``make_fx`` sees operators after batching), and then those operators are performed in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwright._torch_compat import apart_from_tracing, flatten_tree, replaced_vmap, traced_operators, unflatten_tree


@contextmanager
def batched_operators() -> Iterator[None]:
    """While this lasts, ``vmap`` performs batched operators that the tracer around it can record."""
    inside = False

    def performed(original: Any, settings: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal inside
        if inside:  # a level within another one is a part of its trace
            return original(*settings, *args, **kwargs)
        leaves, spec = flatten_tree((args, kwargs))
        places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        shape: Any = None

        def flat(*tensors: torch.Tensor) -> list[Any]:
            nonlocal shape
            own = list(leaves)
            for index, tensor in zip(places, tensors, strict=True):
                own[index] = tensor
            found_args, found_kwargs = unflatten_tree(own, spec)
            results, shape = flatten_tree(original(*settings, *found_args, **found_kwargs))
            return results

        tensors = [leaves[index] for index in places]
        inside = True
        try:
            with apart_from_tracing():
                module = traced_operators(flat, tensors)
        finally:
            inside = False
        return unflatten_tree(list(torch.fx.Interpreter(module).run(*tensors)), shape)

    with replaced_vmap(performed):
        yield
