"""Ids: derived ones that every rank computes alike, ids of records from their place, and random ones for SDK spans.

The encoding is written down with test vectors in `docs/ids.md`; `tests/test_ids.py` checks this file against them.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

TRACE_ID_BYTES = 16
SPAN_ID_BYTES = 8
SEED_BYTES = 16
NO_SEED = bytes(SEED_BYTES)

_PREFIX = b"lens-auto/1\0"
_MASK = (1 << 64) - 1

# --- derived ids ------------------------------------------------------------------------------------------------------


def derive(size: int, domain: str, seed: bytes, *fields: int | str) -> bytes:
    """Hash a domain, a seed and some fields to an id that is never zero.

    Args:
        size: bytes of the id, 1 to 64.
        domain: what the id is of; ids of different domains never meet.
        seed: the run's seed, 16 bytes.
        fields: integers (signed, 64 bits) and strings, in the order that `docs/ids.md` gives for the domain.

    Raises:
        ValueError: the seed has another length, or an integer does not fit into 64 bits.
    """
    if len(seed) != SEED_BYTES:
        raise ValueError(f"a seed has {SEED_BYTES} bytes, this one {len(seed)}")
    parts = [_PREFIX, domain.encode(), b"\0", seed]
    for field in fields:
        if isinstance(field, str):
            text = field.encode("utf-8", "surrogatepass")
            parts += (b"s", len(text).to_bytes(4, "little"), text)
        else:
            try:
                parts += (b"i", field.to_bytes(8, "little", signed=True))
            except OverflowError:
                raise ValueError(f"{field} does not fit into a signed 64-bit integer") from None
    message = b"".join(parts)
    digest = hashlib.blake2b(message, digest_size=size).digest()
    return digest if any(digest) else hashlib.blake2b(message + b"\1", digest_size=size).digest()


def own_seed(nonce: int) -> bytes:
    """The seed of a writer that never agreed on one: its ids are consistent in themselves and meet no other rank's."""
    return derive(SEED_BYTES, "own-seed", NO_SEED, nonce_text(nonce))


def nonce_text(nonce: int) -> str:
    """A writer's nonce as ids and `writer.json` spell it: 16 hexadecimal digits."""
    return f"{nonce:016x}"


def iteration_trace_id(seed: bytes, iteration: int) -> bytes:
    """The trace that all ranks share for an iteration."""
    return derive(TRACE_ID_BYTES, "trace", seed, iteration)


def iteration_span_id(seed: bytes, iteration: int, rank: int) -> bytes:
    """One rank's `train.iteration` span; any rank can name any other's."""
    return derive(SPAN_ID_BYTES, "iteration", seed, iteration, rank)


def job_trace_id(seed: bytes) -> bytes:
    """The trace of what belongs to the job rather than to one iteration."""
    return derive(TRACE_ID_BYTES, "job-trace", seed)


def job_span_id(seed: bytes, rank: int, nonce: int) -> bytes:
    """The `train.job` span of one process as a rank; a restarted process has another nonce."""
    return derive(SPAN_ID_BYTES, "job", seed, rank, nonce_text(nonce))


def send_span_id(seed: bytes, group: str, init: int, source: int, target: int, tag: int, k: int) -> bytes:
    """The k-th send (from 0) from one global rank to another in a group; the receiver computes the same."""
    return derive(SPAN_ID_BYTES, "send", seed, group, init, source, target, tag, k)


def evaluate_span_id(seed: bytes, nonce: int, number: int) -> bytes:
    """An evaluation pass, which has no record of its own: named by the number of its first fetch."""
    return derive(SPAN_ID_BYTES, "evaluate", seed, nonce_text(nonce), number)


def forward_span_id(seed: bytes, nonce: int, number: int) -> bytes:
    """An inferred forward, which has no record of its own: named by the number of the backward it leads to."""
    return derive(SPAN_ID_BYTES, "forward", seed, nonce_text(nonce), number)


# --- ids of records ---------------------------------------------------------------------------------------------------


def record_span_id(nonce: int, number: int) -> int:
    """The span id of a writer's n-th record, as an integer: splitmix64 of nonce + number (Steele, Lea, Flood 2014)."""
    z = (nonce + number + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) or 1


def record_span_ids(nonce: int, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """`record_span_id` of many records of one writer at once.

    Args:
        nonce: the writer's nonce.
        numbers: record numbers, segment * 32768 + index in it.

    Returns:
        The ids in the same order; a span id's eight bytes are the number big-endian.
    """
    import numpy as np

    u64 = np.uint64
    z = numbers.astype(u64) + u64((nonce + 0x9E3779B97F4A7C15) & _MASK)
    z = (z ^ (z >> u64(30))) * u64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> u64(27))) * u64(0x94D049BB133111EB)
    z ^= z >> u64(31)
    z[z == 0] = 1
    return z


# --- random ids -------------------------------------------------------------------------------------------------------

# Training code seeds `random` alike on every rank, and the SDK's default generator then repeats ids across ranks.
_random = random.Random(os.urandom(32))
os.register_at_fork(after_in_child=lambda: _random.seed(os.urandom(32)))


class _LensIdGenerator:
    """Ids for SDK spans from a private generator that the OS seeds, also after `fork`. Never zero.

    It has the methods of the SDK's `IdGenerator` without its import, which no rank pays for that builds no SDK span.
    """

    def generate_span_id(self) -> int:
        """A random 64-bit id."""
        while not (span_id := _random.getrandbits(64)):
            pass
        return span_id

    def generate_trace_id(self) -> int:
        """A random 128-bit id."""
        while not (trace_id := _random.getrandbits(128)):
            pass
        return trace_id

    def is_trace_id_random(self) -> bool:
        """Whether trace ids are uniformly random, for the `random-trace-id` flag of W3C trace context."""
        return True


_LensIdGenerator.__name__ = _LensIdGenerator.__qualname__ = "LensIdGenerator"

if TYPE_CHECKING:
    LensIdGenerator = _LensIdGenerator
else:

    def __getattr__(name: str) -> type[_LensIdGenerator]:
        # The SDK takes a generator named by OTEL_PYTHON_ID_GENERATOR only where issubclass(..., IdGenerator) holds.
        # By the time anybody asks for the class on its behalf, the SDK is loaded.
        if name != "LensIdGenerator":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        sdk = sys.modules.get("opentelemetry.sdk.trace.id_generator")
        if sdk is not None:
            sdk.IdGenerator.register(_LensIdGenerator)
        return _LensIdGenerator
