"""Matrix products. Cutting the contracted loop leaves unreduced sums; a bias then comes in as one, so it counts once."""

from __future__ import annotations

from typing import Any

from shardwright.operators.language import Expression, Sum, TensorArgument, value
from shardwright.operators.record import describes, known


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
