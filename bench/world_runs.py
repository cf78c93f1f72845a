"""Training runs that other people measured and published, as records: model, cluster, configuration, seconds, bytes.

Each source is read by one function; what a source does not say stays out of the record. Runs that differ in configuration
alone (same source, model, devices, batch, sequence, software, day) form a *group*: only inside a group is the order of two
runs a question about configurations. It is the order of their seconds per sequence. Groups, never rows, are halved by a
hash of their name: one half for fitting, one for judging. Where the data comes from, its licences and what to mistrust:
``bench/data/world/README.md``.
"""

from __future__ import annotations

import csv
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORLD = ROOT / "bench" / "data" / "world"
MEGATRON = ROOT / "tests" / "data" / "measured" / "megatron_a100_single_node.csv"
GIB, GB = 2**30, 10**9
DRAWN = "2026-11-19"
"""When the halves were drawn: part of what is hashed. Errors of the halves of 2026-11-18 had been printed before a model of
engines or products was fitted, so all halves were drawn anew, by SHA-256: another salt in CRC-32 only swaps halves, since
it is linear."""
LLAMA = {  # layers, hidden, heads, key-value heads, inner, vocabulary: the model cards of Llama 3.1
    "Llama 3.1 8B": (32, 4096, 32, 8, 14336, 128256),
    "Llama 3.1 70B": (80, 8192, 64, 8, 28672, 128256),
    "Llama 3.1 405B": (126, 16384, 128, 8, 53248, 128256),
}


def fitting(name: str) -> bool:
    """Whether what is called so is in the half that constants may be fitted to.

    >>> [name for name in ("a", "b", "c", "d") if fitting(name)]
    ['a', 'c']
    """
    return hashlib.sha256(f"{DRAWN}|{name}".encode()).digest()[0] % 2 == 0


@dataclass(frozen=True)
class Model:
    """A decoder: ``kv_heads`` of 0 means a GPT (learned positions, biases, tied head), else a Llama."""

    layers: int
    hidden: int
    heads: int
    inner: int
    vocabulary: int
    sequence: int
    kv_heads: int = 0


@dataclass(frozen=True)
class Run:
    """One published run. ``seconds`` of a step; ``inf`` where it ran out of memory. ``memory`` in bytes, 0 where unsaid.

    ``sharding`` is ``none``, ``zero-1`` or ``fsdp``; ``recompute`` is ``none``, ``light`` (selective) or ``blocks`` (full).
    ``left_out`` says why the run is not predicted.
    """

    source: str
    engine: str
    group: str
    model: Model
    device: str
    nodes: int
    devices_per_node: int
    tensor: int
    pipeline: int
    data: int
    microbatch: int
    batch: int
    precision: str
    sharding: str
    recompute: str
    seconds: float
    virtual: int = 1
    memory: float = 0.0
    left_out: str = ""

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def microbatches(self) -> int:
        return self.batch // (self.data * self.microbatch)

    @property
    def out_of_memory(self) -> bool:
        return self.seconds == inf

    @property
    def fitting(self) -> bool:
        """Whether the run's group is in the half that constants may be fitted to."""
        return fitting(f"{self.source}|{self.group}")

    @property
    def name(self) -> str:
        """The configuration in a few letters: tensor, pipeline, data, micro-batch, recomputation."""
        stages = f"p{self.pipeline}" + (f"v{self.virtual}" if self.virtual > 1 else "")
        return f"t{self.tensor} {stages} d{self.data} mb{self.microbatch} {self.recompute}"


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open() as file:
        yield from csv.DictReader(file)


def _whole(row: Mapping[str, str], *keys: str) -> tuple[int, ...]:
    return tuple(int(float(row[key])) for key in keys)


def _number(text: str) -> float:
    """A figure; 0 where a source gives none, or says that the run ran out of memory."""
    return 0.0 if text in ("", "oom") else float(text)


def bloom() -> Iterator[Run]:
    """BigScience's search for the configuration of BLOOM: Megatron-DeepSpeed, ZeRO-1, 1F1B, everything recomputed."""
    for row in _rows(WORLD / "bigscience_bloom_a100.csv"):
        layers, hidden, heads, sequence, vocabulary = _whole(row, "layers", "hidden", "heads", "sequence", "vocabulary")
        gpus, inside, batch = _whole(row, "gpus", "gpus_per_node", "global_batch")
        tensor, stages, data, micro = _whole(row, "tensor", "pipeline", "data", "micro_batch")
        sizes = f"{layers}x{hidden}x{heads}"
        yield Run(
            "bloom",
            "megatron-deepspeed-2022",
            f"{row['date']} {sizes} on {gpus}, batch {batch}, ZeRO-{row['zero_stage']}",
            Model(layers, hidden, heads, 4 * hidden, vocabulary, sequence),
            "A100-80GB",
            gpus // inside,
            inside,
            tensor,
            stages,
            data,
            micro,
            batch,
            "float16",
            "zero-1" if row["zero_stage"] == "1" else "none",
            "blocks",
            _number(row["seconds_per_step"]) or inf,
            memory=_number(row["memory_gb_first_stage"]) * GB,
            left_out="" if tensor * stages * data == gpus else "its degrees do not multiply to its devices",
        )


def mpt() -> Iterator[Run]:
    """MosaicML's MPT on FSDP of torch 2.1, with and without full activation checkpointing."""
    for row in _rows(WORLD / "mosaicml_mpt_fsdp.csv"):
        layers, hidden, heads, inner, vocabulary, sequence = _whole(
            row, "layers", "hidden", "heads", "ffn", "vocabulary", "sequence"
        )
        gpus, inside, micro, batch = _whole(row, "gpus", "gpus_per_node", "micro_batch", "global_batch")
        again = row["full_activation_checkpointing"] == "True"
        reasons = {
            "8-bit floats are no precision of ours": "bf16" not in row["precision"],
            "sharding other than FULL_SHARD": row["fsdp_sharding"] != "FULL_SHARD",
            "activations offloaded to the host": row["activation_cpu_offload"] == "True",
        }
        yield Run(
            "mpt",
            "fsdp-torch-2.1",
            f"{row['gpu']} {row['model']} {sequence} on {gpus}",  # batches differ: the order is that of seconds per sequence
            Model(layers, hidden, heads, inner, vocabulary, sequence),
            {"h100_80gb": "H100", "a100_80gb": "A100-80GB"}[row["gpu"]],
            max(gpus // inside, 1),
            min(gpus, inside),
            1,
            1,
            gpus,
            micro,
            batch,
            "bfloat16",
            "fsdp",
            "blocks" if again else "none",
            batch * sequence / float(row["tokens_per_second"]),
            left_out=next((reason for reason, holds in reasons.items() if holds), ""),
        )


def titan() -> Iterator[Run]:
    """torchtitan's published table."""
    for row in _rows(WORLD / "torchtitan_h100.csv"):
        layers, hidden, heads, kv_heads, inner, vocabulary = LLAMA[row["model"]]
        gpus, shards, tensor, stages, context, local, batch, sequence = _whole(
            row, "gpus", "fsdp", "tensor", "pipeline", "context", "local_batch", "global_batch", "sequence"
        )
        reasons = {
            "8-bit floats are no precision of ours": row["float8"] != "no",
            "context parallelism is no recipe of ours": context > 1,
            "FSDP with tensor parallelism inside is no recipe of ours": tensor > 1,
        }
        yield Run(
            "torchtitan",
            "torchtitan" + ("-compiled" if row["compile"] == "yes" else ""),
            f"{row['source']} {row['model']} {sequence} on {gpus}, batch {batch}, compile {row['compile']}",
            Model(layers, hidden, heads, inner, vocabulary, sequence, kv_heads),
            "H200" if row["gpu"].startswith("H200") else "H100",
            max(gpus // 8, 1),
            min(gpus, 8),
            tensor,
            stages,
            shards,
            local,
            batch,
            "bfloat16",
            "fsdp",
            {"full": "blocks"}.get(row["recompute"], "light"),
            batch * sequence / float(row["tokens_per_second_per_gpu"]) / gpus,
            memory=_number(row["memory_gib"]) * GIB,
            left_out=next((reason for reason, holds in reasons.items() if holds), ""),
        )


def korthikanti() -> Iterator[Run]:
    """Megatron-LM's full against selective recomputation (Korthikanti et al., 2022, table 5)."""
    for row in _rows(WORLD / "korthikanti_a100.csv"):
        layers, hidden, heads, sequence, gpus, batch = _whole(
            row, "layers", "hidden", "heads", "sequence", "gpus", "global_batch"
        )
        tensor, stages, virtual, data, micro = _whole(
            row, "tensor", "pipeline", "virtual_pipeline", "data", "micro_batch"
        )
        selective = row["recompute"] != "full"
        yield Run(
            "korthikanti",
            "megatron-2022",
            row["model"],
            Model(layers, hidden, heads, 4 * hidden, 51200, sequence),
            "A100-80GB",
            gpus // 8,
            8,
            tensor,
            stages,
            data,
            micro,
            batch,
            "float16",
            "none",
            "light" if selective else "blocks",
            float(row["seconds_per_step"]),
            virtual,
        )


def megatron() -> Iterator[Run]:
    """vTrain's Megatron iterations on one node of A100."""
    keys = ("# GPUs", "global batch", "micro batch", "hidden size", "attention heads", "# layers", "sequence length")
    for row in _rows(MEGATRON):
        gpus, batch, micro, hidden, heads, layers, sequence = _whole(row, *keys)
        tensor, data, stages = _whole(row, "tensor parallelism", "data parallelism", "pipeline parallelism")
        yield Run(
            "megatron-a100",
            "megatron-2021",
            f"{layers}x{hidden}x{heads}x{sequence} on {gpus}, batch {batch}",
            Model(layers, hidden, heads, 4 * hidden, 51200, sequence),
            "A100-80GB",
            1,
            gpus,
            tensor,
            stages,
            data,
            micro,
            batch,
            "float16",
            "none",
            "none",
            float(row["iteration time (ms)"]) / 1e3,
        )


SOURCES = {read.__name__: read for read in (bloom, mpt, titan, korthikanti, megatron)}


def runs(names: Iterable[str] = SOURCES) -> list[Run]:
    return [run for name in names for run in SOURCES[name]()]


def grouped(found: Iterable[Run]) -> dict[tuple[str, str], list[Run]]:
    """Runs by source and group."""
    groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in found:
        groups[run.source, run.group].append(run)
    return dict(groups)
