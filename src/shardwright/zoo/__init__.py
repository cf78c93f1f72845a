"""Models to try Shardwright on: those of the papers it rests on, and those people train today.

Each model is one small module written in plain PyTorch; ``forward(inputs..., targets)`` returns a scalar loss. All
sizes are arguments whose defaults are the papers' sizes, and ``small`` holds sizes a test can afford. Whatever device
is ambient (``with torch.device("meta")``) is where a model and its example inputs are built.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwright.errors import ModelError
from shardwright.records import shown
from shardwright.zoo import alexnet, bert, gpt, inception, llama, moe, rnn, rnnlm, transformer, wide_resnet
from shardwright.zoo.sizes import checked_sizes, nearest

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Entry:
    """One model of the zoo: how to build it, its default and its small sizes, what it is and where it comes from."""

    name: str
    build: Callable[..., Built]
    small: Mapping[str, Any]
    summary: str
    paper: str

    @property
    def sizes(self) -> dict[str, Any]:
        """The arguments of ``build`` with their defaults."""
        return {name: parameter.default for name, parameter in inspect.signature(self.build).parameters.items()}


TINY_TEXT = {"batch": 4, "seq": 16, "layers": 2, "width": 32, "vocab": 97}
TINY_DECODER = TINY_TEXT | {"heads": 4, "kv_heads": 2, "inner": 48}
TINY_RESNET = {"batch": 4, "image": 64, "width": 1, "channels": 4, "classes": 10}


def _resnet(layers: int) -> Entry:
    return Entry(
        f"wresnet{layers}",
        functools.partial(wide_resnet.build, layers=layers),
        TINY_RESNET,
        f"wide ResNet-{layers}, every convolution `width` times as wide",
        "Tofu (EuroSys 2019); Zagoruyko and Komodakis 2016",
    )


ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            "alexnet",
            alexnet.build,
            {"batch": 4, "image": 67, "channels": 6, "hidden": 32, "classes": 10},
            "five convolutions, three large linear layers",
            "PaSE (IPDPS 2021); Krizhevsky et al. 2012",
        ),
        Entry(
            "inception",
            inception.build,
            {"batch": 4, "image": 107, "width": 0.125, "classes": 10},
            "InceptionV3: parallel convolution branches",
            "PaSE (IPDPS 2021); Szegedy et al. 2016",
        ),
        Entry(
            "rnnlm",
            rnnlm.build,
            TINY_TEXT,
            "language model of two LSTM layers",
            "PaSE (IPDPS 2021); Jozefowicz et al. 2016",
        ),
        Entry(
            "transformer",
            transformer.build,
            TINY_TEXT | {"heads": 4, "head_width": 8, "inner": 64},
            "encoder-decoder Transformer",
            "PaSE (IPDPS 2021); Vaswani et al. 2017",
        ),
        _resnet(50),
        _resnet(101),
        _resnet(152),
        Entry(
            "rnn",
            rnn.build,
            TINY_TEXT | {"seq": 4},
            "LSTM cells unrolled over `seq` steps and `layers` layers",
            "Tofu (EuroSys 2019)",
        ),
        Entry(
            "bert",
            bert.build,
            TINY_TEXT | {"heads": 4},
            "BERT with masked-word and next-sentence heads",
            "Devlin et al. 2018",
        ),
        Entry(
            "gpt",
            gpt.build,
            TINY_TEXT | {"heads": 4},
            "decoder-only Transformer, GPT-2 sizes",
            "Radford et al. 2019",
        ),
        Entry(
            "llama",
            llama.build,
            TINY_DECODER,
            "RMS norm, rotary positions, grouped queries, SwiGLU",
            "Touvron et al. 2023; Llama 3 2024",
        ),
        Entry(
            "moe",
            moe.build,
            TINY_DECODER | {"experts": 4},
            "mixture of experts, top-k routing with capacity",
            "GShard (Lepikhin et al. 2020); Mixtral 2024",
        ),
    )
}


def entry(name: str) -> Entry:
    """The entry of that name, or an error that names the nearest ones."""
    if name not in ENTRIES:
        raise ModelError(
            f"There is no model {name!r} in the zoo{nearest(name, ENTRIES)}.",
            "`shardwright models` lists them; hf:NAME and path/to/file.py:function reach others.",
        )
    return ENTRIES[name]


def build(name: str, **sizes: Any) -> Built:
    """Build the zoo's model ``name`` with ``sizes`` in place of its defaults: ``(model, args, kwargs)``.

    >>> with torch.device("meta"):
    ...     model, args, kwargs = build("gpt", layers=24, width=1024, heads=16)
    """
    chosen = entry(name)
    checked = checked_sizes(name, chosen.sizes, sizes)
    try:
        return chosen.build(**checked)
    except ModelError:
        raise
    except (
        RuntimeError,
        ArithmeticError,
        ValueError,
        TypeError,
        IndexError,
    ) as problem:  # sizes that do not go together
        why = (str(problem).splitlines() or [type(problem).__name__])[0].rstrip(".")
        asked = ", ".join(f"{key}={shown(value)}" for key, value in sizes.items())
        raise ModelError(
            f"{name} cannot be built with {asked or 'its sizes'}: {why}.",
            "Check the sizes against each other: widths must be multiples of the numbers of heads.",
        ) from problem
