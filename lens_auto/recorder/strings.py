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

    The file is opened for each new string and closed again: a descriptor held for the life of the process may be closed
    by the program (daemonizing code closes all that it finds), and its number be a file of the program's by then.
    """

    def __init__(self, folder: str | None) -> None:
        self._ids: dict[str, int] = {}
        self._lock = threading.Lock()
        self._path = ""
        if folder is not None:
            path = os.path.join(folder, STRINGS_NAME)
            header = json.dumps({"format": STRINGS_FORMAT, "version": FORMAT_VERSION})
            self._write(path, header, os.O_CREAT | os.O_EXCL)
            self._path = path

    @staticmethod
    def _write(path: str, line: str, flags: int = 0) -> bool:
        data = line.encode() + b"\n"
        descriptor = os.open(path, flags | os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            return os.write(descriptor, data) == len(data)
        finally:
            os.close(descriptor)

    def _append(self, line: str) -> bool:
        try:
            return self._write(self._path, line)
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
        if not text or not self._path:
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
        """Write no more; strings not yet known are 0 from now on."""
        with self._lock:
            self._path = ""
