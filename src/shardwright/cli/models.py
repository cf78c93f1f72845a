"""``shardwright models``: the zoo's models, their sizes and parameter counts."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer


def models(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
    """List the models of the zoo; each name takes sizes, as in `gpt:layers=24,width=1024`.

    Example: shardwright models --json
    """
    from shardwright.zoo import ENTRIES

    rows: list[dict[str, Any]] = [
        {
            "name": entry.name,
            "parameters": entry.parameters,
            "sizes": dict(entry.sizes),
            "small": dict(entry.small),
            "summary": entry.summary,
            "paper": entry.paper,
        }
        for entry in ENTRIES.values()
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Models of the zoo")
    table.add_column("model", no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("what it is")
    table.add_column("default sizes", overflow="fold")
    for row in rows:
        shown = ", ".join(f"{name}={value}" for name, value in row["sizes"].items() if value is not None)
        table.add_row(row["name"], _in_words(row["parameters"]), f"{row['summary']}. {row['paper']}", shown)
    console = Console()
    console.print(table)
    console.print(
        "Sizes: gpt:layers=24,width=1024. Tiny: gpt:small. Others: hf:llama, hf:config.json, file.py:function."
    )


def _in_words(count: int) -> str:
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"
