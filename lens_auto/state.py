"""What is switched on in this process, and the carrier of the current iteration. Read on hot paths, written rarely."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_write_lock = threading.Lock()

# The groups that are on. Hot paths read this name directly (a function call would triple the cost); it is always
# replaced as a whole, never changed in place, so that a reader needs no lock. Write it with `set_enabled_span_groups`.
enabled_span_groups: frozenset[str] = frozenset()

# The same for each group that is asked about by its truth alone: not empty while it is on. Changed in place.
_gates: dict[str, list[str]] = {}

_pp_trace_carrier: dict[str, str] | None = None  # what the program set
_shared_carrier: Callable[[], dict[str, str] | None] | None = None  # what the ranks share of an iteration


def is_span_group_enabled(group: str) -> bool:
    """Whether spans of `group` are recorded in this process now."""
    return group in enabled_span_groups


def gate(group: str) -> list[str]:
    """What is true while `group` is on: the same object each time, for readers in C, who call nothing to look at it."""
    with _write_lock:
        return _gates.setdefault(group, [group] if group in enabled_span_groups else [])


def set_enabled_span_groups(groups: Iterable[str]) -> None:
    """Replaces the set of groups that are on; every later check sees the new set."""
    global enabled_span_groups
    if isinstance(groups, str):
        raise TypeError(f"expected a set of span groups, got the string {groups!r}: use SpanGroup.resolve")
    with _write_lock:
        enabled_span_groups = frozenset(groups)
        for group, each in _gates.items():
            each[:] = [group] if group in enabled_span_groups else []


def set_pp_trace_carrier(carrier: dict[str, str] | None) -> None:
    """Sets the carrier (W3C headers) of the iteration that this process is in; None: that which the ranks share."""
    global _pp_trace_carrier
    with _write_lock:
        _pp_trace_carrier = carrier


def get_pp_trace_carrier() -> dict[str, str] | None:
    """The carrier of this iteration, for `create_linked_span(..., remote_carrier=...)`.

    Returns:
        What the program set last; else what the ranks share without being told (`docs/propagation.md`): rank 0's span
        of the iteration that this process is in. None where there is neither.
    """
    if _pp_trace_carrier is not None:
        return _pp_trace_carrier
    shared = _shared_carrier
    return None if shared is None else shared()


def share_pp_trace_carrier(shared: Callable[[], dict[str, str] | None] | None) -> None:
    """Who answers where the program has set no carrier; None: nobody."""
    global _shared_carrier
    with _write_lock:
        _shared_carrier = shared
