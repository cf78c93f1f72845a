"""Configurations that other projects ship, read, written back and compared: one row for every file.

    python bench/exchange_files.py -o bench/measured/exchange/files.md      # seconds

The files are copies in ``tests/data/exchange`` (sources and licences beside them); the ``tp_plan``s are those of the
transformers that is installed. A file is read into the one record of decisions; keys that change speed or memory there and
have no counterpart here are named; what is understood by neither side would stand under *unknown*. *Back*: the record
written from nothing as that engine's file and read again is the same record. *Unchanged*: exporting it into the file
itself changes no letter.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from shardwright.exchange import Configuration, ConfigurationError, read_configuration
from shardwright.exchange.expressing import canonical, nearest
from shardwright.exchange.writing import parse, written

FILES = Path(__file__).resolve().parents[1] / "tests" / "data" / "exchange"
HUGGING_FACE = ("Llama", "Qwen3", "Mixtral", "Gemma2", "Phi3", "Mistral", "DeepseekV3", "Qwen2", "Olmo2")
DEVICES = 128
"""For files that leave it open."""


def settled(found: Configuration) -> Configuration:
    """With every degree and count said, where the file says nothing: on so many devices, a row for each."""
    devices = found.devices or DEVICES
    try:
        return found.on(devices, found.batch)
    except ConfigurationError:
        return found.on(devices, devices * (found.microbatch or 1))


def row(name: str, found: Configuration, text: str | None) -> str:
    engine = found.engine
    near = nearest(settled(found), engine)
    assert near.lost == (), name
    again = parse(written(near), engine)
    devices, batch = near.configuration.devices or 1, near.configuration.batch
    same = not canonical(again.on(devices, batch)).difference(canonical(near.in_file.on(devices, batch)))
    kept = "–" if text is None else "yes" if written(near, text, str(FILES / name)) == text else "NO"
    decided = found.summary()
    unsupported = ", ".join(remark.key for remark in found.unsupported) or "–"
    unknown = ", ".join(remark.key for remark in found.unknown) or "–"
    cells = [name, decided, unsupported, str(len(found.elsewhere)), unknown, "yes" if same else "NO", kept]
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """All rows, as Markdown."""
    lines = [
        "| file | decides | no counterpart here | decides nothing here | unknown | back | unchanged |",
        "|---|---|---|---|---|---|---|",
    ]
    for path in sorted(FILES.glob("*/*.*")):
        name = str(path.relative_to(FILES))
        lines.append(row(name, read_configuration(path), path.read_text()))
    for model in HUGGING_FACE:
        found = read_configuration("hf", f"hf:{model}Config")
        modules = f"tensor open, {len(found.modules)} patterns"
        lines.append(row(f"tp_plan of {model}Config", found, None).replace(found.summary(), modules))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    found = table()
    print(found, end="")
    if asked.output:
        asked.output.parent.mkdir(parents=True, exist_ok=True)
        asked.output.write_text(found)


if __name__ == "__main__":
    main()
