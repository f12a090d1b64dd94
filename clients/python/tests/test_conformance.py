"""The conformance script: the same against our server and the other implementation's.

What a server lacks has to be a clear error, never a hang or a wrong result.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from codex_exec import (
    AsyncSandbox,
    CommandFailedError,
    CommandTimeoutError,
    MethodNotFoundError,
    Output,
    PathNotFoundError,
    ProgramNotFoundError,
    RequestTimeoutError,
    Sandbox,
    StdinClosedError,
    UnsupportedError,
)

from .conftest import CuttingProxy, in_thread

# A stream whose content depends on every position, so that a lost, doubled or swapped piece is noticed.
STREAM = """
import hashlib, sys
left, number, digest = int(sys.argv[1]), 0, hashlib.sha256()
while left > 0:
    block = (hashlib.sha256(str(number).encode()).digest() * 2048)[:left]
    number += 1
    left -= len(block)
    digest.update(block)
    sys.stdout.buffer.write(block)
sys.stdout.flush()
sys.stderr.write(digest.hexdigest())
"""


def test_a_command_returns_its_output_and_exit_code(address: str) -> None:
    with Sandbox.connect(address) as sandbox:
        result = sandbox.run("echo out; echo err >&2; exit 3")
        assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
        with pytest.raises(CommandFailedError) as failed:
            sandbox.run(["false"], check=True)
        assert failed.value.result.exit_code == 1
        with pytest.raises(ProgramNotFoundError):
            sandbox.run(["/nonexistent/program"])
        lines: list[str] = []
        sandbox.run("printf 'a\\nb\\r\\nüc'", on_stdout=lines.append)
        assert lines == ["a", "b", "üc"]


def test_a_timeout_keeps_partial_output(address: str) -> None:
    with Sandbox.connect(address) as sandbox:
        result = sandbox.run("echo early; exec sleep 600", timeout=2)
        assert result.timed_out and result.stdout == "early\n"
        with pytest.raises(CommandTimeoutError) as failed:
            sandbox.run("echo early; exec sleep 600", timeout=2, check=True, on_stdout=lambda _: None)
        assert failed.value.result.stdout == "early\n"


def test_wait_with_a_timeout_loses_nothing(address: str) -> None:
    with Sandbox.connect(address) as sandbox:
        process = sandbox.start("echo one; read line; echo $line", stdin=True)
        with pytest.raises(RequestTimeoutError):
            process.wait(timeout=0.5)
        process.write("two\n")
        assert process.wait(timeout=60).stdout == "one\ntwo\n"


def test_a_large_stream_arrives_whole(address: str, request: pytest.FixtureRequest) -> None:
    size = request.config.getoption("--stream-bytes")

    async def main() -> None:
        async with await AsyncSandbox.connect(address) as sandbox:
            process = await sandbox.start(["python3", "-c", STREAM, str(size)])
            digest, told, count = hashlib.sha256(), b"", 0
            async for event in process:
                if isinstance(event, Output):
                    if event.stream == "stdout":
                        digest.update(event.data)
                        count += len(event.data)
                    else:
                        told += event.data
            assert count == size
            assert digest.hexdigest() == told.decode()

    asyncio.run(main())


def test_input_arrives_whole(address: str) -> None:
    data = random.Random(1).randbytes(3 << 20)
    with Sandbox.connect(address) as sandbox:
        process = sandbox.start(["head", "-c", str(len(data))], stdin=True)
        # Input and output at once: a process that is not read does not read either.
        feeder = in_thread(lambda: process.write(data))
        assert process.wait(60).stdout_bytes == data
        feeder.join(60)
        if sandbox.has("processCloseStdin"):
            assert sandbox.run(["cat"], input=data).stdout_bytes == data
        else:
            with pytest.raises(UnsupportedError):
                sandbox.run(["cat"], input=data)
        quiet = sandbox.start(["sleep", "600"])
        with pytest.raises(StdinClosedError):
            quiet.write("x")


def budgets(rng: random.Random, low: int, high: int, count: int) -> Iterator[int]:
    return itertools.chain((rng.randrange(low, high) for _ in range(count)), itertools.repeat(1 << 60))


def test_cut_connections_lose_no_output(ours: str, seed: int) -> None:
    rng = random.Random(seed)
    size = 16 << 20
    proxy = CuttingProxy(ours, budgets(rng, 2_000, 1_500_000, 25))

    async def main() -> None:
        async with proxy.listening() as through:
            async with await connected(through) as sandbox:
                process = await sandbox.start(["python3", "-c", STREAM, str(size)])
                echo = await sandbox.start(["cat"], stdin=True)
                sent = rng.randbytes(1 << 20)

                async def feed() -> None:
                    for at in range(0, len(sent), 50_000):
                        await echo.write(sent[at : at + 50_000])
                    await echo.close_stdin()

                result, back, _ = await asyncio.gather(process.wait(), echo.wait(), feed())
                assert len(result.stdout_bytes) == size
                assert hashlib.sha256(result.stdout_bytes).hexdigest() == result.stderr
                assert back.stdout_bytes == sent
        assert proxy.cuts >= 5

    asyncio.run(asyncio.wait_for(main(), 120))


async def connected(address: str, **options: Any) -> AsyncSandbox:
    """Connects through a proxy that may cut the first connections too: those are tried once each."""
    for _ in range(30):
        try:
            return await AsyncSandbox.connect(address, **options)
        except (ConnectionError, TimeoutError):
            continue
    raise AssertionError("no connection through the proxy")


@pytest.mark.parametrize("policy", [None, "workspace-write"])
def test_a_drop_in_the_middle_of_an_upload_is_invisible(
    ours: str, tmp_path: Path, seed: int, policy: str | None
) -> None:
    # With a policy, handles end with their connection: such a file starts again from its beginning.
    rng = random.Random(seed + 1)
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    for number in range(6):
        (tree / "sub" / f"{number}.bin").write_bytes(rng.randbytes(rng.randrange(0, 5 << 20)))
    (tree / "link").symlink_to("sub/0.bin")
    proxy = CuttingProxy(ours, budgets(rng, 100_000, 6_000_000, 12))

    async def main() -> None:
        async with proxy.listening() as through:
            async with await connected(through, policy=policy, cwd=tmp_path) as sandbox:
                await sandbox.upload(tree, tmp_path / "there")
                await sandbox.download(tmp_path / "there", tmp_path / "back")
        assert proxy.cuts >= 2

    asyncio.run(asyncio.wait_for(main(), 120))
    for place in ("there", "back"):
        for file in (tree / "sub").iterdir():
            assert (tmp_path / place / "sub" / file.name).read_bytes() == file.read_bytes()
    assert os.readlink(tmp_path / "there" / "link") == "sub/0.bin"
    assert not [p for p in (tmp_path / "there").rglob("*.tmp")]


def test_many_processes_at_once(address: str, request: pytest.FixtureRequest) -> None:
    count = request.config.getoption("--processes")

    async def main() -> None:
        async with await AsyncSandbox.connect(address) as sandbox:
            gate = asyncio.Semaphore(50)

            async def one(number: int) -> None:
                async with gate:
                    result = await sandbox.run(["echo", str(number)])
                    assert result.stdout == f"{number}\n"

            await asyncio.gather(*(one(number) for number in range(count)))
            assert not sandbox._processes

    asyncio.run(asyncio.wait_for(main(), 170))


NAMES = ["plain", "with space", "äöü", "日本語", "emoji 🎉", "100%", "a#b?c", "quote'\"", "new\nline", "-dash"]


def test_unicode_names_survive(address: str, tmp_path: Path) -> None:
    with Sandbox.connect(address, cwd=tmp_path) as sandbox:
        for name in NAMES:
            sandbox.files.write(f"names/{name}", name)
        assert sorted(entry.name for entry in sandbox.files.list("names")) == sorted(NAMES)
        for name in NAMES:
            assert sandbox.files.read_text(f"names/{name}") == name
            assert (tmp_path / "names" / name).read_text() == name
            assert sandbox.files.stat(f"names/{name}").size == len(name.encode())
        # The other implementation leaves names with a line feed out of a walk.
        walked = {e.name for e in sandbox.files.walk("names").entries}
        assert walked == set(NAMES) or (not sandbox.has("fsGlob") and walked == set(NAMES) - {"new\nline"})


def test_names_that_are_not_utf8_survive(ours: str, tmp_path: Path) -> None:
    raw = bytes(tmp_path) + b"/odd \xff\xfe name"
    with Sandbox.connect(ours, cwd=tmp_path) as sandbox:
        sandbox.files.write(raw, b"content")
        assert open(raw, "rb").read() == b"content"
        (entry,) = [e for e in sandbox.files.list() if e.name.startswith("odd")]
        assert sandbox.files.read(entry.path) == b"content"
        sandbox.download(tmp_path, tmp_path.parent / "copy")
        assert open(bytes(tmp_path.parent) + b"/copy/odd \xff\xfe name", "rb").read() == b"content"
        sandbox.files.remove(entry.path)
        assert not os.path.exists(raw)


def test_files_are_read_and_written_at_any_size(address: str, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with Sandbox.connect(address, cwd=tmp_path) as sandbox:
        for size in (0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 9 << 20):
            data = rng.randbytes(size)
            sandbox.files.write("file", data)
            assert (tmp_path / "file").read_bytes() == data
            assert sandbox.files.read("file") == data
        with pytest.raises(PathNotFoundError):
            sandbox.files.read("missing")
        with pytest.raises(FileNotFoundError):
            sandbox.files.stat("missing")
        sandbox.files.remove("file")
        assert not sandbox.files.exists("file")


def test_search_glob_and_watch_work_or_are_clear_errors(address: str, tmp_path: Path) -> None:
    with Sandbox.connect(address, cwd=tmp_path) as sandbox:
        sandbox.files.write("src/a.py", "x = 1  # TODO\n")
        if not sandbox.has("fsSearch"):
            for attempt in (
                lambda: sandbox.files.search("TODO"),
                lambda: sandbox.files.glob("**/*.py"),
                lambda: next(iter(sandbox.files.watch("src"))),
                lambda: sandbox.files.rename("src/a.py", "b"),
                lambda: sandbox.start(["true"], limits={"pids": 5}),
            ):
                with pytest.raises(UnsupportedError, match="does not offer"):
                    attempt()
            with pytest.raises(MethodNotFoundError):
                sandbox.request("fs/search", {"path": "file:///", "pattern": "x"})
            return
        (match,) = sandbox.files.search("TODO").matches
        assert (match.path, match.line_number) == (str(tmp_path / "src/a.py"), 1)
        assert [e.name for e in sandbox.files.glob("**/*.py").entries] == ["a.py"]
        watch = sandbox.files.watch("src", debounce=0.01)
        assert next(watch).changes == []
        sandbox.files.write("src/b.py", "y")
        assert any(change.path.endswith("b.py") for change in next(watch).changes)
        watch.close()  # type: ignore[attr-defined]


def test_terminals_signals_and_resizing(address: str) -> None:
    with Sandbox.connect(address) as sandbox:
        process = sandbox.start("stty size; read line; stty size; trap 'echo caught; exit 7' INT; "
                                "sleep 600 >/dev/null 2>&1 & echo ready; "
                                "while :; do wait; done", pty=True)
        seen = ""
        if sandbox.has("processResize"):
            process.resize(50, 132)
        else:
            with pytest.raises(UnsupportedError):
                process.resize(50, 132)
        process.write("go\n")
        while "ready" not in seen:
            seen += "".join(e.text for e in process.next_events() if isinstance(e, Output))
        assert not sandbox.has("processResize") or "50 132" in seen
        process.signal("interrupt")
        assert process.wait(60).exit_code == 7


def test_policies_confine_commands_and_files(ours: str, tmp_path: Path) -> None:
    with Sandbox.connect(ours, policy="read-only", cwd=tmp_path) as sandbox:
        result = sandbox.run("echo x > here")
        assert result.exit_code != 0 and result.sandbox_denied
        with pytest.raises(PermissionError):
            sandbox.files.write("here", "x")
    with Sandbox.connect(ours, policy="workspace-write", cwd=tmp_path) as sandbox:
        assert sandbox.run("echo x > here").ok
        sandbox.files.write("there", bytes(9 << 20))
        assert sandbox.files.read("here") == b"x\n"


def test_a_detached_process_is_found_by_its_name(ours: str) -> None:
    with Sandbox.connect(ours) as sandbox:
        process = sandbox.start("echo before; read line; echo $line", stdin=True)
        first = process.next_events(1)
        assert isinstance(first[0], Output) and first[0].text == "before\n"
        process.detach("build")
    again = Sandbox.attach("build")
    again.write("after\n")
    result = again.wait(60)
    assert (result.exit_code, result.stdout) == (0, "after\n")
    again.sandbox.close()
