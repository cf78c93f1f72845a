"""Which format a file has, and its configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shardwright.exchange import accelerate, deepspeed, hugging_face, megatron, plain_pytorch, torchtitan
from shardwright.exchange.configuration import Configuration, ConfigurationError
from shardwright.files import read_json

READERS: dict[str, Callable[[str], Configuration]] = {
    "torchtitan": torchtitan.read,
    "megatron": megatron.read,
    "deepspeed": deepspeed.read,
    "accelerate": accelerate.read,
    "pytorch": plain_pytorch.read,
    "hf": hugging_face.read,
}
"""By the engine's name."""

SUFFIXES = {
    ".toml": "torchtitan",
    ".sh": "megatron",
    ".txt": "megatron",
    ".yaml": "accelerate",
    ".yml": "accelerate",
    ".py": "pytorch",
}


def engine_of(path: str) -> str:
    """The engine whose file this is, by its name and, of JSON, by its keys.

    >>> engine_of("llama3_8b.toml")
    'torchtitan'
    """
    suffix = Path(path).suffix.lower()
    if suffix == ".json":
        values = read_json(path, ConfigurationError)
        keys = set(values) if isinstance(values, dict) else set()
        if keys & {"model_type", "tp_plan", "architectures"}:
            return "hf"
        return "accelerate" if "distributed_type" in keys else "deepspeed"
    if suffix in SUFFIXES:
        return SUFFIXES[suffix]
    if path.endswith("Config") and path.isidentifier():
        return "hf"
    raise ConfigurationError(
        f"{path!r} is no configuration that can be read.",
        "Read are torchtitan's .toml, Megatron's .sh, DeepSpeed's .json, accelerate's .yaml, a parallelize.py that export "
        "wrote, and hf for the tp_plan of a Hugging Face model.",
    )


def read_configuration(path: str | Path, model: str = "") -> Configuration:
    """Read another engine's configuration; what of it has no meaning for a plan is listed in the record.

    Parameters
    ----------
    path
        A file of torchtitan, Megatron-LM, DeepSpeed or accelerate, a ``parallelize.py`` that ``export`` wrote, or
        ``hf``: the ``tp_plan`` of ``model``.
    model
        The reference of a Hugging Face model (``hf:gpt2``, ``hf:config.json``), for ``hf`` alone.

    Raises
    ------
    ConfigurationError
        When the file cannot be read; the message says why.

    Examples
    --------
    >>> read_configuration("llama3_70b.toml").tensor                             # doctest: +SKIP
    8
    """
    text = str(path)
    if text == "hf":
        reference = model.removeprefix("hf:").partition(",")[0]
        if not model.startswith("hf:"):
            raise ConfigurationError(
                "--like hf reads the tp_plan of a Hugging Face model.", "Say hf:NAME or hf:config.json as the model."
            )
        return hugging_face.read(reference)
    return READERS[engine_of(text)](text)
