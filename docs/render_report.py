"""Make the outputs and pictures of docs/report.md anew, from jobs that run now.

    python docs/render_report.py

Needs torch, the extra `report`, and Chromium for the pictures (left as they are where there is none).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lens_auto.report.tables import TABLES

DOCS = Path(__file__).parent
PAGE = DOCS / "report.md"
EXAMPLE = DOCS.parent / "examples" / "straggler.py"
BIN = Path(sys.executable).parent


def train(run_dir: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start the example on two ranks."""
    command = [BIN / "opentelemetry-instrument", BIN / "torchrun", "--standalone", "--nproc-per-node", "2", EXAMPLE]
    environment = {**os.environ, "NEMO_LENS_RUN_DIR": str(run_dir), "OMP_NUM_THREADS": "1", "NEMO_LENS_QUIET": "1"}
    environment["PATH"] = f"{BIN}{os.pathsep}{environment['PATH']}"
    quiet = subprocess.DEVNULL
    return subprocess.Popen([*map(str, command), *arguments], env=environment, stdout=quiet, stderr=quiet)


def output(folder: Path, *arguments: str) -> str:
    """What the command prints, as a block."""
    command = [str(BIN / "lens-auto"), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return "\n".join(f"    {line}".rstrip() for line in done.stdout.rstrip().splitlines())


def replace(text: str, name: str, content: str) -> str:
    """Put an output between its marks."""
    return re.sub(
        rf"(<!-- output: {name} -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}{content}\n{found[2]}",
        text,
        flags=re.DOTALL,
    )


def pictures(page: Path) -> None:
    """Photograph a page in both themes."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("no Chromium here: the pictures stay as they are")
        return
    (DOCS / "images").mkdir(exist_ok=True)
    for theme in ("light", "dark"):
        target = DOCS / "images" / f"report-{theme}.png"
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1200,1750"]
        options += ["--virtual-time-budget=8000", f"--screenshot={target}", f"{page.as_uri()}#{theme}"]
        subprocess.run([browser, *options], check=True, capture_output=True)


def main() -> None:
    text = PAGE.read_text()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for run, arguments in (
            ("healthy", ()),
            ("dataset", ("--fault", "dataset", "--rank", "1")),
            ("backward", ("--fault", "backward", "--rank", "0")),
        ):
            if train(folder / run, *arguments).wait():
                raise SystemExit(f"the example failed: {run}")
        running = train(
            folder / "running", "--fault", "forward", "--rank", "1", "--steps", "100000", "--delay-ms", "80"
        )
        try:
            while len(list((folder / "running").glob("ranks/*"))) < 2:
                time.sleep(0.2)
            time.sleep(5)
            text = replace(text, "top", output(folder, "top", "running"))
        finally:
            running.terminate()
            running.wait()
        text = replace(text, "report", output(folder, "report", "dataset"))
        text = replace(text, "backward", output(folder, "report", "backward").split("\n\n")[0])
        text = replace(text, "compare", output(folder, "compare", "healthy", "dataset"))
        query = (
            "select rank, median(own_data_loading_ns) / 1e6 as data_ms, median(waits_ns) / 1e6 as waits_ms from work"
        )
        query += " group by rank order by rank"
        answer = output(folder, "report", "dataset", "--sql", query)
        text = replace(text, "sql", f'    lens-auto report dataset --sql "{query}"\n\n{answer}')
        text = replace(text, "tables", "\n".join(f"| `{name}` | {holds} |" for name, holds in TABLES.items()))
        page = folder / "page.html"
        output(folder, "html", "dataset", "-o", str(page))
        pictures(page)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
