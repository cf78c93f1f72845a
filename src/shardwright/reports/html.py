"""Small pieces of HTML that every page is put together from; whatever comes from a plan is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from string import Template

__all__ = ["asset", "breakable", "card", "data", "escape", "filled", "legend_item", "script", "table"]


def asset(name: str) -> str:
    """The text of a file under ``reports/assets``."""
    return files("shardwright.reports").joinpath("assets", name).read_text(encoding="utf-8")


def filled(name: str, **parts: str) -> str:
    """A file under ``reports/assets`` with its ``$names`` replaced by HTML."""
    return Template(asset(name)).substitute(parts)


def breakable(path: str) -> str:
    """A module's path that may go on in the next line after any of its dots.

    >>> breakable("blocks.0")
    'blocks.<wbr>0'
    """
    return escape(path).replace(".", ".<wbr>")


def legend_item(colour: str, text: str) -> str:
    """One entry of a legend; ``colour`` names a variable of the style sheet."""
    mark = f'<span class="swatch" style="background:var(--{colour})" aria-hidden="true"></span>'
    return f"<li>{mark}{escape(text)}</li>"


def script(names: Iterable[str]) -> str:
    """Script files as one inline script, with names of their own."""
    return '<script>(() => {\n"use strict";\n' + "\n".join(asset(name) for name in names) + "})();\n</script>"


def data(number: str, value: float, text: str) -> str:
    """A number as people read it, with the number itself beside it.

    >>> data("step_seconds", 0.5, "500 ms")
    '<data data-number="step_seconds" value="0.5">500 ms</data>'
    """
    return f'<data data-number="{escape(number)}" value="{value!r}">{escape(text)}</data>'


def card(label: str, big: str, below: str = "") -> str:
    """``big`` and ``below`` are HTML, ``label`` is text."""
    under = f"<p>{below}</p>" if below else ""
    return f'<div class="card"><span class="label">{escape(label)}</span><span class="big">{big}</span>{under}</div>'


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, tight: bool = False) -> str:
    """A table whose first column heads its rows; cells are HTML. ``tight``: short cells, none of them is ever broken."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>' for first, *rest in rows
    )
    label, look = escape(caption, quote=True), ' class="tight"' if tight else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table{look}>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
