"""The ``shardwright`` command: thin, no logic. Each command is a module of this package with a function of its name."""

from __future__ import annotations

import codecs
import importlib
import io
import os
import pkgutil
import sys
from typing import Annotated

import typer

from shardwright.errors import ShardwrightError

app = typer.Typer(
    name="shardwright",
    help="Automatic model parallelism for PyTorch: plan, prove, run.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

for _module in sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")):
    _home = importlib.import_module(f"{__name__}.{_module}")
    app.command(name=_module, cls=getattr(_home, "Command", None))(getattr(_home, _module))


INTERRUPTED = 130
"""The status of a command that Ctrl-C has ended."""


def _version(asked: bool) -> None:
    if asked:
        from shardwright.version import __version__

        print(f"shardwright {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version")
    ] = False,
) -> None:
    """Automatic model parallelism for PyTorch: plan, prove, run."""


def main() -> None:
    """Run the command line; what a user can act on is one sentence, a remedy and exit status 2, never a traceback."""
    speak_plainly()
    try:
        app(standalone_mode=True)
    except SystemExit as ended:
        if ended.code == INTERRUPTED:  # typer ends so, and says nothing
            _stop("interrupted.", status=INTERRUPTED)
        raise
    except ShardwrightError as error:
        _stop(error.message, error.remedy)
    except KeyboardInterrupt:
        _stop("interrupted.", status=INTERRUPTED)
    except MemoryError:
        _stop("there is not enough memory on this machine for that.", "Try a smaller model or problem.")
    except BrokenPipeError:  # the reader of a pipe has seen enough; Python would complain again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        _stop(f"{error.strerror or error}{where}.", "Check the path, and that the disk is not full.")


def _stop(message: str, remedy: str = "", status: int = 2) -> None:
    print(f"shardwright: {message}", file=sys.stderr)
    if remedy:
        print(f"  {remedy}", file=sys.stderr)
    sys.exit(status)


PLAIN = {
    "×": "x", "–": "-", "—": "-", "…": "...", "→": "->", "←": "<-", "↔": "<->", "◀": "<", "▶": ">",
    "µ": "u", "²": "2", "³": "3",
    "≤": "<=", "≥": ">=", "·": "-", "Σ": "sum", "’": "'", "“": '"', "”": '"', "é": "e", "ö": "o", "ü": "u", "ä": "a",
}  # fmt: skip


def _letters(error: UnicodeError) -> tuple[str | bytes, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(PLAIN.get(c, "?") for c in error.object[error.start : error.end]), error.end


def speak_plainly() -> None:
    """Let standard output and standard error write anything, on any terminal."""
    codecs.register_error("shardwright-plain", _letters)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not (stream.encoding or "").lower().startswith("utf"):
            stream.reconfigure(errors="shardwright-plain")
