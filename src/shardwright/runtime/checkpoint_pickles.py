"""The instructions of a pickle, read into inert values: nothing a pickle names is fetched, called or changed.

PyTorch writes a checkpoint's metadata as a pickle, and a pickle is a program: it calls what it names and sets attributes of
what it has, classes of this process among them. Here a name stays a :class:`Named`, and what a pickle makes of one a
:class:`Made` that says of what, with which arguments and which state; turning these into objects is for whoever knows what
they ought to be. Only what ``pickle.dump`` has written for plain data since protocol 2 is understood.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


class Named(NamedTuple):
    """A name in a module, not looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Made:
    """What calling ``what`` with ``args`` and then setting ``state`` would have made."""

    what: Named
    args: tuple[Any, ...]
    state: Any = None


_MARK = object()
"""Where a list of items begins on the stack."""
_TEXTS = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8")
_VALUES = ("BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1", "LONG4", *_TEXTS)


def read_pickle(data: bytes, allowed: Callable[[Named], None]) -> Any:
    """What a pickle holds, in dicts, lists, tuples, numbers, texts, :class:`Named` and :class:`Made`.

    ``allowed`` raises for a name that has no business there. What is torn or of another kind raises a ``ValueError``.

    >>> import pickle, pathlib
    >>> read_pickle(pickle.dumps({"a": [1, (2.5, None)]}), lambda name: None)
    {'a': [1, (2.5, None)]}
    >>> read_pickle(pickle.dumps(pathlib.PurePosixPath("/x")), lambda name: None).args
    ('/', 'x')
    """
    return _Reader(allowed).read(data)


class _Reader:
    def __init__(self, allowed: Callable[[Named], None]) -> None:
        self.allowed = allowed
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def read(self, data: bytes) -> Any:
        push, pop = self.stack.append, self._pop
        does: dict[str, Callable[[Any], Any]] = {
            **dict.fromkeys(_VALUES, push),
            **dict.fromkeys(("PROTO", "FRAME"), lambda _: None),
            **dict.fromkeys(("BINPUT", "LONG_BINPUT"), self._remember),
            **dict.fromkeys(("BINGET", "LONG_BINGET"), self._get),
            **dict.fromkeys(("REDUCE", "NEWOBJ"), self._make),  # a call, a new object of a class
            "MARK": lambda _: push(_MARK),
            "POP": lambda _: pop(),
            "POP_MARK": lambda _: self._marked(),
            "DUP": lambda _: push(self._top()),
            "NONE": push,
            "NEWTRUE": lambda _: push(True),
            "NEWFALSE": lambda _: push(False),
            "EMPTY_DICT": lambda _: push({}),
            "EMPTY_LIST": lambda _: push([]),
            "EMPTY_TUPLE": lambda _: push(()),
            "TUPLE1": lambda _: push((pop(),)),
            "TUPLE2": lambda _: push((pop(), pop())[::-1]),
            "TUPLE3": lambda _: push((pop(), pop(), pop())[::-1]),
            "TUPLE": lambda _: push(tuple(self._marked())),
            "MEMOIZE": lambda _: self._remember(len(self.memo)),
            "APPEND": lambda _: self._extend([pop()]),
            "APPENDS": lambda _: self._extend(self._marked()),
            "SETITEM": lambda _: self._set([pop(), pop()][::-1]),
            "SETITEMS": lambda _: self._set(self._marked()),
            "GLOBAL": lambda names: self._name(*names.split(" ", 1)),
            "STACK_GLOBAL": lambda _: self._name(*(pop(), pop())[::-1]),
            "BUILD": lambda _: self._state(),
            "STOP": lambda _: None,
        }
        for instruction, argument, _ in pickletools.genops(data):
            if instruction.name not in does:
                raise ValueError(f"it holds the instruction {instruction.name}, which no checkpoint needs")
            does[instruction.name](argument)
        return pop()

    def _get(self, place: int) -> None:
        if place not in self.memo:
            raise ValueError("a value is used before it is there")
        self.stack.append(self.memo[place])

    def _top(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise ValueError("an instruction lacks its values")
        return self.stack[-1]

    def _pop(self) -> Any:
        self._top()
        return self.stack.pop()

    def _marked(self) -> list[Any]:
        for start in range(len(self.stack) - 1, -1, -1):
            if self.stack[start] is _MARK:
                items = self.stack[start + 1 :]
                del self.stack[start:]
                return items
        raise ValueError("a list has no beginning")

    def _remember(self, place: int) -> None:
        self.memo[place] = self._top()

    def _extend(self, items: list[Any]) -> None:
        into = self._top()
        if type(into) is not list:
            raise ValueError(f"items are put into a {type(into).__name__}")
        into.extend(items)

    def _set(self, items: list[Any]) -> None:
        into = self._top()
        if type(into) is not dict or len(items) % 2:
            raise ValueError(f"entries are put into a {type(into).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, int, Made):  # a tuple of tuples of tuples may take for ever to be found again
                raise ValueError(f"a {type(key).__name__} is the key of an entry")
            into[key] = value

    def _name(self, module: Any, name: Any) -> None:
        if type(name) is not str or type(module) is not str:
            raise ValueError("a name is no text")
        self.allowed(Named(module, name))
        self.stack.append(Named(module, name))

    def _make(self, _: Any) -> None:
        args, what = self._pop(), self._pop()
        if type(what) is not Named or type(args) is not tuple:
            raise ValueError(f"a {type(what).__name__} is called")
        ordered = what == ("collections", "OrderedDict") and not args
        self.stack.append({} if ordered else Made(what, args))

    def _state(self) -> None:
        state, made = self._pop(), self._top()
        if type(made) is not Made or made.state is not None:
            raise ValueError(f"a {type(made).__name__} is given a state")
        made.state = state
