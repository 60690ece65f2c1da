"""A switch for tests: makes one function of ours fail, so that it can be seen that the program does not mind.

`NEMO_LENS_FAULT=<module>.<qualified name>:<mode>`, read once at interpreter start (`guard`); where it is unset, none of
this is imported. Modes: `raise` an exception, return `garbage`, `sleep` before doing the work.

The function keeps its identity: its code is exchanged, so that whoever holds it, by whatever name, has the faulty one.
"""

from __future__ import annotations

import gc
import importlib
import time
from importlib.util import find_spec
from types import CodeType, FunctionType, ModuleType
from typing import Any

import wrapt

VARIABLE = "NEMO_LENS_FAULT"
MODES = ("raise", "garbage", "sleep")
SLEEP_S = 0.002
_LOCALS = "<locals>"
_OURS = ("lens_auto", "instrumentors")


class Fault(RuntimeError):
    """What a faulty function raises."""


class Garbage:
    """What a faulty function returns: an object that can do nothing."""

    __slots__ = ()


class _Faulty:
    """The function that is faulty now.

    Attributes:
        mode: how.
        struck: how often it was called.
        real: does what it would do; None for one inside another.
        code: what its code was.
        parent: the function that it is inside of, with that one's code; None: it stands alone.
    """

    def __init__(self, mode: str, code: CodeType, real: FunctionType | None) -> None:
        self.mode = mode
        self.struck = 0
        self.real = real
        self.code = code
        self.replacement = _replacement(code)
        self.parent: tuple[FunctionType, CodeType] | None = None

    def act(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.struck += 1
        if self.mode == "raise":
            raise Fault("put in by a test")
        if self.mode == "garbage":
            return Garbage()
        time.sleep(SLEEP_S)
        assert self.real is not None
        return self.real(*args, **kwargs)


current: _Faulty | None = None


def install(value: str) -> None:
    """Put the fault in that the environment names, as soon as its module is imported.

    Raises:
        ValueError: it names no mode, or nothing of ours.
    """
    name, _, mode = value.rpartition(":")
    if mode not in MODES or name.split(".")[0] not in _OURS:
        raise ValueError(f"{VARIABLE}={value!r}: expected a dotted name of ours, and one of {', '.join(MODES)}")

    def put_in(module: ModuleType) -> None:
        put(name, mode)

    wrapt.register_post_import_hook(put_in, _module_of(name))


def put(name: str, mode: str) -> None:
    """Make a function fail from now on; what was faulty before is as it was.

    Args:
        name: dotted; of a function inside another with `<locals>`.
        mode: one of `MODES`.

    Raises:
        LookupError: there is no such function.
        ValueError: a function inside another cannot sleep.
    """
    global current
    remove()
    module = _module_of(name)
    owner: Any = importlib.import_module(module)
    path = name[len(module) + 1 :].split(".")
    outer = path[: path.index(_LOCALS)] if _LOCALS in path else path
    for part in outer:
        owner = vars(owner)[part]
    function = _function_of(owner)
    inner = [part for part in path[len(outer) :] if part != _LOCALS]
    if inner and mode == "sleep":
        raise ValueError(f"{name}: it is made anew at each call of another, and cannot sleep")
    code = _code_inside(function.__code__, inner)
    if not inner:
        real = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
        real.__kwdefaults__ = function.__kwdefaults__
        current = _Faulty(mode, code, real)
        function.__code__ = current.replacement
        current.parent = (function, code)
        return
    current = _Faulty(mode, code, None)
    current.parent = (function, function.__code__)
    function.__code__ = _with(function.__code__, code, current.replacement)
    _exchange(code, current.replacement)


def remove() -> None:
    """Everything is as it was."""
    global current
    if current is not None and current.parent is not None:
        function, code = current.parent
        function.__code__ = code
        if current.real is None:
            _exchange(current.replacement, current.code)
    current = None


def _exchange(there: CodeType, wanted: CodeType) -> None:
    """In all functions that were made so far."""
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__ is there:
            each.__code__ = wanted


def _template(*args: Any, **kwargs: Any) -> Any:
    from lens_auto import faults

    return faults.current.act(args, kwargs)  # type: ignore[union-attr]


def _replacement(code: CodeType) -> CodeType:
    """Code that takes any arguments, and fits into a function with this one's closure."""
    return _template.__code__.replace(
        co_freevars=code.co_freevars,
        co_name=code.co_name,
        co_filename=code.co_filename,
        co_firstlineno=code.co_firstlineno,
    )


def _code_inside(code: CodeType, names: list[str]) -> CodeType:
    for name in names:
        found = [each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == name]
        if not found:
            raise LookupError(f"{code.co_name} has no {name} inside")
        code = found[0]
    return code


def _with(code: CodeType, there: CodeType, wanted: CodeType) -> CodeType:
    """Code with another in the place of one that is somewhere inside it."""
    constants = []
    for each in code.co_consts:
        if each is there:
            constants.append(wanted)
        else:
            constants.append(_with(each, there, wanted) if isinstance(each, CodeType) else each)
    return code.replace(co_consts=tuple(constants))


def _function_of(value: Any) -> FunctionType:
    """The Python function of a function, method, static or class method, or property."""
    value = getattr(value, "fget", value)
    value = getattr(value, "__func__", value)
    value = getattr(value, "__wrapped__", value) if not isinstance(value, FunctionType) else value
    if not isinstance(value, FunctionType):
        raise LookupError(f"{value!r} is no function of ours")
    return value


def _module_of(name: str) -> str:
    """The longest beginning of a name that is a module, without importing it."""
    parts = name.split(f".{_LOCALS}")[0].split(".")
    for length in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:length])
        try:
            if find_spec(module) is not None:
                return module
        except ModuleNotFoundError:  # a class is no package
            continue
    raise LookupError(f"{name} is in no module")
