"""The tiny language in which operators are described (Tofu, EuroSys 2019: operators as lambdas over coordinates).

A description is a Python lambda from the indices of one output element to an expression: tensors indexed by loops,
arithmetic, the reducers ``Sum``, ``Max``, ``Min``, ``Prod``, and ``Opaque`` for what has no element-wise form. Functions
such as ``exp`` are names only (:func:`call`): what matters is which elements are read and where sums are linear.

>>> bmm = lambda n, i, j: Sum(lambda k: a[n, i, k] * b[n, k, j])
>>> linear = lambda *n, j: Sum(lambda k: x[(*n, k)] * weight[j, k]) + bias[j]
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.errors import DescriptionError
from shardwright.operators.indices import Affine, Loop, affine, bounds, loops_of


class Expression:
    """A value computed from tensor elements."""

    def __add__(self, other: object) -> Expression:
        return Plus(self, value(other))

    def __radd__(self, other: object) -> Expression:
        return Plus(value(other), self)

    def __sub__(self, other: object) -> Expression:
        return Plus(self, Times(Number(-1), value(other)))

    def __rsub__(self, other: object) -> Expression:
        return Plus(value(other), Times(Number(-1), self))

    def __neg__(self) -> Expression:
        return Times(Number(-1), self)

    def __mul__(self, other: object) -> Expression:
        return Times(self, value(other))

    def __rmul__(self, other: object) -> Expression:
        return Times(value(other), self)

    def __truediv__(self, other: object) -> Expression:
        return Times(self, call("reciprocal", other))

    def __rtruediv__(self, other: object) -> Expression:
        return Times(value(other), call("reciprocal", self))


@dataclass(frozen=True)
class Number(Expression):
    """A constant; its exact value never matters to the analysis."""

    of: float = 0.0


@dataclass(frozen=True)
class Position(Expression):
    """An index used as a value, as ``arange`` and ``triu`` do: a piece must know where it lies."""

    of: Affine


@dataclass(frozen=True)
class Plus(Expression):
    left: Expression
    right: Expression


@dataclass(frozen=True)
class Times(Expression):
    left: Expression
    right: Expression


@dataclass(frozen=True)
class Function(Expression):
    """Any function of its arguments, not linear in them."""

    name: str
    arguments: tuple[Expression, ...]


@dataclass(frozen=True)
class Choice(Expression):
    """``where(condition, yes, no)``: linear in ``yes`` and ``no`` together."""

    condition: Expression
    yes: Expression
    no: Expression


@dataclass(frozen=True)
class Reduction(Expression):
    """``Sum``, ``Max``, ``Min`` or ``Prod`` of ``body`` over all points of ``loops``."""

    kind: str
    loops: tuple[Loop, ...]
    body: Expression


@dataclass(frozen=True)
class Access(Expression):
    """One element of a tensor argument; an index of ``None`` stands for the whole dim."""

    tensor: TensorArgument
    index: tuple[Affine | None, ...]
    padded: bool = False
    """Whether indices may lie outside the tensor, where the operator reads its padding."""


@dataclass(frozen=True)
class TensorArgument:
    """A tensor argument as a description sees it: ``x.shape``, ``x.dtype``, ``x[n, i]``.

    ``position`` is its place in ``Op.inputs``. With one index per dim it yields an element; ``:`` stands for all of a dim,
    and so does an index that is itself data (``table[tokens[n], d]``).
    """

    position: int
    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    grad: bool = False

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def floating(self) -> bool:
        return self.dtype.startswith(("float", "bfloat", "complex"))

    def __getitem__(self, index: Any) -> Access:
        entries = index if isinstance(index, tuple) else (index,)
        if len(entries) != len(self.shape):
            raise DescriptionError(
                f"{self.name} has {len(self.shape)} dims but is indexed with {len(entries)} indices.",
                f"Its shape is {tuple(self.shape)}; write ':' for a dim that is needed whole.",
            )
        checked: list[Affine | None] = []
        for entry, extent in zip(entries, self.shape, strict=True):
            whole = (isinstance(entry, slice) and entry == slice(None)) or isinstance(entry, Expression)
            checked.append(None if whole else affine(entry if extent != 1 else 0))
        return Access(self, tuple(checked))

    def padded(self, index: Sequence[Any]) -> Access:
        """An element that may lie outside: convolutions and paddings read their own filling there."""
        return replace(self[tuple(index)], padded=True)

    def at(self, index: Sequence[Any]) -> Access:
        """The element that broadcasting pairs with an output element: leading dims dropped, dims of size 1 read at 0."""
        return self[tuple(index)[len(index) - len(self.shape) :] if self.shape else ()]

    def _unindexed(self, *_: Any) -> Any:
        raise DescriptionError(
            f"{self.name} is used without indices.", f"Write {self.name}[...] with one index per dim."
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _unindexed
    __neg__ = __iter__ = __matmul__ = __pow__ = _unindexed


def value(of: object) -> Expression:
    """Anything that may stand in arithmetic, as an expression."""
    if isinstance(of, Expression):
        return of
    if isinstance(of, (Loop, Affine)):
        return Position(affine(of))
    if isinstance(of, (int, float, complex)) or of is None:
        return Number(0.0 if of is None or isinstance(of, complex) else float(of))
    if isinstance(of, TensorArgument):
        return of._unindexed()
    raise DescriptionError(f"{of!r} is not a value.", "Values are tensor elements, numbers, and arithmetic on them.")


def call(name: str, *arguments: object) -> Function:
    """A function of its arguments, known by name only: ``call("exp", x[i])``."""
    return Function(name, tuple(value(a) for a in arguments))


def where(condition: object, yes: object, no: object) -> Choice:
    return Choice(value(condition), value(yes), value(no))


def hit(element: object, index: object) -> Function:
    """One where the data ``element`` equals ``index``, else zero: how lookups are written as sums that can be cut.

    >>> lookup = lambda *n, d: Sum(lambda v: hit(tokens[n], v) * table[v, d])
    """
    return call("hit", element, index)


def Opaque(*accesses: object) -> Function:
    """Some function of whole dims: ``Opaque(x[n, :])`` depends on all of row n in a way that cannot be cut."""
    return Function("opaque", tuple(value(a) for a in accesses))


def _reducer(kind: str) -> Callable[..., Reduction]:
    def reduce(body: Callable[..., Any], extents: Sequence[int] | None = None) -> Reduction:
        return _reduction(kind, body, extents)

    reduce.__name__ = kind.capitalize()
    reduce.__doc__ = f"{kind} of ``body`` over its loops; ``extents`` are needed where no dim shows them."
    return reduce


Sum = _reducer("sum")
Max = _reducer("max")
Min = _reducer("min")
Prod = _reducer("product")
Each = _reducer("each")
"""All points of an inner loop together, as a function that is not reduced piece by piece: the loop is never cut, it only
says how many values there are (the gates of a recurrent cell)."""

_UNKNOWN = 1 << 40
"""The extent of a reduction loop before the tensors it indexes have told it: larger than any dim."""


def _reduction(kind: str, body: Callable[..., Any], extents: Sequence[int] | None) -> Reduction:
    names = parameter_names(body, None if extents is None else len(extents))
    if extents is None:
        trial = value(_apply(body, [Loop(name, _UNKNOWN) for name in names]))
        extents = [_extent_of(name, trial) for name in names]
    if len(extents) != len(names):
        raise DescriptionError(f"{kind.capitalize()} over {names} was given {len(extents)} extents.")
    loops = [Loop(name, extent) for name, extent in zip(names, extents, strict=True)]
    return Reduction(kind, tuple(loops), value(_apply(body, loops)))


def _extent_of(name: str, body: Expression) -> int:
    for access in accesses(body):
        for index, extent in zip(access.index, access.tensor.shape, strict=True):
            if index is not None and (loop := index.bare) is not None and loop.name == name:
                return extent
    if any(a.tensor.shape.count(1) for a in accesses(body)):
        return 1  # the only dims it could have indexed have one element
    raise DescriptionError(
        f"Nothing says how far the loop {name!r} runs.", "Index a dim with it alone, or pass extents=(...)."
    )


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters that stand for loops; those with a default are Python's way to capture a value."""
    found = inspect.signature(function).parameters.values()
    return [p for p in found if p.default is p.empty and p.kind is not p.VAR_KEYWORD]


def parameter_names(function: Callable[..., Any], rank: int | None) -> list[str]:
    """Names of the loops a lambda binds; ``*i`` stands for as many as ``rank`` leaves: ``i0, i1, ...``."""
    names: list[str] = []
    parameters = _parameters(function)
    fixed = sum(p.kind is not p.VAR_POSITIONAL for p in parameters)
    for p in parameters:
        if p.kind is p.VAR_POSITIONAL:
            if rank is None:
                raise DescriptionError(f"A reducer over *{p.name} needs extents=(...).")
            names += [f"{p.name}{d}" for d in range(rank - fixed)]
        else:
            names.append(p.name)
    if rank is not None and len(names) != rank:
        raise DescriptionError(f"The description has {len(names)} indices {names}, its output has {rank} dims.")
    return names


def _apply(function: Callable[..., Any], loops: Sequence[Loop]) -> Any:
    positional, keyword, rest = [], {}, list(loops)
    parameters = _parameters(function)
    after = sum(p.kind is p.KEYWORD_ONLY for p in parameters)
    for p in parameters:
        if p.kind is p.VAR_POSITIONAL:
            count = len(rest) - after
            positional += rest[:count]
            rest = rest[count:]
        elif p.kind is p.KEYWORD_ONLY:
            keyword[p.name] = rest.pop(0)
        else:
            positional.append(rest.pop(0))
    return function(*positional, **keyword)


def put(index: Sequence[Any], dim: int, entry: Any) -> tuple[Any, ...]:
    """``index`` with the entry at ``dim`` replaced."""
    return (*index[:dim], entry, *index[dim + 1 :])


def accesses(expression: Expression) -> Iterator[Access]:
    """Every tensor element an expression reads."""
    if isinstance(expression, Access):
        yield expression
    for part in parts(expression):
        yield from accesses(part)


def parts(expression: Expression) -> tuple[Expression, ...]:
    """The direct operands of an expression."""
    if isinstance(expression, (Plus, Times)):
        return (expression.left, expression.right)
    if isinstance(expression, Function):
        return expression.arguments
    if isinstance(expression, Choice):
        return (expression.condition, expression.yes, expression.no)
    if isinstance(expression, Reduction):
        return (expression.body,)
    return ()


@dataclass(frozen=True)
class Output:
    """One result of a described operator: its loops, in the order of its dims, and what one element is."""

    loops: tuple[Loop, ...]
    body: Expression


@dataclass(frozen=True)
class Nest:
    """A whole operator: one :class:`Output` per result (``None`` where nobody uses it)."""

    outputs: tuple[Output | None, ...]
    reductions: tuple[Loop, ...] = field(default=())


def nest(lambdas: Any, shapes: Sequence[tuple[int, ...] | None]) -> Nest:
    """Call the lambdas of a description with symbolic indices and check what they return."""
    functions = lambdas if isinstance(lambdas, (tuple, list)) else (lambdas,)
    outputs: list[Output | None] = []
    for position, shape in enumerate(shapes):
        function = functions[position] if position < len(functions) else None
        if shape is None or function is None:
            outputs.append(None)
            continue
        names = parameter_names(function, len(shape))
        loops = tuple(Loop(name, extent) for name, extent in zip(names, shape, strict=True))
        body = value(_apply(function, loops))
        _check_bound(body, {loop.name: loop for loop in loops})
        outputs.append(Output(loops, body))
    found: dict[str, Loop] = {}
    for output in outputs:
        if output is not None:
            for loop in reduction_loops(output.body):
                found.setdefault(loop.name, loop)
    return Nest(tuple(outputs), tuple(found.values()))


def reduction_loops(expression: Expression) -> Iterator[Loop]:
    """The loops of all reducers inside an expression, those of ``Each`` left out: they are not cut."""
    if isinstance(expression, Reduction) and expression.kind != "each":
        yield from expression.loops
    for part in parts(expression):
        yield from reduction_loops(part)


def _check_bound(expression: Expression, bound: dict[str, Loop]) -> None:
    used: list[Loop] = []
    if isinstance(expression, Access):
        used = [loop for index in expression.index if index is not None for loop in loops_of(index)]
    elif isinstance(expression, Position):
        used = list(loops_of(expression.of))
    for loop in used:
        if loop.name not in bound:
            raise DescriptionError(
                f"Index {loop.name!r} is not bound here.", "Use it only inside the lambda that introduces it."
            )
    if isinstance(expression, Access):
        for dim, (index, extent) in enumerate(zip(expression.index, expression.tensor.shape, strict=True)):
            bare = None if index is None else index.bare
            if bare is None or not bare.extent or expression.padded:  # a loop over nothing reads nothing
                continue
            if bounds(affine(bare))[1] >= extent:
                raise DescriptionError(
                    f"Loop {bare.name!r} runs over {bare.extent} points but dim {dim} of {expression.tensor.name} "
                    f"has {extent}."
                )
    if isinstance(expression, Reduction):
        for loop in expression.loops:
            if loop.name in bound:
                raise DescriptionError(f"Index {loop.name!r} is bound twice.", "Give the inner loop another name.")
        bound = bound | {loop.name: loop for loop in expression.loops}
    for part in parts(expression):
        _check_bound(part, bound)
