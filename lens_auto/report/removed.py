"""Records that are no longer here because they were sent, or because the export strategy leaves their rank out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def removed(writers: Iterable[Mapping[str, Any]], found: Iterable[int]) -> list[str]:
    """One line for each reason.

    Args:
        writers: what the `writer.json` of each rank says.
        found: how many records of each are here, in the same order.
    """
    sent: dict[int, int] = {}
    left_out: dict[int, int] = {}
    for info, here in zip(writers, found, strict=True):
        gone = int(info.get("records", 0)) - here
        if gone > 0 and info.get("exports") is False:
            left_out[info["rank"]] = gone
        elif gone > 0 and info.get("sends"):
            sent[info["rank"]] = gone
    lines = []
    if sent:
        lines.append(f"{sum(sent.values()):,} records of {_ranks(sent)} were sent to the endpoint and are not here")
    if left_out:
        lines.append(
            f"{sum(left_out.values()):,} records of {_ranks(left_out)} were removed: the export strategy leaves these"
            " ranks out (NEMO_LENS_EXPORT_STRATEGY=all_ranks sends them; without an endpoint all are kept)"
        )
    return lines


def _ranks(counts: Mapping[int, int]) -> str:
    numbers = sorted(counts)
    shown = ", ".join(map(str, numbers[:8])) + (" ..." if len(numbers) > 8 else "")
    return f"rank{'' if len(numbers) == 1 else 's'} {shown}"
