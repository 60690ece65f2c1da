"""One mapped file of records, and the segment of no file that takes the place of one when there is no room."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import time

from lens_auto.recorder import spool
from lens_auto.recorder.layout import (
    FORMAT_VERSION,
    RECORD_BYTES,
    RECORD_FIELDS,
    SEGMENT_BYTES,
    SEGMENT_HEADER,
    SEGMENT_HEADER_BYTES,
    SEGMENT_MAGIC,
    SEGMENT_RECORDS,
    segment_name,
)

_FIELDS_JSON = json.dumps({"fields": [[name, "<" + code] for name, code in RECORD_FIELDS]}).encode()
assert SEGMENT_HEADER.size + len(_FIELDS_JSON) <= SEGMENT_HEADER_BYTES


class Segment:
    """A segment being written.

    `counter` hands out indices: `next()` on it is atomic, so that threads need no lock. It may pass the capacity, a
    thread that draws such an index goes to the next segment.
    """

    __slots__ = ("base", "buffer", "closed_ns", "counter", "number", "path")

    def __init__(self, buffer: mmap.mmap | bytearray, number: int, path: str, first: int = 0) -> None:
        self.buffer = buffer
        self.number = number
        self.base = number * SEGMENT_RECORDS
        self.counter = itertools.count(first)
        self.path = path
        self.closed_ns = 0

    def used(self) -> int:
        """Records handed out so far, at most the capacity."""
        return min(int(self.counter.__reduce__()[1][0]), SEGMENT_RECORDS)  # the next index, without drawing it


def create_segment(folder: str, number: int, nonce: int, rank: int) -> Segment:
    """Make the n-th segment of a writer in its folder.

    Raises:
        OSError: no room, or the folder cannot be written.
    """
    path = os.path.join(folder, segment_name(number))
    buffer = spool.create_mapped(path, SEGMENT_BYTES)
    header = SEGMENT_HEADER.pack(
        SEGMENT_MAGIC,
        FORMAT_VERSION,
        RECORD_BYTES,
        SEGMENT_RECORDS,
        number,
        nonce,
        os.getpid(),
        rank,
        time.monotonic_ns(),
        time.time_ns(),
        len(_FIELDS_JSON),
    )
    buffer[: len(header)] = header
    buffer[len(header) : len(header) + len(_FIELDS_JSON)] = _FIELDS_JSON
    return Segment(buffer, number, path)


def no_segment(number: int) -> Segment:
    """A segment that is full from the start: every record drawn from it is dropped and counted."""
    return Segment(bytearray(), number, "", first=SEGMENT_RECORDS)
