"""What the ranks tell each other while they train: rank 0's carrier and its switches of span groups.

Up to `MAX_RANKS` ranks by the carrier broadcast; beyond it, and where the broadcast ended, switches go through a key of
the store that the housekeeper looks at every few seconds. Nothing here waits.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from lens_auto import state
from lens_auto.groups import TrainingSpanGroup
from lens_auto.iteration.carrier import MAX_RANKS, Carrier, Switch
from lens_auto.iteration.schedule import Requests
from lens_auto.iteration.store import Client, StoreAccess
from lens_auto.recorder import ids
from lens_auto.recorder.recorder import Recorder

logger = logging.getLogger("lens_auto")

STORE_LOOK_S = 2.0
# A switch takes effect so far ahead that every rank knows of it before it gets there.
AHEAD_S_BROADCAST = 2.0
AHEAD_S_STORE = 10.0
AHEAD_ITERATIONS = 8
PACES = 4
SKEW_MESSAGES = 16
SETTLE_PATIENCE_S = 1.0  # in all, of ends, while the ranks meet


class Skew:
    """By how many iterations this rank is ahead of rank 0 for good.

    A single message says little: ranks in lockstep are up to an iteration apart, and a message takes its time. Of some
    in a row the one that is nearest to none says what remains.

    Attributes:
        widest: the widest so far; negative: behind.
    """

    def __init__(self) -> None:
        self.widest = 0
        self._recent: deque[int] = deque(maxlen=SKEW_MESSAGES)

    def add(self, ahead: int) -> None:
        """One message: this rank's iteration less rank 0's."""
        self._recent.append(ahead)
        if len(self._recent) < SKEW_MESSAGES or min(self._recent) <= 0 <= max(self._recent):
            return
        lasting = min(self._recent, key=abs)
        if abs(lasting) > max(1, abs(self.widest)):
            self.widest = lasting


class Sharing:
    """One rank's side.

    Args:
        access: to the job's store.
        prefix, rank, world_size: as for `Agreement`.
        recorder: knows the iteration.
        mode: `broadcast` or `derived`.
        switch: takes switches in, in this process.
    """

    def __init__(
        self,
        access: StoreAccess,
        prefix: str,
        rank: int,
        world_size: int,
        recorder: Recorder,
        mode: str,
        switch: Callable[[list[Switch]], None],
    ) -> None:
        self._access = access
        self._prefix = prefix
        self._rank = rank
        self._recorder = recorder
        self._switch = switch
        self._seed = b""
        self._switches: list[Switch] = []
        self._published = False  # rank 0: whether they are in the store
        self._requests = Requests()
        self._next_look = 0.0
        self._paces = deque([(0, time.monotonic())], maxlen=PACES)  # iterations by time, a few looks back
        self._headers: dict[str, str] = {}
        self._newest: tuple[int, dict[str, str]] = (-1, {})  # the carrier that arrived last, and of which iteration
        self.skew = Skew()
        self._patience_s = SETTLE_PATIENCE_S
        self.carrier: Carrier | None = None
        # The group would keep its client of the store for ever, which not every kind of store bears.
        if mode == "broadcast" and 1 < world_size <= MAX_RANKS and access.lasts:
            self.carrier = Carrier(
                access, prefix, rank, world_size, lambda: recorder.iteration, self._outgoing, self._arrived
            )

    def tick(self, info: dict[str, Any], headers: dict[str, str], run_dir: str | None) -> None:
        """One round, in the housekeeper; seed and run directory are known.

        Args:
            info: of the housekeeper.
            headers: of the trace that the job was started from.
            run_dir: where requests to switch are left.
        """
        if not self._seed:
            self._headers = {name: headers[name] for name in ("tracestate", "baggage") if name in headers}
            self._seed = bytes.fromhex(info["seed"])
            state.share_pp_trace_carrier(self.current_carrier)
            if self.carrier is not None and info["seed_source"] == "agreed":
                self._recorder.boundary_bell = self.carrier.boundary
                self.carrier.start(info["seed"])
        if self.skew.widest:
            info["iteration_skew"] = self.skew.widest
        if self._rank == 0 and run_dir and self._may_request:
            request = self._requests.look(run_dir)
            if request is not None:
                self._request(*request)
        now = time.monotonic()
        if now >= self._paces[-1][1] + STORE_LOOK_S:
            self._paces.append((self._recorder.iteration, now))
        if now >= self._next_look and not self._broadcasts:
            self._next_look = now + STORE_LOOK_S
            if self._rank != 0:
                self._look_at_store()
            elif self._switches and not self._published:
                self._publish()

    def follow(self, access: StoreAccess, prefix: str) -> None:
        """The program has another store from here on. The carrier's group needs none any more."""
        self._access, self._prefix = access, prefix
        self._published = False
        self._next_look = 0.0

    @property
    def _key(self) -> str:
        """With the seed, which only these ranks know: keys that others left in the store are not this one."""
        return f"{self._prefix}/{self._seed.hex()}/switches"

    def stop(self) -> None:
        """The process ends."""
        state.share_pp_trace_carrier(None)
        if self.carrier is not None:
            self.carrier.stop()

    def settle(self) -> None:
        """The store is about to go: wait a little where ranks still meet by way of it."""
        while self.carrier is not None and self.carrier.needs_store and self._patience_s > 0:
            self.carrier.hurry()
            time.sleep(0.01)
            self._patience_s -= 0.01

    def wait(self, timeout_s: float) -> None:
        """Wait a little for what `stop` ends."""
        if self.carrier is not None:
            self.carrier.wait(timeout_s)

    @property
    def _broadcasts(self) -> bool:
        return self.carrier is not None and self.carrier.state != "ended"

    # --- switches -----------------------------------------------------------------------------------------------------

    @property
    def _may_request(self) -> bool:
        """Not before what was asked last has begun: the other ranks must have heard of it to leave it out."""
        if self.carrier is not None and self.carrier.needs_store:
            return False
        return not self._switches or self._switches[0].from_iteration <= self._recorder.iteration

    def _request(self, groups: frozenset[str], for_iterations: int | None) -> None:
        """Rank 0 was asked to switch: decide from which iteration, tell all ranks."""
        wanted = groups & TrainingSpanGroup.ALL_GROUPS
        first = self._recorder.iteration + self._ahead()
        switches = [Switch(wanted, first)]
        if for_iterations is not None:
            before = self._switches[-1:]
            passing = before and before[0].from_iteration > self._recorder.iteration
            lasting = before[0].groups if passing else frozenset(state.enabled_span_groups)
            switches.append(Switch(lasting, first + for_iterations))
        self._switches = switches
        self._switch(switches)
        self._published = False
        self._next_look = 0.0

    def _ahead(self) -> int:
        """How many iterations ahead a switch must lie, by the pace of late."""
        before, since = self._paces[0]
        elapsed = max(time.monotonic() - since, 1e-3)
        pace = max(0.0, (self._recorder.iteration - before) / elapsed)
        return max(AHEAD_ITERATIONS, round(pace * (AHEAD_S_BROADCAST if self._broadcasts else AHEAD_S_STORE)))

    def _publish(self) -> None:
        message = json.dumps([[sorted(each.groups), each.from_iteration] for each in self._switches])
        self._with_store(lambda store: store.set(self._key, message))
        self._published = True

    def _look_at_store(self) -> None:
        def look(store: Client) -> None:
            if store.check([self._key]):
                found = json.loads(store.get(self._key))
                self._switch([Switch(frozenset(groups), int(first)) for groups, first in found])

        self._with_store(look)

    def _with_store(self, use: Callable[[Client], None]) -> None:
        try:
            use(self._access.client())
        except Exception as error:
            logger.debug("lens-auto: the store does not answer (%s); span groups cannot be switched any more", error)
            self._next_look = float("inf")
        finally:
            self._access.let_go()

    # --- the carrier --------------------------------------------------------------------------------------------------

    def derived_carrier(self, iteration: int) -> dict[str, str]:
        """What every rank can tell without a message: the trace of an iteration, and rank 0's span in it."""
        trace_id = ids.iteration_trace_id(self._seed, iteration)
        span_id = ids.iteration_span_id(self._seed, iteration, 0)
        return {"traceparent": f"00-{trace_id.hex()}-{span_id.hex()}-01", **self._headers}

    def current_carrier(self) -> dict[str, str]:
        """The carrier of the iteration that this process is in: what arrived from rank 0, else what can be derived."""
        arrived, carrier = self._newest
        iteration = self._recorder.iteration
        return dict(carrier) if arrived == iteration else self.derived_carrier(iteration)

    def _outgoing(self, iteration: int) -> tuple[dict[str, str], list[Switch]]:
        return self.derived_carrier(iteration), self._switches

    def _arrived(
        self, iteration: int, carrier: dict[str, str], switches: list[Switch], first_is_in: int, was_in: int
    ) -> None:
        self._newest = (iteration, carrier)
        self.skew.add(was_in - first_is_in)
        if switches and switches != self._switches:
            self._switches = switches
            self._switch(switches)
