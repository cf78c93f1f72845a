"""Hugging Face models as they are: captured on the CPU and on meta alike, with the numbers of the eager model."""

from __future__ import annotations

import pytest
from tests.frontend.faithful import faithful, targets

from shardwright.frontend import capture
from shardwright.graph import fingerprint
from shardwright.zoo.reference import resolve

pytest.importorskip("transformers")

MODELS = {
    "gpt2": "aten.addmm.default",
    "llama": "aten.scaled_dot_product_attention.default",
    "bert": "aten.layer_norm.default",
    "bart": "aten.embedding.default",  # layer drop, tokens shifted in place, tied three times
    "mixtral": "transformers.grouped_mm_fallback.default",
    "bloom": "shardwright.autograd_function.default",
    "resnet": "aten._native_batch_norm_legit_functional.default",
    "whisper": "aten.conv1d.default",
}


@pytest.mark.parametrize(("model", "operator"), MODELS.items())
def test_the_graph_computes_what_the_model_computes(model: str, operator: str) -> None:
    resolved = resolve(f"hf:{model}:small", batch=2, device="cpu")
    graph = faithful(resolved.model, (), resolved.kwargs, meta=False)
    assert operator in targets(graph)
    on_meta = resolve(f"hf:{model}:small", batch=2)
    assert fingerprint(capture(on_meta.model, (), on_meta.kwargs)) == fingerprint(graph)


def test_the_loss_is_the_first_output_and_tied_weights_are_one_parameter() -> None:
    resolved = resolve("hf:gpt2:small,vocab_size=50257", batch=2)
    graph = capture(resolved.model, (), resolved.kwargs)
    loss = graph.outputs[0]
    assert graph.tensors[loss.name].shape == ()  # type: ignore[union-attr]
    (tied,) = [p for p in graph.parameters if len(p.paths) > 1]
    assert set(tied.paths) == {"lm_head.weight", "transformer.wte.weight"}
    assert graph.parameter_bytes == 4 * resolved.parameter_count


def test_attention_is_that_of_eager_mode() -> None:
    """No mask is built where eager mode needs none: the kernel is told that attention is causal."""
    resolved = resolve("hf:llama:small", batch=2)
    graph = capture(resolved.model, (), resolved.kwargs)
    attention = next(op for op in graph.ops if "scaled_dot_product_attention" in op.target)
    assert attention.args[3:6] == (None, 0.0, True)
    # With a cache Hugging Face does not look for packed sequences.
    packed = {**resolved.kwargs, "position_ids": resolved.kwargs["input_ids"] * 0, "use_cache": False}
    masked = capture(resolved.model, (), packed)
    assert next(op for op in masked.ops if op.target == attention.target).args[3] is not None
