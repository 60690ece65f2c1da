"""Spans as a Perfetto trace, for ui.perfetto.dev: ranks are processes, links are arrows.

A trace is a protobuf message (https://github.com/google/perfetto/blob/main/protos/perfetto/trace/perfetto_trace.proto);
the few fields that are needed here are written by hand, their numbers beside them. Slices of a track must nest: spans
that overlap others of their rank without lying inside (asynchronous operations) go to further tracks of it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from lens_auto import semconv
from lens_auto.recorder.ids import record_span_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from lens_auto.export.spans import Span, WriterSpans

_SEQUENCE = 1
_FIRST_PACKET, _NEEDS_STATE = 1, 2  # SequenceFlags: SEQ_INCREMENTAL_STATE_CLEARED, SEQ_NEEDS_INCREMENTAL_STATE
_BEGIN, _END = 1, 2  # TrackEvent.Type
_SPANS_PER_PART = 4096
_TRACKS_PER_RANK = 1 << 8
# Arrows from rank 0's iteration to those of other ranks, where a person can still follow them.
_MAX_ARROWS = 64
_MASK = (1 << 64) - 1
_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1


def encoder() -> Callable[[Iterable[WriterSpans]], Iterator[tuple[bytes, int]]]:
    """What encodes the spans of all writers of one run, one writer after the other."""
    return _Trace().parts


# --- protobuf ---------------------------------------------------------------------------------------------------------


def _varint(value: int) -> bytes:
    value &= _MASK
    if value < 0x80:
        return bytes((value,))
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode("utf-8", "replace"))


def _fixed64(field: int, value: int) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<Q", value & _MASK)


# --- the trace --------------------------------------------------------------------------------------------------------


class _Slice(NamedTuple):
    start_ns: int
    end_ns: int
    begin: bytes  # fields of the TrackEvent that begins it, less its type and track
    end: bytes


class _Trace:
    """Packets of one trace. All are of one sequence, which shares names by number."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._keys: dict[str, int] = {}
        self._lives: dict[int, int] = {}
        self._fresh = True

    def parts(self, writers: Iterable[WriterSpans]) -> Iterator[tuple[bytes, int]]:
        """Encode the spans of some writers.

        Returns:
            Parts of the file, and how many spans begin in each.
        """
        for writer in writers:
            yield from self._writer(writer)

    def _writer(self, writer: WriterSpans) -> Iterator[tuple[bytes, int]]:
        info = writer.writer.info
        # A rank that a launcher started again is another process.
        life = self._lives[info.rank] = self._lives.get(info.rank, -1) + 1
        process = (info.rank + 2) + life * 1_000_000  # 0 is the idle process of a trace
        track = process * _TRACKS_PER_RANK
        name = f"rank {info.rank}" + (f", started again {life}x" if life else "") + f" on {info.host}"
        descriptor = _number(1, process) + _text(6, name)  # ProcessDescriptor: pid, process_name
        out = [self._packet(_bytes(60, _number(1, track) + _bytes(3, descriptor)))]  # TrackDescriptor: uuid, process

        interned: list[bytes] = []
        slices = sorted(
            (self._slice(span, info.rank, info.world_size, interned) for span in writer.spans),
            key=lambda each: (each.start_ns, -each.end_ns),
        )
        if interned:
            out.append(self._packet(_bytes(12, b"".join(interned))))  # InternedData
        lanes: list[list[_Slice]] = []
        begun = 0
        for each in slices:
            lane = self._lane(lanes, each, track, out)
            if lane == len(lanes):
                lanes.append([])
                thread = _number(1, process) + _number(2, track + lane + 1)  # ThreadDescriptor: pid, tid, thread_name
                thread += _text(5, "training" if not lane else f"overlapping {lane}")
                out.append(self._packet(_bytes(60, _number(1, track + lane + 1) + _bytes(4, thread))))
            lanes[lane].append(each)
            out.append(self._event(each.start_ns, _BEGIN, track + lane + 1, each.begin))
            begun += 1
            if begun == _SPANS_PER_PART:
                yield b"".join(out), begun
                out, begun = [], 0
        for lane, open_slices in enumerate(lanes):
            while open_slices:
                self._close(open_slices.pop(), track + lane + 1, out)
        yield b"".join(out), begun

    def _lane(self, lanes: list[list[_Slice]], each: _Slice, track: int, out: list[bytes]) -> int:
        """The first track in which a slice nests; what has ended there before is closed."""
        for lane, open_slices in enumerate(lanes):
            while open_slices and open_slices[-1].end_ns <= each.start_ns:
                self._close(open_slices.pop(), track + lane + 1, out)
            if not open_slices or each.end_ns <= open_slices[-1].end_ns:
                return lane
        return min(len(lanes), _TRACKS_PER_RANK - 2)

    def _close(self, each: _Slice, track: int, out: list[bytes]) -> None:
        out.append(self._event(each.end_ns, _END, track, each.end))

    def _packet(self, content: bytes, before: bytes = b"") -> bytes:
        flags = _NEEDS_STATE
        if self._fresh:
            self._fresh = False
            flags |= _FIRST_PACKET
        # TracePacket: timestamp, trusted_packet_sequence_id, sequence_flags
        return _bytes(1, before + _number(10, _SEQUENCE) + _number(13, flags) + content)

    def _event(self, at_ns: int, kind: int, track: int, content: bytes) -> bytes:
        event = _number(9, kind) + _number(11, track) + content  # TrackEvent: type, track_uuid
        return self._packet(_bytes(11, event), _number(8, at_ns))

    # --- one span -----------------------------------------------------------------------------------------------------

    def _slice(self, span: Span, rank: int, world_size: int, interned: list[bytes]) -> _Slice:
        begin = [_number(10, self._intern(self._names, 2, span.name, interned))]  # name_iid
        for key, value in span.attributes.items():
            begin.append(self._annotation(key, value, interned))
        if span.error is not None:
            begin.append(self._annotation("error", span.error, interned))
        begin.append(self._annotation("trace_id", span.trace_id.hex(), interned))
        begin.append(self._annotation("span_id", span.span_id.hex(), interned))
        own = int.from_bytes(span.span_id, "big")
        iteration = span.name == semconv.SPAN_ITERATION
        if iteration and rank == 0:
            begin += [_fixed64(47, _arrow(own, other)) for other in range(1, min(world_size, _MAX_ARROWS))]  # flow_ids
        if iteration or semconv.DL_COMM_PEER in span.attributes or semconv.PIPELINE_RANK in span.attributes:
            begin.append(_fixed64(47, own))
        # An arrow ends where its span ends: a receive may be posted before its send.
        end = []
        for link in span.links:
            target = int.from_bytes(link.span_id, "big")
            if iteration:
                end.append(_fixed64(48, _arrow(target, rank)))  # terminating_flow_ids
            else:
                end.append(_fixed64(47, target))
        return _Slice(span.start_ns, span.end_ns, b"".join(begin), b"".join(end))

    def _annotation(self, key: str, value: Any, interned: list[bytes]) -> bytes:
        content = _number(1, self._intern(self._keys, 3, key, interned))  # DebugAnnotation: name_iid, then its value
        if isinstance(value, bool):
            content += _number(2, int(value))
        elif isinstance(value, int):
            content += _number(4, min(max(value, _INT64_MIN), _INT64_MAX))
        elif isinstance(value, float):
            content += _varint(5 << 3 | 1) + struct.pack("<d", value)
        else:
            content += _text(6, value if isinstance(value, str) else ", ".join(map(str, value)))
        return _bytes(4, content)

    @staticmethod
    def _intern(known: dict[str, int], field: int, text: str, interned: list[bytes]) -> int:
        number = known.get(text)
        if number is None:
            number = known[text] = len(known) + 1
            interned.append(_bytes(field, _number(1, number) + _text(2, text)))  # EventName, DebugAnnotationName
        return number


def _arrow(iteration_id: int, rank: int) -> int:
    """Name of the arrow from rank 0's iteration to that of another rank."""
    return record_span_id(iteration_id, rank)
