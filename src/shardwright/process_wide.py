"""The one owner of what is replaced in the whole process while a model is built or traced: functions of torch and Python.

One thread at a time replaces anything (others that want to, wait their turn), a replacement holds for that thread alone
(others call what was there before), and it is undone however the body ends. Settings that torch keeps once for all threads
(the default dtype, the number of threads, the generator) are changed within :func:`in_turn` too.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import getattr_static
from typing import Any

_LOCK = threading.RLock()


@contextmanager
def in_turn() -> Iterator[None]:
    """One thread at a time is in here; a thread that is in may come in again."""
    with _LOCK:
        yield


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """While this lasts, ``owner.name`` is, for this thread, what ``make`` makes of it.

    Of a class method ``make`` gets, and gives, a function whose first argument is the class.

    >>> import math
    >>> with replaced(math, "sqrt", lambda real: lambda x: -real(x)):
    ...     math.sqrt(4)
    -2.0
    >>> math.sqrt(4)
    2.0
    """
    with _LOCK:
        before = getattr_static(owner, name)
        bound_to_class = isinstance(before, classmethod)
        real: Callable[..., Any] = _with_class(before) if bound_to_class else getattr(owner, name)
        instead, here = make(real), threading.get_ident()

        @functools.wraps(real)
        def either(*args: Any, **kwargs: Any) -> Any:
            return (instead if threading.get_ident() == here else real)(*args, **kwargs)

        own = name in vars(owner)
        setattr(owner, name, classmethod(either) if bound_to_class else either)
        try:
            yield
        finally:
            if own:
                setattr(owner, name, before)
            else:
                delattr(owner, name)  # it was inherited


def _with_class(method: Any) -> Callable[..., Any]:
    def call(cls: type, *args: Any, **kwargs: Any) -> Any:
        return method.__get__(None, cls)(*args, **kwargs)

    return call
