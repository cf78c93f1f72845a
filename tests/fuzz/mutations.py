"""Structure-aware damage: a document is changed here and there, in ways that people, bugs and attackers change documents.

A change names its place by a share of all the places there are, so that the same list of changes applies to every
document and Hypothesis can shrink it.
"""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

NUMBERS = [
    *(0, 1, -1, 2, 3, 7, 0.5, -0.0, 1e-320, 1e18, 10**18, 10**20, 10**30, 10**400, -(10**30), 2**31, 2**63, 2**64),
    *(1e300, -1e300, float("nan"), float("inf"), -float("inf")),
]
WORDS = [
    "",
    "0",
    "nan",
    "S0",
    "S9",
    "S99999999999",
    "P(sum)",
    "P(",
    "R",
    "../../x",
    "/etc/passwd",
    "a\0b",
    "×",
    "\ud800",
    "x" * 5000,
]
VALUES = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(WORDS),
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.just([]),
    st.just({}),
    st.lists(st.sampled_from([1, 0.5, "x", None, [1]]), max_size=3),
    st.just({"x": 1}),
)
WAYS = (
    "replace",
    "replace",
    "replace",
    "delete",
    "repeat",
    "swap",
    "wrap",
    "rename",
    "add",
    "negate",
    "as text",
    "deep",
)
CHANGES = st.lists(
    st.tuples(st.sampled_from(WAYS), st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True), VALUES),
    min_size=1,
    max_size=4,
)
DEEP = "nested without end"
DEPTH = 10_000
TORN = st.tuples(
    st.sampled_from(["whole", "whole", "whole", "cut", "flip", "insert"]), st.floats(0, 1), st.binary(max_size=8)
)


def changed(document: Any, changes: list[tuple[str, float, float, Any]]) -> Any:
    """A copy of a JSON-like document with changes made one after the other."""
    document = copy.deepcopy(document)
    for way, where, other, value in changes:
        places = list(_places(document))
        if not places:
            return value
        holder, key = places[int(where * len(places))]
        _change(holder, key, way, places[int(other * len(places))], copy.deepcopy(value))
    return document


def _places(value: Any) -> Any:
    """Every (holder, key) in a document, without recursion: documents may be deep."""
    waiting = [value]
    while waiting:
        holder = waiting.pop()
        items = list(holder.items()) if isinstance(holder, dict) else list(enumerate(holder))
        for key, entry in items:
            yield holder, key
            if isinstance(entry, (dict, list)):
                waiting.append(entry)


def _change(holder: Any, key: Any, way: str, other: tuple[Any, Any], value: Any) -> None:
    now = holder[key]
    if way == "delete":
        del holder[key]
    elif way == "repeat" and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(now))
    elif way == "swap":
        holder[key] = copy.deepcopy(other[0][other[1]]) if other[1] in _keys(other[0]) else value
    elif way == "wrap":
        holder[key] = [now]
    elif way == "rename" and isinstance(holder, dict):
        holder[f"{key}_"] = holder.pop(key)
    elif way == "add" and isinstance(now, dict):
        now["unheard of"] = value
    elif way == "add" and isinstance(now, list):
        now.append(value)
    elif way == "negate" and isinstance(now, (int, float)):
        holder[key] = -now
    elif way == "as text":
        holder[key] = str(now)[:200]
    elif way == "deep":
        holder[key] = DEEP
    else:
        holder[key] = value


def _keys(holder: Any) -> Any:
    return holder if isinstance(holder, dict) else range(len(holder))


def deepened(text: str) -> bytes:
    """A written document in which what stands for endless nesting is nested so (no encoder writes that)."""
    deep = "[" * DEPTH + "]" * DEPTH
    return text.replace(f'"{DEEP}"', deep).encode("utf-8", "surrogatepass")


def torn(data: bytes, how: tuple[str, float, bytes]) -> bytes:
    """A file's bytes, perhaps cut short, with some overwritten, or with some put in between."""
    way, share, extra = how
    at = int(share * len(data))
    if way == "cut":
        return data[:at]
    if way == "flip":
        return data[:at] + bytes(b ^ 0x5A for b in data[at : at + 1]) + data[at + 1 :]
    return data[:at] + extra + data[at:] if way == "insert" else data
