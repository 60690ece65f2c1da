"""Instruments are made once for each meter and go away with it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.metrics import Meter

T = TypeVar("T")

# Of histograms in milliseconds and seconds: OpenTelemetry's own boundaries end at ten seconds, a rollout does not.
BUCKETS_MS = (1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1e3, 2.5e3, 5e3, 1e4, 2.5e4, 5e4, 1e5, 2.5e5, 5e5)
BUCKETS_S = (0.0005, *(bound / 1e3 for bound in BUCKETS_MS))


class PerMeter(Generic[T]):
    """The instruments of each meter.

    Args:
        make: Makes them; the SDK warns where it would be asked twice for one meter.
    """

    def __init__(self, make: Callable[[Meter], T]) -> None:
        self._make = make
        self._found: WeakKeyDictionary[Meter, T] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def __call__(self, meter: Meter) -> T:
        """Those of a meter, made on first use."""
        found = self._found.get(meter)
        if found is None:
            with self._lock:
                found = self._found.get(meter)
                if found is None:
                    found = self._found[meter] = self._make(meter)
        return found
