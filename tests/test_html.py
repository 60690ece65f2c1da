"""`lens-auto html`: what is in the page, that it needs nothing else, and that a browser draws it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from simulate import Job, on
from synthetic import Writer, train, write_run

from lens_auto.recorder.layout import Kind
from lens_auto.recorder.read import RunDirectory
from lens_auto.report import html
from lens_auto.report.load import load
from lens_auto.report.summary import summarize

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
with_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")


def page_of(run_dir: Path, iterations: list[int] | None = None) -> bytes:
    run = RunDirectory(run_dir)
    loaded = load(run)
    return html.page(summarize(run, loaded), loaded, iterations)


def data_of(page: bytes) -> dict[str, Any]:
    (found,) = re.findall(rb'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    data: dict[str, Any] = json.loads(found)
    return data


def command(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lens_auto.cli", "html", *args],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


# --- what is in it ----------------------------------------------------------------------------------------------------


def test_the_data_of_a_straggler(tmp_path: Path) -> None:
    run_dir = Job(ranks=4, iterations=50, visible=1, extra={"data": on({2}, 10)}).write(tmp_path)
    data = data_of(page_of(run_dir))
    assert data["verdict"].startswith("rank 2 holds the others back: data_loading ")
    assert [each["kind"] for each in data["findings"]] == ["straggler"]
    assert dict(data["facts"])["ranks"] == "4 of 4"
    heat = data["heat"]
    assert (heat["ranks"], heat["group"]) == ([0, 1, 2, 3], 1)
    assert [len(row) for row in heat["time"]] == [50] * 4
    # Every rank's iteration takes as long; whose work it is shows only without the waiting.
    assert max(heat["time"][0][5:]) == pytest.approx(max(heat["time"][2][5:]), rel=0.2)
    own = [sum(row[5:45]) / 40 for row in heat["own"]]
    assert own[2] - max(own[0], own[1], own[3]) == pytest.approx(10, abs=0.5)
    assert heat["own"][0][0] is None  # no operation before it to count from
    assert [each["rank"] for each in data["work"]] == [0, 1, 2, 3]
    assert "all_reduce" in [each["operation"] for each in data["operations"]]


def test_the_timeline(tmp_path: Path) -> None:
    writers = Job(ranks=2, iterations=20, noise=0).run()
    sender, receiver = writers
    begin, other = ([each for each in one.records if each["kind"] == Kind.BACKWARD][7]["start_ns"] for one in writers)
    sender.add(Kind.SEND, 0, 0, name="isend", group="0", peer=1, seq=3, init=1, bytes=2048)
    sender.records[-1].update(start_ns=begin + 1_000_000, end_ns=begin + 2_000_000)
    receiver.add(Kind.RECV, 0, 0, name="irecv", group="0", peer=0, seq=3, init=1)
    receiver.records[-1].update(start_ns=other, end_ns=other + 5_000_000)
    receiver.add(Kind.RECV, 0, 0, name="irecv", group="0", peer=0, seq=99, init=1)  # whose send nobody recorded
    receiver.records[-1].update(start_ns=other, end_ns=other + 5_000_000)
    (picture,) = data_of(page_of(write_run(tmp_path, *writers), [7]))["timeline"]
    assert (picture["iteration"], picture["ranks"], picture["left_out"]) == (7, [0, 1], 0)
    mine = [bar for bar in picture["bars"] if bar[0] == 0]
    # After the optimizer of the one before: 1 ms of other things, data 2, forward 8, backward 12, held 1, optimizer 2.
    assert [(what, start, length) for _, what, start, length, _ in mine if what != "communication"] == [
        ("other", 0, 1),
        ("data_loading", 1, 2),
        ("forward", 3, 8),
        ("backward", 11, 12),
        ("held", 23, 1),
        ("optimizer", 24, 2),
    ]
    labels = [bar[4] for bar in mine if bar[1] == "communication"]
    assert labels == ["all-reduce of backward", "isend on group 0 #3, 2.00 KiB, rank 1"]
    assert picture["arrows"] == [[0, 12, 1, 16]]


def test_which_iterations_are_drawn(tmp_path: Path) -> None:
    late = {20: 30.0}
    extra = {
        "other": lambda rank, iteration: late.get(iteration, 0.0),
        "forward": lambda rank, iteration: 10.0 * (rank == 1 and iteration == 30),
    }
    run_dir = Job(ranks=2, iterations=40, extra=extra).write(tmp_path)
    found = [(each["why"], each["iteration"]) for each in data_of(page_of(run_dir))["timeline"]]
    assert [why for why, _ in found] == [
        "an ordinary iteration",
        "the longest iteration",
        "the most uneven one of ordinary length",
    ]
    assert [number for _, number in found[1:]] == [21, 30]
    assert [each["iteration"] for each in data_of(page_of(run_dir, [3, 5]))["timeline"]] == [3, 5]
    with pytest.raises(ValueError, match=r"^iteration 40 is not in this run; all ranks have 0 to 39$"):
        page_of(run_dir, [40])


def test_long_runs_are_grouped(tmp_path: Path) -> None:
    heat = data_of(page_of(write_run(tmp_path, train(Writer(), 3000))))["heat"]
    assert heat["group"] == 3
    assert [len(row) for row in heat["time"]] == [1000]
    assert heat["time"][0][500] == 11


def test_nothing_recorded_is_a_page_too(tmp_path: Path) -> None:
    data = data_of(page_of(write_run(tmp_path)))
    assert (data["verdict"], data["heat"], data["timeline"]) == ("no rank recorded anything", None, [])


def test_names_cannot_break_out(tmp_path: Path) -> None:
    evil = "</script><script>document.title='broken'</script><b>&"
    writer = Writer(run_id=evil)
    train(writer, 12)
    writer.take(Kind.COLLECTIVE, 1, name=evil, group=evil, seq=1)
    write_run(tmp_path, writer)
    (tmp_path / "manifest.json").write_text(json.dumps({"format": "lens-run", "version": 1, "run_id": evil}))
    page = page_of(tmp_path)
    assert evil.encode() not in page
    data = data_of(page)
    assert data["run"] == evil
    assert evil in [each["operation"] for each in data["operations"]]


def test_it_needs_nothing_else(tmp_path: Path) -> None:
    page = page_of(Job(ranks=2).write(tmp_path))
    library = re.search(rb"<script>(/\*\*.*?)</script>", page, re.DOTALL)
    assert library is not None
    rest = page.replace(library[0], b"").decode()
    assert not re.search(r"(src|href)\s*=|url\(|@import|https?:", rest)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path) -> None:
    run_dir = Job(ranks=2, iterations=12).write(tmp_path / "run")
    target = tmp_path / "report.html"
    done = command(str(run_dir), "-o", str(target), "--iterations", "2,3")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", f"lens-auto: written to {target}\n")
    assert [each["iteration"] for each in data_of(target.read_bytes())["timeline"]] == [2, 3]
    for wanted, said in (
        ("x", "--iterations 'x'; numbers separated by commas are valid"),
        ("99", "iteration 99 is not"),
        ("0,1,2,3,4,5,6", "7 iterations are more than the 6 that a page shows; nothing is written"),
    ):
        done = command(str(run_dir), "-o", str(tmp_path / "none.html"), "--iterations", wanted)
        assert done.returncode == 2
        assert done.stderr.startswith(f"lens-auto: {said}")
        assert not (tmp_path / "none.html").exists()


def test_without_plotly(tmp_path: Path) -> None:
    (tmp_path / "plotly").mkdir()
    (tmp_path / "plotly" / "__init__.py").write_text("raise ImportError")
    run_dir = Job(ranks=2, iterations=3).write(tmp_path / "run")
    done = command(str(run_dir), "-o", str(tmp_path / "none.html"), PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == "lens-auto: plotly is not installed; pip install 'nemo-lens-auto[report]' adds it\n"


# --- in a browser -----------------------------------------------------------------------------------------------------


def browse(page: Path, *args: str) -> str:
    """Open a page in a headless browser that reaches no network."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1320,2300"]
    command += [
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--virtual-time-budget=8000",
        f"--user-data-dir={page.parent}/u",
    ]
    done = subprocess.run([*command, *args], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def first_pixel(png: bytes) -> tuple[int, ...]:
    """Colour of the upper left pixel."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    depth, colour = png[24], png[25]
    assert depth == 8
    channels = {2: 3, 6: 4}[colour]
    body = b"".join(part[4:-4] for part in chunks(png) if part[:4] == b"IDAT")
    line = zlib.decompress(body)[: 1 + channels]
    return tuple(line[1:4])  # no filter changes the first pixel of the first line


def chunks(png: bytes) -> list[bytes]:
    found, at = [], 8
    while at < len(png):
        length = int.from_bytes(png[at : at + 4], "big")
        found.append(png[at + 4 : at + 12 + length])
        at += 12 + length
    return found


@with_browser
@pytest.mark.timeout(150)
def test_a_browser_draws_it(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_bytes(
        page_of(Job(ranks=3, iterations=40, visible=1, extra={"data": on({2}, 10)}).write(tmp_path / "run"))
    )
    dom = browse(page, "--dump-dom", f"{page.as_uri()}#light")
    assert 'data-theme="light"' in dom
    assert 'data-ready="1"' in dom
    for place in ("phases", "heat", "what-if", "timeline"):
        drawn = dom.split(f'<div id="{place}"')[1].split("</section>")[0]
        assert drawn.count("<svg") >= 1, place
    assert dom.split('<div id="heat"')[1].split("</section>")[0].count("<image") == 1
    assert "<h1>rank 2 holds the others back: data_loading " in dom
    assert "Try: more DataLoader workers" in dom


@pytest.mark.slow
@with_browser
@pytest.mark.timeout(150)
def test_it_has_a_light_and_a_dark_theme(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_bytes(page_of(Job(ranks=2, iterations=20).write(tmp_path / "run")))
    colours = {}
    for theme in ("light", "dark"):
        picture = tmp_path / f"{theme}.png"
        browse(page, f"--screenshot={picture}", f"{page.as_uri()}#{theme}")
        colours[theme] = first_pixel(picture.read_bytes())
    assert colours == {"light": (0xF6, 0xF7, 0xF9), "dark": (0x10, 0x13, 0x17)}
