"""Writing TOML: the standard library reads it (``tomllib``) but does not write it. Numbers, strings, lists, tables.

``loads(dumps(data)) == data`` for nested dictionaries with string keys whose leaves are those types.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - Python 3.10
    import tomli as tomllib

loads = tomllib.loads
TOMLDecodeError = tomllib.TOMLDecodeError


def _string(text: str) -> str:
    escaped = (f"\\u{ord(c):04x}" if c in '"\\' or ord(c) < 32 or ord(c) == 127 else c for c in text)
    return '"' + "".join(escaped) + '"'


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _string(key)


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_scalar(item) for item in value) + "]"
    raise TypeError(f"{value!r} has no TOML form")


def _is_tables(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, Mapping) for item in value)


def dumps(data: Mapping[str, Any]) -> str:
    """A dictionary as TOML text.

    >>> print(dumps({"name": "H200", "device": {"memory": 141}}), end="")
    name = "H200"
    <BLANKLINE>
    [device]
    memory = 141
    """
    lines: list[str] = []

    def write(table: Mapping[str, Any], path: tuple[str, ...]) -> None:
        for key, value in table.items():
            if not isinstance(value, Mapping) and not _is_tables(value):
                lines.append(f"{_key(key)} = {_scalar(value)}")
        for key, value in table.items():
            name = ".".join(map(_key, (*path, key)))
            if isinstance(value, Mapping):
                lines.extend(["", f"[{name}]"])
                write(value, (*path, key))
            elif _is_tables(value):
                for item in value:
                    lines.extend(["", f"[[{name}]]"])
                    write(item, (*path, key))

    write(data, ())
    return "\n".join(lines).lstrip("\n") + "\n"
