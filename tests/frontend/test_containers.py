"""Objects that hold tensors, such as the caches of Hugging Face, go in and come out of a captured model."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import CaptureError
from shardwright.frontend import capture
from shardwright.frontend.replay import replay
from shardwright.graph import Graph, fingerprint, from_json, to_json

transformers = pytest.importorskip("transformers")


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    """GPT-2 as its configuration class makes it, but small: the cache is on by default."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=97, n_positions=32)
    assert config.use_cache
    tokens = torch.randint(0, 97, (2, 8))
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def through_json(graph: Graph) -> Graph:
    again = from_json(to_json(graph))
    assert again == graph
    return again


def test_a_training_step_gives_loss_and_logits_and_says_that_the_cache_is_left_out() -> None:
    model, batch = gpt2()
    graph = through_json(capture(model, (), batch))
    torch.manual_seed(1)
    expected = model(**batch)
    torch.manual_seed(1)
    output = replay(graph, model, (), batch)
    assert list(output) == ["loss", "logits"]
    assert output.past_key_values is None
    assert any("past_key_values (DynamicCache)" in note and "use_cache=True" in note for note in graph.notes)
    torch.testing.assert_close(output.loss, expected.loss)
    torch.testing.assert_close(output.logits, expected.logits)
    quiet = capture(model, (), {**batch, "use_cache": False})
    assert not quiet.notes and len(quiet.ops) == len(graph.ops)


def test_a_cache_that_was_asked_for_comes_back() -> None:
    model, batch = gpt2()
    asked = replay(capture(model, (), {**batch, "use_cache": True}), model, (), {**batch, "use_cache": True})
    assert asked.past_key_values.get_seq_length() == 8
    model.eval()
    with torch.no_grad():
        output = replay(through_json(capture(model, (), batch)), model, (), batch)
        expected = model(**batch)
        assert type(output.past_key_values) is type(expected.past_key_values)
        for one, other in zip(output.past_key_values.layers, expected.past_key_values.layers, strict=True):
            torch.testing.assert_close(one.keys, other.keys)
            torch.testing.assert_close(one.values, other.values)
        # The cache is one that the model itself goes on with, and one that it can be captured with.
        following = {"input_ids": batch["input_ids"][:, :1]}
        truth = model(**following, past_key_values=copy.deepcopy(expected.past_key_values))
        eager = model(**following, past_key_values=copy.deepcopy(output.past_key_values))
        torch.testing.assert_close(eager.logits, truth.logits)
        call = {**following, "past_key_values": output.past_key_values}
        graph = capture(model, (), copy.deepcopy(call))
        captured = replay(graph, model, (), copy.deepcopy(call))
        torch.testing.assert_close(captured.logits, truth.logits)
        assert captured.past_key_values.get_seq_length() == 9


@pytest.mark.parametrize("module", ["transformers.models.gpt2", "json"])
def test_a_graph_is_replayed_by_a_process_that_has_its_classes_and_no_other(tmp_path, module: str) -> None:
    """Nothing a file names is imported: a process that has the model has its classes."""
    model, batch = gpt2()
    (tmp_path / "graph.json").write_text(to_json(capture(model.eval(), (), batch)))
    script = """
import importlib
import sys
importlib.import_module(sys.argv[2])
from shardwright.errors import CaptureError
from shardwright.frontend.containers import restored_tree
from shardwright.graph import from_json
graph = from_json(open(sys.argv[1]).read())
try:
    print(restored_tree(graph.output_tree).num_leaves == len(graph.outputs))
except CaptureError as error:
    print(error.message)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "graph.json"), module],
        capture_output=True,
        text=True,
        check=False,
    )
    wanted = "True" if module.startswith("transformers") else "which this process does not have"
    assert wanted in done.stdout, done.stderr


class State:
    """An ordinary object."""

    def __init__(self, hidden: Tensor, steps: int) -> None:
        self.hidden, self.steps, self.dtype = hidden, steps, hidden.dtype


class Stepping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, state: State) -> State:
        return State(self.linear(x) + state.hidden, state.steps + 1)


def test_any_object_that_holds_tensors() -> None:
    model, x = Stepping(), torch.randn(2, 4)
    graph = through_json(capture(model, (x, State(torch.ones(2, 4), 3))))
    output = replay(graph, model, (x, State(torch.ones(2, 4), 3)))
    assert (type(output), output.steps, output.dtype) == (State, 4, torch.float32)
    torch.testing.assert_close(output.hidden, model(x, State(torch.ones(2, 4), 3)).hidden)
    assert fingerprint(graph) == fingerprint(capture(model, (x, State(torch.zeros(2, 4), 3))))


class Remembering(nn.Module):
    def forward(self, x: Tensor, state: State, returned: bool = True) -> Tensor | tuple[Tensor, State]:
        state.hidden = state.hidden + x
        return (x * 2, state) if returned else x * 2


def test_an_argument_that_the_model_changes_is_changed_for_the_caller() -> None:
    x, state = torch.ones(2, 4), State(torch.ones(2, 4), 3)
    graph = through_json(capture(Remembering(), (x, state)))
    torch.testing.assert_close(state.hidden, torch.ones(2, 4))  # capture itself changes nothing
    for count in (2.0, 3.0):
        _, returned = replay(graph, Remembering(), (x, state))
        torch.testing.assert_close(state.hidden, torch.full((2, 4), count))
        assert vars(returned) is vars(state) and set(vars(state)) == {"hidden", "steps", "dtype"}
    with pytest.raises(CaptureError, match="changes its argument 'state' \\(a State\\) and does not return it"):
        capture(Remembering(), (x,), {"state": state, "returned": False})


class Odd(nn.Module):
    def forward(self, x: Tensor) -> State:
        state = State(x * 2, 1)
        state.callback = print  # type: ignore[attr-defined]
        return state


def test_what_cannot_be_written_down_is_named() -> None:
    with pytest.raises(CaptureError, match="State whose attribute 'callback'"):
        capture(Odd(), (torch.randn(2),))
