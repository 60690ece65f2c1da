"""DistributedDataParallel, whose gradients the reducer averages in C++: what the reducer's own logger measures.

On CPU the logger is asked for every iteration (torch's default is every hundredth), unless the user chose a rate; on
CUDA its timers synchronise, so the rate stays as it is and what is sampled is read. No communication hook is installed.
The logger tells of an iteration when the next forward begins, and of the last one when the model goes or the process
ends.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from instrumentors import _comm
from instrumentors._patch import Hook, LensInstrumentor, Patches
from lens_auto import guard, runtime
from lens_auto.guard import Site
from lens_auto.recorder import c10d
from lens_auto.recorder.layout import Kind

if TYPE_CHECKING:
    from lens_auto.recorder.recorder import Recorder

_KIND = int(Kind.DDP)


class _Reducer:
    """One wrapped model: its logger, and the last iteration that was told."""

    __slots__ = ("buckets", "cuda", "flags", "group", "group_size", "logger", "rebuilt", "thread", "told")

    def __init__(self, recorder: Recorder, model: Any) -> None:
        parameter = next(iter(model.module.parameters()), None)
        self.cuda = parameter is not None and parameter.device.type != "cpu"
        self.logger = model.logger
        self.told = -1
        self.buckets = (0, 0)  # bytes of all, string id of their sizes
        self.rebuilt: int | None = None  # what `has_rebuilt_buckets` was when they were looked at
        self.flags = (0, 0)  # of the iteration that runs: what is to be recorded of it when the next one begins
        info = _comm.group_info(recorder, model.process_group)
        self.group = info.name
        self.group_size = info.size
        self.thread = recorder.thread().index
        # The logger prints what it samples under TORCH_DISTRIBUTED_DEBUG=DETAIL: then the user's rate stays.
        quiet = "DETAIL" not in str(_comm.torch.distributed.get_debug_level())
        if not self.cuda and quiet and model not in _rated:
            model.reducer._set_ddp_runtime_logging_sample_rate(1)

    def read(self, recorder: Recorder) -> None:
        """Record what the logger has newly measured: the iteration before this one, by the groups of that."""
        flags, self.flags = self.flags, (recorder.forward_backward, recorder.communication)
        if not any(flags):
            return
        found = self.logger._get_ddp_logging_data()
        numbers = found.ints_map
        iteration = int(numbers.get("iteration", 0)) - 1  # it counts the one that begins now
        if iteration <= self.told:
            return
        self.told = iteration
        if numbers.get("backward_compute_time_start", 0) < numbers.get("forward_compute_time_start", 1):
            return  # a forward without a backward: the rest is of an iteration before
        rebuilt = numbers.get("has_rebuilt_buckets")
        if rebuilt is None or rebuilt != self.rebuilt:  # not in each iteration: the texts name every parameter
            self.rebuilt = rebuilt
            self._look_at_buckets(recorder, found.strs_map)
        self._record(recorder, numbers, iteration, *flags)

    def _look_at_buckets(self, recorder: Recorder, texts: Any) -> None:
        sizes = str(texts.get("rebuilt_bucket_sizes") or texts.get("bucket_sizes") or "")
        nbytes = sum(int(size) for size in sizes.replace(" ", "").split(",") if size.isdigit())
        self.buckets = (nbytes, recorder.strings.id(sizes))

    def _record(self, recorder: Recorder, numbers: Any, iteration: int, phases: int, communication: int) -> None:
        to_monotonic = c10d.wall_offset_ns()  # the logger's times are wall clock time
        forward = numbers.get("forward_compute_time_start", 0)
        backward = numbers.get("backward_compute_time_start", 0)
        backward_end = numbers.get("backward_compute_time_end", 0)
        start, end = numbers.get("backward_comm_time_start", 0), numbers.get("backward_comm_time_end", 0)
        nbytes, sizes = self.buckets
        overlap = max(0, int(numbers.get("backward_compute_comm_overlap_time", 0)))
        if self.cuda:  # the stamps are the host's, when it enqueued; the durations are the device's
            backward_end = backward + numbers.get("backward_compute_time", 0)
            end = start + numbers.get("backward_comm_time", 0)

        def record(name: str, flags: int, begin: int, until: int, **fields: int) -> None:
            if flags and 0 < begin <= until:
                recorder.record(
                    _KIND,
                    begin + to_monotonic,
                    until + to_monotonic,
                    self.thread,
                    flags,
                    recorder.strings.id(name),
                    self.group,
                    group_size=self.group_size,
                    a=iteration,
                    **fields,
                )

        forward_end = forward + numbers.get("forward_compute_time", 0) if self.cuda else backward
        record("forward", phases, forward, forward_end)
        record("backward", phases, backward, backward_end)
        record(
            "communication",
            communication,
            start,
            end,
            nbytes=nbytes,
            detail=sizes,
            exposed_ns=max(1, end - start - overlap),
            b=overlap,
            c=0 if c10d.keeps_flight_records() else max(1, int(numbers.get("num_buckets_reduced", 0))),
        )

    def flush(self) -> None:
        """The last iteration: make the logger take it over, as the next forward would have, and record it."""
        recorder = runtime.recorder
        logger, self.logger = self.logger, None
        if recorder is None or logger is None or self.cuda:
            return
        try:
            logger.set_runtime_stats_and_log()
            self.logger = logger
            self.read(recorder)
        except Exception as error:
            guard.failed("DistributedDataParallel._pre_forward", error)
        finally:
            self.logger = None


_reducers: weakref.WeakKeyDictionary[Any, _Reducer] = weakref.WeakKeyDictionary()
_rated: weakref.WeakSet[Any] = weakref.WeakSet()  # models whose user chose how often the logger samples
_registered = False


def _flush_all() -> None:
    for each in list(_reducers.values()):
        each.flush()


def _after_fork() -> None:
    global _registered
    _reducers.clear()
    _registered = False


os.register_at_fork(after_in_child=_after_fork)


def _register_end() -> None:
    """Before the recorder closes: atexit, and where that does not run multiprocessing's finalizers."""
    global _registered
    if _registered:
        return
    _registered = True
    from multiprocessing import util

    atexit.register(_flush_all)
    util.Finalize(None, _flush_all, exitpriority=-50)


def _forward_hook(site: Site) -> Hook:
    """`_pre_forward`, which `forward` calls and the composable `replicate` as well (2.1 to 2.13)."""

    def hook(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = runtime.recorder
        reducer: _Reducer | None = None
        if recorder is not None and getattr(instance, "logger", None) is not None:
            try:
                reducer = _reducers.get(instance)
                if reducer is None:
                    reducer = _reducers[instance] = _Reducer(recorder, instance)
                    weakref.finalize(instance, reducer.flush).atexit = False
                    _register_end()
            except Exception as error:
                site.fault(error)
        result = wrapped(*args, **kwargs)
        if reducer is not None and recorder is not None:
            try:
                reducer.read(recorder)
                if not any(reducer.flags):
                    site.refresh()
            except Exception as error:
                site.fault(error)
        return result

    return hook


def _rate_hook(site: Site) -> Hook:
    """`_set_ddp_runtime_logging_sample_rate` (2.1 to 2.13)."""

    def hook(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            _rated.add(instance)
        except Exception as error:
            site.fault(error)
        return wrapped(*args, **kwargs)

    return hook


class DDPInstrumentor(LensInstrumentor):
    """Two private methods of `DistributedDataParallel`: no hook of torch's is taken, no method that users override."""

    def _modules(self) -> dict[str, Callable[[ModuleType, Patches], None]]:
        return {"torch.nn.parallel.distributed": self._install}

    @staticmethod
    def _install(module: ModuleType, patches: Patches) -> None:
        import torch.distributed.distributed_c10d as distributed

        _comm.bind(distributed)
        site = guard.site(
            "DistributedDataParallel._pre_forward",
            lambda: (
                bool({"communication", "forward_backward"} & runtime.groups)
                or any(any(each.flags) for each in list(_reducers.values()))
            ),
        )
        patches.wrap(module.DistributedDataParallel, "_pre_forward", _forward_hook(site), site)
        rate = "_set_ddp_runtime_logging_sample_rate"
        rated = guard.site(f"DistributedDataParallel.{rate}")
        patches.wrap(module.DistributedDataParallel, rate, _rate_hook(rated), rated)
