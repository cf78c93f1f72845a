"""An LSTM whose hidden units are cut: each piece contributes its units to every gate, the gates are summed at each step."""

from __future__ import annotations

from typing import Any

from shardwright.operators.pieces import Call, Piece
from shardwright.operators.registry import computes


@computes("aten.lstm.input")
def lstm(call: Call) -> Piece | None:
    import torch

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
