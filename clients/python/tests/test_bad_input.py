"""Servers that are none, drops, cancellation, forks, blocked and foreign event loops, Ctrl-C."""

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
from pathlib import Path

import pytest
import websockets.asyncio.server as ws_server

from codex_exec import (
    AsyncSandbox,
    CodexError,
    CommandEndedError,
    ConnectionLostError,
    ConnectRefusedError,
    InvalidParamsError,
    Output,
    ProtocolViolationError,
    RequestTimeoutError,
    Sandbox,
    TokenRefusedError,
    UnknownSessionError,
    UnsupportedError,
    UsageError,
)
from codex_exec import _connection as connection_module

from .conftest import OURS, CuttingProxy, fake_server, greet, start_server, stop_server

# A server that is not one


def test_nothing_listens() -> None:
    with pytest.raises(ConnectRefusedError, match="nothing listens"):
        Sandbox.connect("ws://127.0.0.1:1")
    with pytest.raises(ConnectionRefusedError):
        Sandbox.connect("unix:/nonexistent/socket")


@pytest.mark.parametrize("address", ["", "http://x", "ws:", "unix:", "env:", "vsock:1:2", "localhost:80", "ws://[bad"])
def test_an_invalid_address_is_a_clear_error(address: str) -> None:
    with pytest.raises((InvalidParamsError, UnsupportedError)):
        Sandbox.connect(address)


def test_a_plain_web_server_is_not_a_server() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        with pytest.raises(ProtocolViolationError, match="not a codex exec-server"):
            await AsyncSandbox.connect(f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        server.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "reply", ["garbage", "[]", "{}", '{"id":"initialize","result":5}', '{"id":7,"result":{}}', "echo"]
)
def test_a_websocket_that_speaks_something_else_is_refused(reply: str) -> None:
    async def script(connection: ws_server.ServerConnection) -> None:
        hello = await connection.recv()
        await connection.send(hello if reply == "echo" else reply)
        await connection.wait_closed()

    async def main() -> None:
        async with fake_server(script) as address:
            with pytest.raises(ProtocolViolationError):
                await AsyncSandbox.connect(address)

    asyncio.run(main())


def test_a_silent_server_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "ATTEMPT_TIMEOUT", 0.3)

    async def script(connection: ws_server.ServerConnection) -> None:
        await connection.wait_closed()

    async def main() -> None:
        async with fake_server(script) as address:
            with pytest.raises(RequestTimeoutError, match="did not answer"):
                await AsyncSandbox.connect(address)

    asyncio.run(main())


def test_commands_that_are_not_servers() -> None:
    with pytest.raises(CommandEndedError, match=r"exit code 3: went wrong"):
        Sandbox.connect("stdio:sh -c 'echo went wrong >&2; exit 3'")
    with pytest.raises(CommandEndedError, match="cannot find"):
        Sandbox.local(program="/nonexistent/codex")
    with pytest.raises(ProtocolViolationError):
        Sandbox.connect("stdio:sh -c 'echo hello; exec cat > /dev/null'")


# An old server without extensions


def test_an_old_server_without_extensions_still_runs_commands() -> None:
    async def script(connection: ws_server.ServerConnection) -> None:
        hello = json.loads(await connection.recv())
        await connection.send(json.dumps({"id": hello["id"], "result": {}}))
        await connection.recv()
        async for raw in connection:
            message = json.loads(raw)
            if message["method"] == "process/start":
                name = message["params"]["processId"]
                assert "retain" not in message["params"] and "limits" not in message["params"]
                await connection.send(json.dumps({"id": message["id"], "result": {"processId": name}}))
                for method, params in (
                    ("output", {"seq": 1, "stream": "stdout", "chunk": "aGkK"}),
                    ("exited", {"seq": 2, "exitCode": 0}),
                    ("closed", {"seq": 3}),
                ):
                    params = {"processId": name, **params}
                    await connection.send(json.dumps({"method": f"process/{method}", "params": params}))
            else:
                error = {"code": -32601, "message": "unknown method"}
                await connection.send(json.dumps({"id": message["id"], "error": error}))

    async def main() -> None:
        async with fake_server(script) as address, await AsyncSandbox.connect(address) as sandbox:
            assert (await sandbox.run(["echo", "hi"])).stdout == "hi\n"
            with pytest.raises(UnsupportedError, match="does not offer fs/search"):
                await sandbox.files.search("x")

    asyncio.run(main())


# A token that is refused


def test_a_refused_token_is_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("right-token-right-token-right-token")
    server, address = start_server(OURS, "--ws-auth", "capability-token", "--ws-token-file", str(tmp_path / "token"))
    try:
        for token in (None, "wrong"):
            with pytest.raises(TokenRefusedError) as refused:
                Sandbox.connect(address, token=token)
            assert "wrong" not in str(refused.value)
        with Sandbox.connect(address, token="right-token-right-token-right-token") as sandbox:
            assert sandbox.run(["true"]).ok
    finally:
        stop_server(server)


# Drops


def test_a_session_that_is_gone_is_an_error_and_not_a_hang() -> None:
    async def main() -> None:
        server, address = start_server(OURS, "--detach-ttl", "0")
        proxy = CuttingProxy(address, iter(lambda: 1 << 60, 0))
        try:
            async with proxy.listening() as through:
                sandbox = await AsyncSandbox.connect(through)
                process = await sandbox.start(["sleep", "600"])
                proxy.cut_all()
                with pytest.raises(UnknownSessionError):
                    await asyncio.wait_for(process.wait(), 30)
                with pytest.raises(UnknownSessionError):
                    await sandbox.run(["true"])
                await sandbox.close()
        finally:
            stop_server(server)

    asyncio.run(main())


def test_patience_ends() -> None:
    async def main() -> None:
        server, address = start_server(OURS)
        sandbox = await AsyncSandbox.connect(address, patience=0.5)
        process = await sandbox.start(["sleep", "600"])
        stop_server(server)
        with pytest.raises(ConnectionLostError, match="reconnecting failed"):
            await asyncio.wait_for(process.wait(), 30)
        await sandbox.close()

    asyncio.run(main())


def test_a_timeout_returns_although_the_server_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("codex_exec._sandbox.KILL_GRACE", 0.2)

    async def script(connection: ws_server.ServerConnection) -> None:
        await greet(connection, capabilities={})
        message = json.loads(await connection.recv())
        name = message["params"]["processId"]
        await connection.send(json.dumps({"id": message["id"], "result": {"processId": name}}))
        output = {"processId": name, "seq": 1, "stream": "stdout", "chunk": "aGkK"}
        await connection.send(json.dumps({"method": "process/output", "params": output}))
        await connection.wait_closed()

    async def main() -> None:
        async with fake_server(script) as address:
            sandbox = await AsyncSandbox.connect(address)
            result = await asyncio.wait_for(sandbox.run(["x"], timeout=0.3), 30)
            assert result.timed_out and result.stdout == "hi\n" and result.exit_code is None
            await sandbox._connection.close()

    asyncio.run(main())


def test_a_request_that_must_not_be_repeated_fails_when_its_connection_is_lost() -> None:
    seen: list[str] = []

    async def script(connection: ws_server.ServerConnection) -> None:
        await greet(connection, capabilities={"fsRenameLinkMode": True})
        message = json.loads(await connection.recv())
        seen.append(message["method"])
        if len(seen) == 1 or message["method"] == "fs/rename":
            connection.transport.abort()
        else:
            await connection.send(json.dumps({"id": message["id"], "result": {"status": "ready"}}))
            await connection.wait_closed()

    async def main() -> None:
        async with fake_server(script) as address:
            sandbox = await AsyncSandbox.connect(address)
            with pytest.raises(ConnectionLostError, match="unknown"):
                await sandbox.files.rename("a", "b")
            assert await sandbox.request("environment/status") == {"status": "ready"}
            await sandbox._connection.close()
        assert seen == ["fs/rename", "environment/status"]

    asyncio.run(asyncio.wait_for(main(), 30))


# Cancellation: test_cancellation.py has every operation at each of its awaits


def test_a_cancelled_run_may_leave_the_command_running(ours: str) -> None:
    async def main() -> None:
        async with await AsyncSandbox.connect(ours) as sandbox:
            started = asyncio.Event()
            task = asyncio.ensure_future(
                sandbox.run("echo up; exec sleep 600", on_stdout=lambda _: started.set(), on_cancel="leave")
            )
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            (process,) = sandbox._processes.values()
            assert process.running and await process.kill()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_random_cancellations_lose_no_output(ours: str, seed: int) -> None:
    rng = random.Random(seed)

    async def main() -> None:
        async with await AsyncSandbox.connect(ours) as sandbox:
            process = await sandbox.start("i=0; while [ $i -lt 3000 ]; do echo $i; i=$((i+1)); done")
            got = b""
            while True:
                taking = asyncio.ensure_future(process.next_events(rng.randrange(1, 5)))
                for _ in range(rng.randrange(0, 4)):
                    await asyncio.sleep(0)
                taking.cancel()
                try:
                    batch = await taking
                except asyncio.CancelledError:
                    continue
                if not batch:
                    break
                got += b"".join(e.data for e in batch if isinstance(e, Output))
            assert got == b"".join(b"%d\n" % i for i in range(3000))

    asyncio.run(asyncio.wait_for(main(), 60))


# Forks, loops, Ctrl-C


def script(text: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(text), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_a_forked_process_gets_an_error_and_the_parent_goes_on(ours: str) -> None:
    child = script(
        """
        import os, sys
        from codex_exec import Sandbox, UsageError
        with Sandbox.connect(sys.argv[1]) as sb:
            sleeper = sb.start(["sleep", "600"])
            pid = os.fork()
            if pid == 0:
                try:
                    sb.run(["true"])
                except UsageError:
                    with Sandbox.connect(sys.argv[1]) as fresh:
                        os._exit(0 if fresh.run(["true"]).ok else 3)
                os._exit(4)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            assert sb.run(["echo", "parent"]).stdout == "parent\\n"
            assert sleeper.running
        print("fine")
        """,
        ours,
    )
    out, err = child.communicate(timeout=60)
    assert out == "fine\n", err


def test_a_second_event_loop_is_refused_and_the_first_goes_on(ours: str) -> None:
    async def use(sandbox: AsyncSandbox) -> None:
        with pytest.raises(UsageError, match="another event loop"):
            await sandbox.run(["true"])

    async def main() -> None:
        async with await AsyncSandbox.connect(ours) as sandbox:
            await asyncio.to_thread(lambda: asyncio.run(use(sandbox)))
            assert (await sandbox.run(["true"])).ok

    asyncio.run(asyncio.wait_for(main(), 60))


def test_sync_works_inside_a_running_loop_and_from_threads(ours: str) -> None:
    with Sandbox.connect(ours) as sandbox:

        async def notebook() -> str:
            return sandbox.run(["echo", "cell"]).stdout

        assert asyncio.run(notebook()) == "cell\n"
        results: list[str] = []
        threads = [
            threading.Thread(target=lambda n=n: results.append(sandbox.run(["echo", str(n)]).stdout)) for n in range(20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(results) == sorted(f"{n}\n" for n in range(20))


def test_a_blocked_event_loop_loses_nothing(ours: str) -> None:
    async def main() -> None:
        async with await AsyncSandbox.connect(ours) as sandbox:
            process = await sandbox.start("head -c 20000000 /dev/zero; echo end")
            time.sleep(2)  # noqa: ASYNC251 - the blocked loop is what is tested
            result = await process.wait(60)
            assert len(result.stdout_bytes) == 20_000_004 and result.stdout_bytes.endswith(b"end\n")

    asyncio.run(main())


def test_a_consumer_that_does_not_read_makes_the_process_wait(ours: str) -> None:
    async def main() -> None:
        async with await AsyncSandbox.connect(ours) as sandbox:
            process = await sandbox.start("head -c 30000000 /dev/zero; echo end", window=1 << 20)
            other = await sandbox.run("head -c 5000000 /dev/zero")
            assert len(other.stdout_bytes) == 5_000_000
            assert process.running and process._events.queued_bytes <= 2 << 20
            assert len((await process.wait(60)).stdout_bytes) == 30_000_004

    asyncio.run(main())


@pytest.mark.parametrize("callback", ["", ", on_stdout=lambda line: print(line, flush=True)"])
def test_ctrl_c_kills_the_command_and_raises_keyboard_interrupt(ours: str, tmp_path: Path, callback: str) -> None:
    child = script(
        f"""
        import sys
        from codex_exec import Sandbox
        with Sandbox.connect(sys.argv[1]) as sb:
            try:
                sb.run("echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; exec sleep 600"{callback})
            except KeyboardInterrupt:
                print("interrupted", sb.run(["echo", "usable"]).stdout, end="")
        """,
        ours,
    )
    pid_file = tmp_path / "pid"
    while not pid_file.exists():
        assert child.poll() is None, child.communicate()
        time.sleep(0.02)
    pid = int(pid_file.read_text())
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert out == "interrupted usable\n", err
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline, "the command is still running"
        time.sleep(0.02)


def test_a_closed_sandbox_says_so(ours: str) -> None:
    sandbox = Sandbox.connect(ours)
    sandbox.close()
    sandbox.close()
    with pytest.raises(CodexError, match="closed"):
        sandbox.run(["true"])


def test_arguments_that_the_protocol_cannot_carry_are_refused(ours: str) -> None:
    with Sandbox.connect(ours) as sandbox:
        for command in ([], ["echo", "\udcff"]):
            with pytest.raises(InvalidParamsError):
                sandbox.run(command)
        with pytest.raises(InvalidParamsError):
            sandbox.files.read("")
        with pytest.raises(InvalidParamsError):
            Sandbox.connect(ours, policy="everything")
