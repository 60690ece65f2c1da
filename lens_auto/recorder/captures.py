"""Whether a CUDA graph is being captured in this process.

A capture in global mode, torch's default, fails when any thread asks whether an event is complete (CUDA's programming
guide, "Stream capture": potentially unsafe calls). torch's flight recorder asks that too when it is dumped. So while a
capture is under way nobody here looks at events, in no thread.
"""

from __future__ import annotations

import os
import threading

_lock = threading.Lock()
_count = 0


def begun() -> None:
    """A capture begins."""
    global _count
    with _lock:
        _count += 1


def ended() -> None:
    """A capture has ended, or failed to begin."""
    global _count
    with _lock:
        _count = max(0, _count - 1)


def under_way() -> bool:
    """Whether there is one."""
    return _count > 0


def _forget() -> None:
    global _lock, _count
    _lock, _count = threading.Lock(), 0


os.register_at_fork(after_in_child=_forget)
