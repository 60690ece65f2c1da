"""What the training thread wakes another thread by."""

from __future__ import annotations

import threading


class Bell:
    """An event that one thread waits for, and that is reset by waiting.

    A lock alone: `threading.Event` runs Python in `set` and in `wait`, which in a program that trains is in no cache
    when it is needed, and takes a tenth of a millisecond.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """Wake the thread that waits, or let its next wait return at once."""
        try:
            self._lock.release()
        except RuntimeError:  # it rang already
            pass

    def wait(self, timeout_s: float) -> bool:
        """Wait until it rings; whether it did."""
        return self._lock.acquire(timeout=timeout_s)
