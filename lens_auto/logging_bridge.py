"""Python's `logging` as OpenTelemetry log records, which carry the ids of the span that is current."""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any

from lens_auto.semconv import (
    CODE_FILE_PATH,
    CODE_FUNCTION_NAME,
    CODE_LINE_NUMBER,
    EXCEPTION_MESSAGE,
    EXCEPTION_STACKTRACE,
    EXCEPTION_TYPE,
)
from lens_auto.values import encodable, held

# What every LogRecord has; anything else on one came from `extra=`.
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def setup_logging_bridge(logger_name: str = "", level: int = logging.INFO) -> None:
    """Sends what a logger emits to OpenTelemetry as well, when an SDK logger provider is set; else does nothing.

    A second call for the same logger adjusts the level only. The logger's own level is not touched: a root logger left
    at WARNING passes no INFO on to any handler.

    Args:
        logger_name: The logger; empty: the root logger.
        level: The least severe level that is sent.
    """
    provider = _sdk_logger_provider()
    if provider is None:
        return
    logger = logging.getLogger(logger_name)
    for handler in logger.handlers:
        if isinstance(handler, OTelLogHandler):
            handler.setLevel(level)
            return
    logger.addHandler(OTelLogHandler(provider, level))


def _sdk_logger_provider() -> Any | None:
    # An SDK provider cannot exist while the SDK is not imported, so the question itself imports nothing of it.
    sdk = sys.modules.get("opentelemetry.sdk._logs")
    if sdk is None:
        return None
    from opentelemetry._logs import get_logger_provider

    provider = get_logger_provider()
    return provider if isinstance(provider, sdk.LoggerProvider) else None


class OTelLogHandler(logging.Handler):
    """Turns a LogRecord into an OpenTelemetry one. The SDK's own such handler is deprecated and about to go."""

    def __init__(self, provider: Any, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self._provider = provider

    def emit(self, record: logging.LogRecord) -> None:
        """Emits one record; failures go where `logging` sends them (`logging.raiseExceptions`)."""
        try:
            self.send(record)
        except Exception:
            self.handleError(record)

    def send(self, record: logging.LogRecord) -> None:
        """Emits one record, or raises."""
        name = str(record.name)
        if name == "opentelemetry" or name.startswith("opentelemetry."):
            return  # an exporter that reports its own failure would feed itself
        if sys.is_finalizing():
            return  # nothing can be imported or sent any more
        self._provider.get_logger(encodable(name)).emit(_translate(record))

    def flush(self) -> None:
        """Nothing is held here: the provider's processors hold it, and shutdown flushes them."""


def _translate(record: logging.LogRecord) -> Any:
    from opentelemetry._logs import LogRecord, SeverityNumber
    from opentelemetry.context import get_current

    time_ns = int(record.created * 1e9)
    return LogRecord(
        timestamp=time_ns,
        observed_timestamp=time_ns,
        context=get_current(),
        severity_text="WARN" if record.levelname == "WARNING" else encodable(str(record.levelname)),
        # DEBUG, INFO, WARNING, ERROR, CRITICAL are 10 to 50; OpenTelemetry's five begin at 5, 9, 13, 17, 21.
        severity_number=SeverityNumber(4 * min(record.levelno // 10, 5) + 1 if record.levelno > 0 else 0),
        body=encodable(_message(record)),
        attributes=_attributes(record),
    )


def _message(record: logging.LogRecord) -> str:
    """The message; as it was written where its arguments do not fit: `logging` itself tells the program of that."""
    try:
        return record.getMessage()
    except Exception:
        return _text(record.msg)


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception as error:
        return f"<{type(value).__name__} whose text fails with {type(error).__name__}>"


def _attributes(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[Any, Any] = vars(record)  # what `extra` names there need not be text
    attributes: dict[str, Any] = {
        encodable(key): kept
        for key, value in fields.items()
        if isinstance(key, str) and key not in _STANDARD_FIELDS and (kept := held(value)) is not None
    }
    # A record that a program made by itself has not all of these.
    for key, value in (
        (CODE_FILE_PATH, record.pathname),
        (CODE_FUNCTION_NAME, record.funcName),
        (CODE_LINE_NUMBER, record.lineno),
    ):
        if value and (kept := held(value)) is not None:
            attributes[key] = kept
    if record.exc_info and record.exc_info[0] is not None:
        kind, error, trace = record.exc_info
        attributes[EXCEPTION_TYPE] = kind.__name__
        attributes[EXCEPTION_MESSAGE] = encodable(_text(error))
        attributes[EXCEPTION_STACKTRACE] = encodable("".join(traceback.format_exception(kind, error, trace)))
    return attributes
