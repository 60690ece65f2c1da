"""From records to something that others read: `spans` makes spans, one file per form writes them."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from lens_auto.export.spans import WriterSpans

    Encoder = Callable[[Iterable[WriterSpans]], Iterator[tuple[bytes, int]]]

FORMATS = ("otlp-json", "console", "perfetto")


def encoder(name: str) -> Encoder:
    """The function that encodes spans in a form of `FORMATS`.

    Raises:
        ValueError: there is no such form; the message lists those that there are.
    """
    if name == "otlp-json":
        from lens_auto.export import otlp_json

        return otlp_json.lines
    if name == "console":
        from lens_auto.export import console

        return console.lines
    if name == "perfetto":
        from lens_auto.export import perfetto

        return perfetto.encoder()
    raise ValueError(f"{name!r} is no form of export; valid: {', '.join((*FORMATS, 'otlp'))}")


@contextlib.contextmanager
def output(path: str | None) -> Iterator[IO[bytes]]:
    """Where to write an export: a file that appears whole or not at all, or standard output (None or "-").

    What exists and is no regular file (a device, a pipe) is written to as it is.

    Raises:
        OSError: the file cannot be written; nothing is left of it.
    """
    if path is None or path == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = 0
    if mode and not stat.S_ISREG(mode):
        with open(path, "wb") as file:
            yield file
        return
    target = os.path.realpath(path)
    try:
        descriptor, draft = tempfile.mkstemp(prefix=f".{os.path.basename(target)}.", dir=os.path.dirname(target))
    except OSError as error:
        raise type(error)(error.errno, error.strerror, path) from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.chmod(draft, stat.S_IMODE(mode) if mode else 0o666 & ~_umask())
        os.replace(draft, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current
