"""Ids against the test vectors of docs/ids.md, and their promises: never zero, never repeated, private after fork."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lens_auto.recorder import ids

PAGE = (Path(__file__).parent.parent / "docs" / "ids.md").read_text(encoding="utf-8")
SEED = bytes(range(16))
DERIVED = re.findall(r"^\| (\d+) \| `([\w-]+)` \| `(\[.*\])` \| `([0-9a-f]+)` \|$", PAGE, re.MULTILINE)
RECORDS = re.findall(r"^\| `([0-9a-f]{16})` \| (\d+) \| `([0-9a-f]{16})` \|$", PAGE, re.MULTILINE)


def test_the_page_has_its_vectors() -> None:
    assert len(DERIVED) >= 13
    assert len(RECORDS) >= 8


@pytest.mark.parametrize(("size", "domain", "fields", "expected"), DERIVED)
def test_derived_ids(size: str, domain: str, fields: str, expected: str) -> None:
    found = ids.derive(int(size), domain, SEED, *json.loads(fields))
    assert found.hex() == expected
    assert len(found) == int(size)


def test_named_ids_are_the_documented_fields() -> None:
    vectors = {(domain, fields): expected for _, domain, fields, expected in DERIVED}
    nonce = 0x0123456789ABCDEF
    found = {
        ("trace", "[1]"): ids.iteration_trace_id(SEED, 1),
        ("iteration", "[41, 7]"): ids.iteration_span_id(SEED, 41, 7),
        ("job-trace", "[]"): ids.job_trace_id(SEED),
        ("job", '[3, "0123456789abcdef"]'): ids.job_span_id(SEED, 3, nonce),
        ("send", '["pipeline/日", 2, 3, 4, -1, 12]'): ids.send_span_id(SEED, "pipeline/日", 2, 3, 4, -1, 12),
        ("evaluate", '["0123456789abcdef", 32768]'): ids.evaluate_span_id(SEED, nonce, 32768),
        ("forward", '["0123456789abcdef", 17]'): ids.forward_span_id(SEED, nonce, 17),
    }
    assert {key: value.hex() for key, value in found.items()} == {key: vectors[key] for key in found}
    own = re.search(r"own seed of nonce `0123456789abcdef` is `([0-9a-f]{32})`", PAGE)
    assert own is not None
    assert ids.own_seed(nonce).hex() == own[1]


def test_a_digest_of_zeros_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = []

    class Zeros:
        def __init__(self, message: bytes, digest_size: int) -> None:
            messages.append(message)
            self.size = digest_size

        def digest(self) -> bytes:
            return (b"\0" if len(messages) == 1 else b"\7") * self.size

    monkeypatch.setattr(ids.hashlib, "blake2b", Zeros)
    assert ids.derive(8, "x", SEED) == b"\7" * 8
    assert messages[1] == messages[0] + b"\1"


@pytest.mark.parametrize("field", [1 << 63, -(1 << 63) - 1])
def test_an_integer_that_does_not_fit(field: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        ids.derive(8, "x", SEED, field)


def test_a_seed_of_another_length() -> None:
    with pytest.raises(ValueError, match="16 bytes, this one 3"):
        ids.derive(8, "x", b"abc")


@pytest.mark.parametrize(("nonce", "number", "expected"), RECORDS)
def test_record_ids(nonce: str, number: str, expected: str) -> None:
    assert f"{ids.record_span_id(int(nonce, 16), int(number)):016x}" == expected
    many = ids.record_span_ids(int(nonce, 16), np.array([int(number)], dtype=np.int64))
    assert many.dtype == np.uint64
    assert f"{int(many[0]):016x}" == expected


def test_record_ids_do_not_repeat() -> None:
    numbers = np.arange(300_000, dtype=np.int64)
    assert len(np.unique(ids.record_span_ids(0xFFFFFFFFFFFFFF00, numbers))) == len(numbers)


def test_the_generator_is_private() -> None:
    generator = ids.LensIdGenerator()
    state = random.getstate()
    random.seed(0)
    first = (generator.generate_trace_id(), generator.generate_span_id())
    random.seed(0)
    second = (generator.generate_trace_id(), generator.generate_span_id())
    before = random.getstate()
    generator.generate_span_id()
    assert random.getstate() == before
    random.setstate(state)
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert 0 < first[0] < 1 << 128
    assert 0 < first[1] < 1 << 64
    assert generator.is_trace_id_random() is True


def test_the_generator_is_seeded_again_after_fork() -> None:
    program = """
import os
from lens_auto.recorder.ids import LensIdGenerator
generator = LensIdGenerator()
for _ in range(3):
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, b"%032x" % generator.generate_trace_id())
        os._exit(0)
    os.wait()
    print(os.read(read, 32).decode())
print("%032x" % generator.generate_trace_id())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=os.getcwd())
    lines = done.stdout.split()
    assert len(lines) == 4
    assert len(set(lines)) == 4


def test_importing_the_ids_imports_no_sdk_and_the_sdk_accepts_the_generator() -> None:
    program = """
import sys
import lens_auto.recorder.ids as ids
assert not [name for name in sys.modules if name.startswith("opentelemetry.sdk")], "imports the SDK"
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
assert issubclass(ids.LensIdGenerator, IdGenerator)
span = TracerProvider(id_generator=ids.LensIdGenerator()).get_tracer("t").start_span("s")
assert span.get_span_context().is_valid
print(ids.LensIdGenerator.__name__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=os.getcwd())
    assert done.stdout == "LensIdGenerator\n"
