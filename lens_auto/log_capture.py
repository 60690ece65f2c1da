"""The program's `logging` records as OpenTelemetry log records, without a line of code (`NEMO_LENS_LOGS_ENABLED=1`)."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from opentelemetry import trace

from lens_auto import guard, identity
from lens_auto.current_context import iteration_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from lens_auto.logging_bridge import OTelLogHandler

_installed = False


def install(provider: Callable[[], Any | None], closed: Callable[[], bool]) -> None:
    """Send what reaches the root logger, INFO and above, to OpenTelemetry as well.

    Not by a handler of the root logger: `logging.basicConfig()` does nothing where there is one, and the program would
    lose its own output.

    Args:
        provider: Gives the logger provider, at the first record; None: records go nowhere.
        closed: Whether it takes no more.
    """
    global _installed
    if _installed:
        return
    _installed = True
    import wrapt

    handler: list[OTelLogHandler] = []
    inside = threading.local()
    site = guard.site("logging.Logger.callHandlers")

    def call_handlers(wrapped: Callable[..., None], instance: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        record = args[0] if args else kwargs["record"]
        if getattr(inside, "busy", False) or not site.gate:
            return
        inside.busy = True  # what building the provider logs must not come back here
        try:
            if record.levelno < logging.INFO or closed() or not _reaches_root(instance):
                return
            if not handler:
                from lens_auto.logging_bridge import OTelLogHandler

                found = provider()
                if found is None:
                    return
                handler.append(OTelLogHandler(found, logging.INFO))
            handler[0].send(record)
        except Exception as error:
            site.fault(error)
        finally:
            inside.busy = False

    wrapt.wrap_function_wrapper(logging.Logger, "callHandlers", call_handlers)


def _reaches_root(found: logging.Logger | None) -> bool:
    while found is not None and found.parent is not None:
        if not found.propagate:
            return False
        found = found.parent
    return True


def iteration_processor() -> Any:
    """Gives a log record of a rank its rank, and the iteration's trace where no span is current."""
    from opentelemetry.sdk._logs import LogRecordProcessor

    from lens_auto.semconv import DL_RANK

    class IterationLogs(LogRecordProcessor):
        def on_emit(self, log_record: Any) -> None:
            rank, _ = identity.rank()
            if rank < 0:
                return
            record = log_record.log_record
            record.attributes[DL_RANK] = rank
            if not record.trace_id:
                found = iteration_ids()
                if found is not None:
                    record.trace_id, record.span_id = found
                    record.trace_flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)

        def shutdown(self) -> None:
            pass

        def force_flush(self, timeout_millis: int = 30000) -> bool:
            return True

    return IterationLogs()
