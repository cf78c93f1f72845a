"""``shardwright cache``: what is kept on this machine between runs, and how to be rid of it."""

from __future__ import annotations

from typing import Annotated

import typer

from shardwright.cli._show import bytes_text, console, print_json, table


def cache(
    action: Annotated[str, typer.Argument(help="show, or clear to remove everything that is kept")] = "show",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")] = False,
) -> None:
    """Show what Shardwright keeps on this machine: probed rules, calibrations. Nothing of it is needed, all saves time.

    Example: shardwright cache clear
    """
    from shardwright.errors import ShardwrightError
    from shardwright.reports.machine import caches

    if action not in ("show", "clear"):
        raise ShardwrightError(f"A cache cannot {action!r}.", "Say shardwright cache, or shardwright cache clear.")
    kept = caches()
    rows = [
        {"what": c.name, "files": len(c.files), "bytes": c.bytes, "folder": str(c.folder), "without it": c.without}
        for c in kept
    ]
    if action == "clear":
        for one in kept:
            one.clear()
    if as_json:
        print_json({"cleared": action == "clear", "caches": rows})
        return
    title = "Removed" if action == "clear" else "Kept on this machine"
    shown = [[str(r["what"]), str(r["files"]), bytes_text(float(str(r["bytes"]))), str(r["folder"])] for r in rows]
    table(title, ["what", "files", "bytes", "folder"], shown)
    if action == "show":
        console.print("; ".join(f"without {c.name}: {c.without}" for c in kept) + ".")
