"""What an endpoint said about a batch, and what a lane needs of whoever sends one."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Protocol

from lens_auto.export.spans import Span


class Outcome(enum.Enum):
    """What becomes of a batch."""

    ACCEPTED = "accepted"
    LATER = "later"  # nothing of it was taken; the same batch may be sent again
    TOO_LARGE = "too large"  # nothing of it was taken; a smaller one may be
    INVALID = "invalid"  # the endpoint will never take it as it is


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one batch.

    Attributes:
        outcome: what becomes of the batch.
        reason: why it was not accepted, for the log.
        retry_after_s: how long the endpoint asks to be left alone; None: it does not say.
        rejected: spans of an accepted batch that the endpoint says it threw away.
    """

    outcome: Outcome
    reason: str = ""
    retry_after_s: float | None = None
    rejected: int = 0


ACCEPTED = Answer(Outcome.ACCEPTED)


class Sender(Protocol):
    """Sends spans of one writer somewhere."""

    remote: bool
    """Whether what it accepts leaves this node: the records need not be kept then."""

    def send(self, spans: list[Span], resource: dict[str, Any]) -> Answer:
        """Send one batch and wait, bounded, for the answer. Never raises."""

    def close(self) -> None:
        """Send no more."""
