"""Instruments are made once for each meter and go away with it; what they record is a number of Python's."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from lens_auto.values import encodable, held

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from opentelemetry.metrics import Meter

logger = logging.getLogger("lens_auto")

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


def number(name: str, value: Any) -> int | float | None:
    """A value as the SDK can aggregate and export it: what has `float()` is converted, such as a tensor of one element.

    Args:
        name: The metric, for the debug line about what is no number.
        value: None: nothing is to be recorded.
    """
    if value is None:
        return None
    found = held(value)
    if isinstance(found, (int, float)):
        return found
    try:
        if not hasattr(value, "__float__"):
            raise TypeError(type(value).__name__)
        return float(value)
    except Exception as error:  # a tensor of many elements, an integer beyond a float's range
        logger.debug("lens-auto: the value of %s is no number and is not recorded (%s)", name, error)
        return None


def labels(attributes: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Those attributes that can be exported."""
    if attributes is None:
        return None
    kept: dict[str, Any] = {}
    for key, value in attributes.items():
        if isinstance(value, (list, tuple)):
            items = tuple(held(item) for item in value)
            found: Any = None if None in items else items
        else:
            found = held(value)
        if found is not None:
            kept[encodable(str(key))] = found
    return kept
