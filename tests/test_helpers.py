"""Spans around a user's own code, attributes, carriers, links, the logging bridge, and the package's top level."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Generator, Iterator
from typing import Any

import numpy as np
import pytest
from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, StatusCode, TraceFlags, Tracer

import lens_auto
from lens_auto import fallbacks, helpers, state
from lens_auto.distributed import create_linked_span
from lens_auto.helpers import (
    DEFAULT_REDACT_KEYS,
    managed_span,
    redact_value,
    safe_set_span_attributes,
    span_cm,
    trace_fn,
)
from lens_auto.propagation import extract_context, inject_context
from lens_auto.state import is_span_group_enabled, set_enabled_span_groups

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
REMOTE_TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C
REMOTE_SPAN_ID = 0xB7AD6B7169203331


class Recorded:
    """A tracer and the spans it has finished."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer: Tracer = provider.get_tracer("test")

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.spans]

    def only(self) -> ReadableSpan:
        [span] = self.spans
        return span


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture(autouse=True)
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    set_enabled_span_groups({"step"})
    monkeypatch.setattr(helpers, "_failure_logged", False)
    yield
    set_enabled_span_groups(frozenset())
    state.set_pp_trace_carrier(None)
    assert trace.get_current_span() is trace.INVALID_SPAN, "a test left its span current"


def current_name() -> str | None:
    return getattr(trace.get_current_span(), "name", None)


def is_error(span: ReadableSpan) -> bool:
    return span.status.status_code is StatusCode.ERROR


# --- state ------------------------------------------------------------------------------------------------------------


def test_groups_are_replaced_as_a_whole() -> None:
    assert is_span_group_enabled("step") is True
    assert is_span_group_enabled("job") is False
    set_enabled_span_groups(["job"])
    assert state.enabled_span_groups == {"job"}
    assert type(state.enabled_span_groups) is frozenset
    assert is_span_group_enabled("step") is False


def test_a_string_is_not_a_set_of_groups() -> None:
    with pytest.raises(TypeError, match="got the string 'step'"):
        set_enabled_span_groups("step")
    assert state.enabled_span_groups == {"step"}


def test_the_carrier_is_shared_by_all_threads() -> None:
    assert state.get_pp_trace_carrier() is None
    thread = threading.Thread(target=state.set_pp_trace_carrier, args=({"traceparent": TRACEPARENT},))
    thread.start()
    thread.join()
    assert state.get_pp_trace_carrier() == {"traceparent": TRACEPARENT}


# --- managed_span and span_cm -----------------------------------------------------------------------------------------


def test_managed_span_off(recorded: Recorded) -> None:
    ran = False
    with managed_span("job", "train.job", tracer=recorded.tracer, iteration=1) as span:
        ran = True
        assert span is None
        assert current_name() is None
    assert ran
    assert recorded.spans == []
    assert managed_span("job", "a") is managed_span("optimizer", "b"), "no object is made while a group is off"


def test_managed_span_off_passes_exceptions_on() -> None:
    error = RuntimeError("the user's")
    with pytest.raises(RuntimeError) as raised, managed_span("job", "train.job"):
        raise error
    assert raised.value is error


def test_managed_span_on(recorded: Recorded) -> None:
    with managed_span("step", "train.step", recorded.tracer, iteration=7, text="private", skipped=None) as span:
        assert span is trace.get_current_span()
        with managed_span("step", "inner", tracer=recorded.tracer):
            assert current_name() == "inner"
        assert current_name() == "train.step"
    inner, outer = recorded.spans
    assert (outer.name, dict(outer.attributes or {})) == ("train.step", {"iteration": 7, "text": "[REDACTED]"})
    assert inner.parent is not None
    assert inner.parent.span_id == outer.context.span_id
    assert outer.status.status_code is StatusCode.UNSET
    assert current_name() is None


def test_an_exception_is_recorded_and_raised(recorded: Recorded) -> None:
    error = ValueError("bad batch")
    with pytest.raises(ValueError) as raised, managed_span("step", "s", recorded.tracer):
        raise error
    assert raised.value is error
    span = recorded.only()
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "ValueError: bad batch")
    [event] = span.events
    assert event.name == "exception"
    attributes = dict(event.attributes or {})
    assert (attributes["exception.type"], attributes["exception.message"]) == ("ValueError", "bad batch")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), asyncio.CancelledError()])
def test_leaving_is_no_error(recorded: Recorded, error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, managed_span("step", "s", recorded.tracer):
        raise error
    assert raised.value is error
    assert (is_error(recorded.only()), len(recorded.only().events)) == (False, 0)


def test_an_exception_that_cannot_be_printed_is_still_the_users(recorded: Recorded) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    with pytest.raises(Unprintable), managed_span("step", "s", recorded.tracer):
        raise Unprintable
    assert recorded.names == ["s"]


class BrokenTracer:
    def start_span(self, *_: Any, **__: Any) -> Any:
        raise OSError("exporter is gone")


def test_our_own_failure_never_reaches_the_user(caplog: pytest.LogCaptureFixture) -> None:
    broken: Any = BrokenTracer()
    for _ in range(2):
        with managed_span("step", "s", broken) as span:
            assert span is None
        with span_cm("s", broken) as span_of_nothing:
            span_of_nothing.set_attribute("a", 1)
            assert span_of_nothing.is_recording() is False
        assert trace_fn("step", "s", broken)(lambda: 5)() == 5
        assert list(trace_fn("step", "s", broken)(plain_generator)()) == [1, 2]
        assert asyncio.run(collect(trace_fn("step", "s", broken)(async_generator)(2))) == [0, 1]
    assert [record.getMessage() for record in caplog.records] == [
        "span 's' could not be recorded; further failures are not shown"
    ]


def test_span_cm_is_always_on(recorded: Recorded) -> None:
    set_enabled_span_groups(frozenset())
    with span_cm("evaluate", recorded.tracer, dataset="mmlu", shards=(1, 2), model=object()) as span:
        assert span is trace.get_current_span()
    assert dict(recorded.only().attributes or {}) == {"dataset": "mmlu", "shards": (1, 2)}


@pytest.mark.parametrize(("record_exception", "events"), [(True, 1), (False, 0)])
def test_span_cm_and_exceptions(recorded: Recorded, record_exception: bool, events: int) -> None:
    with pytest.raises(KeyError), span_cm("s", recorded.tracer, record_exception=record_exception):
        raise KeyError("k")
    assert (is_error(recorded.only()), len(recorded.only().events)) == (True, events)


def test_the_global_provider_is_used_without_a_tracer() -> None:
    script = """
from opentelemetry import trace, metrics
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from lens_auto import get_meter, get_tracer, managed_span, set_enabled_span_groups, span_cm, trace_fn

decorated = trace_fn("step", "decorated")(lambda: None)  # before there is a provider
exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
metrics.set_meter_provider(MeterProvider([reader]))
set_enabled_span_groups({"step"})
with managed_span("step", "managed"):
    pass
with span_cm("always"):
    pass
decorated()
get_tracer().start_span("direct").end()
get_tracer("mine").start_span("named").end()
get_meter().create_counter("c").add(1)
print([(span.instrumentation_scope.name, span.name) for span in exporter.get_finished_spans()])
print([scope.scope.name for resource in reader.get_metrics_data().resource_metrics for scope in resource.scope_metrics])
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [
        "[('nemo.lens', 'managed'), ('nemo.lens', 'always'), ('nemo.lens', 'decorated'), ('nemo.lens', 'direct'), "
        "('mine', 'named')]",
        "['nemo.lens']",
    ]


# --- attributes -------------------------------------------------------------------------------------------------------


def test_default_redact_keys() -> None:
    assert (
        frozenset({"prompt", "input_text", "output_text", "text", "password", "token", "secret", "key"})
        == DEFAULT_REDACT_KEYS
    )


def test_redact_value() -> None:
    assert redact_value("prompt", "hello") == "[REDACTED]"
    assert redact_value("Password", "hello") == "[REDACTED]"
    assert redact_value("model", 7) == "7"
    assert redact_value("model", "m", {"model"}) == "[REDACTED]"
    assert redact_value("API", "m", {"API"}) == "[REDACTED]"
    assert redact_value("prompt", "hello", ()) == "hello"


def test_safe_set_span_attributes(recorded: Recorded) -> None:
    span = recorded.tracer.start_span("s")
    safe_set_span_attributes(
        span,
        {
            "int": 1,
            "float": 0.5,
            "bool": True,
            "str": "x",
            "list": [1, 2],
            "tuple": ("a", "b"),
            "empty": [],
            "none": None,
            "dict": {"a": 1},
            "object": object(),
            "list of lists": [[1]],
            "list with none": [1, None],
            "prompt": "private",
            "text": ["private", "too"],
            "token": 12,
        },
    )
    span.end()
    attributes = dict(recorded.only().attributes or {})
    assert attributes == {
        "int": 1,
        "float": 0.5,
        "bool": True,
        "str": "x",
        "list": (1, 2),
        "tuple": ("a", "b"),
        "empty": (),
        "prompt": "[REDACTED]",
        "text": ("[REDACTED]", "[REDACTED]"),
        "token": 12,
    }
    assert attributes["bool"] is True


def test_what_opentelemetry_cannot_hold_is_left_out_with_one_debug_line(
    recorded: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    attributes: dict[str, Any] = {
        "most": 2**63 - 1,
        "least": -(2**63),
        "seed": 2**63,
        "seeds": [1, 2**70],
        "none": None,
        "object": object(),
        "file": "caf\udce9",
        "names": ["\ud800", "b"],
    }
    with (
        caplog.at_level(logging.DEBUG, logger="lens_auto.helpers"),
        managed_span("step", "\ud800 s", recorded.tracer, **attributes),
    ):
        pass
    span = recorded.only()
    assert span.name == "? s"
    assert dict(span.attributes or {}) == {
        "most": 2**63 - 1,
        "least": -(2**63),
        "file": "caf?",
        "names": ("?", "b"),
    }
    assert [record.getMessage() for record in caplog.records] == [
        "lens-auto: attributes that cannot be held and are left out: seed (int), seeds (list), object (object)"
    ]


def test_an_exceptions_message_can_be_sent(recorded: Recorded) -> None:
    with pytest.raises(FileNotFoundError), managed_span("step", "s", recorded.tracer):
        os.stat(b"/nonexistent/caf\xe9")
    with pytest.raises(ValueError), managed_span("step", "s", recorded.tracer):
        raise ValueError("caf\udce9")
    for span in recorded.spans:
        (event,) = span.events
        json.dumps([span.status.description, dict(event.attributes or {})], ensure_ascii=False).encode()
    assert recorded.spans[1].status.description == "ValueError: caf?"
    assert dict(recorded.spans[1].events[0].attributes or {})["exception.message"] == "caf?"


def test_numpys_scalars_become_pythons_and_tensors_are_not_read(recorded: Recorded) -> None:
    class Tensor:
        def item(self) -> float:
            raise AssertionError("read")

        __float__ = __int__ = item

    values: dict[str, Any] = {"i": np.int64(3), "f": np.float32(0.5), "b": np.bool_(True), "d": np.float64(2.0)}
    with managed_span(
        "step", "s", recorded.tracer, **values, all=[np.int8(1), 2], time=np.datetime64("now"), t=Tensor()
    ):
        pass
    attributes = dict(recorded.only().attributes or {})
    assert attributes == {"i": 3, "f": 0.5, "b": True, "d": 2.0, "all": (1, 2)}
    assert [type(attributes[key]) for key in ("i", "f", "b", "d")] == [int, float, bool, float]


def test_nothing_is_set_on_a_span_that_does_not_record() -> None:
    class Untouchable(dict[str, Any]):
        def items(self) -> Any:
            raise AssertionError("looked at")

    safe_set_span_attributes(trace.INVALID_SPAN, Untouchable(a=1))


# --- trace_fn ---------------------------------------------------------------------------------------------------------


def plain_generator() -> Generator[int, None, str]:
    yield 1
    yield 2
    return "end"


async def async_generator(count: int) -> AsyncGenerator[int, None]:
    for number in range(count):
        await asyncio.sleep(0)
        yield number


async def collect(items: AsyncGenerator[Any, Any]) -> list[Any]:
    return [item async for item in items]


def test_a_function_keeps_its_identity(recorded: Recorded) -> None:
    @trace_fn("step", "f", recorded.tracer)
    def function(a: int, *, b: int = 2) -> int:
        """Adds."""
        return a + b

    assert (function.__name__, function.__doc__) == ("function", "Adds.")
    assert str(inspect.signature(function)) == "(a: 'int', *, b: 'int' = 2) -> 'int'"
    assert function(1, b=5) == 6
    assert recorded.names == ["f"]


def test_the_group_is_looked_at_on_each_call(recorded: Recorded) -> None:
    set_enabled_span_groups(frozenset())
    seen: list[str | None] = []

    @trace_fn("step", "f", recorded.tracer)
    def function() -> None:
        seen.append(current_name())

    function()
    set_enabled_span_groups({"step"})
    function()
    set_enabled_span_groups({"job"})
    function()
    assert seen == [None, "f", None]
    assert recorded.names == ["f"]


def test_methods_of_all_kinds(recorded: Recorded) -> None:
    class Model:
        scale = 3

        @trace_fn("step", "method", recorded.tracer)
        def method(self, x: int) -> int:
            return self.scale * x

        @classmethod
        @trace_fn("step", "class", recorded.tracer)
        def of_class(cls, x: int) -> int:
            return cls.scale + x

        @staticmethod
        @trace_fn("step", "static", recorded.tracer)
        def static(x: int) -> int:
            return -x

    assert (Model().method(2), Model.of_class(2), Model.static(2)) == (6, 5, -2)
    assert recorded.names == ["method", "class", "static"]


def test_an_exception_of_a_function(recorded: Recorded) -> None:
    error = ValueError("bad")

    @trace_fn("step", "f", recorded.tracer)
    def function() -> None:
        raise error

    with pytest.raises(ValueError) as raised:
        function()
    assert raised.value is error
    assert is_error(recorded.only())


@pytest.mark.parametrize(("group", "names"), [("step", ["c"]), ("job", [])])
def test_a_coroutine_function(recorded: Recorded, group: str, names: list[str]) -> None:
    seen: list[str | None] = []

    @trace_fn(group, "c", recorded.tracer)
    async def coroutine(x: int) -> int:
        await asyncio.sleep(0)
        seen.append(current_name())
        return x + 1

    assert inspect.iscoroutinefunction(coroutine)
    assert asyncio.run(coroutine(1)) == 2
    assert recorded.names == names
    assert seen == (names or [None])


def test_coroutines_side_by_side_keep_their_own_spans(recorded: Recorded) -> None:
    async def inner(number: int) -> None:
        with managed_span("step", f"inner {number}", recorded.tracer):
            await asyncio.sleep(0)

    async def outer(number: int) -> None:
        await trace_fn("step", f"outer {number}", recorded.tracer)(inner)(number)

    async def main() -> None:
        await asyncio.gather(*(outer(number) for number in range(5)))

    asyncio.run(main())
    by_name = {span.name: span for span in recorded.spans}
    assert len(by_name) == 10
    for number in range(5):
        parent = by_name[f"inner {number}"].parent
        assert parent is not None
        assert parent.span_id == by_name[f"outer {number}"].context.span_id


def test_a_cancelled_coroutine_ends_its_span_without_error(recorded: Recorded) -> None:
    @trace_fn("step", "c", recorded.tracer)
    async def forever() -> None:
        await asyncio.sleep(60)

    async def main() -> None:
        task = asyncio.ensure_future(forever())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert not is_error(recorded.only())


@trace_fn("step", "module.coroutine")
async def coroutine_of_this_module(value: int) -> int:
    return value


@trace_fn("step", "module.generator")
def generator_of_this_module(value: int) -> Generator[int, None, None]:
    yield value


@pytest.mark.parametrize("group", ["step", "job"])
def test_kinds_as_methods(recorded: Recorded, group: str) -> None:
    """In a class, of a class, of nothing, and put into a class later: bound as a function is, and of its kind."""

    class Worker:
        @trace_fn(group, "method", recorded.tracer)
        async def method(self, value: int) -> tuple[object, int]:
            return self, value

        @classmethod
        @trace_fn(group, "of class", recorded.tracer)
        async def of_class(cls, value: int) -> tuple[object, int]:
            return cls, value

        @staticmethod
        @trace_fn(group, "of nothing", recorded.tracer)
        async def of_nothing(value: int) -> int:
            return value

        @trace_fn(group, "items", recorded.tracer)
        def items(self) -> Generator[object, None, None]:
            yield self

        @trace_fn(group, "async items", recorded.tracer)
        async def async_items(self) -> AsyncGenerator[object, None]:
            yield self

        async def bare(self, value: int) -> tuple[object, int]:
            return self, value

    Worker.later = trace_fn(group, "later", recorded.tracer)(Worker.bare)  # type: ignore[attr-defined]
    worker: Any = Worker()

    async def use() -> None:
        assert await worker.method(1) == (worker, 1)
        assert await Worker.method(worker, 2) == (worker, 2)
        assert await worker.of_class(3) == (Worker, 3)
        assert await Worker.of_nothing(4) == 4
        assert await worker.later(5) == (worker, 5)
        assert list(worker.items()) == [worker]
        assert [item async for item in worker.async_items()] == [worker]

    asyncio.run(use())
    expected = ["method", "method", "of class", "of nothing", "later", "items", "async items"]
    assert recorded.names == (expected if group == "step" else [])
    for name in ("method", "of_class", "of_nothing", "later"):
        assert inspect.iscoroutinefunction(getattr(worker, name)), name
    assert inspect.isgeneratorfunction(worker.items)
    assert inspect.isasyncgenfunction(worker.async_items)


def test_a_group_that_is_off_leaves_nothing_between(recorded: Recorded) -> None:
    """What the caller awaits or loops over is the function's own; switched on, the next call has a span."""

    async def coroutine(value: int) -> int:
        return value

    async def items(value: int) -> AsyncGenerator[int, None]:
        yield value

    traced = trace_fn("job", "c", recorded.tracer)(coroutine)
    traced_items = trace_fn("job", "i", recorded.tracer)(items)
    running = traced(1)
    assert running.cr_code is coroutine.__code__
    running.close()
    assert traced_items(1).ag_code is items.__code__
    set_enabled_span_groups({"job"})
    assert asyncio.run(traced(2)) == 2
    assert recorded.names == ["c"]


@pytest.mark.parametrize("function", [coroutine_of_this_module, generator_of_this_module])
def test_kinds_are_described_copied_and_pickled_as_functions(function: Any) -> None:
    assert pickle.loads(pickle.dumps(function)) is function
    assert copy.copy(function) is function
    assert copy.deepcopy({"held": function})["held"] is function
    assert function.__name__ == function.__qualname__ == f"{function.__wrapped__.__name__}"
    assert function.__module__ == __name__
    assert str(inspect.signature(function)).startswith("(value: 'int')")
    assert inspect.isroutine(function)


@pytest.mark.parametrize(("group", "names"), [("step", ["g"]), ("job", [])])
def test_a_generator(recorded: Recorded, group: str, names: list[str]) -> None:
    seen: list[tuple[object, str | None]] = []

    @trace_fn(group, "g", recorded.tracer)
    def generator() -> Generator[int, str, str]:
        seen.append(((yield 1), current_name()))
        try:
            yield 2
        except LookupError as error:
            seen.append((type(error), current_name()))
        yield 3
        return "result"

    assert inspect.isgeneratorfunction(generator)
    running = generator()
    assert recorded.spans == []
    assert next(running) == 1
    assert current_name() is None, "the consumer's context is its own"
    assert running.send("sent") == 2
    assert running.throw(LookupError()) == 3
    with pytest.raises(StopIteration) as stop:
        next(running)
    assert stop.value.value == "result"
    assert seen == [("sent", names[0] if names else None), (LookupError, names[0] if names else None)]
    assert recorded.names == names
    assert not any(is_error(span) for span in recorded.spans)


def test_a_generator_inside_a_span_of_its_own_when_it_yields(recorded: Recorded) -> None:
    seen: list[str | None] = []

    @trace_fn("step", "g", recorded.tracer)
    def generator() -> Generator[None, None, None]:
        with span_cm("inside", recorded.tracer):
            yield
            seen.append(current_name())
        seen.append(current_name())
        yield

    for _ in generator():
        seen.append(current_name())
    assert seen == [None, "inside", "g", None]
    inside, outer = recorded.spans
    assert inside.parent is not None
    assert inside.parent.span_id == outer.context.span_id


def test_a_generator_that_fails_is_closed_or_is_dropped(recorded: Recorded) -> None:
    closed: list[str] = []

    @trace_fn("step", "g", recorded.tracer)
    def generator(fail: bool) -> Generator[int, None, None]:
        try:
            yield 1
            if fail:
                raise ValueError("bad")
            yield 2
        finally:
            closed.append("closed")

    with pytest.raises(ValueError, match="bad"):
        list(generator(True))
    assert [is_error(span) for span in recorded.spans] == [True]

    running = generator(False)
    next(running)
    running.close()
    dropped = generator(False)
    next(dropped)
    del dropped
    gc.collect()
    assert closed == ["closed"] * 3
    assert [is_error(span) for span in recorded.spans] == [True, False, False]


@pytest.mark.parametrize(("group", "names"), [("step", ["a"]), ("job", [])])
def test_an_async_generator(recorded: Recorded, group: str, names: list[str]) -> None:
    seen: list[tuple[object, str | None]] = []

    @trace_fn(group, "a", recorded.tracer)
    async def generator() -> AsyncGenerator[int, str]:
        await asyncio.sleep(0)
        seen.append(((yield 1), current_name()))
        try:
            yield 2
        except LookupError as error:
            await asyncio.sleep(0)
            seen.append((type(error), current_name()))
        yield 3

    assert inspect.isasyncgenfunction(generator)

    async def main() -> None:
        running = generator()
        assert await running.__anext__() == 1
        assert current_name() is None
        assert await running.asend("sent") == 2
        assert await running.athrow(LookupError()) == 3
        with pytest.raises(StopAsyncIteration):
            await running.__anext__()

    asyncio.run(main())
    assert seen == [("sent", names[0] if names else None), (LookupError, names[0] if names else None)]
    assert recorded.names == names
    assert not any(is_error(span) for span in recorded.spans)


def test_an_async_generator_that_fails_or_is_closed(recorded: Recorded) -> None:
    closed: list[str] = []

    @trace_fn("step", "a", recorded.tracer)
    async def generator(fail: bool) -> AsyncGenerator[int, None]:
        try:
            yield 1
            if fail:
                raise ValueError("bad")
            yield 2
        finally:
            await asyncio.sleep(0)
            closed.append("closed")

    async def main() -> None:
        with pytest.raises(ValueError, match="bad"):
            await collect(generator(True))
        running = generator(False)
        await running.__anext__()
        await running.aclose()
        assert closed == ["closed", "closed"], "not left to the end of the loop"

    asyncio.run(main())
    assert [is_error(span) for span in recorded.spans] == [True, False]


# --- carriers and links -----------------------------------------------------------------------------------------------


def test_inject_and_extract(recorded: Recorded) -> None:
    carrier: dict[str, str] = {}
    inject_context(carrier)
    assert carrier == {}
    with span_cm("s", recorded.tracer) as span:
        token = otel_context.attach(baggage.set_baggage("customer", "42"))
        inject_context(carrier)
        otel_context.detach(token)
    context = span.get_span_context()
    assert carrier == {
        "traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}",
        "baggage": "customer=42",
    }
    extracted = extract_context(carrier)
    remote = trace.get_current_span(extracted).get_span_context()
    assert (remote.trace_id, remote.span_id, remote.is_remote) == (context.trace_id, context.span_id, True)
    assert baggage.get_all(extracted) == {"customer": "42"}


@pytest.mark.parametrize(
    "carrier", [None, {}, {"traceparent": "nonsense"}, {"traceparent": 7}, {"traceparent": None}, 5, "text", [1]]
)
def test_an_invalid_carrier_gives_an_empty_context(carrier: Any) -> None:
    token = otel_context.attach(baggage.set_baggage("mine", "not theirs"))
    try:
        assert dict(extract_context(carrier)) == {}
    finally:
        otel_context.detach(token)


def link_of(span: ReadableSpan) -> tuple[int, int]:
    [link] = span.links
    return link.context.trace_id, link.context.span_id


@pytest.mark.parametrize(
    "arguments",
    [
        {"remote_carrier": {"traceparent": TRACEPARENT}},
        {"remote_context": extract_context({"traceparent": TRACEPARENT})},
        {"remote_context": SpanContext(REMOTE_TRACE_ID, REMOTE_SPAN_ID, True, TraceFlags(1))},
        {"remote_context": otel_context.Context(), "remote_carrier": {"traceparent": TRACEPARENT}},
    ],
)
def test_a_linked_span(recorded: Recorded, arguments: dict[str, Any]) -> None:
    span = create_linked_span(recorded.tracer, "recv", microbatch_id=4, secret="s", **arguments)
    assert recorded.spans == [], "the caller ends it"
    span.end()
    assert link_of(recorded.only()) == (REMOTE_TRACE_ID, REMOTE_SPAN_ID)
    assert dict(recorded.only().attributes or {}) == {"microbatch_id": 4, "secret": "[REDACTED]"}
    assert recorded.only().parent is None
    assert recorded.only().context.trace_id != REMOTE_TRACE_ID


def test_the_remote_context_is_looked_at_before_the_carrier(recorded: Recorded) -> None:
    context = SpanContext(1, 2, True, TraceFlags(1))
    carrier = {"traceparent": TRACEPARENT}
    create_linked_span(recorded.tracer, "recv", remote_context=context, remote_carrier=carrier).end()
    assert link_of(recorded.only()) == (1, 2)


@pytest.mark.parametrize("arguments", [{}, {"remote_carrier": {}}, {"remote_carrier": {"traceparent": "x"}}])
def test_without_a_valid_remote_there_is_no_link(recorded: Recorded, arguments: dict[str, Any]) -> None:
    create_linked_span(recorded.tracer, "recv", **arguments).end()
    assert list(recorded.only().links) == []


# --- the logging bridge -----------------------------------------------------------------------------------------------


def test_the_bridge_does_nothing_without_a_provider() -> None:
    script = """
import logging, sys
from lens_auto.logging_bridge import setup_logging_bridge
setup_logging_bridge()
print(logging.getLogger().handlers, "opentelemetry.sdk" in sys.modules)
"""
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{script}"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[] False"


def test_the_bridge(recorded: Recorded) -> None:
    script = """
import json, logging, sys
from opentelemetry import trace
from opentelemetry._logs import set_logger_provider
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider
from lens_auto.logging_bridge import setup_logging_bridge

exporter = InMemoryLogRecordExporter()
provider = LoggerProvider()
provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
set_logger_provider(provider)
setup_logging_bridge("app", logging.DEBUG)
setup_logging_bridge("app", logging.INFO)
logger = logging.getLogger("app")
logger.setLevel(logging.DEBUG)
logger.debug("too quiet")
with TracerProvider().get_tracer("t").start_as_current_span("s") as span:
    logger.getChild("sub").info("step %d", 3, extra={"loss": 0.5, "model": object()})
try:
    1 / 0
except ZeroDivisionError:
    logger.exception("failed")
logger.warning("careful")
logging.getLogger("other").warning("not bridged")
setup_logging_bridge()
logging.getLogger("opentelemetry.sdk").warning("would feed itself")
for data in exporter.get_finished_logs():
    record, attributes = data.log_record, dict(data.log_record.attributes)
    stack = attributes.pop("exception.stacktrace", "").splitlines()[-1:]
    attributes.pop("code.file.path"), attributes.pop("code.line.number")
    print(json.dumps([data.instrumentation_scope.name, record.body, record.severity_text, record.severity_number.value,
                      record.span_id == span.get_span_context().span_id, attributes, stack]))
print(len(logger.handlers))
"""
    result = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True)
    *records, handlers = [json.loads(line) for line in result.stdout.splitlines()]
    function = {"code.function.name": "<module>"}
    assert records == [
        ["app.sub", "step 3", "INFO", 9, True, {"loss": 0.5, **function}, []],
        [
            "app",
            "failed",
            "ERROR",
            17,
            False,
            {**function, "exception.type": "ZeroDivisionError", "exception.message": "division by zero"},
            ["ZeroDivisionError: division by zero"],
        ],
        ["app", "careful", "WARN", 13, False, function, []],
    ]
    assert handlers == 1


# --- fallbacks and the top level --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["managed_span", "span_cm", "trace_fn", "safe_set_span_attributes"])
def test_fallbacks_have_the_same_parameters(name: str) -> None:
    real = inspect.signature(getattr(helpers, name)).parameters.values()
    fallback = inspect.signature(getattr(fallbacks, name)).parameters.values()
    assert [(p.name, p.kind) for p in real] == [(p.name, p.kind) for p in fallback]
    assert [p.default is p.empty for p in real] == [p.default is p.empty for p in fallback]


def test_fallbacks_do_nothing() -> None:
    def function() -> None:
        """The user's."""

    assert fallbacks.trace_fn("step", "f")(function) is function
    assert fallbacks.is_span_group_enabled("step") is False
    with fallbacks.managed_span("step", "s", None, a=1) as managed, fallbacks.span_cm("s", None, True, a=1) as always:
        assert (managed, always) == (None, None)
    fallbacks.safe_set_span_attributes(None, {"a": 1}, {"a"})
    with pytest.raises(KeyError), fallbacks.span_cm("s"):
        raise KeyError


def test_every_name_of_the_top_level_is_what_its_module_holds() -> None:
    from lens_auto import config, distributed, propagation, strategies
    from lens_auto import groups as groups_module

    expected = {
        "NemoLensConfig": config.NemoLensConfig,
        "SpanGroup": groups_module.SpanGroup,
        "DEFAULT_REDACT_KEYS": helpers.DEFAULT_REDACT_KEYS,
        "get_meter": helpers.get_meter,
        "get_tracer": helpers.get_tracer,
        "managed_span": helpers.managed_span,
        "redact_value": helpers.redact_value,
        "safe_set_span_attributes": helpers.safe_set_span_attributes,
        "span_cm": helpers.span_cm,
        "trace_fn": helpers.trace_fn,
        "extract_context": propagation.extract_context,
        "inject_context": propagation.inject_context,
        "create_linked_span": distributed.create_linked_span,
        "is_span_group_enabled": state.is_span_group_enabled,
        "set_enabled_span_groups": state.set_enabled_span_groups,
        "ExportStrategy": strategies.ExportStrategy,
        "register_export_strategy": strategies.register_export_strategy,
        "registered_strategies": strategies.registered_strategies,
        "unregister_export_strategy": strategies.unregister_export_strategy,
    }
    for name, value in expected.items():
        assert getattr(lens_auto, name) is value, name
        assert name in dir(lens_auto)
    assert lens_auto.__version__ == "0.1.0"


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match=r"^module 'lens_auto' has no attribute 'nonsense'$"):
        _ = lens_auto.nonsense


def test_importing_the_package_imports_nothing_else() -> None:
    script = f"""
import sys
sys.path[:0] = {sys.path!r}
import typing
before = set(sys.modules)
import lens_auto
print(sorted(set(sys.modules) - before - {{"__future__"}}))
lens_auto.state.is_span_group_enabled("step")
print(sorted(set(sys.modules) - before - {{"__future__", "threading", "_weakrefset", "_thread", "itertools"}}))
"""
    result = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["['lens_auto']", "['lens_auto', 'lens_auto.state']"]


def test_no_module_of_the_api_imports_torch_or_the_sdk() -> None:
    modules = [
        *("config", "distributed", "fallbacks", "groups", "helpers", "logging_bridge", "propagation", "resources"),
        *("sampling", "semconv", "settings", "state", "strategies"),
    ]
    script = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module("lens_auto." + name)
print([name for name in sys.modules if name == "torch" or name.startswith("opentelemetry.sdk")])
"""
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{script}"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"


# --- misuse -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "made",
    [
        lambda: managed_span("step", "s"),
        lambda: managed_span("off", "s"),
        lambda: span_cm("s"),
        lambda: fallbacks.managed_span("step", "s"),
        lambda: fallbacks.span_cm("s"),
    ],
)
def test_a_context_manager_as_a_decorator_names_the_one_that_is(made: Any) -> None:
    with pytest.raises(TypeError, match=r"the decorator is trace_fn: @trace_fn\(group, name\)"):
        made()(lambda: None)


def test_trace_fn_above_classmethod_and_staticmethod(recorded: Recorded) -> None:
    class Model:
        @trace_fn("step", "class", recorded.tracer)
        @classmethod
        def build(cls, size: int) -> tuple[type, int]:
            return cls, size

        @trace_fn("step", "static", recorded.tracer)
        @staticmethod
        def double(size: int) -> int:
            return 2 * size

        @trace_fn("step", "async", recorded.tracer)
        @classmethod
        async def load(cls) -> type:
            return cls

    class Larger(Model):
        pass

    assert Larger.build(3) == (Larger, 3)
    assert Larger().double(3) == Model.double(3) == 6
    assert asyncio.run(Larger.load()) is Larger
    assert recorded.names == ["class", "static", "static", "async"]
    set_enabled_span_groups(frozenset())
    assert (Larger.build(3), Model.double(3), asyncio.run(Model().load())) == ((Larger, 3), 6, Model)
    assert len(recorded.names) == 4


def test_trace_fn_above_property_is_refused_where_it_is_written() -> None:
    with pytest.raises(TypeError, match=r"^trace_fn decorates functions, got <property .*below @property"):

        class _Model:
            @trace_fn("step", "s")
            @property
            def size(self) -> int:
                return 1
