"""What the host waits for is performed between two parts of a recorded pass, forward and backward.

Without a GPU a recording here is a list of PyTorch's operators with the very tensors that they read and wrote, done again in
order: as with CUDA graphs no Python of the pass runs at a replay, and what is taken out of the recording does not run while
it is made.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.test_regions import uncompiled
from runtime.test_replay import recorded_by
from shardwright.cluster import parse_cluster
from shardwright.frontend import capture
from shardwright.planner import Options, plan_graph
from shardwright.program.recording import performed_between, why_not_recorded
from shardwright.runtime import parallelize, regions
from shardwright.runtime.shards import whole

STEPS = 10


class Selecting(nn.Module):
    """A loss whose rows are selected by a mask, amid other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.first(x).tanh()
        chosen = h[mask].exp().sum(0)  # as many rows as the mask has: nobody knows before it is there
        h = self.last(h * torch.sigmoid(self.gate(chosen)))
        return h.square().mean()


class Speech(nn.Module):
    """Connectionist temporal classification: the host reads the lengths of all labels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.last(self.first(x).tanh())
        kept = labels >= 0
        lengths = torch.full((x.shape[0],), x.shape[1], dtype=torch.long)
        found = nn.functional.log_softmax(logits, -1).transpose(0, 1)
        return nn.functional.ctc_loss(found, labels.masked_select(kept), lengths, kept.sum(-1), blank=4)


class Plain(Selecting):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.first(x).tanh()
        h = self.last(h * torch.sigmoid(self.gate((h * mask[..., None]).sum((0, 1)))))
        return h.square().mean()


def example(name: str) -> tuple[nn.Module, list[tuple[Tensor, ...]]]:
    torch.manual_seed(0)
    if name != "speech":
        masks = [torch.rand(8, 5) > share for share in (0.5, 0.2)]
        return (Selecting() if name == "selecting" else Plain()).double(), [
            (torch.randn(8, 5, 6).double(), mask) for mask in masks
        ]
    labels = [torch.randint(0, 4, (8, 3)) for _ in range(2)]
    labels[1][::2, 2] = -100
    return Speech().double(), [(torch.randn(8, 9, 6).double(), some) for some in labels]


class _Noting(TorchDispatchMode):
    def __init__(self, tape):
        super().__init__()
        self.tape, self.scattered = tape, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = _performed(function, args, kwargs or {})
        if function.namespace == "c10d":
            self.scattered |= _storages(args[0])
        elif function is torch.ops.aten.copy_.default and _storages(args[0]) <= self.scattered:
            return made  # gloo itself, for whoever waits, copies what it has scattered to where it should be
        self.tape.parts[-1].append((function, args, kwargs or {}, made))
        return made


def _performed(function, args, kwargs):
    """Collectives are waited for at once: what their own threads do is not part of a recording."""
    made = function(*args, **kwargs)
    if function.namespace == "c10d":
        for one in made if isinstance(made, tuple) else (made,):
            if not isinstance(one, (Tensor, list)):
                one.wait()
    return made


def _storages(value) -> set[int]:
    if isinstance(value, Tensor):
        return {value.untyped_storage().data_ptr()}
    return set().union(*map(_storages, value)) if isinstance(value, (tuple, list)) else set()


def _tensors(value) -> list[Tensor]:
    return [x for x in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(x, Tensor)]


class Tape:
    """Records operators; ``parts`` of the recording under way are lists of them, and what is done in between."""

    def __init__(self) -> None:
        self.parts: list = []
        self.between = self.replayed = 0

    def attempt(self):
        return nullcontext()

    def record(self, work, draws=False):
        assert not draws
        self.parts = parts = [[]]
        with _Noting(self):
            work()
        self.parts = []
        return _Taped(self, parts)

    def apart(self, work):
        self.parts += [work, []]
        self.between += 1

    def memory(self):
        return nullcontext()

    def window(self):
        pass

    def again(self):
        return False

    def failed(self, error):
        return False


class _Taped:
    def __init__(self, tape, parts) -> None:
        self.tape, self.parts = tape, parts

    def replay(self) -> None:
        self.tape.replayed += 1
        for part in self.parts:
            if callable(part):
                part()
                continue
            for function, args, kwargs, made in part:
                if function._schema.is_mutable or function.namespace == "c10d":
                    _performed(function, args, kwargs)
                elif not _storages(made) & _storages((args, *kwargs.values())):
                    for old, new in zip(_tensors(made), _tensors(function(*args, **kwargs)), strict=True):
                        old.copy_(new)


def trained(model, batches) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for step in range(STEPS):
        loss = model(*batches[step % 2])
        loss.backward()
        losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def replayed(rank: int, name: str, compiled: bool = False) -> tuple[int, int, int]:
    model, batches = example(name)
    graph = capture(model, batches[0])
    wanted = trained(reference := copy.deepcopy(model), batches)
    plan = plan_graph(graph, parse_cluster("local:4"), Options("data-parallel", baselines=(), fewer_devices=False))
    parallel = parallelize(model, plan, graph=graph, device="cpu")
    execution, tape = parallel._planned, Tape()
    program = execution.program
    assert name == "plain" or (performed_between(program) and not why_not_recorded(program))
    recorded_by(execution, tape)
    before = regions.compiled_function
    try:
        if compiled:
            regions.compiled_function = uncompiled
            parallel.compile()
        found = trained(parallel, batches)
    finally:
        regions.compiled_function = before
    assert not compiled or execution.executor._compiled.functions
    torch.testing.assert_close(torch.stack(found), torch.stack(wanted), rtol=1e-9, atol=1e-12)
    truth = dict(reference.named_parameters())
    for path, parameter in parallel.named_parameters():
        torch.testing.assert_close(whole(parameter.detach()), truth[path].detach(), rtol=1e-9, atol=1e-12)
    return execution.recorder.replays, tape.between, tape.replayed


@pytest.mark.parametrize(
    ("name", "compiled"), [("plain", False), ("selecting", False), ("speech", False), ("selecting", True)]
)
def test_what_the_host_waits_for_is_done_between_parts_of_a_recording(pool, name, compiled):
    for replays, between, done in pool.run(replayed, name, compiled):
        assert replays >= 4
        assert between == (0 if name == "plain" else 2)  # once forward, once backward
        assert done == 2 * replays
