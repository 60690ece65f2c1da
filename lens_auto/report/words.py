"""Figures as words: ranks, times, sizes, shares."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_LONG_UNITS = (("d", 86_400e9), ("h", 3_600e9), ("min", 60e9))


def counted(count: int, noun: str) -> str:
    """A number of things: `1 rank`, `2,000 ranks`."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun[:-1]}ies" if noun.endswith("ry") else f"{count:,} {noun}s"


def every(count: float, noun: str) -> str:
    """How often: `in every iteration`, `about every 3rd iteration`."""
    number = round(count)
    if number <= 1:
        return f"in every {noun}"
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"about every {number}{ending} {noun}"


def named(ranks: Sequence[int], limit: int = 8) -> str:
    """Ranks as words: `rank 3`, `ranks 0 to 3, 7`."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    words = [f"{run[0]} to {run[-1]}" if run[-1] > run[0] + 1 else ", ".join(map(str, run)) for run in runs]
    text = ", ".join(words[:limit]) + (" and more" if len(words) > limit else "")
    return f"rank {text}" if len(set(ranks)) == 1 else f"ranks {text}"


def duration(ns: float) -> str:
    """A time to three digits, in the unit that suits it."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if ns >= size:
            return f"{three_digits(ns / size)} {unit}"
    return f"{ns:.0f} ns"


def three_digits(value: float) -> str:
    """A number from 1 up to three digits, no more than two of them after the point."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def size(count: float) -> str:
    """Bytes to three digits, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} B" if unit == "B" else f"{three_digits(count)} {unit}"


def rate(bytes_per_second: float) -> str:
    """A bandwidth to three digits, in powers of 1000 as links are sold."""
    for unit in ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"):
        if bytes_per_second < 999.5 or unit == "TB/s":
            break
        bytes_per_second /= 1000
    return f"{three_digits(bytes_per_second)} {unit}"


def long_duration(ns: float) -> str:
    """A time that may be hours, in the unit that suits it."""
    for unit, size in _LONG_UNITS:
        if ns >= 2 * size:
            return f"{three_digits(ns / size)} {unit}"
    return duration(ns)


def span(part_ns: float, whole_ns: float) -> str:
    """A part of a time, both in the unit that suits the whole: `2.10 h of 11.7 h`."""
    for unit, size in (*_LONG_UNITS, ("s", 1e9), ("ms", 1e6)):
        if whole_ns >= (2 * size if size >= 60e9 else size):
            return f"{three_digits(part_ns / size)} {unit} of {three_digits(whole_ns / size)} {unit}"
    return f"{duration(part_ns)} of {duration(whole_ns)}"


def percent(share: float) -> str:
    """A share in percent: whole ones from 10 up."""
    return f"{share:.0%}" if abs(share) >= 0.0995 else f"{share:.1%}"
