"""Stored weights: slices of named tensors in ``safetensors`` files, and whether their names and shapes are the model's.

A name that does not match leaves a parameter as it was drawn, which nothing later would notice. So what is stored must be
what the model has, as with ``load_state_dict(strict=True)``; leaving something out has to be asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwright.errors import RunError

Shape = tuple[int, ...]
_SHOWN = 4


def check_names(
    where: str | Path, stored: Mapping[str, Shape], wanted: Mapping[tuple[str, ...], Shape], strict: bool
) -> None:
    """Refuse stored tensors that are not the model's, naming them.

    ``wanted`` has, for every tensor of the model, all the names it may be stored under (tied weights have several).
    Without ``strict`` the names may differ, shapes may not.

    >>> check_names("w.safetensors", {"model.a": (2,)}, {("a",): (2,)}, strict=False)
    """
    own = {name: shape for names, shape in wanted.items() for name in names}
    shapes = [
        f"{name} is {list(shape)} there and {list(own[name])} in the model"
        for name, shape in stored.items()
        if name in own and tuple(shape) != tuple(own[name])
    ]
    missing = [names[0] for names in wanted if not any(name in stored for name in names)] if strict else []
    unexpected = [name for name in stored if name not in own] if strict else []
    clauses = [_listed("missing", missing), _listed("unexpected", unexpected), _listed("of another shape", shapes)]
    if found := [clause for clause in clauses if clause]:
        raise RunError(
            f"The weights in {where} are not this model's: {'; '.join(found)}.", _remedy(missing, unexpected)
        )


def _listed(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {what} ({', '.join(names[:_SHOWN])}{more})" if names else ""


def _remedy(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    if not missing and not unexpected:
        return "Build the model with the sizes these weights were made for."
    for name in missing[:1]:
        for other in unexpected:
            if other.endswith(f".{name}"):
                return (
                    f"The stored names begin with {other.removesuffix(name)!r}: store them without, or wrap the model."
                )
            if name.endswith(f".{other}"):
                return (
                    f"The stored names lack {name.removesuffix(other)!r}: store them with it, or load the inner model."
                )
    return "Give the weights of this model, or pass strict=False: what is missing is then initialised."


class Weights:
    """Slices of named tensors in a folder (or file) of ``safetensors``."""

    def __init__(self, path: Path) -> None:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise RunError("Reading safetensors needs the safetensors package.", "pip install safetensors") from None
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files or not files[0].is_file():
            raise RunError(f"There are no safetensors files at {path}.", "Check the path given as weights=.")
        try:
            self._open: dict[str, Any] = {file.name: safe_open(str(file), framework="pt") for file in files}
        except (SafetensorError, OSError) as error:
            raise RunError(f"The weights in {path} cannot be read: {error}.", "Write or download them again.") from None
        self._file = {name: file for file, handle in self._open.items() for name in handle.keys()}  # noqa: SIM118 - not a dict
        index = path / "model.safetensors.index.json"
        if index.is_file():
            mapped: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
            if lost := [name for name, file in mapped.items() if self._file.get(name) != file]:
                raise RunError(f"{index} promises {_listed('absent tensors', lost)}.", "Download all files again.")
            self._file = dict(mapped)

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: tuple(self._lazy(name).get_shape()) for name in self._file}

    def slice(self, names: Iterable[str], spans: Sequence[tuple[int, int]]) -> Tensor | None:
        """The region of the first of these names that is there."""
        name = next((name for name in names if name in self._file), None)
        if name is None:
            return None
        return self._lazy(name)[tuple(slice(*span) for span in spans)] if spans else self._lazy(name)[:]

    def _lazy(self, name: str) -> Any:
        return self._open[self._file[name]].get_slice(name)
