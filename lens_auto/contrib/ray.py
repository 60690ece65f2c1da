"""Trace context from a Ray driver to tasks and actors, in a keyword argument of the call.

Ray itself is not imported.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, TypeVar, cast

from opentelemetry import context as otel_context

from lens_auto.helpers import get_tracer
from lens_auto.propagation import extract_context, inject_context

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

F = TypeVar("F", bound="Callable[..., Any]")

CARRIER_ARGUMENT = "_otel_carrier"


def inject_ray_context() -> dict[str, str]:
    """A carrier with the current trace context and baggage, to pass as `_otel_carrier`."""
    carrier: dict[str, str] = {}
    inject_context(carrier)
    return carrier


def extract_ray_context(carrier: Mapping[str, str] | None = None) -> Context:
    """The context that a carrier holds; without a carrier the current one."""
    return otel_context.get_current() if carrier is None else extract_context(carrier)


def traced_remote_call(method: F, tracer: Tracer | None = None) -> F:
    """Decorates a task or an actor's method with a span, a child of the caller's.

    The span is named by the method's qualified name. The caller's context comes in the keyword `_otel_carrier`, which
    the method never sees; without it the span belongs to whatever is current in the worker. Coroutine functions and
    generators stay what they are.

    Args:
        method: What Ray calls. Put `@ray.remote` outside of this.
        tracer: Who makes the span; None: `get_tracer()`, looked up in the worker at each call.
    """
    name = method.__qualname__

    def span(carrier: Mapping[str, str] | None) -> Any:
        made_by = tracer if tracer is not None else get_tracer()
        return made_by.start_as_current_span(name, context=extract_ray_context(carrier))

    wrapper: Callable[..., Any]
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def wrapper(*args: Any, _otel_carrier: Mapping[str, str] | None = None, **kwargs: Any) -> Any:
            with span(_otel_carrier):
                return await method(*args, **kwargs)

    elif inspect.isasyncgenfunction(method):

        @functools.wraps(method)
        async def wrapper(*args: Any, _otel_carrier: Mapping[str, str] | None = None, **kwargs: Any) -> Any:
            with span(_otel_carrier):
                async for item in method(*args, **kwargs):
                    yield item

    elif inspect.isgeneratorfunction(method):

        @functools.wraps(method)
        def wrapper(*args: Any, _otel_carrier: Mapping[str, str] | None = None, **kwargs: Any) -> Any:
            with span(_otel_carrier):
                yield from method(*args, **kwargs)

    else:

        @functools.wraps(method)
        def wrapper(*args: Any, _otel_carrier: Mapping[str, str] | None = None, **kwargs: Any) -> Any:
            with span(_otel_carrier):
                return method(*args, **kwargs)

    # Ray checks a call against a signature, and takes that of an actor's method from what `__wrapped__` leads to, where
    # there is no such keyword.
    wrapper.__signature__ = _with_carrier(inspect.signature(method))  # type: ignore[attr-defined]
    del wrapper.__wrapped__  # type: ignore[attr-defined]
    return cast("F", wrapper)


def _with_carrier(signature: inspect.Signature) -> inspect.Signature:
    carrier = inspect.Parameter(CARRIER_ARGUMENT, inspect.Parameter.KEYWORD_ONLY, default=None)
    parameters = list(signature.parameters.values())
    last_is_kwargs = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    at = len(parameters) - 1 if last_is_kwargs else len(parameters)
    return signature.replace(parameters=[*parameters[:at], carrier, *parameters[at:]])


def ray_dispatch_with_context(
    remote_fn: Any, *args: Any, _carrier: Mapping[str, str] | None = None, **kwargs: Any
) -> Any:
    """Calls `remote_fn.remote(...)` with a carrier in `_otel_carrier`.

    Args:
        remote_fn: A remote function, or a method of an actor; what it runs is decorated with `traced_remote_call`.
        *args: Its arguments.
        _carrier: The carrier; None: the current context's.
        **kwargs: Its keyword arguments.

    Returns:
        What `remote` returns.
    """
    carrier = inject_ray_context() if _carrier is None else dict(_carrier)
    return remote_fn.remote(*args, **{CARRIER_ARGUMENT: carrier}, **kwargs)
