"""Renders what documents take from the code: ``python -m bench.documents`` (or ``make documents``).

- README.md: what its commands print, and the table of results between ``<!-- results -->`` and ``<!-- end -->``;
- other documents with ``console`` blocks: what the commands print;
- docs/commands.md: every command's ``--help``;
- docs/reference.md: every name of the Python API, from its docstring;
- docs/pictures: the pictures of plans.

``--quick`` leaves out what has to be run. A test holds all of it to the code.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RUN = (README, *(ROOT / "docs" / name for name in ("getting-started.md", "concepts.md", "how-to.md")))
"""Documents that a reader follows, and whose blocks run."""
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
RESULTS = re.compile(r"(?<=<!-- results -->\n).*?(?=<!-- end -->)", re.DOTALL)
PICTURES = ROOT / "docs" / "pictures"


def with_results(text: str) -> str:
    """README with the table of results that the stored measurements give now."""
    from bench.front_page import results

    return RESULTS.sub(lambda _: results() + "\n", text)


def followed(documents: tuple[Path, ...], folder: Path) -> dict[str, Any]:
    """What came of following the documents in a folder: one process for all."""
    shutil.copytree(ROOT / "examples", folder / "examples", dirs_exist_ok=True)
    return _followed(documents, folder, ROOT / "src")


def contributed(document: Path, folder: Path) -> dict[str, Any]:
    """What came of making a document's edits in a copy of the source and running what stands under them."""
    shutil.copytree(
        ROOT / "src" / "shardwright", folder / "src" / "shardwright", ignore=shutil.ignore_patterns("__pycache__")
    )
    return _followed((document,), folder, folder / "src")


def _followed(documents: tuple[Path, ...], folder: Path, source: Path) -> dict[str, Any]:
    known = os.pathsep.join([str(source), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "bench.document_blocks", *map(str, documents)],
        cwd=folder, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": known},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


COMMANDS = """# Commands

Every command says this itself with `--help`; every one that prints a table prints JSON with `--json`. Rendered by
`make documents` from the commands themselves.
"""


def commands_page() -> str:
    """docs/commands.md."""
    import typer

    from shardwright.cli import app

    group: Any = typer.main.get_command(app)
    names = sorted(group.commands)
    parts = [COMMANDS, " · ".join(f"[{name}](#shardwright-{name})" for name in names), ""]
    for name in names:
        parts += [*_command(name, group.commands[name]), ""]
    return "\n".join(parts)


def _command(name: str, command: Any) -> Iterator[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    usage = [name, *(p.name.upper() + ("" if p.required else "?") + ("…" if p.nargs < 0 else "") for p in arguments)]
    yield f"## shardwright {name}\n"
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        plain = re.sub(r"\[/?\w+\]", "", paragraph)
        yield f"```\n{plain}\n```\n" if plain.startswith(("Example", "A pipeline:")) else f"{plain}\n"
    yield f"Usage: `shardwright {' '.join(usage)}{' [options]' if options else ''}`\n"
    yield "| argument or option | what it is | unless given |\n|---|---|---|"
    for param in [*arguments, *options]:
        flags = ", ".join(f"`{flag}`" for flag in param.opts) if param in options else f"`{param.name.upper()}`"
        default = param.default
        shown = "" if default in (None, False, (), []) or callable(default) else f"`{default}`"
        what = (getattr(param, "help", "") or "").replace("|", "\\|")
        yield f"| {flags} | {what} | {shown} |"


REFERENCE = """# The Python API

`import shardwright` offers these names and loads each when it is first used. Errors are `ShardwrightError`s: a sentence
and a remedy. Rendered by `make documents` from the docstrings.
"""


def reference_page() -> str:
    """docs/reference.md."""
    import shardwright

    parts = [REFERENCE]
    for name in sorted({*shardwright.__all__} - {"__version__"}, key=lambda n: (n.lower(), n)):
        parts += [f"## {name}\n", *_described(name), ""]
    return "\n".join(parts)


def _described(name: str) -> Iterator[str]:
    import shardwright

    home = shardwright._HOME.get(name, "")
    if home.startswith("shardwright.integrations"):  # their libraries take seconds to import
        source = importlib.util.find_spec(home)
        tree = ast.parse(Path(source.origin).read_text())  # type: ignore[union-attr, arg-type]
        node = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
        yield _markdown(ast.get_docstring(node) or "")
        return
    value = getattr(shardwright, name)
    if inspect.ismodule(value):
        yield _markdown(inspect.getdoc(value) or "")
        offered = getattr(value, "__all__", None) or [n for n, v in vars(value).items() if _own(value, n, v)]
        yield "\nOffers " + ", ".join(f"`{n}`" for n in sorted(offered, key=lambda n: (n.lower(), n))) + "."
        return
    if not issubclass_of_exception(value):
        yield f"```python\n{_signature(name, value)}\n```\n"
    yield _markdown(inspect.getdoc(value) or "")


def issubclass_of_exception(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Exception)


def _own(module: Any, name: str, value: Any) -> bool:
    there = getattr(value, "__module__", module.__name__) == module.__name__
    return not name.startswith("_") and callable(value) and there


def _signature(name: str, value: Any) -> str:
    if dataclasses.is_dataclass(value):
        fields = [
            f"    {f.name}: {f.type}" + _default(f)
            for f in dataclasses.fields(value)
            if f.init and not f.name.startswith("_")
        ]
        return "\n".join([f"class {name}:", *fields])
    text = re.sub(r"'([\w.\[\], |]+)'", r"\1", f"{name}{inspect.signature(value)}")
    return (
        text
        if len(text) < 110
        else text.replace("(", "(\n    ", 1).replace(", *, ", ",\n    *, ").replace(") ->", ",\n) ->")
    )


def _default(field: Any) -> str:
    if field.default is not dataclasses.MISSING:
        return f" = {field.default!r}"
    return "" if field.default_factory is dataclasses.MISSING else f" = {field.default_factory.__name__}()"


def _markdown(doc: str) -> str:
    """A docstring as Markdown: examples fenced, headings bold, roles as plain code."""
    doc = re.sub(r":(?:func|class|mod|data):`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", doc).replace("``", "`")
    doc = re.sub(r"^(\w[\w ]*)\n-+$", r"\n**\1**\n", doc, flags=re.MULTILINE)
    doc = re.sub(r"\s+# doctest: \+SKIP", "", doc)
    doc = re.sub(r"^(\w[\w, ]*)\n((?:    \S.*\n?)+)", _listed, doc, flags=re.MULTILINE)
    out: list[str] = []
    fenced = False
    for line in doc.splitlines():
        starts = line.lstrip().startswith(">>>")
        if starts and not fenced:
            out += ["", "```python"]
            fenced = True
        elif fenced and not line.strip():
            out.append("```")
            fenced = False
        out.append(textwrap.dedent(line) if fenced else line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join([*out, "```"] if fenced else out)).strip()


def _listed(found: re.Match[str]) -> str:
    return f"- `{found[1]}`: {' '.join(found[2].split())}\n"


def write(path: Path, text: str) -> None:
    """Write what has changed, and say so."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
        print(path.relative_to(ROOT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="run no command of a document")
    given = parser.parse_args()
    write(ROOT / "docs" / "commands.md", commands_page())
    write(ROOT / "docs" / "reference.md", reference_page())
    write(README, with_results(README.read_text()))
    if given.quick:
        return
    with tempfile.TemporaryDirectory() as folder:
        found = followed(RUN, Path(folder))
        for picture in Path(folder).glob("*.svg"):
            write(PICTURES / picture.name, picture.read_text())
    with tempfile.TemporaryDirectory() as folder:
        found |= contributed(CONTRIBUTING, Path(folder))
    for name, answer in found.items():
        for wrong in answer["wrong"]:
            print(f"{name}: {wrong}")
        if answer["stale"]:
            write(Path(name), answer["now"])


if __name__ == "__main__":
    main()
