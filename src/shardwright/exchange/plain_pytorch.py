"""A ``parallelize.py`` in plain PyTorch, read back: its degrees stand in it as one table of plain values.

Nothing of the file is executed: the value of its name ``PARALLELISM`` is read as a literal.
"""

from __future__ import annotations

import ast
from pprint import pformat
from typing import Any

from shardwright.exchange.configuration import Configuration, ConfigurationError, Keys
from shardwright.files import read_text

NAME = "PARALLELISM"
WIDTH = 90
FIELDS = """
    replicate shard context tensor sequence pipeline expert sharding reshard schedule stages_per_device cuts
    microbatch microbatches batch length recompute recomputed_share precision optimizer modules
""".split()  # noqa: SIM905 - thirty lines less


def read(path: str) -> Configuration:
    """The configuration in a ``parallelize.py``.

    >>> read("parallelize.py").shard                                             # doctest: +SKIP
    8
    """
    return parse(read_text(path), path)


def parse(text: str, source: str) -> Configuration:
    """The configuration in a text."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as problem:
        raise ConfigurationError(f"{source} is not Python: {problem}.", "Is this the file that was meant?") from None
    for node in tree.body:
        named = isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == NAME for t in node.targets)
        if named and isinstance(node, ast.Assign):
            try:
                values = ast.literal_eval(node.value)
            except ValueError:
                break
            if isinstance(values, dict):
                return of_table(values, source)
    raise ConfigurationError(
        f"{source} has no table {NAME} of plain values.",
        "Only files that `shardwright export --to pytorch` wrote are read.",
    )


def of_table(values: dict[str, Any], source: str) -> Configuration:
    """The configuration in a table of its fields."""
    keys = Keys(values, source)
    given = {name: keys.values[name] for name in FIELDS if keys.take(name) is not None}
    for name in ("cuts", "modules"):
        if name in given:
            given[name] = tuple(tuple(one) if isinstance(one, list | tuple) else one for one in given[name])
    try:
        return Configuration(engine="pytorch", source=source, **given, **keys.lists())
    except TypeError as problem:
        raise ConfigurationError(f"{source}: {problem}.", "Export the plan again.") from None


def table(configuration: Configuration) -> str:
    """The table as it stands in the file."""
    said = configuration.decisions()
    plain = Configuration("pytorch").decisions()
    lines = [
        f"    {name!r}: {pformat(value, width=WIDTH).replace(chr(10), chr(10) + '     ')},"
        for name, value in said.items()
        if value != plain[name]
    ]
    return "\n".join([f"{NAME} = {{", *lines, "}"])
