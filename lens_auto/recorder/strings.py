"""Strings interned once: a record holds a number, the side file the text."""

from __future__ import annotations

import json
import os
import threading

from lens_auto.recorder.layout import FORMAT_VERSION, STRINGS_FORMAT, STRINGS_NAME

MAX_TEXT = 512
MAX_STRINGS = 100_000


class Interner:
    """Gives each string a number from 1 and appends it to the writer's side file.

    The file gets a line before the number is handed out, so that no record names a string that is not on disk. Where
    the disk is full, the number 0 (no string) is given instead.
    """

    def __init__(self, folder: str | None) -> None:
        self._ids: dict[str, int] = {}
        self._lock = threading.Lock()
        self._descriptor = -1
        if folder is not None:
            path = os.path.join(folder, STRINGS_NAME)
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o600)
            self._append(json.dumps({"format": STRINGS_FORMAT, "version": FORMAT_VERSION}))

    def _append(self, line: str) -> bool:
        data = line.encode() + b"\n"
        try:
            return os.write(self._descriptor, data) == len(data)
        except OSError:
            return False

    def id(self, text: str) -> int:
        """The number of a string; 0 for the empty one, and where there is no room for more."""
        found = self._ids.get(text)
        return self._intern(text) if found is None else found

    def text(self, number: int) -> str:
        """The string of a number; empty where there is none. Looks through all of them."""
        return next((text for text, each in list(self._ids.items()) if each == number), "")

    def _intern(self, text: str) -> int:
        if not text or self._descriptor < 0:
            return 0
        with self._lock:
            found = self._ids.get(text)
            if found is not None:
                return found
            number = len(self._ids) + 1
            if number > MAX_STRINGS or not self._append(json.dumps(text[:MAX_TEXT])):
                return 0
            self._ids[text] = number
            return number

    def close(self) -> None:
        """Close the side file; strings not yet known are 0 from now on."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
