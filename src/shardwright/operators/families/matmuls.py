"""Matrix products. Cutting the contracted loop leaves unreduced sums; a bias then comes in as one, so it counts once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from shardwright.graph.core import DTYPE_BYTES
from shardwright.operators.language import Expression, Sum, TensorArgument, value
from shardwright.operators.record import HostClass, describes, known
from shardwright.operators.samples import reals
from shardwright.operators.work import Kernels, LocalOp, memory_kernels, memory_work, product


@describes("aten.linear.default", kind="matmul")
def linear(x: TensorArgument, weight: TensorArgument, bias: Any) -> Any:
    if weight.rank == 1:
        return lambda *n: Sum(lambda k: x[(*n, k)] * weight[k]) + (0 if bias is None else bias[()])
    if bias is None:
        return lambda *n, j: Sum(lambda k: x[(*n, k)] * weight[j, k])
    return lambda *n, j: Sum(lambda k: x[(*n, k)] * weight[j, k]) + bias[j]


@describes("aten.mm.default", kind="matmul")
def mm(a: TensorArgument, b: TensorArgument) -> Any:
    return lambda i, j: Sum(lambda k: a[i, k] * b[k, j])


@describes("aten.bmm.default", kind="matmul")
def bmm(a: TensorArgument, b: TensorArgument) -> Any:
    return lambda n, i, j: Sum(lambda k: a[n, i, k] * b[n, k, j])


@describes("aten.matmul.default", kind="matmul")
def matmul(a: TensorArgument, b: TensorArgument) -> Any:
    if a.rank == 1 and b.rank == 1:
        return lambda: Sum(lambda k: a[k] * b[k])
    if a.rank == 1:
        return lambda *n, j: Sum(lambda k: a[k] * b[(*n, k, j)])
    if b.rank == 1:
        return lambda *n, i: Sum(lambda k: a[(*n, i, k)] * b[k])
    return lambda *n, i, j: Sum(lambda k: a.at((*n, i, k)) * b.at((*n, k, j)))


@describes("aten.dot.default", "aten.vdot.default", kind="matmul")
def dot(a: TensorArgument, b: TensorArgument) -> Any:
    return lambda: Sum(lambda k: a[k] * b[k])


@describes("aten.mv.default", kind="matmul")
def mv(a: TensorArgument, b: TensorArgument) -> Any:
    return lambda i: Sum(lambda k: a[i, k] * b[k])


@describes("aten.addmm.default", kind="matmul")
def addmm(bias: TensorArgument, a: TensorArgument, b: TensorArgument, *, beta: Any, alpha: Any) -> Any:
    return lambda i, j: bias.at((i, j)) * beta + Sum(lambda k: a[i, k] * b[k, j]) * alpha


@describes("aten.addmv.default", kind="matmul")
def addmv(bias: TensorArgument, a: TensorArgument, b: TensorArgument) -> Any:
    return lambda i: bias.at((i,)) + Sum(lambda k: a[i, k] * b[k])


@describes("aten.baddbmm.default", kind="matmul")
def baddbmm(bias: TensorArgument, a: TensorArgument, b: TensorArgument) -> Any:
    return lambda n, i, j: bias.at((n, i, j)) + Sum(lambda k: a[n, i, k] * b[n, k, j])


@describes("aten.addbmm.default", kind="matmul")
def addbmm(bias: TensorArgument, a: TensorArgument, b: TensorArgument) -> Any:
    return lambda i, j: bias.at((i, j)) + Sum(lambda n, k: a[n, i, k] * b[n, k, j])


@describes("aten.outer.default", "aten.ger.default", kind="elementwise")
def outer(a: TensorArgument, b: TensorArgument) -> Any:
    return lambda i, j: a[i] * b[j]


@describes("aten.einsum.default", kind="matmul")
def einsum(equation: str, tensors: tuple[TensorArgument, ...]) -> Any:
    """``"bsec,bsw->becw"``: letters are loops; those that do not occur on the right are summed over."""
    terms, result = _equation(equation, [t.rank for t in tensors])
    extent = {
        letter: n for term, t in zip(terms, tensors, strict=True) for letter, n in zip(term, t.shape, strict=True)
    }
    extent |= {
        letter: n
        for term, t in zip(terms, tensors, strict=True)
        for letter, n in zip(term, t.shape, strict=True)
        if n > 1
    }
    summed = [letter for letter in extent if letter not in result]

    def element(index: dict[str, Any]) -> Expression:
        product = value(1)
        for position, (term, t) in enumerate(zip(terms, tensors, strict=True)):
            factor = t[tuple(index[letter] for letter in term)]
            product = factor if position == 0 else product * factor
        return product

    def output(*i: Any) -> Expression:
        kept = dict(zip(result, i, strict=True))
        if not summed:
            return element(kept)
        return Sum(lambda *k: element(kept | dict(zip(summed, k, strict=True))), [extent[letter] for letter in summed])

    return output


def _equation(equation: str, ranks: list[int]) -> tuple[list[str], str]:
    """Letters of every operand and of the result; an ellipsis becomes capital letters from the end of the alphabet."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    spare = "".join(c for c in "ZYXWVUTSRQPONMLKJIHGFEDCBA" if c not in equation)
    width = max(
        (rank - len(t.replace("...", "")) for t, rank in zip(terms, ranks, strict=True) if "..." in t), default=0
    )
    dots = spare[:width]
    full = []
    for term, rank in zip(terms, ranks, strict=True):
        here = rank - len(term.replace("...", ""))
        full.append(term.replace("...", dots[width - here :] if here else ""))
    if arrow:
        return full, right.replace("...", dots)
    letters = "".join(full)
    return full, dots + "".join(sorted(c for c in set(letters) if letters.count(c) == 1 and c not in dots))


known("aten.matmul.default", orders_operands=True)


def _with_backward(
    dtype: str, m: np.ndarray, n: np.ndarray, k: np.ndarray, batch: np.ndarray, left: bool, right: bool, single: bool
) -> Kernels:
    """A product and its gradients; ``single``: of two matrices, however it is split. A batch that is cut down to one stays
    a batch: what a split costs must not depend on the other splits that are priced with it."""
    kind = "matmul" if single else "bmm"
    size = DTYPE_BYTES[dtype]
    rows = np.gcd(np.round(n * size).astype(np.int64), np.round(k * size).astype(np.int64))
    alignment = np.gcd(rows, 16)
    backward = []
    if left:
        backward.append(product(dtype, m, k, n, batch, f"{kind}/{'input' if single else 'forward'}", alignment))
    if right:
        backward.append(product(dtype, n, k, m, batch, f"{kind}/{'weight' if single else 'forward'}", alignment))
    return [product(dtype, m, n, k, batch, f"{kind}/forward", alignment)], backward


def _product_kernels(local: LocalOp, left: int, right: int) -> Kernels:
    """Products of two operands, with or without a batch and a bias."""
    if len(local.inputs) <= max(left, right):
        return memory_kernels(local)
    a, b, c = local.elements(left), local.elements(right), local.elements(0, output=True)
    batch, single = np.ones_like(c), True
    if min(local.input_shapes[i].shape[1] for i in (left, right)) >= 3:
        batch, single = local.output_shapes[0][:, :-2].prod(axis=1), prod(local.outputs[0].shape[:-2]) == 1
        a, b, c = a / batch, b / batch, c / batch
    m, n, k = np.sqrt(a * c / b), np.sqrt(b * c / a), np.sqrt(a * b / c)
    grads = (local.inputs[left].grad, local.inputs[right].grad)
    forward, backward = _with_backward(local.dtype, m, n, k, batch, *grads, single)
    others = [i for i in range(len(local.inputs)) if i not in (left, right)]
    if single and others:  # with a bias libraries choose another kernel
        plain = forward[0]
        forward = [replace(plain, curve="matmul/biased", instead=plain)]
    if any(local.inputs[i].grad for i in others):  # the bias' gradient sums the output's
        backward.append(memory_work("sum/forward", local.dtype, local.output_bytes, n))
    return forward, backward


def _ordered(labels: str, groups: list[str]) -> bool:
    """Whether an operand's labels already stand in these groups, in order, so that it need not be copied."""
    return labels == "".join(groups) or (len(groups) == 3 and labels == groups[0] + groups[2] + groups[1])


def _contraction_kernels(local: LocalOp) -> Kernels:
    """A contraction, two operands at a time from the left, as PyTorch takes it apart, with the copies that bring operands
    into order."""
    if len(local.inputs) < 2:
        return memory_kernels(local)
    equation = str(local.op.args[0]).replace(" ", "")
    if "->" not in equation or "." in equation or equation.split("->")[0].count(",") + 1 != len(local.inputs):
        work = memory_work("elementwise/forward", local.dtype, local.bytes)
        return [work], [work, work]
    terms, result = equation.split("->")
    operands = terms.split(",")
    extent: dict[str, np.ndarray] = {}
    whole: dict[str, int] = {}
    for labels, shape, operand in zip(operands, local.input_shapes, local.inputs, strict=True):
        for position, label in enumerate(labels):
            extent[label] = np.maximum(shape[:, position], extent.get(label, shape[:, position]))
            whole[label] = max(operand.shape[position], whole.get(label, 1))
    ones = np.ones(len(local.flops))

    def volume(labels: str) -> np.ndarray:
        return np.prod([extent[x] for x in labels], axis=0) if labels else ones

    size = DTYPE_BYTES[local.dtype]
    forward, backward = [], []
    held, held_grad = operands[0], local.inputs[0].grad
    for index in range(1, len(operands)):
        other, other_grad = operands[index], local.inputs[index].grad
        wanted = set(result).union(*operands[index + 1 :])
        batch = "".join(x for x in held if x in other and x in wanted)
        summed = "".join(x for x in held if x in other and x not in wanted)
        rows = "".join(x for x in held if x not in other)
        columns = "".join(x for x in other if x not in held)
        sizes = (volume(rows), volume(columns), volume(summed), volume(batch))
        single = all(whole[label] == 1 for label in batch)
        there, back = _with_backward(local.dtype, *sizes, held_grad, other_grad, single)
        for labels, groups in ((held, [batch, rows, summed]), (other, [batch, summed, columns])):
            if not _ordered(labels, groups):
                # Turning the innermost dim scatters every element; turning others moves whole rows.
                kind = "copy_rows" if labels[-1:] == "".join(groups)[-1:] else "copy"
                copied = memory_work(f"{kind}/forward", local.dtype, 2 * volume(labels) * size)
                there.append(copied)
                back.append(copied)
        forward += there
        backward += back
        held, held_grad = batch + rows + columns, held_grad or other_grad
    return forward, backward


_PLAIN, _WITH_BIAS = partial(_product_kernels, left=0, right=1), partial(_product_kernels, left=1, right=2)
_LIKE_MM, _LIKE_LINEAR = HostClass("mm", gradients=2), HostClass("linear", gradients=3)
known("aten.linear", kernels=_PLAIN, issued=_LIKE_LINEAR)
known("aten.mm", "aten.bmm", "aten.mv", kernels=_PLAIN, issued=_LIKE_MM)
known("aten.dot", kernels=_PLAIN)
known("aten.matmul", kernels=_PLAIN, issued=HostClass(flat="mm", gradients=2))
known("aten.addmm", "aten.baddbmm", "aten.addmv", kernels=_WITH_BIAS, issued=_LIKE_LINEAR)
known("aten.einsum", kernels=_contraction_kernels, issued=HostClass("mm", turned=True))


known(
    "aten.linear.default",
    module="Linear",
    samples=lambda b, s, k, j: [
        (reals(b, s, k), reals(j, k), reals(j)),
        (reals(b, k), reals(j, k)),
        (reals(k), reals(j, k), reals(j)),
    ],
)
known("aten.mm.default", samples=lambda i, k, j: [(reals(i, k), reals(k, j))])
known("aten.bmm.default", samples=lambda n, i, k, j: [(reals(n, i, k), reals(n, k, j))])
known(
    "aten.matmul.default",
    samples=lambda n, h, i, k, j: [
        (reals(k), reals(k)),
        (reals(k), reals(n, k, j)),
        (reals(n, i, k), reals(k)),
        (reals(i, k), reals(k, j)),
        (reals(n, h, i, k), reals(h, k, j)),
        (reals(n, 1, i, k), reals(h, k, j)),
        (reals(n, i, k), reals(k, j)),
    ],
)
known("aten.dot.default", "aten.vdot.default", samples=lambda k: [(reals(k), reals(k))])
known("aten.mv.default", samples=lambda i, k: [(reals(i, k), reals(k))])
known(
    "aten.addmm.default",
    samples=lambda i, k, j: [
        (reals(j), reals(i, k), reals(k, j)),
        (reals(i, j), reals(i, k), reals(k, j), {"beta": 0.5, "alpha": 2.0}),
        (reals(i, 1), reals(i, k), reals(k, j)),
    ],
)
known("aten.addmv.default", samples=lambda i, k: [(reals(i), reals(i, k), reals(k))])
known(
    "aten.baddbmm.default",
    samples=lambda n, i, k, j: [
        (reals(n, i, j), reals(n, i, k), reals(n, k, j)),
        (reals(1, 1, j), reals(n, i, k), reals(n, k, j)),
    ],
)
known("aten.addbmm.default", samples=lambda n, i, k, j: [(reals(i, j), reals(n, i, k), reals(n, k, j))])
known("aten.outer.default", "aten.ger.default", samples=lambda i, j: [(reals(i), reals(j))])
known(
    "aten.einsum.default",
    samples=lambda b, s, e, c, w: [
        ("bsec,bsw->becw", [reals(b, s, e, c), reals(b, s, w)]),
        ("...ij,...jk->...ik", [reals(b, s, e), reals(b, e, w)]),
        ("ij,jk", [reals(b, s), reals(s, e)]),
        ("bij->bji", [reals(b, s, e)]),
        ("bsk,bske->bse", [reals(b, s, c), reals(b, s, c, e)]),
    ],
)


known("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.mv", "aten.addmv", "aten.dot", any_strides=True)
