"""Spans as the bytes of an OTLP `ExportTraceServiceRequest`, without protobuf messages in between.

The same bytes that the SDK's encoder gives, at a fraction of its cost: most of a span repeats from one to the next, so
whole attributes are remembered in their encoded form. Field numbers are those of `trace.proto` and `common.proto` in
https://github.com/open-telemetry/opentelemetry-proto/tree/main/opentelemetry/proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any

from lens_auto import __version__, semconv
from lens_auto.export.spans import Link, Span

_KNOWN = 20_000  # encoded attributes remembered, a few hundred bytes each
_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1
_HAS_IS_REMOTE, _IS_REMOTE = 0x100, 0x200  # SpanFlags
_STATUS_ERROR = 2
_double = struct.Struct("<d").pack
_times = struct.Struct("<BQBQ").pack


def varint(value: int) -> bytes:
    """An unsigned integer as protobuf writes it."""
    if value < _TABLE:
        return _VARINTS[value]
    if value < 1 << 21:
        return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14))
    if value < 1 << 28:
        return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14 & 0x7F | 0x80, value >> 21))
    return _long_varint(value)


def _long_varint(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


_TABLE = 1 << 14  # two bytes hold no more
_VARINTS = [_long_varint(value) for value in range(_TABLE)]


def _field(number: int, content: bytes) -> bytes:
    """A field of bytes, a string or a message."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def _any_value(value: Any) -> bytes:
    kind = type(value)
    if kind is str:
        return _field(1, value.encode("utf-8", "replace"))
    if kind is bool:
        return b"\x10\x01" if value else b"\x10\x00"
    if kind is int:
        return b"\x18" + varint(min(max(value, _INT64_MIN), _INT64_MAX) & 0xFFFF_FFFF_FFFF_FFFF)
    if kind is float:
        return b"\x21" + _double(value)
    return _field(5, b"".join([_field(1, _any_value(item)) for item in value]))


def _key_value(number: int, key: str, value: Any) -> bytes:
    return _field(number, _field(1, key.encode()) + _field(2, _any_value(value)))


def _attributes(number: int, attributes: Mapping[str, Any]) -> bytes:
    return b"".join([_key_value(number, key, value) for key, value in attributes.items()])


_SPAN_ATTRIBUTES, _LINK_ATTRIBUTES = 9, 4
_SCOPE = _field(1, _field(1, semconv.INSTRUMENTATION_SCOPE.encode()) + _field(2, __version__.encode()))
_FLAGS = b"\x85\x01" + struct.pack("<I", _HAS_IS_REMOTE)
_LINK_FLAGS = b"\x35" + struct.pack("<I", _HAS_IS_REMOTE | _IS_REMOTE)
_PLAIN_END = _field(15, b"") + _FLAGS  # without a status


class Encoder:
    """Encodes spans; remembers what it has encoded. Not for several threads at once."""

    def __init__(self) -> None:
        self._texts: dict[tuple[str, Any], bytes] = {}
        self._numbers: dict[tuple[str, Any], bytes] = {}
        self._booleans: dict[tuple[str, Any], bytes] = {}  # apart: True equals 1
        self._heads: dict[tuple[str, int], bytes] = {}  # of an integer: key and length, all but its own bytes
        self._names: dict[str, bytes] = {}
        self._resource: tuple[Mapping[str, Any], bytes] = ({}, _field(1, b""))

    def request(self, spans: Iterable[Span], resource: Mapping[str, Any]) -> bytes:
        """A request with the spans of one resource."""
        if self._resource[0] != resource:
            self._resource = (resource, _field(1, _attributes(1, resource)))
        encode = self._span
        pieces = [encode(span) for span in spans]
        scope_spans = _SCOPE + b"".join(pieces)
        return _field(1, self._resource[1] + _field(2, scope_spans))

    def _span(self, span: Span) -> bytes:
        name = self._names.get(span.name)
        if name is None:
            if len(self._names) > _KNOWN:
                self._names.clear()
            # With the kind behind it: internal.
            name = self._names[span.name] = _field(5, span.name.encode("utf-8", "replace")) + b"\x30\x01"
        times = _times(0x39, span.start_ns, 0x41, span.end_ns)
        if span.parent_id is None:
            pieces = [b"\n\x10", span.trace_id, b"\x12\x08", span.span_id, name, times]
        else:
            pieces = [b"\n\x10", span.trace_id, b"\x12\x08", span.span_id, b'"\x08', span.parent_id, name, times]
        texts, numbers, booleans = self._texts, self._numbers, self._booleans
        for key, value in span.attributes.items():
            kind = type(value)
            if kind is str:
                pieces.append(texts.get((key, value)) or self._text(key, value))
            elif kind is int:
                pieces.append(numbers.get((key, value)) or self._number(key, value))
            elif kind is bool:
                pieces.append(booleans.get((key, value)) or self._boolean(key, value))
            else:
                pieces.append(_key_value(_SPAN_ATTRIBUTES, key, value))
        for link in span.links:
            pieces.append(self._link(link))
        pieces.append(_PLAIN_END if span.error is None else self._error(span.error) + _FLAGS)
        body = b"".join(pieces)
        return b"\x12" + varint(len(body)) + body

    def _text(self, key: str, value: Any) -> bytes:
        if len(self._texts) > _KNOWN:
            self._texts.clear()
        found = self._texts[key, value] = _key_value(_SPAN_ATTRIBUTES, key, value)
        return found

    def _boolean(self, key: str, value: Any) -> bytes:
        if len(self._booleans) > _KNOWN:
            self._booleans.clear()
        found = self._booleans[key, value] = _key_value(_SPAN_ATTRIBUTES, key, value)
        return found

    def _number(self, key: str, value: Any) -> bytes:
        if not 0 <= value <= _INT64_MAX:
            return _key_value(_SPAN_ATTRIBUTES, key, value)
        digits = varint(value)
        head = self._heads.get((key, len(digits)))
        if head is None:
            head = _key_value(_SPAN_ATTRIBUTES, key, value)[: -len(digits)]
            self._heads[key, len(digits)] = head
        if value < _TABLE:  # sizes, ranks and counts; times and sequence numbers hardly repeat
            if len(self._numbers) > _KNOWN:
                self._numbers.clear()
            self._numbers[key, value] = head + digits
        return head + digits

    @staticmethod
    def _link(link: Link) -> bytes:
        ids = b"\n\x10" + link.trace_id + b"\x12\x08" + link.span_id
        if link.trace_state:
            ids += _field(3, link.trace_state.encode("utf-8", "replace"))
        return _field(13, ids + _attributes(_LINK_ATTRIBUTES, link.attributes) + _LINK_FLAGS)

    @staticmethod
    def _error(message: str) -> bytes:
        return _field(15, _field(2, message.encode("utf-8", "replace")) + bytes((0x18, _STATUS_ERROR)))
