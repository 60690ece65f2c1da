"""DataLoader: waiting for a batch, and starting the workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from instrumentors._patch import LensInstrumentor, Patches
from instrumentors._phase import Call, phase_hook
from instrumentors._weak import ByIdentity
from lens_auto import guard
from lens_auto.recorder.layout import Flag, Kind, Phase

if TYPE_CHECKING:
    from lens_auto.recorder.recorder import Recorder, ThreadState


class _Pass:
    """One pass over a loader: from `DataLoader.__iter__` to the last fetch."""

    __slots__ = ("batch_size", "fetched", "number", "workers")

    def __init__(self, number: int, workers: int, iterator: Any) -> None:
        self.number = number
        self.workers = workers
        self.fetched = 0
        # The loader's batch sampler; where batching is off, its sampler, which has no batch size.
        size = getattr(getattr(iterator, "_index_sampler", None), "batch_size", 0)
        self.batch_size = size if type(size) is int and 0 < size < 1 << 32 else 0


_numbers = itertools.count(1)
_passes: ByIdentity[_Pass] = ByIdentity()


def _write_start(
    recorder: Recorder,
    state: ThreadState,
    call: Call,
    start: int,
    end: int,
    iterator: Any,
    error: BaseException | None,
) -> None:
    workers = int(getattr(call[0], "num_workers", 0) or 0)
    this = _Pass(next(_numbers), workers, iterator)
    if iterator is not None:
        _passes[iterator] = this  # persistent workers: the same iterator starts a new pass
    flags = recorder.data_loading | (Flag.FAILED if error is not None else 0)
    name = recorder.strings.id("DataLoader.__iter__")
    recorder.record(Kind.LOADER_START, start, end, state.index, flags, name, a=this.number, b=workers)


def _write_fetch(
    recorder: Recorder,
    state: ThreadState,
    call: Call,
    start: int,
    end: int,
    batch: Any,
    error: BaseException | None,
) -> None:
    iterator = call[0]
    this = _passes.get(iterator)
    if this is None:  # the loader was started before we were
        this = _passes[iterator] = _Pass(next(_numbers), int(getattr(iterator, "_num_workers", 0) or 0), iterator)
    flags, detail = recorder.data_loading, 0
    if isinstance(error, StopIteration):
        flags |= Flag.EXHAUSTED
    elif error is not None:
        flags |= Flag.FAILED
        detail = recorder.strings.id(type(error).__name__)
    recorder.fetches += 1
    name = recorder.strings.id("DataLoader.__next__")
    recorder.record(
        *(Kind.FETCH, start, end, state.index, flags, name),
        seq=this.fetched,
        detail=detail,
        a=this.number,
        b=this.workers,
        c=this.batch_size,
    )
    this.fetched += 1


class DataLoaderInstrumentor(LensInstrumentor):
    """`_BaseDataLoaderIter.__next__` (2.4 to 2.13), which every iterator of `torch.utils.data` and torchdata calls, and
    `DataLoader.__iter__`, which starts workers.
    """

    def _modules(self) -> dict[str, Callable[[ModuleType, Patches], None]]:
        return {"torch.utils.data.dataloader": self._install}

    @staticmethod
    def _install(module: ModuleType, patches: Patches) -> None:
        start = guard.site("torch.utils.data.DataLoader.__iter__")
        patches.wrap(module.DataLoader, "__iter__", phase_hook(start, Phase.DATA_LOADING, None, _write_start), start)
        fetch = guard.site("torch.utils.data.DataLoader.__next__")
        hook = phase_hook(fetch, Phase.DATA_LOADING, Phase.FORWARD, _write_fetch)
        patches.wrap(module._BaseDataLoaderIter, "__next__", hook, fetch)
