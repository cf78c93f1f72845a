"""The code blocks of a document, run one after the other as a reader would: ``python -m bench.document_blocks README.md``.

A reader copies what stands in ``console`` blocks behind ``$`` and in ``python`` blocks, in the document's order, in one
folder. So does this, in one process where that is possible (importing PyTorch anew for every command would take most of the
time): commands of ours are called, scripts and jobs of several processes are started. A comment before a block says more:

- ``<!-- file train.py -->``: the reader saves the block under that name;
- ``<!-- append train.py -->``, ``<!-- insert train.py after: LINE -->``: the reader adds it to a file that is there;
- ``<!-- output -->``: what stands under the commands is what they print;
- ``<!-- output varies -->``: the words of the output are the same everywhere, its numbers are of the machine;
- ``<!-- not run: why -->``: the block asks for what a test has not (a cluster, a network).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"(?:<!-- (?P<note>[^\n]*) -->\n)?```(?P<language>\w+)\n(?P<body>.*?)```", re.DOTALL)
SECONDS = 300
"""For one command: a job of two processes takes ten of them on an idle machine."""
COLUMNS = "80"


@dataclass(frozen=True)
class Block:
    """One fenced block: where it lies in the document, what is said before it, what it holds."""

    start: int
    end: int
    note: str
    language: str
    body: str

    @property
    def skipped(self) -> bool:
        followed = self.language in ("python", "console", "toml") or self.edit
        return self.note.startswith("not run: ") or not followed

    @property
    def edit(self) -> re.Match[str] | None:
        """How the block is to be saved, where, and behind which line."""
        return re.fullmatch(r"(file|append|insert) (\S+)(?: after: (.+))?", self.note)


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a document, in order.

    >>> [(b.language, b.body) for b in blocks("Say:\\n```console\\n$ ls\\n```\\n")]
    [('console', '$ ls\\n')]
    """
    for found in BLOCK.finditer(text):
        yield Block(found.start("body"), found.end("body"), found["note"] or "", found["language"], found["body"])


def commands(body: str) -> Iterator[tuple[str, str]]:
    """Every command of a console block as it is written, over several lines where they end in a backslash, and what stands
    under it.

    >>> list(commands("$ one \\\\\n  two\nsaid\n$ three\n"))
    [('$ one \\\\\n  two\n', 'said\n'), ('$ three\n', '')]
    """
    command, said = "", ""
    for line in body.splitlines(keepends=True):
        if line.startswith("$ ") and command:
            yield command, said
            command, said = "", ""
        if line.startswith("$ ") or command.endswith("\\\n"):
            command += line
        else:
            said += line
    if command:
        yield command, said


@dataclass
class Reader:
    """Somebody who follows documents, in the current folder; the same command is not run twice. One who changes our
    ``source`` makes all edits before the first command, so that all commands can run in this process."""

    ascii: bool = False
    source: bool = False

    def __post_init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "document"}
        self.printed: dict[str, str] = {}

    def follow(self, text: str) -> tuple[str, list[str]]:
        """The document with what its commands print now, and what went wrong, a text each."""
        wrong, after, last = [], "", 0
        if self.source:
            for block in blocks(text):
                if block.edit:
                    self._save(block.body, *block.edit.groups())
        for block in blocks(text):
            body = block.body
            if not block.skipped and not (self.source and block.edit):
                try:
                    body = self._done(block)
                except Exception as error:
                    why = str(error) if isinstance(error, AssertionError) else traceback.format_exc(limit=-4)
                    wrong.append(f"{block.body.strip()}\n→ {why}")
            after += text[last : block.start] + body
            last = block.end
        return after + text[last:], wrong

    def _done(self, block: Block) -> str:
        if block.edit:
            self._save(block.body, *block.edit.groups())
        elif block.language == "python":
            exec(compile(block.body, "<document>", "exec"), self.names)
        elif block.language == "console":
            body = ""
            for command, said in commands(block.body):
                if command not in self.printed:
                    self.printed[command] = self._run(command.removeprefix("$ ").replace("\\\n", " "))
                body += command + (self.printed[command] if block.note.startswith("output") else said)
            return body
        return block.body

    def _save(self, body: str, how: str, name: str, line: str | None) -> None:
        path = Path(name)
        before = "" if how == "file" else path.read_text()
        if how == "file" and self.source:
            assert not path.exists(), f"{name} is there already"
        if how == "insert":
            assert before.count(f"\n{line}\n") == 1, f"{name} has no single line {line!r}"
            path.write_text(before.replace(f"\n{line}\n", f"\n{line}\n{body}"))
        else:
            path.write_text(f"{before}\n\n{body}" if before else body)

    def _run(self, command: str) -> str:
        words = shlex.split(command, comments=True)
        if words[0] == "shardwright" and words[1] not in ("run", "tour"):
            return self._called(words[1:])
        if words[0] == "cat":
            return "".join(Path(name).read_text() for name in words[1:])
        programs = {
            "shardwright": [sys.executable, "-m", "shardwright"],
            "python": [sys.executable],
            "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        }
        assert words[0] in programs, f"nobody here runs {words[0]!r}; say <!-- not run: why --> before the block"
        done = subprocess.run(
            programs[words[0]] + words[1:], capture_output=True, text=True, timeout=SECONDS, env={**os.environ}
        )
        assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}{done.stderr}"
        return _tidied(done.stdout)

    def _called(self, words: Sequence[str]) -> str:
        """A command of ours, in this process."""
        from shardwright.cli import app, speak_plainly

        said = io.TextIOWrapper(io.BytesIO(), encoding="ascii" if self.ascii else "utf-8", write_through=True)
        with contextlib.redirect_stdout(said):
            speak_plainly()
            status = app(list(words), standalone_mode=False)
        said.seek(0)
        text = said.read()
        assert not status, f"shardwright {' '.join(words)} ended with {status}\n{text}"
        return _tidied(text)


def _tidied(text: str) -> str:
    text = text.replace(f"{Path.cwd()}/", "").replace(f"{Path.cwd().name}/", "")
    return "".join(line.rstrip() + "\n" for line in text.strip("\n").splitlines())


VARIES = (r"\b(Planned|Searched|Solved) (in|for) [\d.]+ m?s", r"\d\.\d+e-\d+", r"zoo/\w+\.py:\d+")


def same(block: Block, before: str, after: str) -> bool:
    """Whether a block still says what its commands print: without the seconds of this run, and rounding of this machine."""
    if block.note == "output varies":
        pattern = re.compile(r"[A-Za-z]{3,}")
        return pattern.findall(before) == pattern.findall(after)
    for varies in VARIES:
        before, after = (re.sub(varies, "…", " ".join(text.split())) for text in (before, after))
    return before == after


def stale(text: str, now: str) -> list[str]:
    """The blocks of a document whose output is another now."""
    return [
        f"{one.body}→ now:\n{two.body}"
        for one, two in zip(blocks(text), blocks(now), strict=True)
        if not one.skipped and one.note.startswith("output") and not same(one, one.body, two.body)
    ]


def surroundings() -> None:
    """What commands find in their environment: a terminal of 80 columns without colours."""
    os.environ.update(FORCE_COLOR="1", TERM="dumb", COLUMNS=COLUMNS)


def main() -> None:
    """Follow the documents named, each in the current folder, and print what went wrong and what they say now, as JSON."""
    surroundings()
    reader, found = Reader(), {}
    for name in sys.argv[1:]:
        text = Path(name).read_text()
        reader = replace(reader, ascii=Path(name).name == "README.md", source=Path(name).name == "CONTRIBUTING.md")
        with contextlib.redirect_stdout(sys.stderr):
            now, wrong = reader.follow(text)
        found[name] = {"wrong": wrong, "stale": stale(text, now), "now": now}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
