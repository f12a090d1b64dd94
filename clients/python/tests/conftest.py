"""Servers to test against: ours, the other implementation, a fake one, and a proxy that cuts connections.

``CODEX_BIN`` names our program; ``CODEX_OTHER_BIN`` the other implementation, whose tests are skipped without
it, and fail without it where ``CI`` is set.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import websockets.asyncio.server as ws_server
from websockets.exceptions import ConnectionClosed

OURS = os.environ.get("CODEX_BIN", "codex")
OTHER = os.environ.get("CODEX_OTHER_BIN")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stream-bytes", type=int, default=64 << 20, help="bytes of the large checksummed stream")
    parser.addoption("--processes", type=int, default=1000, help="processes of the test with many")
    parser.addoption("--seed", type=int, default=20261118, help="seed of the random tests")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--seed"))


def start_server(program: str, *arguments: str, listen: str = "ws://127.0.0.1:0") -> tuple[subprocess.Popen[str], str]:
    """Starts a server and returns it with its address, which it prints when it listens."""
    server = subprocess.Popen(
        [program, "exec-server", "--listen", listen, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdout is not None
    address = server.stdout.readline().strip()
    assert address, f"{program} printed no address"
    return server, address


def stop_server(server: subprocess.Popen[str]) -> None:
    server.terminate()
    try:
        server.wait(10)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    assert server.stdout is not None
    server.stdout.close()


@pytest.fixture(scope="session")
def ours() -> Iterator[str]:
    """The address of our server."""
    server, address = start_server(OURS)
    yield address
    stop_server(server)


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the other implementation's server."""
    if not OTHER:
        if os.environ.get("CI"):
            pytest.fail("CODEX_OTHER_BIN is not set; clients/python/run-tests installs the program")
        pytest.skip("CODEX_OTHER_BIN is not set")
    home = tmp_path_factory.mktemp("home")
    before = os.environ.get("CODEX_HOME")
    os.environ["CODEX_HOME"] = str(home)
    try:
        server, address = start_server(OTHER)
    finally:
        if before is None:
            del os.environ["CODEX_HOME"]
        else:
            os.environ["CODEX_HOME"] = before
    yield address
    stop_server(server)


@pytest.fixture(params=["ours", "other"])
def address(request: pytest.FixtureRequest) -> str:
    """The address of either server."""
    return str(request.getfixturevalue(request.param))


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of detached processes go to a directory of the test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("CODEX_BIN", OURS)


class CuttingProxy:
    """Forwards bytes, and cuts each connection once it has carried its share of them."""

    def __init__(self, target: str, budgets: Iterator[int]) -> None:
        host, _, port = target.removeprefix("ws://").rpartition(":")
        self._target = (host, int(port.rstrip("/")))
        self._budgets = budgets
        self.cuts = 0
        self.open: set[asyncio.StreamWriter] = set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        budget = [next(self._budgets)]
        try:
            to_reader, to_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        self.open |= {writer, to_writer}

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                budget[0] -= len(data)
                if budget[0] < 0:
                    # The bytes before the limit arrive, in the middle of a message.
                    sink.write(data[: len(data) + budget[0]])
                    self.cuts += 1
                    return
                sink.write(data)
                await sink.drain()

        tasks = [asyncio.ensure_future(pump(reader, to_writer)), asyncio.ensure_future(pump(to_reader, writer))]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for end in (writer, to_writer):
            self.open.discard(end)
            end.transport.abort() if budget[0] >= 0 else end.close()

    def cut_all(self) -> None:
        """Cuts every connection now."""
        for writer in list(self.open):
            self.cuts += 1
            writer.transport.abort()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            yield f"ws://127.0.0.1:{port}"
        finally:
            server.close()
            self.cut_all()


Script = Callable[[ws_server.ServerConnection], Awaitable[None]]


@asynccontextmanager
async def fake_server(script: Script) -> AsyncIterator[str]:
    """A websocket server that runs a script for each connection."""

    async def handle(connection: ws_server.ServerConnection) -> None:
        try:
            await script(connection)
        except ConnectionClosed:
            pass

    async with ws_server.serve(handle, "127.0.0.1", 0, max_size=None) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        yield f"ws://127.0.0.1:{port}"


async def greet(connection: ws_server.ServerConnection, **info: Any) -> dict[str, Any]:
    """Answers initialize as a server does, and takes initialized."""
    hello: dict[str, Any] = json.loads(await connection.recv())
    result = {"sessionId": hello["params"].get("resumeSessionId") or "fake", "environmentInfo": info}
    await connection.send(json.dumps({"id": hello["id"], "result": result}))
    await connection.recv()
    return hello


def in_thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
