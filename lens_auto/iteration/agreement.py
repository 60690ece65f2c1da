"""The ranks agree once on a run seed and a run id, without ever blocking the job.

Runs in the housekeeper alone, on a clone of the job's store, with `set`, `check`, and `get` after `check` said yes.
Every rank writes a nonce; rank 0 answers each with a "go" that echoes it. A key that an earlier attempt of the same job
left in the store carries another nonce and is not believed.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from typing import Any

from lens_auto.iteration import origin
from lens_auto.iteration.store import Store


class Agreed:
    """What the ranks agreed on.

    Attributes:
        seed: 16 random bytes.
        run_id: of rank 0.
        headers: of the trace that rank 0 was started from, see `origin`.
    """

    __slots__ = ("headers", "run_id", "seed")

    def __init__(self, seed: bytes, run_id: str, headers: dict[str, str] | None = None) -> None:
        self.seed = seed
        self.run_id = run_id
        self.headers = headers or {}


class Agreement:
    """One rank's side. `step()` does what can be done now, and never waits.

    Args:
        connect: gives the client of the store, the same each time; called in the housekeeper, may raise.
        prefix: what tells this init of this attempt from others (restart count and ordinal).
        rank, world_size: of the default group.
        offer: what rank 0 proposes.
    """

    def __init__(self, connect: Callable[[], Store], prefix: str, rank: int, world_size: int, offer: Agreed) -> None:
        self._connect = connect
        self._prefix = prefix
        self._rank = rank
        self._offer = offer
        self._nonce = secrets.token_hex(8)
        self._asked = False
        self._answered: dict[int, str] = {}
        self._pending = set(range(1, world_size)) if rank == 0 else set()
        self.result: Agreed | None = offer if rank == 0 else None
        self.failed: str = ""

    @property
    def finished(self) -> bool:
        """Nothing is left to do: this rank knows, and (rank 0) every rank has said that it knows."""
        return bool(self.failed) or (self.result is not None and not self._pending)

    def step(self) -> None:
        """Go on as far as possible without waiting."""
        if self.finished:
            return
        try:
            store = self._connect()
            if self._rank == 0:
                for rank in sorted(self._pending):
                    self._answer(store, rank)
                return
            if not self._asked:
                store.set(self._key("nonce", self._rank), self._nonce)
                self._asked = True
            self._listen(store)
        except Exception as error:
            self.failed = f"{type(error).__name__}: {error}"

    def _key(self, what: str, rank: int) -> str:
        return f"{self._prefix}/{what}/{rank}"

    def _answer(self, store: Store, rank: int) -> None:
        key = self._key("nonce", rank)
        if not store.check([key]):
            return
        nonce = store.get(key).decode()
        if self._answered.get(rank) != nonce:
            go = {
                "nonce": nonce,
                "seed": self._offer.seed.hex(),
                "run_id": self._offer.run_id,
                "headers": self._offer.headers,
            }
            store.set(self._key("go", rank), json.dumps(go))
            self._answered[rank] = nonce
        acknowledged = self._key("ack", rank)
        if store.check([acknowledged]) and store.get(acknowledged).decode() == nonce:
            self._pending.discard(rank)

    def _listen(self, store: Store) -> None:
        key = self._key("go", self._rank)
        if not store.check([key]):
            return
        go: dict[str, Any] = json.loads(store.get(key))
        if go.get("nonce") != self._nonce:
            return
        self.result = Agreed(bytes.fromhex(go["seed"]), str(go["run_id"]), origin.clean(go.get("headers")))
        store.set(self._key("ack", self._rank), self._nonce)
