"""Notebooks as a reader runs them: ``python -m bench.notebooks`` runs every cell of each and stores the outputs.

Nothing of Jupyter is needed: a cell is Python whose last expression is shown, a file (``%%writefile NAME``), or a command
behind ``!``. They run in order, in one process per notebook and in an empty folder. A test runs them and compares words;
``docs/site.py`` makes pages of them.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parents[1] / "docs" / "notebooks"
SECONDS = 300


def run(path: Path) -> dict[str, Any]:
    """The notebook with the outputs of this run, from a process of its own."""
    root = NOTEBOOKS.parents[1]
    with tempfile.TemporaryDirectory() as folder:
        known = os.pathsep.join([folder, str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "bench.notebooks", "--cells", str(path)]
        around = {"cwd": folder, "env": {**os.environ, "PYTHONPATH": known}, "timeout": 2 * SECONDS}
        done = subprocess.run(command, capture_output=True, text=True, **around)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{path.name}\n{done.stdout}\n{done.stderr[-3000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def cells(path: Path) -> dict[str, Any]:
    """Run the cells here, in the current folder."""
    book, names = json.loads(path.read_text()), dict[str, Any](__name__="__main__")
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, 1):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            value = _done("".join(cell["source"]), names)
        cell["execution_count"], cell["outputs"] = number, list(_outputs(said.getvalue(), value, number))
    return book


def _done(source: str, names: dict[str, Any]) -> Any:
    if source.startswith("%%writefile "):
        first, _, body = source.partition("\n")
        Path(first.split()[1]).write_text(body)
        return None
    if source.startswith("!"):
        words = shlex.split(source[1:])
        words[:1] = [sys.executable, "-m", "torch.distributed.run"] if words[0] == "torchrun" else words[:1]
        done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, f"{source} ended with {done.returncode}\n{done.stdout}{done.stderr}"
        print(done.stdout, end="")
        return None
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)


def _outputs(said: str, value: Any, number: int) -> Iterator[dict[str, Any]]:
    if said:
        yield {"name": "stdout", "output_type": "stream", "text": said.splitlines(keepends=True)}
    if value is not None:
        shown = {"text/plain": repr(value).splitlines(keepends=True)}
        yield {"data": shown, "execution_count": number, "metadata": {}, "output_type": "execute_result"}


def text(book: dict[str, Any]) -> str:
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    if sys.argv[1:2] == ["--cells"]:
        with contextlib.redirect_stdout(sys.stderr):
            book = cells(Path(sys.argv[2]))
        print(json.dumps(book))
        return
    for path in map(Path, sys.argv[1:] or sorted(NOTEBOOKS.glob("*.ipynb"))):
        path.write_text(text(run(path.resolve())))
        print(path)


if __name__ == "__main__":
    main()
