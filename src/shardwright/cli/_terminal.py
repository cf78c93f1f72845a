"""Standard output on terminals that know no more than ASCII: what they lack is written in the letters they have."""

from __future__ import annotations

import codecs
import io
import sys

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
