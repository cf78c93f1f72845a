"""One rank of eight on a GPU: our programs beside one device by itself and ``fully_shard``, in one run.

    python bench/device_step.py [--model gpt2|llama] [--rounds 5]

Collectives are PyTorch's fake ones (they return at once), so this shows what one rank computes and what its host does, not
the network. Host seconds are those until everything of a step is issued, step seconds those until the device has done it;
memory is the peak above what rests between steps (parameters, optimizer states), as reserved from the device: what CUDA
graphs keep for themselves counts. Every engine is also run with its host alone, the device idle before each step, because
a host that waits for a full queue looks busy. ``--check`` compares losses of replayed and eager steps on changing batches.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import logging
import os
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fake_rank import join_fake_group, report_kernels
from shardwright.cluster import parse_cluster
from shardwright.frontend import capture
from shardwright.planner import Options, plan_graph
from shardwright.runtime import parallelize
from shardwright.runtime.cuda_graphs import SWITCH
from shardwright.verification.recorded import loss_of
from shardwright.zoo.reference import resolve

RANKS = 8
Step = Callable[[], torch.Tensor]
MODELS: dict[str, tuple[str, int, int | None]] = {
    "gpt2": ("gpt", 8, 1024),
    "llama": ("llama:layers=4,vocab=32000", 2, 2048),
    "hf-gpt2": ("hf:gpt2", 8, 1024),
    "hf-bert": ("hf:BertForMaskedLM", 16, 512),
    "hf-t5": ("hf:t5", 16, 512),
    "hf-vit": ("hf:vit", 64, None),
    "resnet": ("wresnet50:width=1", 64, None),
    "llama-8": ("llama:layers=8,width=1024,vocab=32000", 1, 512),
    "llama-80": ("llama:layers=80,width=1024,vocab=32000", 1, 512),
    "moe": ("moe:layers=4,width=1024,inner=2048", 8, 512),
    # The smallest sizes in which Llama and a mixture of experts are published: Llama 3.2 1B, Granite 3.0 1B-A400M.
    "hf-llama": (
        "hf:llama:hidden_size=2048,intermediate_size=8192,num_attention_heads=32,num_key_value_heads=8,head_dim=64,"
        "num_hidden_layers=16,vocab_size=128256,tie_word_embeddings=True",
        2,
        2048,
    ),
    "hf-moe": (
        "hf:granitemoe:hidden_size=1024,intermediate_size=512,num_attention_heads=16,num_key_value_heads=8,"
        "num_hidden_layers=24,num_local_experts=32,num_experts_per_tok=8,vocab_size=49155",
        4,
        1024,
    ),
}
HERE = Path(__file__).resolve().parent
NAMED: dict[str, tuple[str, int, int | None]] = {
    # DeBERTa-v3 base (the sizes of its published configuration, He et al., 2021, MIT licence), Whisper small, Mamba-2 130M
    # of eight layers in short chunks (without its own kernels a chunk's scores hold the state's size too).
    "unet": (f"{HERE}/pipeline_models.py:diffusion", 16, None),
    "convnext": ("hf:convnext", 64, None),
    "deberta": (f"hf:{HERE}/data/configs/deberta_v3_base.json", 8, 512),
    "whisper": (
        "hf:whisper:d_model=768,encoder_layers=12,decoder_layers=12,encoder_attention_heads=12,decoder_attention_heads=12,"
        "encoder_ffn_dim=3072,decoder_ffn_dim=3072",
        2,
        128,
    ),
    "mamba2": (
        "hf:mamba2:hidden_size=768,num_hidden_layers=8,num_heads=24,head_dim=64,state_size=128,n_groups=1,chunk_size=64,"
        "vocab_size=50288",
        2,
        128,
    ),
}
DRAWN: dict[str, tuple[str, int, int | None]] = {
    # ``random.Random(31)`` over ``drawn._types()``, each with one of 4, 8, 16 rows and of 128, 256, 384 positions: the first
    # five that can be built and fit (aria and minicpmv4_7 cannot, blenderbot is too large), before any was run.
    "pop2piano": ("hf:pop2piano:dropout=0", 4, 384),
    "distilbert": ("hf:distilbert:dropout=0", 4, 384),
    "bert": ("hf:bert:dropout=0", 16, 128),
    "dinov3_convnext": ("hf:dinov3_convnext:dropout=0", 4, 384),
    "wav2vec2": ("hf:wav2vec2:dropout=0", 8, 384),
}
KEPT: dict[str, tuple[str, int, int | None]] = {  # what compiled steps keep
    "qwen3": (
        "hf:qwen3:hidden_size=1024,intermediate_size=3072,num_hidden_layers=28,num_attention_heads=16,num_key_value_heads=8,"
        "head_dim=128,vocab_size=151936,tie_word_embeddings=True",
        2,
        2048,
    ),
    "gemma2": (
        "hf:gemma2:hidden_size=1152,intermediate_size=6912,num_hidden_layers=12,num_attention_heads=8,num_key_value_heads=4,"
        "head_dim=128,vocab_size=64000",
        2,
        1024,
    ),
    "phi3": (
        "hf:phi3:hidden_size=1536,intermediate_size=4096,num_hidden_layers=12,num_attention_heads=16,num_key_value_heads=16,"
        "vocab_size=32064,pad_token_id=0,bos_token_id=1,eos_token_id=2",
        2,
        1024,
    ),
}
SMALL: dict[str, tuple[str, int, int | None]] = {
    "small-gpt": ("gpt:small", 2, 16),
    "small-unet": (f"{HERE}/pipeline_models.py:small_diffusion", 2, None),
}
MODELS |= {**NAMED, **DRAWN, **KEPT, **SMALL}


def built(name: str, ranks: int, device: str) -> Any:
    """A model of the tables above, or of a file as ``FILE.py:FUNCTION``, in sixteen rows a rank."""
    reference, rows, length = MODELS.get(name, (name, 16, None))
    sizes = {"batch": rows * ranks} | ({} if length is None else {"seq": length})
    return resolve(reference, dtype="bfloat16", device=device, **sizes)


def step_of(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> torch.Tensor:
        loss = loss_of(model(*args, **kwargs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def engines(name: str, device: str) -> dict[str, Callable[[], Step]]:
    def alone() -> Step:
        one = built(name, 1, device)
        return step_of(one.model, one.args, one.kwargs)

    def compiled() -> Step:
        one = built(name, 1, device)
        return step_of(torch.compile(one.model), one.args, one.kwargs)  # type: ignore[arg-type]  # a module again

    def native() -> Step:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        one = built(name, 1, device)
        mesh = init_device_mesh("cuda" if device == "cuda" else "cpu", (RANKS,))
        for block in max((m for m in one.model.modules() if isinstance(m, torch.nn.ModuleList)), key=len):
            fully_shard(block, mesh=mesh)
        fully_shard(one.model, mesh=mesh)
        return step_of(one.model, one.args, one.kwargs)

    def ours(search: str, graphs: bool = True, compiled: bool = False, again: str = "auto") -> Callable[[], Step]:
        def make() -> Step:
            os.environ[SWITCH] = "1" if graphs else "0"
            whole = built(name, RANKS, device)
            graph = capture(whole.model, whole.args, whole.kwargs)
            options = Options(search, baselines=(), fewer_devices=False, ignore_device_memory=True, recompute=again)
            plan = plan_graph(graph, parse_cluster("8xH200"), options)
            print(f"  predicted: {1e3 * plan.prediction.step_seconds:.1f} ms, {'; '.join(plan.notes)}")
            parallel = parallelize(whole.model, plan, graph=graph, device=device)
            if compiled:
                parallel.compile()
            step = step_of(parallel, whole.args, whole.kwargs)
            step.predicted = plan.prediction.memory_bytes  # type: ignore[attr-defined]  # a function may carry notes
            step.model = parallel  # type: ignore[attr-defined]
            return step

        return make

    return {
        "one device": alone,
        "one device, compiled": compiled,
        "fully_shard": native,
        "our fsdp": ours("fsdp"),
        "our data-parallel": ours("data-parallel"),
        "our fsdp, compiled": ours("fsdp", compiled=True),
        "our data-parallel, compiled": ours("data-parallel", compiled=True),
        "our data-parallel, what is cheap again": ours("data-parallel", again="light"),
        "our data-parallel, blocks again": ours("data-parallel", again="blocks"),
        "our fsdp, eager": ours("fsdp", graphs=False),
        "our data-parallel, eager": ours("data-parallel", graphs=False),
    }


def checked(name: str, device: str) -> float:
    """The largest difference between the losses of replayed and of eager training, over batches that change."""
    found = []
    for graphs in ("1", "0"):
        os.environ[SWITCH] = graphs
        torch.manual_seed(0)
        whole = built(name, RANKS, device)
        graph = capture(whole.model, whole.args, whole.kwargs)
        options = Options(search="data-parallel", baselines=(), fewer_devices=False, ignore_device_memory=True)
        plan = plan_graph(graph, parse_cluster("8xH200"), options)
        model = parallelize(whole.model, plan, graph=graph, device=device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        generator, losses = torch.Generator(device).manual_seed(1), []
        for number in range(16):
            args = [torch.randint(0, 1000, x.shape, generator=generator, device=device) for x in whole.args]
            loss = loss_of(model(*args))
            loss.backward()
            optimizer.param_groups[0]["lr"] = 1e-4 / (1 + number)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if number % 3:
                optimizer.zero_grad()
            losses.append(loss.item())
        recorder = model._planned.recorder
        print(f"{name}: {0 if recorder is None else recorder.replays} of 16 steps replayed; last loss {losses[-1]:.6f}")
        found.append(losses)
    return max(abs(a - b) for a, b in zip(*found, strict=True))


def report_pools(name: str) -> None:
    """What private pools (CUDA graphs) hold of the device."""
    segments = [s for s in torch.cuda.memory_snapshot() if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0)]
    sizes = sorted((s["total_size"] for s in segments), reverse=True)
    if sizes:
        largest = ", ".join(f"{size / 2**20:.0f}" for size in sizes[:12])
        print(f"  {name}: graphs hold {sum(sizes) / 2**30:.2f} GiB in {len(sizes)} segments, the largest {largest} MiB")


def timed(step: Step, device: str, steps: int) -> tuple[float, float]:
    sync = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    sync()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    issued = time.perf_counter()
    sync()
    return (issued - begun) / steps, (time.perf_counter() - begun) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--raw", help="write every figure here")
    parser.add_argument("--engine", default="", help="this one alone: its memory, with nothing left over from others")
    parser.add_argument("--without", nargs="*", default=[], help="engines to leave out")
    parser.add_argument("--profile", help="write the host's profile of the engines here")
    parser.add_argument("--kernels", action="store_true", help="say where the device's time goes")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    logging.basicConfig(format="  %(message)s")
    logging.getLogger("shardwright").setLevel(logging.INFO)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    join_fake_group(RANKS)
    if given.check:
        print(f"{given.model}: losses differ by at most {checked(given.model, device):.3g}")
        return
    figures: dict[str, list[tuple[float, float]]] = {}
    above: dict[str, float] = {}
    for name, make in engines(given.model, device).items():
        if name in given.without or given.engine not in ("", name):
            continue
        begun = time.perf_counter()
        try:
            step = make()
            made = time.perf_counter()
            step()
            first = time.perf_counter() - made
            for _ in range(9):  # operators are traced after the third pass, graphs captured after the fifth
                step()
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        ready = time.perf_counter() - begun
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            resting = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step()
            torch.cuda.synchronize()
            above[name] = (torch.cuda.max_memory_reserved() - resting) / 2**30
            predicted = getattr(step, "predicted", None)
            if predicted is not None:
                peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), predicted
                shown = "allocated {:.3f}, reserved {:.3f}, predicted {:.3f}".format(*(x / 2**30 for x in peaks))
                print(f"  {name}: peak {shown} GiB")
            report_pools(name)
        figures[name] = [timed(step, device, given.steps) for _ in range(given.rounds)]
        hosts = [timed(step, device, 1)[0] for _ in range(given.rounds)]
        if given.kernels:
            report_kernels(step, device)
        if given.profile:
            profile = cProfile.Profile()
            profile.runcall(timed, step, device, given.steps)
            with open(f"{given.profile}-{given.model}-{name.replace(' ', '_').replace(',', '')}.txt", "w") as file:
                pstats.Stats(profile, stream=file).sort_stats("tottime").print_stats(35)
        del step
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        host, whole = (1e3 * statistics.median(column) for column in zip(*figures[name], strict=True))
        print(
            f"{given.model} {name}: {whole:.1f} ms a step, host {host:.1f} ms (alone {1e3 * statistics.median(hosts):.1f}), "
            f"{above.get(name, 0):.2f} GiB, ready after {ready:.0f} s (first step {first:.1f})",
            flush=True,
        )
    if given.raw:
        Path(given.raw).write_text(json.dumps({"model": given.model, "figures": figures, "above_gib": above}))


if __name__ == "__main__":
    main()
