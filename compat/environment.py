"""Virtual environments with unmodified releases from the package index, each beside our own wheel."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_INSTALL_TIMEOUT_S = 1800
_WHEEL_TIMEOUT_S = 300
_HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


class Unavailable(Exception):
    """There is no such interpreter here, or something does not install; the message says why."""


@dataclass(frozen=True)
class Environment:
    """What is installed into a virtual environment of its own.

    Attributes:
        name: its folder below the cache.
        packages: requirements, as pip takes them.
        build: requirements of `packages` that must be there before them, because their set-up imports these.
        python: the interpreter's version, as "3.12"; by default that of this process.
        variables: set while pip runs.
    """

    name: str
    packages: tuple[str, ...]
    build: tuple[str, ...] = ()
    python: str = _HERE
    variables: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Prepared:
    """An environment that stands."""

    folder: Path

    @property
    def bin(self) -> Path:
        """Where its commands are."""
        return self.folder / "bin"

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(self.bin / "python")

    def version(self, distribution: str) -> str:
        """The version that is installed of a distribution."""
        (site,) = self.folder.glob("lib/python*/site-packages")
        for found in metadata.distributions(name=distribution, path=[str(site)]):
            return found.version
        raise Unavailable(f"{distribution} is not in {self.folder}")


class Environments:
    """Makes environments below a cache folder, and keeps those whose requirements have not changed."""

    def __init__(self, cache: Path, interpreters: Sequence[str] = ()) -> None:
        self._cache = cache
        self._given = list(interpreters)
        self._wheel: Path | None = None
        self._wheel_folder: tempfile.TemporaryDirectory[str] | None = None
        cache.mkdir(parents=True, exist_ok=True)

    def prepare(self, wanted: Environment) -> Prepared:
        """The environment with its packages and the wheel of this checkout.

        Raises:
            Unavailable: there is no such interpreter, or pip could not install it.
        """
        folder = self._cache / wanted.name
        prepared = Prepared(folder)
        requirements = _digest(wanted.python, *wanted.build, "--", *wanted.packages)
        stamp = folder / "requirements.stamp"
        if not stamp.exists() or stamp.read_text() != requirements:
            shutil.rmtree(folder, ignore_errors=True)
            _call([self._interpreter(wanted.python), "-m", "venv", str(folder)], f"making {wanted.name}")
            if wanted.build:
                self._install(prepared, wanted, wanted.build)
            self._install(prepared, wanted, (*wanted.packages, *wanted.build, str(self._own_wheel())))
            stamp.write_text(requirements)
        self._install_own(prepared, wanted)
        return prepared

    def _install_own(self, prepared: Prepared, wanted: Environment) -> None:
        wheel = self._own_wheel()
        own = hashlib.sha256(wheel.read_bytes()).hexdigest()
        stamp = prepared.folder / "own.stamp"
        if not stamp.exists() or stamp.read_text() != own:
            self._install(prepared, wanted, ("--no-deps", "--force-reinstall", str(wheel)))
            stamp.write_text(own)

    def _install(self, prepared: Prepared, wanted: Environment, requirements: Sequence[str]) -> None:
        isolated = ["--no-build-isolation"] if wanted.build else []
        # Most of what is installed is never imported: not compiling it saves minutes.
        options = ["--quiet", "--no-compile", "--disable-pip-version-check", *isolated]
        command = [prepared.python, "-m", "pip", "install", *options]
        _call([*command, *requirements], f"pip install {' '.join(wanted.packages)}", **dict(wanted.variables))

    def _own_wheel(self) -> Path:
        """Our wheel, built once a run."""
        if self._wheel is None:
            folder = self._cache / "wheel"
            shutil.rmtree(folder, ignore_errors=True)
            command = [
                sys.executable,
                "-m",
                "pip",
                "wheel",
                "--quiet",
                "--no-deps",
                "--wheel-dir",
                str(folder),
                str(ROOT),
            ]
            _call(command, "building the wheel", _WHEEL_TIMEOUT_S)
            (self._wheel,) = folder.glob("*.whl")
        return self._wheel

    def _interpreter(self, version: str) -> str:
        if version == _HERE:
            return sys.executable
        pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
        named = shutil.which(f"python{version}")
        candidates = [*self._given, *([named] if named else []), *map(str, pyenv.glob(f"{version}.*/bin/python"))]
        for candidate in candidates:
            if _version_of(candidate) == version:
                return candidate
        raise Unavailable(f"no Python {version} here (on PATH, or pyenv's; --python names one)")


def _version_of(interpreter: str) -> str | None:
    """An interpreter's version; None where it does not run (pyenv's stand-ins may not)."""
    shows = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        said = subprocess.run([interpreter, "-c", shows], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return said.stdout.strip() if said.returncode == 0 else None


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _call(command: Sequence[str], what: str, timeout_s: float = _INSTALL_TIMEOUT_S, **variables: str) -> None:
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        try:
            status = subprocess.run(
                command,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
            ).returncode
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{what}: not done after {timeout_s:.0f} s") from None
        if status:
            said.seek(0)
            raise Unavailable(f"{what}: {_reason(said.read())}")


def _reason(said: str) -> str:
    """The line of pip's output that says what went wrong."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() and not line.startswith("note:")]
    return (errors or lines or ["it said nothing"])[-1]
