"""Exit codes of ranks, in the process that starts them: torchrun's agent, or a parent of multiprocessing's children."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from instrumentors._patch import Hook, LensInstrumentor, Patches
from lens_auto import guard, runtime
from lens_auto.guard import Site

_cwd = os.getcwd()  # where the run directory is, also where the program goes elsewhere later


def _note(pid: int, code: int, rank: int | None, by_launcher: bool, message: str = "") -> None:
    from lens_auto.recorder import exits

    run_id = os.environ.get(runtime.RUN_ID_VARIABLE, "")
    exits.note(exits.describe(pid, code, rank, by_launcher, message), run_id, _cwd)


# --- torchrun ---------------------------------------------------------------------------------------------------------


class _Agent:
    """The workers of one attempt, as torchelastic's `PContext` has them (seen in 2.4 to 2.13)."""

    def __init__(self, context: Any) -> None:
        self.context = context

    def codes(self) -> dict[int, tuple[int, int]]:
        """Process id and exit status of the workers that ended, by local rank, where torch has asked already."""
        found: dict[int, tuple[int, int]] = {}
        for local_rank, handler in dict(getattr(self.context, "subprocess_handlers", None) or {}).items():
            process = handler.proc
            if process.returncode is not None:
                found[int(local_rank)] = (int(process.pid), int(process.returncode))
        processes = getattr(getattr(self.context, "_pc", None), "processes", None) or []
        for local_rank, process in enumerate(processes):
            if process.exitcode is not None:
                found[local_rank] = (int(process.pid), int(process.exitcode))
        return found

    def rank(self, local_rank: int) -> int | None:
        """Global rank of a worker."""
        try:
            return int(self.context.envs[local_rank]["RANK"])
        except (AttributeError, LookupError, TypeError, ValueError):
            return None

    def message(self, local_rank: int) -> str:
        """What the worker wrote into its error file."""
        import json

        try:
            with open(self.context.error_files[local_rank], "rb") as file:
                found = json.loads(file.read(1 << 20))
            message = found["message"]
            return str(message.get("message", message) if isinstance(message, dict) else message)
        except Exception:
            return ""

    def tell(self, by_launcher: bool) -> None:
        """Write down what is known now and was not before."""
        for local_rank, (pid, code) in self.codes().items():
            _note(pid, code, self.rank(local_rank), by_launcher and code < 0, self.message(local_rank) if code else "")


def _close_hook(site: Site) -> Hook:
    """`PContext.close`: who ended before it did so alone, who ends in it is ended by the agent."""

    def hook(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            _Agent(instance).tell(by_launcher=False)
        except Exception as error:
            site.fault(error)
        try:
            return wrapped(*args, **kwargs)
        finally:
            try:
                _Agent(instance).tell(by_launcher=True)
            except Exception as error:
                site.fault(error)

    return hook


# --- multiprocessing --------------------------------------------------------------------------------------------------


def _poll_hook(site: Site) -> Hook:
    """`Popen.poll` of multiprocessing, which asks for the end of a child (3.10 to 3.14)."""

    def hook(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = instance.returncode
        code = wrapped(*args, **kwargs)
        if code is not None and before is None and runtime.recorder is None:
            try:
                _note(int(instance.pid), int(code), None, False)
            except Exception as error:
                site.fault(error)
        return code

    return hook


class ExitsInstrumentor(LensInstrumentor):
    """`PContext.close` of torchelastic, `Popen.poll` of multiprocessing. Children of a rank are not asked for."""

    def _modules(self) -> dict[str, Callable[[ModuleType, Patches], None]]:
        return {
            "torch.distributed.elastic.multiprocessing.api": self._install_elastic,
            "multiprocessing.popen_fork": self._install_multiprocessing,
        }

    @staticmethod
    def _install_elastic(module: ModuleType, patches: Patches) -> None:
        site = guard.site("torch.distributed.elastic.PContext.close")
        patches.wrap(module.PContext, "close", _close_hook(site), site)

    @staticmethod
    def _install_multiprocessing(module: ModuleType, patches: Patches) -> None:
        site = guard.site("multiprocessing.Popen.poll")
        patches.wrap(module.Popen, "poll", _poll_hook(site), site)
