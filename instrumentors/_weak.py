"""Facts about objects of the program that last as long as they do."""

from __future__ import annotations

import weakref
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
        key, known = id(thing), self._found

        def gone(reference: weakref.ref[Any]) -> None:
            if known.get(key, (None,))[0] is reference:
                del known[key]

        known[key] = (weakref.ref(thing, gone), value)

    def __len__(self) -> int:
        return len(self._found)
