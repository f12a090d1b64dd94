"""Servers that change their mind, and Ctrl-C, forks and event loops in the middle of something."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import websockets.asyncio.server as ws_server
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from codex_exec import (
    AsyncSandbox,
    ConnectionLostError,
    Output,
    ProtocolViolationError,
    Sandbox,
    TokenRefusedError,
    UnsupportedError,
    UsageError,
    _transport,
)

from .conftest import OURS, CuttingProxy, fake_server, greet, start_server, stop_server

# A server that becomes none


def test_a_server_that_is_away_for_a_while_is_reconnected(tmp_path: Path) -> None:
    """A proxy says so by its status, or closes what it has accepted."""
    connections = 0

    def admit(connection: ws_server.ServerConnection, _: Request) -> Response | None:
        nonlocal connections
        connections += 1
        if connections in (2, 3):
            return Response(HTTPStatus.BAD_GATEWAY, "Bad Gateway", Headers(), b"")
        if connections == 4:
            connection.transport.abort()
        return None

    async def script(connection: ws_server.ServerConnection) -> None:
        await greet(connection, capabilities={})
        message = json.loads(await connection.recv())
        if connections == 1:
            connection.transport.abort()
            return
        await connection.send(json.dumps({"id": message["id"], "result": {"status": "ready"}}))
        await connection.wait_closed()

    async def main() -> None:
        async with ws_server.serve(script, "127.0.0.1", 0, process_request=admit) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            async with await AsyncSandbox.connect(f"ws://127.0.0.1:{port}") as sandbox:
                assert await sandbox.request("environment/status") == {"status": "ready"}
        assert connections == 5

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("garbage", ["not JSON", "[1]", b"\xff\xfe"])
def test_garbage_in_the_middle_of_a_session_fails_every_call(garbage: str | bytes) -> None:
    async def script(connection: ws_server.ServerConnection) -> None:
        await greet(connection, capabilities={})
        await connection.recv()
        await connection.recv()
        await connection.send(garbage)
        await connection.wait_closed()

    async def main() -> None:
        async with fake_server(script) as address:
            sandbox = await AsyncSandbox.connect(address)
            calls = [asyncio.ensure_future(work) for work in (sandbox.run(["true"]), sandbox.files.stat("/"))]
            for call in calls:
                with pytest.raises(ProtocolViolationError):
                    await call
            with pytest.raises(ProtocolViolationError):
                await sandbox.run(["true"])
            await sandbox.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_what_an_old_server_lacks_is_an_error_before_anything_is_sent() -> None:
    sent: list[str] = []

    async def script(connection: ws_server.ServerConnection) -> None:
        hello = json.loads(await connection.recv())
        await connection.send(json.dumps({"id": hello["id"], "result": {}}))
        await connection.recv()
        async for raw in connection:
            message = json.loads(raw)
            sent.append(message["method"])
            params = message.get("params") or {}
            if message["method"] == "process/start":
                answer: dict[str, Any] = {"result": {"processId": params["processId"]}}
            else:
                answer = {"error": {"code": -32601, "message": "unknown method"}}
            await connection.send(json.dumps({"id": message["id"], **answer}))

    async def main() -> None:
        async with fake_server(script) as address, await AsyncSandbox.connect(address) as sandbox:
            process = await sandbox.start(["cat"], stdin=True)
            sent.clear()
            attempts: list[Callable[[], Awaitable[Any]]] = [
                lambda: sandbox.run(["cat"], input="x"),
                lambda: sandbox.start(["true"], limits={"pids": 5}),
                lambda: process.close_stdin(),
                lambda: process.resize(10, 10),
                lambda: process.signal("terminate"),
                lambda: process.detach("name"),
                lambda: sandbox.files.write("file", "x", mode=0o600),
                lambda: sandbox.files.rename("a", "b"),
                lambda: sandbox.files.glob("*"),
            ]
            for attempt in attempts:
                with pytest.raises(UnsupportedError):
                    await attempt()
            assert sent == []

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_token_that_is_refused_after_a_drop_ends_the_reconnecting() -> None:
    connections = 0

    def admit(connection: ws_server.ServerConnection, _: Request) -> Response | None:
        nonlocal connections
        connections += 1
        return None if connections == 1 else Response(HTTPStatus.UNAUTHORIZED, "Unauthorized", Headers(), b"")

    async def script(connection: ws_server.ServerConnection) -> None:
        await greet(connection, capabilities={})
        await connection.recv()
        connection.transport.abort()

    async def main() -> None:
        async with ws_server.serve(script, "127.0.0.1", 0, process_request=admit) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            sandbox = await AsyncSandbox.connect(f"ws://127.0.0.1:{port}", token="secret-token")
            with pytest.raises(TokenRefusedError) as refused:
                await sandbox.run(["true"])
            assert "secret-token" not in str(refused.value) and connections == 2
            await sandbox.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_server_that_dies_in_the_middle_of_an_upload_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    for number in range(4):
        (tmp_path / "tree" / str(number)).write_bytes(bytes(3 << 20))

    def budgets() -> Iterator[int]:
        yield 5 << 20
        while True:
            yield 0

    async def main() -> None:
        server, address = start_server(OURS)
        proxy = CuttingProxy(address, budgets())
        try:
            async with proxy.listening() as through:
                sandbox = await AsyncSandbox.connect(through, patience=1)
                with pytest.raises(ConnectionLostError, match="reconnecting failed"):
                    await sandbox.upload(tmp_path / "tree", tmp_path / "there")
                await sandbox.close()
        finally:
            stop_server(server)
        # A file is there whole, or not at all.
        assert all(file.stat().st_size == 3 << 20 for file in (tmp_path / "there").iterdir() if file.suffix != ".tmp")

    asyncio.run(asyncio.wait_for(main(), 60))


# Event loops


def test_a_loop_that_is_blocked_for_longer_than_a_ping_loses_nothing(
    ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_transport, "PING_INTERVAL", 0.2)
    monkeypatch.setattr(_transport, "PING_TIMEOUT", 0.2)

    async def main() -> None:
        async with await AsyncSandbox.connect(ours) as sandbox:
            process = await sandbox.start("i=0; while [ $i -lt 20000 ]; do echo $i; i=$((i+1)); done")
            got, blocked = b"", 0
            async for event in process:
                got += event.data if isinstance(event, Output) else b""
                if blocked < 3:
                    blocked += 1
                    time.sleep(0.7)  # noqa: ASYNC251 - the blocked loop is what is tested
            assert got == b"".join(b"%d\n" % i for i in range(20000))

    asyncio.run(asyncio.wait_for(main(), 60))


def test_two_event_loops_have_a_sandbox_each(ours: str) -> None:
    failures: list[BaseException] = []

    def thread(number: int) -> None:
        async def main() -> None:
            async with await AsyncSandbox.connect(ours) as sandbox:
                results = await asyncio.gather(*(sandbox.run(["echo", f"{number} {n}"]) for n in range(20)))
                assert [result.stdout for result in results] == [f"{number} {n}\n" for n in range(20)]

        try:
            asyncio.run(main())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=thread, args=[number]) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert not failures and not any(one.is_alive() for one in threads)


def test_a_sandbox_outlives_no_event_loop(ours: str) -> None:
    sandbox = asyncio.run(AsyncSandbox.connect(ours))

    async def use() -> None:
        with pytest.raises(UsageError, match="another event loop"):
            await sandbox.run(["true"])

    asyncio.run(use())


# Forks and Ctrl-C


def script(text: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(text), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_forks_of_asyncio_and_in_the_middle_of_a_call(ours: str) -> None:
    child = script(
        """
        import asyncio, os, sys, threading
        from codex_exec import AsyncSandbox, Sandbox, UsageError

        def forked(work):
            pid = os.fork()
            if pid == 0:
                try:
                    work()
                except UsageError:
                    os._exit(0)
                finally:
                    os._exit(9)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

        async def main():
            async with await AsyncSandbox.connect(sys.argv[1]) as sb:
                assert forked(lambda: sb._connection.post("environment/info")) == 0
                assert (await sb.run(["true"])).ok

        asyncio.run(main())

        # Another thread is in a call, and holds whatever it holds.
        with Sandbox.connect(sys.argv[1]) as sb:
            up = threading.Event()
            results = []
            call = lambda: results.append(sb.run("echo up; read line; echo $line", input="x" * 5,
                                                 on_stdout=lambda _: up.set()))
            thread = threading.Thread(target=call)
            thread.start()
            up.wait()
            assert forked(lambda: sb.run(["true"])) == 0
            def fresh():
                with Sandbox.connect(sys.argv[1]) as other:
                    os._exit(0 if other.run(["true"]).ok else 8)
            assert forked(fresh) == 0
            thread.join()
            assert results[0].stdout == "up\\nxxxxx\\n"
        print("fine")
        """,
        ours,
    )
    out, err = child.communicate(timeout=60)
    assert out == "fine\n", err


INTERRUPTED = {
    "asyncio.run": """
        import asyncio
        from codex_exec import AsyncSandbox
        async def main():
            async with await AsyncSandbox.connect(address) as sb:
                await sb.run(waiting)
        try:
            asyncio.run(main())
        except KeyboardInterrupt:
            print("interrupted")
        """,
    "iterating": """
        from codex_exec import Sandbox
        try:
            with Sandbox.connect(address) as sb:
                for event in sb.start(waiting):
                    pass
        except KeyboardInterrupt:
            print("interrupted")
        """,
    "waiting": """
        from codex_exec import Sandbox
        try:
            with Sandbox.connect(address) as sb:
                sb.start(waiting).wait()
        except KeyboardInterrupt:
            print("interrupted")
        """,
    "writing": """
        from codex_exec import Sandbox
        try:
            with Sandbox.connect(address) as sb:
                sb.start(waiting, stdin=True).write(bytes(200_000_000))
        except KeyboardInterrupt:
            print("interrupted")
        """,
}


@pytest.mark.parametrize("how", INTERRUPTED)
def test_ctrl_c_ends_what_waits_and_the_command_with_it(ours: str, tmp_path: Path, how: str) -> None:
    os.mkfifo(tmp_path / "up")
    waiting = f"exec 3> {tmp_path}/up; echo up >&3; exec sleep 600"
    code = textwrap.dedent(INTERRUPTED[how])
    child = script(f"address, waiting = {ours!r}, {waiting!r}\n{code}")
    with open(tmp_path / "up", "rb") as up:
        assert up.readline() == b"up\n"
        child.send_signal(signal.SIGINT)
        # The command holds the other end.
        assert up.read() == b""
    out, err = child.communicate(timeout=60)
    assert out == "interrupted\n", err


def test_ctrl_c_in_an_upload_leaves_no_half_file(ours: str, tmp_path: Path) -> None:
    data = random.Random(5).randbytes(1 << 20) * 12
    (tmp_path / "large").write_bytes(data)
    child = script(
        """
        import sys
        from codex_exec import Sandbox
        with Sandbox.connect(sys.argv[1]) as sb:
            try:
                while True:
                    sb.upload(sys.argv[2] + "/large", sys.argv[2] + "/there")
                    print("uploaded", flush=True)
            except KeyboardInterrupt:
                print("interrupted", sb.run(["echo", "usable"]).stdout, end="", flush=True)
        """,
        ours,
        str(tmp_path),
    )
    assert child.stdout is not None and child.stdout.readline() == "uploaded\n"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert out.replace("uploaded\n", "") == "interrupted usable\n", err
    assert (tmp_path / "there").read_bytes() == data
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["large", "there"]


def test_ctrl_c_while_a_silent_server_is_dialled() -> None:
    async def main() -> None:
        asked = asyncio.Event()

        async def silent(connection: ws_server.ServerConnection) -> None:
            await connection.recv()
            asked.set()
            await connection.wait_closed()

        async with fake_server(silent) as address:
            child = script(
                """
                import sys
                from codex_exec import Sandbox
                try:
                    Sandbox.connect(sys.argv[1])
                except KeyboardInterrupt:
                    print("interrupted")
                """,
                address,
            )
            await asked.wait()
            child.send_signal(signal.SIGINT)
            out, err = await asyncio.to_thread(child.communicate, timeout=60)
            assert out == "interrupted\n", err

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_synchronous_sandbox_that_is_left_in_a_callback_says_so(ours: str) -> None:
    with Sandbox.connect(ours) as sandbox:

        def inside() -> None:
            with pytest.raises(UsageError, match="use AsyncSandbox there"):
                sandbox.run(["true"])

        done = threading.Event()
        sandbox._runner.loop.call_soon_threadsafe(lambda: (inside(), done.set()))
        assert done.wait(30)
