"""The benchmark runs and prints its ratios; what they are is not tested."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import OURS

TOOL = Path(__file__).resolve().parent.parent / "tools" / "benchmark.py"
# Built beside the program by `cargo test`, or by `cargo build --package codex-exec-client --example measure`.
RUST = Path(OURS).parent / "examples" / "measure"


def test_the_benchmark_prints_both_ratios() -> None:
    if not RUST.exists():
        if os.environ.get("CI"):
            pytest.fail(f"{RUST} is missing; cargo build --package codex-exec-client --example measure")
        pytest.skip(f"{RUST} is missing")
    small = ["--bytes", "1000000", "--commands", "3", "--turns", "2"]
    command = [sys.executable, str(TOOL), "--server", OURS, "--rust", str(RUST), *small]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    stream, awaited = ran.stdout.splitlines()
    number = r"[0-9.]+"
    assert re.fullmatch(rf"stream +{number} MB/s +Rust +{number} MB/s +ratio {number} +goal ≥ 0.3", stream)
    assert re.fullmatch(rf'run\(\["true"\]\) +{number} ms +Rust +{number} ms +ratio {number} +goal ≤ 2', awaited)
