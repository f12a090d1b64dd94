"""Every operation, cancelled at each of its awaits: nothing is left behind, and the connection stays usable."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from codex_exec import AsyncSandbox, _files, _transfer

from .conftest import OURS, start_server, stop_server


class Cancelling:
    """Awaits, and cancels the task while it waits for the n-th time, as ``task.cancel()`` from outside would."""

    def __init__(self, work: Awaitable[Any], step: int) -> None:
        self._work, self._step = work, step
        self.cancelled = False

    def __await__(self) -> Generator[Any, Any, Any]:
        task = asyncio.current_task()
        assert task is not None
        inner = self._work.__await__()
        resume: Callable[[], Any] = functools.partial(next, inner)
        for number in itertools.count():
            try:
                waiting = resume()
            except StopIteration as end:
                return end.value
            if number == self._step:
                self.cancelled = True
                asyncio.get_running_loop().call_soon(task.cancel)
            try:
                value = yield waiting
                resume = functools.partial(inner.send, value)
            except BaseException as error:
                resume = functools.partial(inner.throw, error)


async def cancel_everywhere(operation: Callable[[], Awaitable[Any]], after: Callable[[], Awaitable[Any]]) -> int:
    """Cancels the operation at its first await, at its second, until it ends before that; returns how many it has."""
    for step in itertools.count():
        cancelling = Cancelling(operation(), step)

        async def main(work: Cancelling = cancelling) -> Any:
            return await work

        task = asyncio.ensure_future(main())
        done, _ = await asyncio.wait({task}, timeout=60)
        assert done, f"the operation hangs after it was cancelled at await {step}"
        if not task.cancelled():
            # Either it had ended before, or it ended in the turn in which it was cancelled.
            task.result()
        await after()
        if not cancelling.cancelled:
            return step
    raise AssertionError("unreachable")


class Machine:
    """A server of its own, whose open files and processes are looked at."""

    def __init__(self, sandbox: AsyncSandbox, pid: int, directory: Path) -> None:
        self.sandbox, self.pid, self.directory = sandbox, pid, directory

    async def settled(self) -> None:
        """Waits until the server has no file of the directory open or half written, and no process runs."""
        while self._open_files() or self._unfinished() or await self._running():
            # Each round trip comes after the requests that the cancelled operation queued.
            await self.sandbox.request("environment/info")
        assert not self.sandbox._processes

    def _unfinished(self) -> list[Path]:
        return [path for path in self.directory.rglob("*") if path.name.endswith(".tmp")]

    def _open_files(self) -> list[str]:
        links = []
        for link in Path(f"/proc/{self.pid}/fd").iterdir():
            try:
                links.append(os.readlink(link))
            except FileNotFoundError:
                continue  # It was closed since.
        return [target for target in links if target.startswith(str(self.directory))]

    async def _running(self) -> bool:
        listed = await self.sandbox.request("process/list", {})
        return not all(process["exited"] for process in listed["processes"])


@asynccontextmanager
async def machine(directory: Path, **options: Any) -> AsyncIterator[Machine]:
    server, address = start_server(OURS)
    try:
        async with await AsyncSandbox.connect(address, cwd=directory, **options) as sandbox:
            yield Machine(sandbox, server.pid, directory)
    finally:
        stop_server(server)


#: Bytes of a block in these tests, so that a file of many blocks is quickly sent.
BLOCK = 64 << 10
LARGE = random.Random(3).randbytes(11 * BLOCK + 5)
SLEEPER = "echo up; exec sleep 600"


async def start_and_talk(sandbox: AsyncSandbox) -> None:
    process = await sandbox.start(["cat"], stdin=True)
    try:
        await process.write("typed\n")
        await process.next_events()
        await process.close_stdin()
        assert (await process.wait()).exit_code == 0
    finally:
        if process.running:
            process.kill_soon()
        process._forget()


async def terminal(sandbox: AsyncSandbox) -> None:
    process = await sandbox.start("read line; stty size", pty=True)
    try:
        await process.resize(30, 90)
        await process.write("go\n")
        await process.signal("interrupt")
        await process.wait()
    finally:
        if process.running:
            process.kill_soon()
        process._forget()


async def first_change(sandbox: AsyncSandbox) -> None:
    watch = sandbox.files.watch("tree")
    try:
        await watch.__anext__()
    finally:
        await watch.aclose()  # type: ignore[attr-defined]


PATCH = "*** Begin Patch\n*** Update File: tree/a\n@@\n-one\n+one\n*** Add File: tree/new\n+new\n*** End Patch"
OPERATIONS: dict[str, Callable[[AsyncSandbox, Path], Awaitable[Any]]] = {
    "run": lambda sb, _: sb.run("echo out; echo err >&2", timeout=60),
    "run with input": lambda sb, _: sb.run(["wc", "-c"], input=LARGE),
    "run with a timeout": lambda sb, _: sb.run(SLEEPER, timeout=0.05),
    "start, write, wait": lambda sb, _: start_and_talk(sb),
    "a terminal": lambda sb, _: terminal(sb),
    "read": lambda sb, _: sb.files.read("large"),
    "write": lambda sb, _: sb.files.write("fresh", LARGE),
    "write a small file": lambda sb, _: sb.files.write("deep/down/fresh", "content"),
    "list, stat, walk": lambda sb, _: _each(sb.files.list("tree"), sb.files.stat("tree"), sb.files.walk("tree")),
    "search, glob": lambda sb, _: _each(sb.files.search("one", "tree"), sb.files.glob("**/*", "tree")),
    "copy, rename, remove": lambda sb, _: _each(
        sb.files.copy("tree", "copied", recursive=True),
        sb.files.rename("copied", "renamed"),
        sb.files.remove("renamed", recursive=True),
    ),
    "watch": lambda sb, _: first_change(sb),
    "upload": lambda sb, local: sb.upload(local, "uploaded"),
    "download": lambda sb, local: sb.download("tree", local.parent / "downloaded"),
    "patch": lambda sb, _: sb.apply_patch(PATCH),
}


async def _each(*work: Awaitable[Any]) -> None:
    left = list(work)
    try:
        while left:
            await left.pop(0)
    finally:
        for one in left:
            one.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", OPERATIONS)
def test_cancellation_at_every_await_leaves_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_files, "BLOCK", BLOCK)
    monkeypatch.setattr(_transfer, "BLOCK", BLOCK)
    monkeypatch.setattr(_files, "WHOLE_FILE", BLOCK)
    local, remote = tmp_path / "local", tmp_path / "remote"
    for directory in (local / "sub", remote / "tree"):
        directory.mkdir(parents=True)
    for file in (local / "sub" / "large", remote / "large", remote / "tree" / "large"):
        file.write_bytes(LARGE)
    (remote / "tree" / "a").write_text("one\n")

    async def main() -> None:
        async with machine(remote) as there:
            # The tasks of the connection exist once it was used.
            await there.settled()
            before = asyncio.all_tasks()

            async def operation() -> Any:
                for leftover in ("copied", "renamed"):
                    await there.sandbox.files.remove(leftover, recursive=True, missing_ok=True)
                return await OPERATIONS[name](there.sandbox, local)

            async def after() -> None:
                await there.settled()
                assert (await there.sandbox.run(["echo", "usable"])).stdout == "usable\n"
                await there.settled()
                left = asyncio.all_tasks() - before
                if left:
                    # What runs in the background ends by itself.
                    await asyncio.wait(left, timeout=30)
                assert not [task for task in left if not task.done()]
                # A file is there whole, or not at all.
                for path in (remote / "fresh", remote / "uploaded/sub/large", tmp_path / "downloaded/large"):
                    assert not path.exists() or path.read_bytes() == LARGE

            assert await cancel_everywhere(operation, after) >= 2

    asyncio.run(asyncio.wait_for(main(), 120))


def test_cancelled_connections_leave_no_task_and_no_socket(ours: str) -> None:
    async def main() -> None:
        before = asyncio.all_tasks()
        files = set(os.listdir("/proc/self/fd"))

        async def operation() -> None:
            async with await AsyncSandbox.connect(ours) as sandbox:
                await sandbox.run(["true"])

        async def after() -> None:
            if left := asyncio.all_tasks() - before:
                await asyncio.wait(left, timeout=30)
            assert not [task for task in asyncio.all_tasks() - before if not task.done()]
            while set(os.listdir("/proc/self/fd")) - files:  # noqa: ASYNC110
                # Transports close in the next turns of the loop.
                await asyncio.sleep(0)

        assert await cancel_everywhere(operation, after) >= 3

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_cancelled_local_server_ends(tmp_path: Path) -> None:
    def children() -> set[str]:
        return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}

    async def main() -> None:
        others = children()
        before = asyncio.all_tasks()

        async def operation() -> None:
            async with await AsyncSandbox.local(cwd=tmp_path) as sandbox:
                await sandbox.run(["true"])

        async def after() -> None:
            if left := asyncio.all_tasks() - before:
                await asyncio.wait(left, timeout=30)
            assert not [task for task in asyncio.all_tasks() - before if not task.done()]
            while children() - others:  # noqa: ASYNC110
                # The watcher of children may still be about to reap it.
                await asyncio.sleep(0)

        assert await cancel_everywhere(operation, after) >= 3

    asyncio.run(asyncio.wait_for(main(), 120))
