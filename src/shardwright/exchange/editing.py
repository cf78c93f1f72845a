"""Another engine's file with some of its values changed; every other key, its order and its comments stay.

An edit is a path of keys and a value, ``None`` to take the key away. TOML, YAML and shell scripts are changed in their
text, which is otherwise not touched.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from shardwright.cluster.toml_text import dumps
from shardwright.exchange.configuration import ConfigurationError

Path = tuple[str, ...]
Edits = Mapping[Path, Any]


def least(text: str, edits: Edits, apply: Callable[[str, Edits], str], right: Callable[[str], bool]) -> str:
    """The text with as few of the edits as make it ``right``: all are made, then each is left out that is not needed.

    >>> least("a = 1", {("a",): 2, ("b",): 3}, toml, lambda text: "a = 2" in text)
    'a = 2\\n'
    """
    needed = dict(edits)
    for path in list(edits):
        fewer = {name: value for name, value in needed.items() if name != path}
        if right(apply(text, fewer)):
            needed = fewer
    return apply(text, needed) if needed else text


def toml(text: str, edits: Edits) -> str:
    """TOML with the values of ``(section, key)`` or ``(key,)`` changed.

    >>> print(toml("[training]\\nsteps = 10  # few\\n", {("training", "steps"): 20}), end="")
    [training]
    steps = 20  # few
    """
    lines = text.splitlines()
    for path, value in edits.items():
        section, key = ".".join(path[:-1]), path[-1]
        start, stop = _section(lines, section)
        at = next((i for i in range(start, stop) if re.match(rf"\s*{re.escape(key)}\s*=", lines[i])), None)
        said = None if value is None else f"{key} = {_toml_value(value)}"
        if at is not None:
            last = _end_of_value(lines, at, stop)
            comment = _comment(lines[last])
            lines[at : last + 1] = [] if said is None else [said + comment]
        elif said is not None:
            if section and start < 0:
                lines += ["", f"[{section}]", said]
                continue
            while stop > max(start, 0) and not lines[stop - 1].strip():
                stop -= 1
            lines.insert(stop, said)
    return "\n".join(lines) + "\n"


def _section(lines: list[str], name: str) -> tuple[int, int]:
    """From which line to which a section's keys stand; (-1, -1) where there is none."""
    heads = [i for i, line in enumerate(lines) if re.match(r"\s*\[", line)]
    if not name:
        return 0, heads[0] if heads else len(lines)
    for number, i in enumerate(heads):
        if re.match(rf"\s*\[\s*{re.escape(name)}\s*\]", lines[i]):
            return i + 1, heads[number + 1] if number + 1 < len(heads) else len(lines)
    return -1, -1


def _end_of_value(lines: list[str], at: int, stop: int) -> int:
    """The last line of an array that is written over several."""
    depth = 0
    for i in range(at, stop):
        line = re.sub(r"\"[^\"]*\"|'[^']*'", "", lines[i]).partition("#")[0]
        depth += line.count("[") - line.count("]")
        if depth <= 0:
            return i
    return at


def _comment(line: str) -> str:
    """The comment behind a value, with the spaces before it."""
    found = re.search(r"(\s+#[^\"']*)$", line)
    return found[1] if found else ""


def _toml_value(value: Any) -> str:
    return dumps({"x": {"value": value}}).rpartition("value = ")[2].strip()


def yaml(text: str, edits: Edits) -> str:
    """YAML with the values of ``(section, key)`` or ``(key,)`` changed, and whole sections taken away.

    >>> print(yaml("fsdp:\\n  version: 1 # old\\nuse_cpu: false\\n", {("fsdp", "version"): 2}), end="")
    fsdp:
      version: 2 # old
    use_cpu: false
    """
    lines = text.splitlines()
    for path, value in edits.items():
        start, stop, indent = 0, len(lines), ""
        if len(path) == 2:
            head = _yaml_line(lines, path[0], 0, len(lines), "")
            if head is None:
                lines += [] if value is None else [f"{path[0]}:", f"  {path[1]}: {value}"]
                continue
            lines[head] = re.sub(r":\s*\{\s*\}", ":", lines[head])
            start, stop = head + 1, _end_of_section(lines, head)
            indent = next((re.match(r"\s*", line)[0] for line in lines[start:stop] if line.strip()), "  ")  # type: ignore[index]  # always matches
        at = _yaml_line(lines, path[-1], start, stop, indent)
        said = f"{indent}{path[-1]}: {value}"
        if at is None:
            if value is not None:
                lines.insert(stop, said)
        elif value is None:
            lines[at : _end_of_section(lines, at)] = []
        else:
            lines[at] = said + _comment(lines[at])
    return "\n".join(lines) + "\n"


def _yaml_line(lines: list[str], key: str, start: int, stop: int, indent: str) -> int | None:
    return next(
        (i for i in range(start, stop) if re.match(rf"{indent}['\"]?{re.escape(key)}['\"]?\s*:", lines[i])), None
    )


def _end_of_section(lines: list[str], head: int) -> int:
    """Behind the lines that are further in than this one."""
    own = len(lines[head]) - len(lines[head].lstrip())
    stop = head + 1
    while stop < len(lines) and (not lines[stop].strip() or len(lines[stop]) - len(lines[stop].lstrip()) > own):
        stop += 1
    while stop > head + 1 and not lines[stop - 1].strip():
        stop -= 1
    return stop


def json_text(text: str, edits: Edits) -> str:
    """JSON with the values at paths changed.

    >>> json_text('{"seed": 7, "zero": {"stage": 1, "bucket": 2e8}}', {("zero", "stage"): 3, ("seed",): None})
    '{"zero": {"stage": 3, "bucket": 2e8}}'
    """
    for path, value in edits.items():
        text = _json_edited(text, text.index("{"), path, value)
    return text


def _json_edited(text: str, start: int, path: Path, value: Any) -> str:
    """With one value changed, of the object that begins at ``start``."""
    members = _members(text, start)
    found = next((place for place in members if place[0] == path[0]), None)
    if found is None:
        return text if value is None else _json_added(text, start, members, path, value)
    _, key, begin, end = found
    if len(path) > 1 and text[begin] == "{":
        return _json_edited(text, begin, path[1:], value)
    if value is not None:
        for name in reversed(path[1:]):
            value = {name: value}
        return text[:begin] + json.dumps(value) + text[end:]
    if len(path) > 1:
        return text
    after = re.match(r"\s*,\s*", text[end:])
    if after:
        return text[:key] + text[end + after.end() :]
    return re.sub(r"\s*,\s*$", "", text[:key]) + text[end:] if len(members) > 1 else text[:key] + text[end:]


def _members(text: str, start: int) -> list[tuple[str, int, int, int]]:
    """Of the object that begins there every key, where it stands, and from where to where its value."""
    decoder, at, found = json.JSONDecoder(), start + 1, list[tuple[str, int, int, int]]()
    space = re.compile(r"[\s,]*")
    while text[(at := space.match(text, at).end())] != "}":  # type: ignore[union-attr]  # matches always
        key = at
        name, at = decoder.raw_decode(text, at)
        begin = re.compile(r"\s*:\s*").match(text, at).end()  # type: ignore[union-attr]  # json was read before
        _, at = decoder.raw_decode(text, begin)
        found.append((name, key, begin, at))
    return found


def _json_added(text: str, start: int, members: list[tuple[str, int, int, int]], path: Path, value: Any) -> str:
    for name in reversed(path[1:]):
        value = {name: value}
    said = f"{json.dumps(path[0])}: {json.dumps(value)}"
    if not members:
        return f"{text[: start + 1]}{said}{text[start + 1 :]}"
    end = members[-1][3]
    indent = re.search(r"\s*$", text[: members[-1][1]])
    return f"{text[:end]},{indent[0] if indent and indent[0] else ' '}{said}{text[end:]}"


def shell(text: str, edits: Edits) -> str:
    """A launch script with the values of ``(option,)`` changed: ``True`` for an option without one.

    >>> print(shell("torchrun x.py --bf16 --size 2\\n", {("size",): 4, ("bf16",): None, ("seq",): True}), end="")
    torchrun x.py --seq --size 4
    """
    for (name,), value in edits.items():
        either = "[-_]".join(map(re.escape, name.split("-")))
        found = re.compile(rf"(?<![\w-])--{either}(?![\w-])([ \t=]+(?!-)[^\s\\\"')]+)?")
        said = f"--{name}" if value is True else f"--{name} {shlex.quote(str(value))}"
        if value is None:
            text = re.sub(rf"(?m)^[ \t]*{found.pattern}[ \t]*\\?[ \t]*\n", "", text)
            text = re.sub(rf"[ \t]*{found.pattern}", "", text)
        elif found.search(_without_comments(text)):
            text = found.sub(lambda match, said=said: said, text)  # type: ignore[misc]  # bound at once
        else:
            text = _added(text, said)
    return text


def _without_comments(text: str) -> str:
    return re.sub(r"(?m)^\s*#.*$", "", text)


_BESIDE = ["tensor-model-parallel-size", "pipeline-model-parallel-size", "micro-batch-size", "global-batch-size"]


def _added(text: str, said: str) -> str:
    """With an option more: before one about parallelism, or behind the Python file that is started."""
    for name in _BESIDE:
        found = re.search(rf"(?m)^(?!\s*#).*?(--{name})(?![\w-])", text)
        if found:
            return f"{text[: found.start(1)]}{said} {text[found.start(1) :]}"
    started = list(re.finditer(r"[\w./${}-]+\.py\b", text))
    if not started:
        raise ConfigurationError("The script starts no Python file.", "Export without --base, and put the options in.")
    return f"{text[: started[-1].end()]} {said}{text[started[-1].end() :]}"
