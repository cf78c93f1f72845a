"""Hugging Face's ``tp_plan``: module patterns and how each is cut, as configurations of transformers carry them.

The words are those of transformers' tensor parallelism (Apache-2.0): ``colwise`` cuts a weight's first dim (features
that it makes), ``rowwise`` its second (features that it reads); ``…_gather_output`` and ``…_rep`` put the result
together again. All devices are one tensor axis.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.exchange.configuration import Configuration, ConfigurationError, Remark
from shardwright.files import read_json

COLUMNS, ROWS, WHOLE = "columns", "rows", "whole"

WAYS = {
    "colwise": COLUMNS,
    "packed_colwise": COLUMNS,
    "colwise_rep": COLUMNS,
    "colwise_gather_output": COLUMNS,
    "local_colwise": COLUMNS,
    "rowwise": ROWS,
    "packed_rowwise": ROWS,
    "rowwise_rep": ROWS,
    "rowwise_split_input": ROWS,
    "local_rowwise": ROWS,
    "embedding_rowwise": COLUMNS,
    "vocab_parallel_embedding": COLUMNS,
    "replicated": WHOLE,
    "replicated_with_grad_allreduce": WHOLE,
    "sequence_parallel": WHOLE,
}
"""Words of theirs → how a weight lies on the tensor axis."""

HINTS = ("moe_tp_experts", "gather", "moe_identity_expert", "mla_kv_a_proj", "ep_router", "ep_dispatch_experts")
"""Words about what goes in and out of a module, which follows from how weights lie here."""


def read(reference: str) -> Configuration:
    """The plan of a model: a ``config.json``, a folder with one, or the name of a configuration class of transformers.

    >>> read("LlamaConfig").modules[0]                                           # doctest: +SKIP
    ('layers.*.self_attn.q_proj', 'columns')
    """
    return of_plan(_plan(reference), reference)


def of_plan(plan: Mapping[str, str], source: str = "tp_plan") -> Configuration:
    """The configuration that a ``tp_plan`` is.

    >>> of_plan({"layers.*.mlp.down_proj": "rowwise"}).modules
    (('layers.*.mlp.down_proj', 'rows'),)
    """
    modules, elsewhere, unknown = [], [], []
    for pattern, way in plan.items():
        if way in WAYS:
            modules.append((pattern, WAYS[way]))
        elif way in HINTS:
            elsewhere.append(Remark(pattern, way, "what goes in and out follows from how weights lie"))
        else:
            unknown.append(Remark(pattern, str(way)))
    return Configuration(
        engine="hf",
        source=source,
        tensor=None,
        modules=tuple(modules),
        elsewhere=tuple(elsewhere),
        unknown=tuple(unknown),
    )


def _plan(reference: str) -> dict[str, str]:
    try:
        import transformers
    except ImportError:
        raise ConfigurationError(
            f"The tp_plan of {reference} is in transformers.", "Run pip install transformers."
        ) from None
    path = Path(reference)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        values = read_json(path, ConfigurationError)
        if isinstance(values, dict) and isinstance(values.get("tp_plan"), dict):
            return dict(values["tp_plan"])
        kind = values.get("model_type", "") if isinstance(values, dict) else ""
        known: Any = transformers.models.auto.configuration_auto.CONFIG_MAPPING
        if kind not in known:
            raise ConfigurationError(
                f"{path} has the model_type {kind!r}, which transformers does not know.", "Check the path."
            )
        found = known[kind]
    else:
        found = getattr(transformers, reference, None)
    plan = getattr(found, "base_model_tp_plan", None)
    if not plan:
        raise ConfigurationError(
            f"{reference} has no tp_plan in transformers {transformers.__version__}.",
            "Name a config.json, or a configuration class with a base_model_tp_plan.",
        )
    return dict(plan)


def write(configuration: Configuration) -> str:
    """A ``tp_plan`` as JSON: ``from_pretrained(…, tp_plan=…)`` takes it.

    >>> write(Configuration("hf", tensor=8, modules=(("head", "columns"),)))
    '{\\n  "tp_plan": {\\n    "head": "colwise"\\n  }\\n}\\n'
    """
    words = {COLUMNS: "colwise", ROWS: "rowwise", WHOLE: "replicated"}
    return json.dumps({"tp_plan": {pattern: words[way] for pattern, way in configuration.modules}}, indent=2) + "\n"
