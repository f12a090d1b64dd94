#!/usr/bin/env python3
"""Compares this client with the Rust client on the same server: a stream, and commands one after the other.

    tools/benchmark.py              # builds both programs with optimizations first
    tools/benchmark.py --server PROGRAM --rust PROGRAM --bytes 1048576 --commands 10

Both clients are measured by turns, and the medians are shown as ratios; goals are a throughput of at least 0.3 and
an await of at most 2 times that of the Rust client. Nothing fails if they are missed: the figures of a busy machine say
little. The Rust client is crates/client/examples/measure.rs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from codex_exec import AsyncSandbox, Output

ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Measured:
    """One turn of a client."""

    bytes_per_second: float
    seconds: list[float]


async def measure_python(address: str, size: int, commands: int) -> Measured:
    """The stream and the commands, with this client."""
    async with await AsyncSandbox.connect(address) as sandbox:
        begun = time.perf_counter()
        process = await sandbox.start(["head", "-c", str(size), "/dev/zero"])
        received = 0
        while events := await process.next_events():
            received += sum(len(event.data) for event in events if isinstance(event, Output))
        rate = received / (time.perf_counter() - begun)
        if received != size:
            raise SystemExit(f"the stream had {received} bytes instead of {size}")
        seconds = []
        for _ in range(commands):
            begun = time.perf_counter()
            await sandbox.run(["true"])
            seconds.append(time.perf_counter() - begun)
        return Measured(rate, seconds)


def measure_rust(program: str, address: str, size: int, commands: int) -> Measured:
    """The same with the Rust client, in a process of its own."""
    ran = subprocess.run([program, address, str(size), str(commands)], check=True, stdout=subprocess.PIPE, text=True)
    rate, *seconds = map(float, ran.stdout.split())
    return Measured(rate, seconds)


def report(python: list[Measured], rust: list[Measured]) -> str:
    """Both clients' medians, and their ratios."""

    def medians(turns: list[Measured]) -> tuple[float, float]:
        return (
            statistics.median(turn.bytes_per_second for turn in turns),
            statistics.median(each for turn in turns for each in turn.seconds),
        )

    (rate, wait), (floor_rate, floor_wait) = medians(python), medians(rust)
    return (
        f"stream         {rate / 1e6:8.0f} MB/s   Rust {floor_rate / 1e6:8.0f} MB/s   "
        f"ratio {rate / floor_rate:.2f}   goal ≥ 0.3\n"
        f'run(["true"])  {wait * 1e3:8.2f} ms     Rust {floor_wait * 1e3:8.2f} ms     '
        f"ratio {wait / floor_wait:.2f}   goal ≤ 2"
    )


def build() -> tuple[str, str]:
    """Builds the server and the Rust client; returns their paths."""
    release = ["cargo", "build", "--release", "--locked"]
    subprocess.run([*release, "--package", "codex"], check=True, cwd=ROOT)
    subprocess.run([*release, "--package", "codex-exec-client", "--example", "measure"], check=True, cwd=ROOT)
    where = ["cargo", "metadata", "--no-deps", "--format-version", "1"]
    shown = subprocess.run(where, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
    target = Path(json.loads(shown)["target_directory"]) / "release"
    return str(target / "codex"), str(target / "examples" / "measure")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare this client with the Rust client.")
    parser.add_argument("--server", metavar="PROGRAM", help="codex (default: built with optimizations)")
    parser.add_argument("--rust", metavar="PROGRAM", help="the example measure (default: the same)")
    parser.add_argument("--bytes", type=int, default=256 << 20, help="bytes of the stream (default 256 MiB)")
    parser.add_argument("--commands", type=int, default=200, help="commands of each turn")
    parser.add_argument("--turns", type=int, default=5, help="turns of each client")
    options = parser.parse_args()
    if bool(options.server) != bool(options.rust):
        parser.error("--server and --rust belong together")
    program, rust = (options.server, options.rust) if options.server else build()
    server = subprocess.Popen(
        [program, "exec-server", "--listen", "ws://127.0.0.1:0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        if not address:
            sys.exit(f"{program} printed no address")
        ours: list[Measured] = []
        theirs: list[Measured] = []
        for _ in range(options.turns):
            theirs.append(measure_rust(rust, address, options.bytes, options.commands))
            ours.append(asyncio.run(measure_python(address, options.bytes, options.commands)))
        print(report(ours, theirs))
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
