"""A coroutine or generator function under `trace_fn` that costs nothing more for each item while its group is off.

A Python function that stays of its kind around another is a second coroutine or generator: twice the price of the
first, for asynchronous generators much more. wrapt's wrapper decides in C and hands out the function's own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, cast

import wrapt

from lens_auto import state


class TracedFunction(wrapt.FunctionWrapper[Any, Any]):
    """The function while its group is off, the traced one while it is on; of the same kind, as `inspect` sees it.

    Args:
        function: as it was decorated.
        traced: of the same kind, with a span.
        group: decides at each call.
    """

    def __init__(self, function: Callable[..., Any], traced: Callable[..., Any], group: str) -> None:
        super().__init__(
            function,
            lambda wrapped, instance, args, kwargs: traced(*args, **kwargs),
            enabled=cast("bool", state.gate(group)),  # its truth is asked for at each call
        )
        self._self_traced = traced

    # As a method the traced function stands for itself: wrapt would make a bound wrapper at every call.

    def __set_name__(self, owner: type, name: str) -> None:
        setattr(owner, name, self._self_traced)

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        return self if instance is None else MethodType(self._self_traced, instance)

    # wrapt's own wrappers refuse to be copied and pickled; a function is copied as itself and pickled by its name.

    def __reduce_ex__(self, protocol: Any) -> str:
        return str(self.__wrapped__.__qualname__)

    def __copy__(self) -> TracedFunction:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedFunction:
        return self
