"""The ``shardwright`` command: thin, no logic. Each command is a module of this package with a function of its name."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import typer

from shardwright.errors import ShardwrightError

app = typer.Typer(
    name="shardwright",
    help="Automatic model parallelism for PyTorch: plan, prove, run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

for _module in sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")):
    _command = getattr(importlib.import_module(f"{__name__}.{_module}"), _module)
    app.command(name=_module)(_command)


def main() -> None:
    """Run the command line; an error of ours is one sentence, a remedy and exit status 2."""
    try:
        app()
    except ShardwrightError as error:
        print(f"shardwright: {error.message}", file=sys.stderr)
        if error.remedy:
            print(f"  {error.remedy}", file=sys.stderr)
        sys.exit(2)
