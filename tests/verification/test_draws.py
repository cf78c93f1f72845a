"""Models that draw numbers draw the same ones wherever they run, and what is changed about them is said."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardwright.errors import RunError
from shardwright.frontend import capture
from shardwright.verification.draws import Draws, changed_by, handing_out, quiet, written_down
from shardwright.verification.prepare import all_double, subject
from shardwright.verification.verify import forced_mesh, streams


class Autoencoder(nn.Module):
    """A variational one: its code is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        mean, log = self.inner(x).chunk(2, -1)
        return F.mse_loss(self.outer(mean + torch.randn_like(mean) * log.exp()), x)


class Forger(nn.Module):
    """A generator and what judges it; some of the forged features are dropped, others get more noise or less: numbers made
    of a condition, which are of PyTorch's default precision."""

    def __init__(self) -> None:
        super().__init__()
        self.forge, self.judge = nn.Linear(3, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        forged = self.forge(torch.randn(x.shape[0], 3))
        forged = F.dropout1d(forged.unsqueeze(-1), 0.3).squeeze(-1)
        noise = torch.empty_like(forged).uniform_(-1, 1) * torch.bernoulli(torch.full_like(forged, 0.5))
        noisy = forged + noise * torch.add(0.1, torch.rand_like(forged) > 0.5, alpha=0.6)
        return F.softplus(-self.judge(x)).mean() + F.softplus(self.judge(noisy)).mean()


class Picker(nn.Module):
    """ViLT: places drawn without replacement, and rows that repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        columns = torch.ones(6).multinomial(3)
        rows = torch.multinomial(torch.ones(4), 8, replacement=True)
        return self.linear(x)[rows][:, columns]


MODELS = {
    "picker": (Picker, (4, 6), ["random numbers drawn once"]),
    "vae": (Autoencoder, (4, 6), ["random numbers drawn once"]),
    "gan": (Forger, (4, 6), ["one fixed mask", "random numbers drawn once"]),
    "encoder": (
        functools.partial(nn.TransformerEncoderLayer, 8, 2, 16, dropout=0.3, batch_first=True),
        (4, 5, 8),
        ["no dropout inside of fused attention", "one fixed mask"],
    ),
    "lstm": (functools.partial(nn.LSTM, 4, 4, 2, dropout=0.3, batch_first=True), (4, 5, 4), ["no dropout between"]),
}


def build(name: str):
    make, shape, _ = MODELS[name]
    return make(), (torch.randn(*shape),), {}


@pytest.mark.parametrize("name", MODELS)
def test_every_run_draws_the_same_numbers(name):
    model, args, _ = build(name)
    before = [name for name, _ in model.named_parameters()]
    draws = written_down(model, args, {})
    model, changes = handing_out(model, draws), changed_by(draws)
    assert [name for name, _ in model.named_parameters()] == before
    assert [any(text.startswith(start) for text in changes) for start in MODELS[name][2]] == [True] * len(
        MODELS[name][2]
    )
    first, second, copied = (_first(m(*args)) for m in (model, model, copy.deepcopy(model)))
    assert torch.equal(first, second) and torch.equal(first, copied)
    with all_double():
        wide = _first(copy.deepcopy(model).double()(args[0].double()))
    assert torch.allclose(wide, first.double(), atol=1e-5) and not torch.equal(wide, first.double())
    assert not any(word in op.target for word in ("drop", "rand", "multinomial") for op in capture(model, args).ops)


def test_what_draws_nothing_stays_as_it_is():
    draws = written_down(nn.Linear(3, 3), (torch.ones(2, 3),), {})
    assert not draws.values and not draws.notes and changed_by(draws) == []


def test_a_given_plan_keeps_its_operators():
    real = capture(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2)), (torch.ones(2, 4),))
    graph, notes = quiet(real)
    assert [op.name for op in graph.ops] == [op.name for op in real.ops] and "no dropout" in notes[0]
    assert [op.args[1] for op in graph.ops if "dropout" in op.target] == [0.0]
    model, args, _ = build("vae")
    with pytest.raises(RunError, match="draws random numbers"):
        quiet(capture(model, args))


def agree(rank: int, name: str) -> tuple[bool, list[str]]:
    """The forced strategies of one model against one process, and its streams."""
    from shardwright.verification.forced import forced_strategies
    from shardwright.verification.verify import check

    it = subject(functools.partial(build, name), double=True)
    steps = it.steps(2)
    runs = []
    for title, strategy in list(forced_strategies(it.graph, forced_mesh(4)))[:3]:
        asked = {"graph": it.graph, "shown": it.shown, "name": title}
        runs.append(check(it.model, it.args, it.kwargs, strategy, steps=steps, **asked))
    runs += streams(functools.partial(build, name), 4)
    return all(run.agrees for run in runs if run is not None), [run.name for run in runs if run is not None]


@pytest.mark.parametrize("name", ["gan", "encoder"])
def test_models_that_draw_agree_with_one_process(pool, name):
    agrees, names = pool.run(agree, name, seconds=200)[0]
    assert agrees and "batch" in names and "random numbers, whole" in names


class Checkpointed(nn.Module):
    """Two layers with dropout between them, computed again in the backward pass, or not."""

    def __init__(self, again: bool, reentrant: bool = False) -> None:
        super().__init__()
        self.inner, self.outer, self.again, self.reentrant = nn.Linear(6, 6), nn.Linear(6, 6), again, reentrant

    def body(self, x: Tensor) -> Tensor:
        return self.outer(F.dropout(torch.tanh(self.inner(x)), 0.4))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        return (checkpoint(self.body, x, use_reentrant=self.reentrant) if self.again else self.body(x)).square().mean()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_are_given_their_numbers_once(reentrant):
    """Computed again in the backward pass, where nobody hands numbers out, they would draw others."""
    torch.manual_seed(0)
    model, x = Checkpointed(True, reentrant), torch.randn(4, 6, requires_grad=True)
    plain = Checkpointed(False)
    plain.load_state_dict(model.state_dict())
    for numbers in (written_down(model, (x,), {}), Draws([torch.rand(4, 6) > 0.4], final=True)):
        found = []
        for one in (model, plain):
            one.zero_grad()
            handing_out(one, copy.deepcopy(numbers))(x).backward()
            found.append({name: parameter.grad.clone() for name, parameter in one.named_parameters()})
        assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())


def test_one_process_can_be_given_what_others_draw():
    """Where a model's calls and the operators of its graph correspond; else its numbers are drawn once for all."""
    for name, result in (("vae", True), ("gan", True), ("encoder", True), ("lstm", False)):
        it = subject(functools.partial(build, name), double=True)
        assert (it.shown is not None) == result, name
        assert not any("random numbers drawn once" in text or "one fixed mask" in text for text in it.changes)
        if it.shown is not None:
            assert len(it.shown.graph.outputs) == len(it.graph.outputs) + len(it.shown.operators)
    odd = subject(lambda: (Unused(), (torch.randn(4, 6),), {}), double=True)
    assert odd.shown is None and any("random numbers drawn once" in text for text in odd.changes)


class Unused(Autoencoder):
    """Draws something that nobody reads, and that no graph has."""

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(3)
        return super().forward(x)


def _first(result):
    return result if isinstance(result, Tensor) else result[0]
