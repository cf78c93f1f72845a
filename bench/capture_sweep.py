"""How many Hugging Face architectures can be captured: every model type with a head that computes a loss, at tiny sizes.

For each: build ``hf:TYPE:small`` on the CPU, run it eagerly (what cannot run is no test of capture), capture it, and
replay the graph; its loss and all gradients must be those of the eager model. Each runs in its own process with a
time limit.

    python bench/capture_sweep.py [--limit SECONDS] [--only TYPE,TYPE] [--json FILE] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

BATCH, SEQ, TOLERANCE = 2, 16, 1e-4


def attempt(model_type: str, pipe: Any) -> None:
    """One architecture; sends a dict that says how far it came."""
    import torch

    from shardwright.errors import CaptureError, ModelError

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    result: dict[str, Any] = {"type": model_type, "stage": "build"}
    try:
        from shardwright.frontend import capture
        from shardwright.frontend.replay import replay
        from shardwright.zoo.reference import resolve

        resolved = resolve(f"hf:{model_type}:small", batch=BATCH, device="cpu")
        result |= {"stage": "eager", "class": type(resolved.model).__name__}
        model, kwargs = resolved.model, resolved.kwargs
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        eager_loss, eager_grads = _step(model, lambda: model(**kwargs))
        if not torch.isfinite(eager_loss):
            raise ArithmeticError(f"the eager loss is {eager_loss.item()}")
        again, _ = _step(model, lambda: model(**kwargs), before)
        result["random"] = bool(again != eager_loss)
        for name, buffer in model.named_buffers():
            buffer.data.copy_(before[name])
        result["stage"] = "capture"
        started = time.perf_counter()
        graph = capture(model, (), kwargs)
        result |= {"seconds": time.perf_counter() - started, "ops": len(graph.ops)}
        result["stage"] = "replay"
        loss, grads = _step(model, lambda: replay(graph, model, (), kwargs), before)
        result["difference"] = _difference(eager_loss, eager_grads, loss, grads)
        result["stage"] = "done" if result["difference"] < TOLERANCE or result["random"] else "differs"
    except (CaptureError, ModelError) as error:
        result["why"] = error.message
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        result["why"] = f"{type(error).__name__}: {str(error)[:300]} ({Path(where.filename).name}:{where.lineno})"
    pipe.send(result)


def _step(model: Any, run: Any, buffers: Any = None) -> tuple[Any, dict[str, Any]]:
    import torch

    for name, buffer in model.named_buffers() if buffers else ():
        buffer.data.copy_(buffers[name])
    model.zero_grad()
    torch.manual_seed(0)
    out = run()
    loss = out.loss if hasattr(out, "loss") else out["loss"]
    loss = loss.sum()
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def _difference(loss: Any, grads: dict[str, Any], other_loss: Any, other_grads: dict[str, Any]) -> float:
    """The largest difference relative to the size of what is compared; a gradient only one of them has counts as 1."""
    worst = (loss - other_loss).abs().item() / max(1.0, loss.abs().item())
    scale = max((grad.abs().max().item() for grad in grads.values() if grad.numel()), default=1.0) or 1.0
    for name in {*grads, *other_grads}:
        one, other = grads.get(name), other_grads.get(name)
        if one is None or other is None:
            present = one if other is None else other
            worst = max(worst, 1.0 if present.abs().max() > 0 else 0.0)
        elif one.numel():
            worst = max(worst, (one - other).abs().max().item() / scale)
    return worst


def with_limit(model_type: str, limit: float) -> dict[str, Any]:
    """Run one attempt in a forked process and stop it after ``limit`` seconds."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=attempt, args=(model_type, there), daemon=True)
    process.start()
    there.close()
    result: dict[str, Any] = {"type": model_type, "stage": "time limit", "why": f"longer than {limit:.0f} s"}
    try:
        if here.poll(limit):
            result = here.recv()
    except EOFError:
        result = {"type": model_type, "stage": "crash", "why": "the process died"}
    process.kill()
    process.join()
    return result


def model_types() -> list[str]:
    """Model types with a configuration of their own and a head we know how to feed."""
    import transformers

    from shardwright.zoo.hugging_face import ENCODER_DECODER_HEADS, HEADS

    found = []
    for model_type, config_class in transformers.CONFIG_MAPPING.items():
        for head in {*ENCODER_DECODER_HEADS, *HEADS}:
            mapping = getattr(transformers, f"MODEL_FOR_{head}_MAPPING", None)
            if mapping is not None and config_class in mapping:
                found.append(model_type)
                break
    return sorted(found)


STAGES = {
    "done": "captured, and the graph gives the eager loss and gradients",
    "differs": "captured, but the graph gives other numbers",
    "replay": "captured, but the graph does not run",
    "capture": "refused by capture, with the reason below",
    "time limit": "not finished within the time limit",
    "crash": "the process died",
    "eager": "no test of capture: the tiny model does not run eagerly with our example inputs",
    "build": "no test of capture: no tiny model can be built",
}


def report(results: list[dict[str, Any]]) -> str:
    """The results as Markdown: how many came how far, and every architecture that did not come through."""
    counts = Counter(result["stage"] for result in results)
    runnable = sum(counts[stage] for stage in STAGES if stage not in ("eager", "build"))
    lines = [
        f"{len(results)} model types with a head that computes a loss; {runnable} of them run eagerly at tiny sizes;",
        f"{counts['done']} of those {runnable} ({counts['done'] / max(1, runnable):.0%}) are captured faithfully.",
        "",
        "| architectures | outcome |",
        "|---|---|",
        *(f"| {counts[stage]} | {words} |" for stage, words in STAGES.items() if counts[stage]),
        "",
    ]
    for stage, words in STAGES.items():
        found = sorted((r for r in results if r["stage"] == stage), key=lambda r: r["type"])
        if stage != "done" and found:
            lines += [f"### {words.capitalize()}", "", "| type | why |", "|---|---|"]
            for result in found:
                why = result.get("why") or f"largest relative difference {result.get('difference', 0):.1e}"
                lines.append(f"| {result['type']} | {' '.join(why.replace('|', '/').split())[:220]} |")
            lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    import torch
    import transformers

    wanted = options.only.split(",") if options.only else model_types()
    results = []
    for number, model_type in enumerate(wanted):
        results.append(with_limit(model_type, options.limit))
        last = results[-1]
        print(f"{number + 1}/{len(wanted)} {model_type}: {last['stage']} {last.get('why', '')[:160]}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    for stage, count in Counter(result["stage"] for result in results).most_common():
        print(f"{stage:>12} {count}")
    if options.markdown:
        options.markdown.write_text(report(results))


if __name__ == "__main__":
    main()
