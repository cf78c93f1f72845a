"""Recurrent layers: free along the batch. An LSTM's hidden units can be cut too: each piece multiplies its part of the
hidden state with its columns of the recurrent weights, and the gates are exchanged at every step.

An LSTM whose hidden units are cut: each piece contributes its units to every gate, the gates are summed at each step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shardwright.graph import Op, Tensor
from shardwright.operators.families.recurrent_kernels import lstm_on
from shardwright.operators.language import Each, Expression, Opaque, Sum, TensorArgument, call, value
from shardwright.operators.pieces import Call, Piece
from shardwright.operators.record import Draws, HostClass, computes, describes, known
from shardwright.operators.samples import Spec, reals
from shardwright.operators.work import Kernels, LocalOp, Work

ALL = slice(None)


def _flops(arguments: dict[str, Any], shapes: Any) -> float:
    """Two operations per weight, step and sequence."""
    x, weights = arguments["input"], arguments["params"]
    matrices = sum(math.prod(w.shape) for w in weights if w.rank == 2)
    return 2.0 * math.prod(x.shape[:-1]) * matrices


def batch_dim(x: TensorArgument, batch_first: bool) -> int | None:
    return None if x.rank < 3 else (0 if batch_first else 1)


def units(x: TensorArgument, hidden: TensorArgument, weights: Sequence[TensorArgument], settings: Any) -> bool:
    """Whether hidden units can be cut: one direction, no projection, no dropout between layers."""
    _, layers, dropout, train, bidirectional = settings
    width = hidden.shape[-1]
    plain = not bidirectional and not (dropout and train and layers > 1)
    return plain and x.rank == 3 and weights[0].shape[0] == 4 * width


@describes("aten.lstm.input", kind="recurrent", flops=_flops)
def lstm(
    x: TensorArgument,
    hx: Sequence[TensorArgument],
    params: Sequence[TensorArgument],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    batch = batch_dim(x, batch_first)
    hidden, memory = hx[0], hx[1]
    cuttable = units(x, hidden, params, (has_biases, num_layers, dropout, train, bidirectional))
    width = hidden.shape[-1]
    per_layer = 4 if has_biases else 2

    def whole(t: TensorArgument) -> Expression:
        return t[(ALL,) * t.rank]

    def layer(t: Any, b: Any, number: int) -> Expression:
        into, recur = params[per_layer * number], params[per_layer * number + 1]
        step = x[(b, t, ALL) if batch_first else (t, b, ALL)] if number == 0 else None

        def state(k: Any) -> Expression:
            return call("after", hidden[number, b, k], value(t + 0))  # unit k after t steps

        def gate(r: Any) -> Expression:
            total = Sum(lambda k: state(k) * recur[r, k], [width])
            if step is None:
                # The layer below hands up its units: they are cut like this layer's own.
                return total + Sum(lambda k: state(k) * into[r, k], [width])
            return call("gate", total, step)

        parts = [Each(lambda r: gate(r), [4 * width]), memory[number, b, ALL]]
        parts += [whole(p) for p in params[per_layer * number + 2 : per_layer * (number + 1)]]
        return call("cell", *parts, *([whole(into)] if number == 0 else []))

    def cut_units(b: Any) -> Expression:
        steps = [x.shape[1 if batch_first else 0]]
        return call(
            "layers", *(Each(lambda s, number=number: layer(s, b, number), steps) for number in range(num_layers))
        )

    def opaque(b: Any) -> Expression:
        if b is None:
            return Opaque(*map(whole, (x, *hx, *params)))
        index = [ALL] * x.rank
        index[batch] = b  # type: ignore[index]  # there is a batch where b is one
        return Opaque(x[tuple(index)], *(h[ALL, b, ALL] for h in hx), *map(whole, params))

    if batch is None:
        return lambda *i: opaque(None), lambda *i: opaque(None), lambda *i: opaque(None)
    if not cuttable:
        if batch_first:
            return lambda b, t, u: opaque(b), lambda n, b, u: opaque(b), lambda n, b, u: opaque(b)
        return lambda t, b, u: opaque(b), lambda n, b, u: opaque(b), lambda n, b, u: opaque(b)
    state = (lambda n, b, u: cut_units(b), lambda n, b, u: cut_units(b))
    if batch_first:
        return lambda b, t, u: cut_units(b), *state
    return lambda t, b, u: cut_units(b), *state


@describes("aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input", kind="recurrent", flops=_flops)
def recurrent(
    x: TensorArgument,
    hx: TensorArgument,
    params: Sequence[TensorArgument],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    batch = batch_dim(x, batch_first)
    if batch is None:
        return None

    def element(b: Any) -> Expression:
        index = [ALL] * x.rank
        index[batch] = b
        return Opaque(x[tuple(index)], hx[ALL, b, ALL], *(p[(ALL,) * p.rank] for p in params))

    if batch_first:
        return lambda b, t, u: element(b), lambda n, b, u: element(b)
    return lambda t, b, u: element(b), lambda n, b, u: element(b)


@describes("aten.lstm_cell.default", kind="recurrent")
def lstm_cell(x: TensorArgument, hx: Sequence[TensorArgument], w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any) -> Any:
    weights = [w for w in (w_ih, w_hh, b_ih, b_hh) if w is not None]
    cell = lambda b, u: Opaque(x[b, ALL], *(h[b, ALL] for h in hx), *(w[(ALL,) * w.rank] for w in weights))
    return (cell, cell) if x.rank == 2 else None


@describes("aten.gru_cell.default", "aten.rnn_tanh_cell.default", "aten.rnn_relu_cell.default", kind="recurrent")
def recurrent_cell(x: TensorArgument, hx: TensorArgument, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any) -> Any:
    weights = [w for w in (w_ih, w_hh, b_ih, b_hh) if w is not None]
    if x.rank != 2:
        return None
    return lambda b, u: Opaque(x[b, ALL], hx[b, ALL], *(w[(ALL,) * w.rank] for w in weights))


@computes("aten.lstm.input")
def lstm_piece(call: Call) -> Piece | None:
    hidden = call.input_spans(1).get(2)
    if hidden is None:
        return None
    layers = call.argument("num_layers")
    per_layer = 4 if call.argument("has_biases") else 2
    loop, start, stop = hidden.loop, hidden.start, hidden.stop

    def run_layer(inputs: list[Any], h: Any, c: Any, weights: list[Any], own_input: bool, exchange: Any) -> Any:
        """``h`` holds this piece's units; ``inputs`` are whole for the first layer, this piece's units above it."""
        into, recur, *biases = weights
        fixed = sum(biases) if biases else 0.0
        full, outputs = None, []
        for x in inputs:
            partial = h @ recur.t()
            if own_input:
                gates = exchange(partial + x @ into.t(), "sum", loop) + fixed
            else:
                gates = exchange(partial, "sum", loop) + x @ into.t() + fixed
            admit, forget, candidate, emit = gates.chunk(4, -1)
            c = forget.sigmoid() * c + admit.sigmoid() * candidate.tanh()
            full = emit.sigmoid() * c.tanh()
            outputs.append(full)
            h = full[:, start:stop]
        return outputs, full, c

    def kernel(exchange: Any, **arguments: Any) -> Any:
        x, (h0, c0), params = arguments["input"], arguments["hx"], arguments["params"]
        first = 0 if arguments["batch_first"] else 1
        steps = list(x.unbind(1 - first))
        last_h, last_c, outputs = [], [], steps
        for layer in range(layers):
            weights = list(params[per_layer * layer : per_layer * (layer + 1)])
            inputs = steps if layer == 0 else [o[:, start:stop] for o in outputs]
            outputs, h, c = run_layer(inputs, h0[layer], c0[layer], weights, layer > 0, exchange)
            last_h.append(h)
            last_c.append(c)
        return torch.stack(outputs, 1 - first), torch.stack(last_h), torch.stack(last_c)

    return call.kernel(kernel)


def _draws(op: Op) -> bool:
    numbers = [value for value in op.args if isinstance(value, float)]
    return bool(numbers and numbers[0] and op.kwarg("train", True))


RECURRENCES = ("aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu")
known(*RECURRENCES, draws=Draws(_draws))
known("aten.lstm.input", on_device={"cuda": lstm_on("cuda"), "cpu": lstm_on("cpu")})


def _kernels(local: LocalOp) -> Kernels:
    """LSTM layers: per layer and time step four gates of (input + hidden) × hidden products."""
    x, out = local.input_shapes[0], local.output_shapes[0]
    first = any(a is True for a in local.op.args[-1:])  # batch_first is the last argument
    batch, steps = (x[:, 0], x[:, 1]) if first else (x[:, 1], x[:, 0])
    weights = [i for i, t in enumerate(local.inputs) if len(t.shape) == 2]
    flops = 2 * sum((local.elements(i) for i in weights), np.zeros(len(local.flops))) * steps * batch
    features = np.stack([steps, batch, out[:, -1]], axis=1)
    forward = [Work("lstm/forward", local.dtype, flops, local.bytes, features)]
    if not any(t.grad for t in local.inputs):
        return forward, []
    return forward, [Work("lstm/backward", local.dtype, 2 * flops, 2 * local.bytes, features)]


def _steps(op: Op, inputs: Sequence[Tensor]) -> int:
    """How many steps a recurrence takes, over all its layers and directions: each has two matrices of weights."""
    first = any(a is True for a in op.args[-1:]) and len(inputs[0].shape) == 3  # batch_first is the last argument
    matrices = sum(len(tensor.shape) == 2 for tensor in inputs[2:])
    return inputs[0].shape[1 if first else 0] * max(matrices // 2, 1)


known(*RECURRENCES, kernels=_kernels, issued=HostClass("lstm", steps=_steps))


known(
    "aten.lstm_cell.default",
    samples=lambda b, i, h: [
        (reals(b, i), [reals(b, h), reals(b, h)], reals(4 * h, i), reals(4 * h, h), reals(4 * h), reals(4 * h))
    ],
)
known(
    "aten.gru_cell.default",
    samples=lambda b, i, h: [(reals(b, i), reals(b, h), reals(3 * h, i), reals(3 * h, h), reals(3 * h), reals(3 * h))],
)
known(
    "aten.rnn_tanh_cell.default",
    "aten.rnn_relu_cell.default",
    samples=lambda b, i, h: [(reals(b, i), reals(b, h), reals(h, i), reals(h, h), reals(h), reals(h))],
)


def _weights(gates: int, i: int, h: int, layers: int = 1, biases: bool = True, directions: int = 1) -> list[Spec]:
    found = []
    for layer in range(layers):
        for _ in range(directions):
            found += [reals(gates * h, i if layer == 0 else directions * h), reals(gates * h, h)]
            found += [reals(gates * h), reals(gates * h)] if biases else []
    return found


def _lstm_calls(b: int, i: int, h: int) -> list[tuple]:
    def call(x: Spec, layers: int, biases: bool, both: bool, first: bool) -> tuple:
        states, weights = layers * (1 + both), _weights(4, i, h, layers, biases, 1 + both)
        return x, [reals(states, b, h), reals(states, b, h)], weights, biases, layers, 0.0, True, both, first

    return [
        call(reals(b, 3, i), 2, True, False, True),
        call(reals(3, b, i), 1, False, False, False),
        call(reals(3, b, i), 1, True, True, False),
    ]


known("aten.lstm.input", samples=_lstm_calls)
known(
    "aten.gru.input",
    samples=lambda b, i, h: [(reals(b, 3, i), reals(2, b, h), _weights(3, i, h, 2), True, 2, 0.0, True, False, True)],
)
known(
    "aten.rnn_tanh.input",
    "aten.rnn_relu.input",
    samples=lambda b, i, h: [(reals(3, b, i), reals(1, b, h), _weights(1, i, h), True, 1, 0.0, True, False, False)],
)
