"""Ways to the job's store that are ours alone, and that leave no trace when the store goes away.

The program's own client is never used, and never kept alive: on rank 0 it is the server, whose keys must be gone when
the program makes the next one on the same port. A client of a server that is gone is not used either: torch prints a
stack trace of C++ where it fails, and waits where it connects. Whether the server is there can be seen from outside: a
socket whose other end has closed says so to `poll`.
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from datetime import timedelta
from typing import Any, Protocol

WAIT_TIMEOUT_S = 20.0
WAIT_LOOK_S = 0.02


class Store(Protocol):
    """The part of `torch.distributed.Store` that we use."""

    def set(self, key: str, value: str | bytes, /) -> Any: ...
    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...


class StoreGone(ConnectionError):
    """The server has ended, or the program has let go of its store."""

    def __init__(self) -> None:
        super().__init__("the job's store is gone")


class Client:
    """A client that looks whether the server is there before each operation, and raises StoreGone if not."""

    def __init__(self, access: StoreAccess, raw: Any) -> None:
        self._access = access
        self._raw = raw

    def set(self, key: str, value: str | bytes) -> None:
        """As torch's."""
        self._there().set(key, value)

    def check(self, keys: list[str]) -> bool:
        """As torch's."""
        return bool(self._there().check(keys))

    def get(self, key: str) -> bytes:
        """As torch's."""
        found: bytes = self._there().get(key)
        return found

    def close(self) -> None:
        """Let the server have its descriptor back."""
        self._raw = None

    def _there(self) -> Any:
        self._access.ensure()
        if self._raw is None:
            raise StoreGone
        return self._raw


def patient_store(client: Client, prefix: str, stopping: threading.Event) -> Any:
    """A store for a process group of our own: its waits end when we are to stop, or with the server, without a word.

    torch's own waits in C++ until the timeout, and prints a stack trace where the server goes meanwhile.
    """
    from torch._C._distributed_c10d import Store as TorchStore

    class PatientStore(TorchStore):
        def set(self, key: str, value: Any) -> None:
            client.set(f"{prefix}/{key}", value)

        def check(self, keys: list[str]) -> bool:
            return client.check([f"{prefix}/{key}" for key in keys])

        def get(self, key: str) -> bytes:
            self.wait([key])
            return client.get(f"{prefix}/{key}")

        def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
            deadline = time.monotonic() + (timeout.total_seconds() if timeout is not None else WAIT_TIMEOUT_S)
            while not self.check(keys):
                if stopping.wait(WAIT_LOOK_S):
                    raise InterruptedError("this process ends")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no rank has set {keys[:4]}")

    return PatientStore()


class StoreAccess:
    """Our clients of one store.

    Args:
        store: the program's; only a weak reference is kept.
    """

    def __init__(self, store: Any) -> None:
        self._store = weakref.ref(store)
        self._port = _server_port(store)
        self._client: Client | None = None
        self._sockets: list[tuple[int, str]] = []
        self._looked = False

    @property
    def lasts(self) -> bool:
        """Whether a client may be kept. The file of a FileStore goes when nobody has it open any more."""
        return self._port is not None

    def client(self) -> Client:
        """The client of the housekeeper, made when it is first needed.

        Raises:
            StoreGone: there is nothing to talk to.
            Exception: whatever a store raises that cannot be cloned.
        """
        if self._client is None:
            self._client = self.another()
        return self._client

    def let_go(self) -> None:
        """Keep no client that must not last."""
        if not self.lasts:
            self._client = None

    def another(self) -> Client:
        """A client of its own, for another thread. Raises as `client` does."""
        store = self._store()
        if store is None:
            raise StoreGone
        self.ensure()
        client = Client(self, store.clone())
        self._looked = False
        return client

    def is_gone(self) -> bool:
        """Whether the server has closed our connections; False also where that cannot be seen."""
        if self._port is None:
            return self._store() is None
        if not self._looked:
            self._looked = True
            self._sockets = _sockets_to(self._port)
        poll = select.poll()
        watched = 0
        for descriptor, inode in self._sockets:
            if _inode(descriptor) == inode:  # else it was closed, and its number may be another's by now
                poll.register(descriptor, select.POLLRDHUP)
                watched += 1
        return any(event & (select.POLLRDHUP | select.POLLHUP | select.POLLERR) for _, event in poll.poll(0))

    def ensure(self) -> None:
        """Raises StoreGone where the store is gone."""
        if self.is_gone():
            raise StoreGone


def _server_port(store: Any) -> int | None:
    """The port of a TCPStore, however it is wrapped; None for other kinds."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    for _ in range(32):
        if not isinstance(store, PrefixStore):
            break
        store = store.underlying_store
    return int(store.port) if isinstance(store, TCPStore) else None


def _sockets_to(port: int) -> list[tuple[int, str]]:
    """Descriptors of this process that are connected to a port, with what they name; empty where that is not told."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/self/net/{table}") as file:
                rows = file.readlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split(maxsplit=10)
            if int(fields[2].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    try:
        descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return []
    return [(each, inode) for each in descriptors if (inode := _inode(each)) in inodes]


def _inode(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
