"""The single-device cases of the accuracy benchmark and how one is measured; needs torch (and transformers for ``hf:``).

A case is a model reference of the zoo, a batch, a sequence length and a dtype. Measured are steady-state training steps in
eager mode with AdamW: wall seconds per step with the host's pace beside it (:mod:`paced`), events around the three phases,
the allocator's peak, and a table of kernels per operator to see where a prediction is wrong.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import paced
from shardwright.verification.recorded import loss_of

ANNOTATIONS = ("Optimizer.", "ProfilerStep")
"""Names of spans that PyTorch marks on the device's timeline, over kernels that are listed themselves."""


@dataclass(frozen=True)
class Case:
    """One training step to measure and predict."""

    reference: str
    batch: int
    dtype: str
    seq: int | None = None
    family: str = ""

    @property
    def name(self) -> str:
        length = "" if self.seq is None else f" × {self.seq}"
        return f"{self.reference}, batch {self.batch}{length}, {self.dtype}"


CASES = (
    Case("alexnet", 256, "float32", family="CNN"),
    Case("inception", 64, "float32", family="CNN"),
    Case("wresnet50:width=2", 32, "float32", family="CNN"),
    Case("wresnet101:width=1", 64, "bfloat16", family="CNN"),
    Case("rnnlm", 64, "float32", 64, family="RNN"),
    Case("rnnlm", 128, "bfloat16", 64, family="RNN"),
    Case("rnn:width=2048", 256, "bfloat16", 20, family="RNN"),
    Case("transformer", 16, "bfloat16", 512, family="encoder-decoder"),
    Case("bert", 32, "bfloat16", 512, family="encoder"),
    Case("bert:layers=24,width=1024,heads=16", 8, "float32", 512, family="encoder"),
    Case("gpt", 8, "bfloat16", 1024, family="decoder"),
    Case("gpt:layers=24,width=1024,heads=16", 4, "float32", 1024, family="decoder"),
    Case("llama:layers=4,vocab=32000", 2, "bfloat16", 2048, family="decoder"),
    Case("moe:layers=4,width=1024,heads=16,inner=3584", 8, "bfloat16", 1024, family="mixture of experts"),
    Case("hf:BertForMaskedLM", 16, "bfloat16", 512, family="encoder"),
    Case("hf:gpt2", 8, "bfloat16", 1024, family="decoder"),
    Case(
        "hf:llama:hidden_size=2048,num_hidden_layers=16,intermediate_size=8192,num_attention_heads=32,"
        "num_key_value_heads=8",
        2,
        "bfloat16",
        2048,
        family="decoder",
    ),
    Case("hf:vit", 64, "float32", family="encoder"),
)


class Squares(torch.nn.Module):
    """A model that gives no loss, trained on the mean square of what it gives, as everywhere in this project."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return loss_of(self.model(*args, **kwargs))


def gives_no_loss(out: Any) -> bool:
    """Whether the model's result holds nothing to train on as it is: Hugging Face's without labels of its own."""
    return not isinstance(out, torch.Tensor | tuple) and getattr(out, "loss", None) is None


def resolved_model(case: Case, device: str, squares: bool = False) -> Any:
    """The model in training mode and an example of its inputs; ``squares``: it gives no loss of its own."""
    from shardwright.zoo.reference import resolve

    found = resolve(case.reference, batch=case.batch, seq=case.seq, device=device, dtype=case.dtype)
    model = found.model.train()
    return replace(found, model=Squares(model) if squares else model)


def _training_step(case: Case, row: dict[str, Any], device: str) -> Any:
    resolved = resolved_model(case, device)
    row["squares"] = gives_no_loss(resolved.model(*resolved.args, **resolved.kwargs))
    model = Squares(resolved.model) if row["squares"] else resolved.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step(mark: Any = lambda: None) -> None:
        mark()
        out = model(*resolved.args, **resolved.kwargs)
        loss = out if isinstance(out, torch.Tensor) else out[0] if isinstance(out, tuple) else out.loss
        mark()
        loss.backward()
        mark()
        optimizer.step()  # what the model gave is still held, as in a plain loop
        optimizer.zero_grad(set_to_none=True)
        mark()

    return step


def kernels_of(averages: Iterable[Any]) -> list[Any]:
    """What the device did: kernels and copies, not the annotations that span them (an optimizer's step is one)."""
    return [
        row
        for row in averages
        if "cuda" in str(row.device_type).lower()
        and not getattr(row, "is_user_annotation", False)
        and not row.key.startswith(ANNOTATIONS)
    ]


def _profiled(step: Any) -> Any:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    return recorded.key_averages()


def launch_gap() -> float:
    """Seconds between two kernels in a full queue: what a tiny one takes there, less what the profiler says it runs."""
    from shardwright.cluster.timing import Stopwatch

    x = torch.zeros(64, device="cuda")
    queued = Stopwatch(torch.device("cuda")).seconds(lambda: x.add_(1.0), repeats=9)
    rows = kernels_of(_profiled(lambda: [x.add_(1.0) for _ in range(200)]))
    alone = sum(row.self_device_time_total for row in rows) * 1e-6 / max(sum(row.count for row in rows), 1)
    return max(queued - alone, 0.0)


def _kernel_table(step: Any) -> dict[str, Any]:
    """Device seconds per operator of one step, and of all its kernels together, with their number."""
    averages = _profiled(step)
    rows = [
        {
            "name": r.key,
            "count": r.count,
            "device": r.self_device_time_total * 1e-6,
            "host": r.self_cpu_time_total * 1e-6,
        }
        for r in averages
    ]
    kernels = kernels_of(averages)
    return {
        "kernels": sorted(rows, key=lambda row: -row["device"])[:80],
        "device_seconds": sum(r.self_device_time_total for r in kernels) * 1e-6,
        "kernel_count": sum(r.count for r in kernels),
    }


def measure(case: Case, repeats: int = 24) -> dict[str, Any]:
    """Measure one case on the CUDA device."""
    row: dict[str, Any] = asdict(case)
    try:
        step = _training_step(case, row, "cuda")
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        row["resting_bytes"] = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        row |= {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
        row["repeats"] = paced.measure(step, "cuda", repeats=repeats)
        marks: list[Any] = []

        def mark() -> None:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()

        step(mark)
        torch.cuda.synchronize()
        row["phases"] = [a.elapsed_time(b) * 1e-3 for a, b in itertools.pairwise(marks)]
        row |= _kernel_table(step)
    except Exception as error:  # one model that cannot run here must not cost the others
        row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
    gc.collect()
    torch.cuda.empty_cache()
    return row
