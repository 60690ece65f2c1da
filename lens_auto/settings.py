"""What the runtime reads from the environment, parsed once per process.

Unlike `NemoLensConfig`, which a program builds and which raises on bad input, reading the settings never raises: it
runs before the user's program, which must start whatever the environment holds. What is wrong is kept in `problems`,
one line each. Nothing heavy is imported here: this runs at the start of every interpreter.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lens_auto.groups import ZERO_CODE_PRESET, TrainingSpanGroup

if TYPE_CHECKING:
    from collections.abc import Mapping

DISABLED = "NEMO_LENS_DISABLED"
ENABLED = "NEMO_LENS_ENABLED"
SDK_DISABLED = "OTEL_SDK_DISABLED"
SPAN_GROUPS = "NEMO_LENS_SPAN_GROUPS"
HANG_TIMEOUT_S = "NEMO_LENS_HANG_TIMEOUT_S"
SPOOL_DIR = "NEMO_LENS_SPOOL_DIR"
RUN_DIR = "NEMO_LENS_RUN_DIR"
RUN_ID = "NEMO_LENS_RUN_ID"
MAX_RUN_BYTES = "NEMO_LENS_MAX_RUN_BYTES"
EXIT_TIMEOUT_S = "NEMO_LENS_EXIT_TIMEOUT_S"
ITERATION_OPTIMIZER = "NEMO_LENS_ITERATION_OPTIMIZER"
QUIET = "NEMO_LENS_QUIET"
PROPAGATION = "NEMO_LENS_PROPAGATION"
EXPORT_STRATEGY = "NEMO_LENS_EXPORT_STRATEGY"
WINDOW = "NEMO_LENS_WINDOW"
DEVICE_TIMES = "NEMO_LENS_DEVICE_TIMES"
EXPORTER = "NEMO_LENS_EXPORTER"
TRACES_EXPORTER = "OTEL_TRACES_EXPORTER"
ENDPOINTS = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
    "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT",
)

SWITCHES = (
    "NEMO_LENS_TRACES_ENABLED",
    "NEMO_LENS_METRICS_ENABLED",
    "NEMO_LENS_LOGS_ENABLED",
    "NEMO_LENS_SAMPLER_ENABLED",
)

# Every variable of ours, also those that are read elsewhere; what else begins like them is most likely a slip.
PREFIX = "NEMO_LENS_"
_KEYS = (
    "CONFIG_PREFIX DEVICE_TIMES DISABLED ENABLED EXIT_TIMEOUT_S EXPORTER EXPORTER_LINGER_S EXPORT_RANK "
    "EXPORT_SAMPLE_RATE EXPORT_STRATEGY FAULT FILE HANG_TIMEOUT_S ITERATION_OPTIMIZER LOGS_ENABLED MAX_RUN_BYTES "
    "METRICS_ENABLED OTLP_ENCODER PROPAGATION QUIET RUN_DIR RUN_ID SAMPLER_ENABLED SPAN_GROUPS SPOOL_DIR "
    "TRACES_ENABLED USER_ID WINDOW"
)
VARIABLES = tuple(PREFIX + key for key in _KEYS.split())

DEFAULT_MAX_RUN_BYTES = 1 << 30
PROPAGATIONS = ("broadcast", "derived", "off")
# Exporters that need no endpoint: nothing, standard output, the run directory.
LOCAL_EXPORTERS = frozenset({"none", "console", "lens_file"})

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
# Powers of 1024 whichever way they are written: the limit is compared with sizes of files, not with a disk's label.
_BYTE_UNITS = {
    suffix: factor
    for unit, factor in (("K", 1 << 10), ("M", 1 << 20), ("G", 1 << 30))
    for suffix in (unit, unit + "B", unit + "IB")
} | {"": 1, "B": 1}
_SHOWN_CHARACTERS = 80


def parse_bool(text: str) -> bool | None:
    """Reads 1/0, true/false, yes/no, on/off in any case; None when the text is none of them."""
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    return None


def parse_bytes(text: str) -> int | None:
    """Reads a size above 0, such as `1073741824`, `512M` or `1 GiB` (powers of 1024); None when it is not one."""
    word = text.strip().upper()
    digits = len(word) - len(word.lstrip("0123456789"))
    factor = _BYTE_UNITS.get(word[digits:].strip())
    if not digits or factor is None:
        return None
    try:
        size = int(word[:digits]) * factor
    except ValueError:  # more digits than int() accepts
        return None
    return size or None


def parse_window(text: str) -> tuple[tuple[int, int], ...] | None:
    """Reads iteration ranges such as `10-19,40`, both ends included, sorted; None when the text is malformed."""
    ranges: list[tuple[int, int]] = []
    for entry in text.split(","):
        if not entry.strip():
            continue
        first_text, dash, last_text = entry.partition("-")
        try:
            first = _iteration_number(first_text)
            last = _iteration_number(last_text) if dash else first
        except ValueError:
            return None
        if last < first:
            return None
        ranges.append((first, last))
    return tuple(sorted(ranges)) or None


def _iteration_number(text: str) -> int:
    word = text.strip()
    if not (word.isascii() and word.isdigit()):
        raise ValueError(word)
    return int(word)


class _Environment:
    """Reads typed values from variables, noting where each came from and what was wrong with it."""

    __slots__ = ("_environ", "problems", "sources")

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.problems: list[str] = []
        self.sources: dict[str, str] = {}

    def text(self, variable: str) -> str | None:
        """The value, or None where the variable is unset or blank: OpenTelemetry treats both alike."""
        value = self._environ.get(variable)
        return value if value and not value.isspace() else None

    def take(self, field: str, variable: str) -> str | None:
        """The value as it stands, as the source of `field`."""
        value = self.text(variable)
        if value is not None:
            self.sources[field] = variable
        return value

    def reject(self, variable: str, value: str, valid: str, now: str) -> None:
        shown = value if len(value) <= _SHOWN_CHARACTERS else value[: _SHOWN_CHARACTERS - 3] + "..."
        # repr keeps line breaks and control characters out of the line.
        self.problems.append(f"{variable}={shown!r} is not valid: {valid}; {now}")

    def boolean(self, variable: str, now: str) -> bool | None:
        """The value; None where it is unset or, after a complaint, not a boolean."""
        value = self.text(variable)
        parsed = parse_bool(value) if value is not None else None
        if value is not None and parsed is None:
            self.reject(variable, value, "expected 1/0, true/false, yes/no or on/off", now)
        return parsed

    def seconds(self, field: str, variable: str, default: float, zero_means: str) -> float:
        value = self.text(variable)
        if value is None:
            return default
        try:
            parsed = float(value)
        except ValueError:
            parsed = -1.0
        if not 0 <= parsed < float("inf"):
            valid = f"expected seconds, 0 or more (0 {zero_means})"
            self.reject(variable, value, valid, f"using the default, {default:g}")
            return default
        self.sources[field] = variable
        return parsed


class Settings:
    """The runtime's settings. Build them with `from_env`; a bare `Settings()` holds the defaults.

    Attributes:
        disabled: Leave no trace of us in this process.
        groups: The span groups that are on at start.
        hang_timeout_s: After how many seconds in one blocking call a rank counts as hung; 0: no watch.
        spool_dir: Where open segments go; None: chosen by the recorder.
        run_dir: The run directory itself; None: one named by the run id under `./lens-runs`.
        run_id: The id shared by all ranks; None: not known yet.
        max_run_bytes: How much one node may keep of a run.
        exit_timeout_s: How long a rank may wait for others at its exit.
        iteration_optimizer: What counts iterations: `first`, `last` or a class name; None: found by repetition.
        quiet: Print nothing at the end of a run.
        propagation: How ranks share an iteration's trace: `broadcast`, `derived` or `off`.
        export_strategy: Which ranks export, by name. It may be registered later, so the name is not checked here.
        window: Ranges of iterations to record, both ends included; empty: all.
        device_times: Events on a GPU's streams tell what it took.
        endpoint_configured: Spans are to be sent somewhere, not (only) kept in the run directory.
        console: Spans are to be printed.
        problems: One line for each value that could not be used.
    """

    __slots__ = (
        "_sources",
        "console",
        "device_times",
        "disabled",
        "endpoint_configured",
        "exit_timeout_s",
        "export_strategy",
        "groups",
        "hang_timeout_s",
        "iteration_optimizer",
        "max_run_bytes",
        "problems",
        "propagation",
        "quiet",
        "run_dir",
        "run_id",
        "spool_dir",
        "window",
    )

    def __init__(self) -> None:
        self.disabled: bool = False
        self.groups: frozenset[str] = TrainingSpanGroup.resolve(ZERO_CODE_PRESET)
        self.hang_timeout_s: float = 300.0
        self.spool_dir: str | None = None
        self.run_dir: str | None = None
        self.run_id: str | None = None
        self.max_run_bytes: int = DEFAULT_MAX_RUN_BYTES
        self.exit_timeout_s: float = 5.0
        self.iteration_optimizer: str | None = None
        self.quiet: bool = False
        self.propagation: str = "broadcast"
        self.export_strategy: str = "single_rank"
        self.window: tuple[tuple[int, int], ...] = ()
        self.device_times: bool = True
        self.endpoint_configured: bool = False
        self.console: bool = False
        self.problems: list[str] = []
        self._sources: dict[str, str] = {}

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Reads every setting from `environ`. Never raises; what could not be used is in `problems`."""
        settings = cls()
        env = _Environment(environ)
        settings.problems = env.problems
        settings._sources = env.sources

        settings._read_disabled(env)
        settings._read_groups(env)
        settings.hang_timeout_s = env.seconds("hang_timeout_s", HANG_TIMEOUT_S, 300.0, "turns the hang watch off")
        settings.exit_timeout_s = env.seconds("exit_timeout_s", EXIT_TIMEOUT_S, 5.0, "does not wait")
        settings.spool_dir = env.take("spool_dir", SPOOL_DIR)
        settings.run_dir = env.take("run_dir", RUN_DIR)
        settings.run_id = _stripped(env.take("run_id", RUN_ID))
        settings._read_max_run_bytes(env)
        settings._read_iteration_optimizer(env)
        settings._read_quiet(env)
        settings._read_propagation(env)
        settings.export_strategy = _stripped(env.take("export_strategy", EXPORT_STRATEGY)) or "single_rank"
        settings._read_window(env)
        settings._read_device_times(env)
        settings._read_destination(env)
        for variable in SWITCHES:  # read elsewhere, where nobody would say that they are wrong
            env.boolean(variable, "it is ignored")
        settings.problems += _unknown_variables(environ)
        return settings

    def describe(self) -> list[tuple[str, str, str]]:
        """Every setting as (name, value, source); the source is a variable's name or `default`."""
        groups = ", ".join(sorted(self.groups)) or "none"
        window = ", ".join(f"{first}-{last}" for first, last in self.window)
        values: list[tuple[str, str]] = [
            ("disabled", _yes_no(self.disabled)),
            ("groups", groups),
            ("hang_timeout_s", f"{self.hang_timeout_s:g}" if self.hang_timeout_s else "0 (no hang watch)"),
            ("spool_dir", self.spool_dir or "chosen at start"),
            ("run_dir", self.run_dir or "./lens-runs/<run id>"),
            ("run_id", self.run_id or "chosen at start"),
            ("max_run_bytes", str(self.max_run_bytes)),
            ("exit_timeout_s", f"{self.exit_timeout_s:g}"),
            ("iteration_optimizer", self.iteration_optimizer or "found by repetition"),
            ("quiet", _yes_no(self.quiet)),
            ("propagation", self.propagation),
            ("export_strategy", self.export_strategy),
            ("window", window or "all iterations"),
            ("device_times", _yes_no(self.device_times)),
            ("endpoint_configured", _yes_no(self.endpoint_configured)),
            ("console", _yes_no(self.console)),
        ]
        return [(name, value, self._sources.get(name, "default")) for name, value in values]

    def _read_disabled(self, env: _Environment) -> None:
        enabled = env.boolean(ENABLED, "it is ignored")
        answers = [
            (DISABLED, env.boolean(DISABLED, "it is ignored")),
            (ENABLED, not enabled if enabled is not None else None),
            (SDK_DISABLED, None),
        ]
        value = env.text(SDK_DISABLED)
        if value is not None:
            # OpenTelemetry's specification: only "true", in any case, is true, and everything else is false.
            word = value.strip().lower()
            answers[-1] = (SDK_DISABLED, word == "true")
            if word not in ("true", "false"):
                env.reject(SDK_DISABLED, value, "expected true or false", "OpenTelemetry reads it as false")
        given = [(variable, answer) for variable, answer in answers if answer is not None]
        # One "off" is enough; the source is the variable that decided.
        for variable, answer in sorted(given, key=lambda pair: not pair[1])[:1]:
            self.disabled = answer
            env.sources["disabled"] = variable

    def _read_groups(self, env: _Environment) -> None:
        value = env.text(SPAN_GROUPS)
        if value is None:
            return
        try:
            self.groups = TrainingSpanGroup.resolve(value)
        except ValueError as error:
            env.reject(SPAN_GROUPS, value, str(error), f"using the default, {ZERO_CODE_PRESET}")
        else:
            env.sources["groups"] = SPAN_GROUPS

    def _read_quiet(self, env: _Environment) -> None:
        parsed = env.boolean(QUIET, "the line at the end of a run is printed")
        if parsed is not None:
            self.quiet = parsed
            env.sources["quiet"] = QUIET

    def _read_device_times(self, env: _Environment) -> None:
        parsed = env.boolean(DEVICE_TIMES, "times of GPUs are taken")
        if parsed is not None:
            self.device_times = parsed
            env.sources["device_times"] = DEVICE_TIMES

    def _read_max_run_bytes(self, env: _Environment) -> None:
        value = env.text(MAX_RUN_BYTES)
        if value is None:
            return
        parsed = parse_bytes(value)
        if parsed is None:
            env.reject(MAX_RUN_BYTES, value, "expected bytes, or a number with K, M or G", "using the default, 1 GiB")
        else:
            self.max_run_bytes = parsed
            env.sources["max_run_bytes"] = MAX_RUN_BYTES

    def _read_iteration_optimizer(self, env: _Environment) -> None:
        value = env.text(ITERATION_OPTIMIZER)
        if value is None:
            return
        word = value.strip()
        if not word.isidentifier():
            env.reject(
                ITERATION_OPTIMIZER,
                value,
                "expected first, last or the class name of an optimizer, such as AdamW",
                "iterations are found by repetition",
            )
            return
        self.iteration_optimizer = word.lower() if word.lower() in ("first", "last") else word
        env.sources["iteration_optimizer"] = ITERATION_OPTIMIZER

    def _read_propagation(self, env: _Environment) -> None:
        value = env.text(PROPAGATION)
        if value is None:
            return
        word = value.strip().lower()
        if word not in PROPAGATIONS:
            env.reject(PROPAGATION, value, f"expected {', '.join(PROPAGATIONS)}", "using the default, broadcast")
            return
        self.propagation = word
        env.sources["propagation"] = PROPAGATION

    def _read_window(self, env: _Environment) -> None:
        value = env.text(WINDOW)
        if value is None:
            return
        parsed = parse_window(value)
        if parsed is None:
            env.reject(WINDOW, value, "expected iterations such as 10-19,40", "all iterations are recorded")
            return
        self.window = parsed
        env.sources["window"] = WINDOW

    def _read_destination(self, env: _Environment) -> None:
        value = env.text(TRACES_EXPORTER)
        if value is not None:
            exporters = {entry.strip() for entry in value.split(",")} - {""}
            self.console = "console" in exporters
            self.endpoint_configured = not exporters <= LOCAL_EXPORTERS
            env.sources["console"] = TRACES_EXPORTER
            env.sources["endpoint_configured"] = TRACES_EXPORTER
        else:
            self._read_lens_exporter(env)
        for variable in ENDPOINTS:
            if env.text(variable) is not None:
                self.endpoint_configured = True
                env.sources["endpoint_configured"] = variable
                return

    def _read_lens_exporter(self, env: _Environment) -> None:
        """Lens's own variable, which a user of Lens may have set; OpenTelemetry's wins."""
        value = env.text(EXPORTER)
        if value is None:
            return
        word = value.strip().lower()
        if word not in ("otlp", "console", "file"):
            env.reject(EXPORTER, value, "expected otlp, console or file", "the run directory is used")
            return
        self.console = word == "console"
        self.endpoint_configured = word == "otlp"
        env.sources["console"] = EXPORTER
        env.sources["endpoint_configured"] = EXPORTER


def _unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """One line for each variable that begins like ours and is none of them; its value may be a secret."""
    unknown = sorted(name for name in environ if name.startswith(PREFIX) and name not in VARIABLES)
    if not unknown:
        return []
    from difflib import get_close_matches

    lines = []
    for name in unknown:
        alike = get_close_matches(name, VARIABLES, 1, 0.8)
        meant = f"; did you mean {alike[0]}?" if alike else f"; lens-auto reads {', '.join(VARIABLES)}"
        lines.append(f"{name} is not a variable of lens-auto and is ignored{meant}")
    return lines


def _stripped(value: str | None) -> str | None:
    return value.strip() if value is not None else None


def _yes_no(value: bool) -> str:
    return "yes" if value else "no"
