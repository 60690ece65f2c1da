"""Facts about objects of the program that last as long as they do."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ByIdentity(Generic[T]):
    """A weak dict by identity: `__eq__` and `__hash__` of an object are the program's code, which is not called."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Any], T]] = {}

    def get(self, thing: Any) -> T | None:
        """What is known of an object; None: nothing."""
        found = self._found.get(id(thing))
        return found[1] if found is not None and found[0]() is thing else None

    def __setitem__(self, thing: Any, value: T) -> None:
        key = id(thing)
        forget = partial(self._found.pop, key)  # its second argument, the default, is the dead reference
        self._found[key] = (weakref.ref(thing, forget), value)

    def __len__(self) -> int:
        return len(self._found)
