"""How a function is wrapped, found under its other names, and put back."""

from __future__ import annotations

import copy
import sys
from abc import abstractmethod
from collections.abc import Callable, Collection
from types import FunctionType, ModuleType
from typing import Any, cast

import wrapt
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]

from lens_auto import guard, runtime
from lens_auto.guard import Site

Hook = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]


_WraptBase: Any = wrapt.FunctionWrapper.__mro__[1]


class _LensBound(wrapt.BoundFunctionWrapper[Any, Any]):
    """A bound method that copies and pickles as torch's own: by its instance and name."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        owner = self._self_instance if self._self_instance is not None else self._self_owner
        return getattr, (owner, self.__wrapped__.__name__)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._self_instance is None:
            return self
        return getattr(copy.deepcopy(self._self_instance, memo), self.__wrapped__.__name__)


class LensWrapper(wrapt.FunctionWrapper[Any, Any]):
    """A wrapt wrapper that copies and pickles as the function it stands for.

    wrapt's own refuse both; a model that holds `dist.all_reduce` must still deep-copy and pickle. The pickle is by
    name, byte for byte the one of the bare function, and loads where lens-auto is not installed.
    """

    __bound_function_wrapper__ = _LensBound

    @classmethod
    def of_module(cls, function: FunctionType, hook: Hook, gate: list[bool], module: ModuleType) -> LensWrapper:
        """Wrap a module's plain function, for a quarter of what a call of wrapt's own wrapper costs.

        wrapt asks such a function at each call for the `__self__` that it has not, and the error that is raised and
        dropped costs more than the rest (0.65 us of 0.82, wrapt 2.5 on Python 3.11). It does not ask where it holds an
        instance already; our hooks do not look at it. Where wrapt's base class takes other arguments, it goes its way.
        """
        wrapper = cls(function, hook, enabled=cast(Any, gate))
        try:
            _WraptBase.__init__(wrapper, function, module, hook, gate, "function")
        except TypeError:
            return cls(function, hook, enabled=cast(Any, gate))
        return wrapper

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __reduce_ex__(self, protocol: Any) -> str:
        return str(self.__wrapped__.__qualname__)

    def __reduce__(self) -> str:
        return str(self.__wrapped__.__qualname__)

    def __copy__(self) -> LensWrapper:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> LensWrapper:
        return self


class _Installed:
    """One wrapper at one place."""

    __slots__ = ("aliases", "attribute", "owner", "site", "wrapper")

    def __init__(self, owner: Any, attribute: str, wrapper: LensWrapper, site: Site) -> None:
        self.site = site
        self.owner = owner
        self.attribute = attribute
        self.wrapper = wrapper
        self.aliases: list[tuple[dict[str, Any], str]] = []


class Patches:
    """All wrappers of one instrumentor, in the order they were installed."""

    def __init__(self) -> None:
        self._installed: list[_Installed] = []
        self._registered: list[tuple[str, Callable[[], None]]] = []
        self.active = True

    def wrap(self, owner: Any, attribute: str, hook: Hook, site: Site) -> None:
        """Wrap `owner.attribute`, gated by the site; nothing where this version of torch has no such attribute.

        The name is looked up in the owner itself: for a class that inherits it there is nothing to wrap here.
        """
        original = vars(owner).get(attribute)
        if original is None or type(original) is LensWrapper:  # a module that re-exports what is wrapped already
            return
        if type(hook) is not FunctionType or type(site.gate) is not list:
            raise TypeError(f"no hook for {attribute}")
        if isinstance(owner, ModuleType) and type(original) is FunctionType:
            wrapper = LensWrapper.of_module(original, hook, site.gate, owner)
        else:
            wrapper = LensWrapper(original, hook, enabled=cast(Any, site.gate))
        if type(wrapper) is not LensWrapper:
            raise TypeError(f"no wrapper for {attribute}")
        installed = _Installed(owner, attribute, wrapper, site)
        setattr(owner, attribute, wrapper)
        self._installed.append(installed)

    def names(self) -> list[str]:
        """What is wrapped, as dotted names."""
        wrapped = [
            f"{getattr(each.owner, '__qualname__', each.owner.__name__)}.{each.attribute}" for each in self._installed
        ]
        return wrapped + [name for name, _ in self._registered if name]

    def register(self, name: str, undo: Callable[[], None]) -> None:
        """Something else that was put in, and how it is taken out again."""
        self._registered.append((name, undo))

    def wrap_aliases(self) -> None:
        """Give every module that already imported a wrapped function by `from` the wrapper, the same object.

        For a program that had imported torch before us. `P2POp` compares functions with the module's own by identity,
        so two different objects for one function would break it.
        """
        wanted = {id(each.wrapper.__wrapped__): each for each in self._installed if isinstance(each.owner, ModuleType)}
        if not wanted:
            return
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", None)
            if not isinstance(names, dict):
                continue
            for name, value in list(names.items()):
                each = wanted.get(id(value))
                if each is not None and value is each.wrapper.__wrapped__:
                    names[name] = each.wrapper
                    each.aliases.append((names, name))

    def restore(self) -> None:
        """Put back what was there, by identity. A wrapper that somebody else wrapped again is taken out from below;
        where that cannot be done it stays, and does nothing.
        """
        self.active = False
        for each in reversed(self._installed):
            each.site.retire()
            original = each.wrapper.__wrapped__
            for names, name in each.aliases:
                if names.get(name) is each.wrapper:
                    names[name] = original
            if vars(each.owner).get(each.attribute) is each.wrapper:
                setattr(each.owner, each.attribute, original)
            else:
                try:
                    wrapt.unwrap_object(each.owner, each.attribute, each.wrapper, missing_ok=True)
                except Exception as error:
                    guard.logger.debug("lens-auto: %s stays, switched off (%s)", each.attribute, error)
        self._restore_names()
        self._installed.clear()
        while self._registered:
            self._registered.pop()[1]()

    def _restore_names(self) -> None:
        """Names bound by `from ... import` after the wrapper was installed."""
        wrappers = {id(each.wrapper): each.wrapper for each in self._installed if isinstance(each.owner, ModuleType)}
        if not wrappers:
            return
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", None)
            if not isinstance(names, dict):
                continue
            for name, value in list(names.items()):
                while id(value) in wrappers:
                    names[name] = value = value.__wrapped__


def _hide_from_dynamo(trace_rules: ModuleType) -> None:
    """Tell torch.compile not to trace into our frames (`torch._dynamo.trace_rules.add`, 2.4 to 2.13).

    Otherwise it would compile a hook that runs in a graph break, guard on the recorder, and recompile at every call.
    """
    for package in ("lens_auto", "instrumentors"):
        trace_rules.add(package)


_hidden = False


def _register_hiding() -> None:
    global _hidden
    if not _hidden:
        _hidden = True
        wrapt.register_post_import_hook(guarded(_hide_from_dynamo), "torch._dynamo.trace_rules")


def guarded(install: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """A post-import hook that cannot break the program's import."""

    def hook(module: ModuleType) -> None:
        try:
            install(module)
        except Exception as error:
            guard.lost(module.__name__, error)

    return hook


class LensInstrumentor(BaseInstrumentor):  # type: ignore[misc]
    """What all of ours share: which modules they wait for, and how they come off again.

    Subclasses give `modules`: module name -> method that installs into it.
    """

    def instrumentation_dependencies(self) -> Collection[str]:
        """Nothing is required: without torch the hooks wait for an import that never comes."""
        return ()

    @abstractmethod
    def _modules(self) -> dict[str, Callable[[ModuleType, Patches], None]]:
        """Which modules to wait for, and what to do with each."""

    def _instrument(self, **kwargs: Any) -> None:
        try:  # OpenTelemetry's own loader leaves out all instrumentors after one that raises
            self._install_all()
        except Exception as error:
            guard.lost(type(self).__name__, error)

    def _install_all(self) -> None:
        if runtime.configure().disabled:
            return
        patches = self._patches = Patches()
        for name, install in self._modules().items():
            late = name in sys.modules

            def hook(module: ModuleType, install: Any = install, late: bool = late) -> None:
                if patches.active:
                    install(module, patches)
                    if late:
                        patches.wrap_aliases()

            wrapt.register_post_import_hook(guarded(hook), name)
        _register_hiding()

    def waits_for(self) -> list[str]:
        """Names of the modules that it patches once they are imported."""
        return list(self._modules())

    def patched(self) -> list[str]:
        """What it has wrapped so far."""
        patches: Patches | None = getattr(self, "_patches", None)
        return [] if patches is None else patches.names()

    def _uninstrument(self, **kwargs: Any) -> None:
        patches = getattr(self, "_patches", None)
        if patches is not None:
            patches.restore()
