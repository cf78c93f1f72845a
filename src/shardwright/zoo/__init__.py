"""Models to try Shardwright on: those of the papers it rests on, and those people train today.

Each model is one small module written in plain PyTorch; ``forward(inputs..., targets)`` returns a scalar loss. All
sizes are arguments; :data:`ENTRIES` holds the papers' sizes and ones a test can afford. Whatever device is ambient
(``with torch.device("meta")``) is where a model and its example inputs are built. The table is data: reading it imports
neither PyTorch nor a model, so ``shardwright models`` answers at once.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwright.errors import ModelError
from shardwright.records import shown
from shardwright.zoo.sizes import checked_sizes, nearest

if TYPE_CHECKING:
    from torch import nn

    Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Entry:
    """One model of the zoo: its module here, default and small sizes, how many numbers the default has, what it is."""

    name: str
    module: str
    sizes: Mapping[str, Any]
    small: Mapping[str, Any]
    parameters: int
    summary: str
    paper: str

    def build(self, **sizes: Any) -> Built:
        """The model and its inputs; every size is given."""
        return importlib.import_module(f"{__name__}.{self.module}").build(**sizes)


TINY_TEXT = {"batch": 4, "seq": 16, "layers": 2, "width": 32, "vocab": 97}
TINY_DECODER = TINY_TEXT | {"heads": 4, "kv_heads": 2, "inner": 48}


def _resnet(layers: int, parameters: int) -> Entry:
    return Entry(
        f"wresnet{layers}",
        "wide_resnet",
        {"batch": 8, "image": 224, "layers": layers, "width": 10, "channels": 64, "classes": 1000},
        {"batch": 4, "image": 64, "width": 1, "channels": 4, "classes": 10},
        parameters,
        f"wide ResNet-{layers}, every convolution `width` times as wide",
        "Tofu (EuroSys 2019); Zagoruyko and Komodakis 2016",
    )


ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            "alexnet",
            "alexnet",
            {"batch": 128, "image": 227, "channels": 96, "hidden": 4096, "classes": 1024, "dropout": 0.0},
            {"batch": 4, "image": 67, "channels": 6, "hidden": 32, "classes": 10},
            62_476_672,
            "five convolutions, three large linear layers",
            "PaSE (IPDPS 2021); Krizhevsky et al. 2012",
        ),
        Entry(
            "inception",
            "inception",
            {"batch": 128, "image": 299, "width": 1.0, "classes": 1000, "auxiliary": False, "dropout": 0.0},
            {"batch": 4, "image": 107, "width": 0.125, "classes": 10},
            23_834_568,
            "InceptionV3: parallel convolution branches",
            "PaSE (IPDPS 2021); Szegedy et al. 2016",
        ),
        Entry(
            "rnnlm",
            "rnnlm",
            {"batch": 64, "seq": 64, "layers": 2, "width": 2048, "vocab": 50_000, "dropout": 0.0},
            TINY_TEXT,
            271_991_632,
            "language model of two LSTM layers",
            "PaSE (IPDPS 2021); Jozefowicz et al. 2016",
        ),
        Entry(
            "transformer",
            "transformer",
            {
                "batch": 64,
                "seq": 512,
                "layers": 6,
                "width": 1024,
                "heads": 16,
                "head_width": 128,
                "inner": 8192,
                "vocab": 50_000,
                "dropout": 0.0,
            },
            TINY_TEXT | {"heads": 4, "head_width": 8, "inner": 64},
            506_226_688,
            "encoder-decoder Transformer",
            "PaSE (IPDPS 2021); Vaswani et al. 2017",
        ),
        _resnet(50, 2_365_656_680),
        _resnet(101, 4_260_169_320),
        _resnet(152, 5_820_386_920),
        Entry(
            "rnn",
            "rnn",
            {"batch": 512, "seq": 20, "layers": 6, "width": 4096, "vocab": 10_000, "dropout": 0.0},
            TINY_TEXT | {"seq": 4},
            887_334_672,
            "LSTM cells unrolled over `seq` steps and `layers` layers",
            "Tofu (EuroSys 2019)",
        ),
        Entry(
            "bert",
            "bert",
            {
                "batch": 32,
                "seq": 512,
                "layers": 12,
                "width": 768,
                "heads": 12,
                "inner": None,
                "vocab": 30_522,
                "dropout": 0.0,
            },
            TINY_TEXT | {"heads": 4},
            110_106_428,
            "BERT with masked-word and next-sentence heads",
            "Devlin et al. 2018",
        ),
        Entry(
            "gpt",
            "gpt",
            {
                "batch": 8,
                "seq": 1024,
                "layers": 12,
                "width": 768,
                "heads": 12,
                "inner": None,
                "vocab": 50_257,
                "dropout": 0.0,
            },
            TINY_TEXT | {"heads": 4},
            124_439_808,
            "decoder-only Transformer, GPT-2 sizes",
            "Radford et al. 2019",
        ),
        Entry(
            "llama",
            "llama",
            {
                "batch": 1,
                "seq": 8192,
                "layers": 32,
                "width": 4096,
                "heads": 32,
                "kv_heads": 8,
                "inner": 14_336,
                "vocab": 128_256,
                "rope_base": 500_000.0,
                "dropout": 0.0,
            },
            TINY_DECODER,
            8_030_261_248,
            "RMS norm, rotary positions, grouped queries, SwiGLU",
            "Touvron et al. 2023; Llama 3 2024",
        ),
        Entry(
            "moe",
            "moe",
            {
                "batch": 8,
                "seq": 2048,
                "layers": 32,
                "width": 4096,
                "heads": 32,
                "kv_heads": 8,
                "inner": 14_336,
                "experts": 8,
                "top_k": 2,
                "capacity_factor": 1.25,
                "vocab": 32_000,
                "balance_weight": 0.01,
                "dropout": 0.0,
            },
            TINY_DECODER | {"experts": 4},
            46_702_792_704,
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

    >>> import torch
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
