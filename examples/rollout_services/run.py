"""Start the three servers under `opentelemetry-instrument`, collect some rollouts, and stop them again.

    python examples/rollout_services/run.py --rollouts 2 --logs logs

Each server's output goes to `logs/<name>.log`. With `OTEL_TRACES_EXPORTER=console` the spans are there too, one a line:

    cat logs/*.log | grep '"trace_id"' \\
      | jq -r '[.trace_id, .resource.attributes."service.name", .kind, .name] | @tsv' | sort

Under `opentelemetry-instrument` this program takes part itself: a `gym.job` span goes around all rollouts while the
group `job` is on. With `NEMO_LENS_SPAN_GROUPS=per_rollout` it is off, and each rollout is a trace of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp

from lens_auto import managed_span

HERE = Path(__file__).parent
INSTRUMENT = str(Path(sys.executable).parent / "opentelemetry-instrument")
START_TIMEOUT_S = 60.0
SERVERS = ("model", "resources", "agent")


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start(name: str, arguments: list[str], port: int, logs: Path, plain: bool) -> subprocess.Popen[bytes]:
    """Start one server.

    Args:
        name: Its file, and its service name.
        arguments: What it is told besides its port.
        port: Where it listens.
        logs: Where its output goes.
        plain: Without `opentelemetry-instrument`.
    """
    environment = {**os.environ, "OTEL_SERVICE_NAME": f"{name}-server", "PYTHONUNBUFFERED": "1"}
    groups = os.environ.get(f"{name.upper()}_SPAN_GROUPS")
    if groups is not None:
        environment["NEMO_LENS_SPAN_GROUPS"] = groups
    if plain:
        environment["NEMO_LENS_DISABLED"] = "1"
        environment.pop("PYTHONPATH", None)
    command = [sys.executable, str(HERE / f"{name}.py"), str(port), *arguments]
    with open(logs / f"{name}.log", "wb") as log:
        return subprocess.Popen(
            command if plain else [INSTRUMENT, *command], stdout=log, stderr=subprocess.STDOUT, env=environment
        )


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server listens. A connection without a request leaves no span."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"{process.args!r} ended with status {process.returncode}; its log says why")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise SystemExit(f"{process.args!r} does not listen after {START_TIMEOUT_S:g} s")


@contextlib.contextmanager
def servers(logs: Path, plain: list[str]) -> Iterator[str]:
    """The three servers; gives the agent's URL, and stops them at the end."""
    ports = {name: free_port() for name in SERVERS}
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    arguments = {"agent": [urls["model"], urls["resources"]]}
    running = {name: start(name, arguments.get(name, []), port, logs, name in plain) for name, port in ports.items()}
    try:
        for name, process in running.items():
            wait_for(ports[name], process)
        yield urls["agent"]
    finally:
        for process in running.values():
            process.send_signal(signal.SIGINT)
        for process in running.values():
            process.wait(30)


async def collect(agent_url: str, rollouts: int) -> list[dict[str, object]]:
    """Drive the rollouts, one after the other."""
    results = []
    with managed_span("job", "gym.job", rollouts=rollouts):
        async with aiohttp.ClientSession() as session:
            for number in range(rollouts):
                task = {"prompt": f"{number}+2", "expected": str(number + 2)}
                async with session.post(f"{agent_url}/ng-rollout/task{number}/run", json=task) as response:
                    results.append(await response.json())
    return results


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Three services, one trace for each rollout.")
    parser.add_argument("--rollouts", type=int, default=1)
    parser.add_argument("--logs", type=Path, default=Path("logs"))
    parser.add_argument(
        "--plain",
        action="append",
        default=[],
        choices=SERVERS,
        help="a server to start without opentelemetry-instrument",
    )
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    # One run directory for all of them, as under a launcher.
    os.environ.setdefault("NEMO_LENS_RUN_ID", time.strftime("rollouts-%Y%m%d-%H%M%S"))
    with servers(options.logs, options.plain) as agent_url:
        for result in asyncio.run(collect(agent_url, options.rollouts)):
            print(f"{result['rollout']}: {result['answer']}, reward {result['reward']}")


if __name__ == "__main__":
    main()
