"""The primitives without telemetry: same signatures as in `helpers` and `state`, nothing recorded, nothing imported.

For a library that wants to run where it may not import OpenTelemetry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from contextlib import AbstractContextManager

F = TypeVar("F", bound="Callable[..., Any]")


NO_DECORATOR = "managed_span and span_cm are for `with`; the decorator is trace_fn: @trace_fn(group, name)"


class _Nothing:
    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None

    def __call__(self, *_: object) -> None:
        raise TypeError(NO_DECORATOR)


_NOTHING = _Nothing()


def managed_span(group: str, name: str, tracer: Any = None, **attributes: Any) -> AbstractContextManager[None]:
    """Yields None and runs the block."""
    return _NOTHING


def span_cm(
    name: str, tracer: Any = None, record_exception: bool = True, **attributes: Any
) -> AbstractContextManager[None]:
    """Yields None and runs the block."""
    return _NOTHING


def trace_fn(group: str, name: str, tracer: Any = None) -> Callable[[F], F]:
    """A decorator that returns the function itself."""
    return lambda function: function


def is_span_group_enabled(group: str) -> bool:
    """False: nothing is recorded."""
    return False


def safe_set_span_attributes(
    span: Any, attributes: Mapping[str, Any], redact_keys: Collection[str] = frozenset()
) -> None:
    """Sets nothing."""
