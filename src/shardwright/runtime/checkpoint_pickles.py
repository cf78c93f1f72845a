"""The instructions of a pickle, read into inert values: nothing a pickle names is fetched, called or changed.

PyTorch writes a checkpoint's metadata as a pickle, and a pickle is a program: it calls what it names and sets attributes of
what it has, classes of this process among them. Here a name stays a :class:`Named`, and what a pickle makes of one a
:class:`Made` that says of what, with which arguments and which state; turning these into objects is for whoever knows what
they ought to be. Only what ``pickle.dump`` has written for plain data since protocol 2 is understood.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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


class _Mark:
    """Where a list of items begins on the stack."""


_MARK = _Mark()
_NUMBERS = {0x4A: "<i", 0x4B: "<B", 0x4D: "<H", 0x47: ">d"}
_TEXTS = {0x8C: "<B", 0x58: "<I", 0x8D: "<Q"}
_BYTES = {0x43: "<B", 0x42: "<I", 0x8E: "<Q"}
_LONGS = {0x8A: "<B", 0x8B: "<i"}
_PUTS, _GETS = {0x71: "<B", 0x72: "<I"}, {0x68: "<B", 0x6A: "<I"}
_STOP = 0x2E


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _long(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def read_pickle(data: bytes, allowed: Callable[[Named], None]) -> Any:
    """What a pickle holds, in dicts, lists, tuples, numbers, texts, :class:`Named` and :class:`Made`.

    ``allowed`` raises for a name that has no business there. What is torn or of another kind raises a ``ValueError``.

    >>> import pickle, pathlib
    >>> read_pickle(pickle.dumps({"a": [1, (2.5, None)]}), lambda name: None)
    {'a': [1, (2.5, None)]}
    >>> read_pickle(pickle.dumps(pathlib.PurePosixPath("/x")), lambda name: None).args
    ('/', 'x')
    """
    return _Reader(data, allowed).read()


class _Reader:
    def __init__(self, data: bytes, allowed: Callable[[Named], None]) -> None:
        self.data, self.at, self.allowed = data, 0, allowed
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def read(self) -> Any:
        push, pop = self.stack.append, self._pop
        does: dict[int, Callable[[], Any]] = {
            0x28: lambda: push(_MARK),
            0x30: pop,
            0x31: self._marked,
            0x32: lambda: push(self._top()),
            0x4E: lambda: push(None),
            0x88: lambda: push(True),
            0x89: lambda: push(False),
            0x7D: lambda: push({}),
            0x5D: lambda: push([]),
            0x29: lambda: push(()),
            0x85: lambda: push((pop(),)),
            0x86: lambda: push((pop(), pop())[::-1]),
            0x87: lambda: push((pop(), pop(), pop())[::-1]),
            0x74: lambda: push(tuple(self._marked())),
            0x94: lambda: self._remember(len(self.memo)),
            0x61: lambda: self._extend([pop()]),
            0x65: lambda: self._extend(self._marked()),
            0x73: lambda: self._set([pop(), pop()][::-1]),
            0x75: lambda: self._set(self._marked()),
            0x63: lambda: self._name(self._line(), self._line()),
            0x93: self._named,
            0x52: self._make,  # a call
            0x81: self._make,  # a new object of a class
            0x62: self._state,
            0x80: lambda: self._bytes(1),  # the protocol
            0x95: lambda: self._bytes(8),  # the length of what follows
        }
        for code, form in _NUMBERS.items():
            does[code] = partial(self._push_number, struct.Struct(form))
        for counted, made in ((_TEXTS, _text), (_BYTES, bytes), (_LONGS, _long)):
            for code, form in counted.items():
                does[code] = partial(self._push_counted, struct.Struct(form), made)
        for code, form in _PUTS.items():
            does[code] = partial(self._put, struct.Struct(form))
        for code, form in _GETS.items():
            does[code] = partial(self._get, struct.Struct(form))
        while (code := self._bytes(1)[0]) != _STOP:
            if code not in does:
                raise ValueError(f"it holds the instruction {code:#x}, which no checkpoint needs")
            does[code]()
        return pop()

    def _bytes(self, count: int) -> bytes:
        found = self.data[self.at : self.at + count]
        if count < 0 or len(found) < count:
            raise ValueError("it ends early")
        self.at += count
        return found

    def _number(self, form: struct.Struct) -> Any:
        return form.unpack(self._bytes(form.size))[0]

    def _push_number(self, form: struct.Struct) -> None:
        self.stack.append(self._number(form))

    def _push_counted(self, form: struct.Struct, made: Callable[[bytes], Any]) -> None:
        self.stack.append(made(self._bytes(self._number(form))))

    def _put(self, form: struct.Struct) -> None:
        self._remember(self._number(form))

    def _get(self, form: struct.Struct) -> None:
        place = self._number(form)
        if place not in self.memo:
            raise ValueError("a value is used before it is there")
        self.stack.append(self.memo[place])

    def _line(self) -> str:
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise ValueError("it ends early")
        found, self.at = self.data[self.at : end], end + 1
        return found.decode()

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

    def _named(self) -> None:
        name, module = self._pop(), self._pop()
        if type(name) is not str or type(module) is not str:
            raise ValueError("a name is no text")
        self._name(module, name)

    def _name(self, module: str, name: str) -> None:
        self.allowed(Named(module, name))
        self.stack.append(Named(module, name))

    def _make(self) -> None:
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
