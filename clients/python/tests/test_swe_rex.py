"""SWE-ReX: its own test scenarios against our runtime, and what those leave out.

``SWE_REX_TESTS`` names the tests of its source distribution, which run-tests fetches; without them theirs are skipped,
and fail where ``CI`` is set.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("swerex", reason="install codex-exec[swe-rex]")

from swerex.deployment.hooks.abstract import DeploymentHook
from swerex.exceptions import (
    CommandTimeoutError,
    DeploymentNotStartedError,
    NoExitCodeError,
    NonZeroExitCodeError,
    SessionExistsError,
    SwerexException,
)
from swerex.runtime.abstract import (
    BashAction,
    BashInterruptAction,
    BashObservation,
    CloseBashSessionRequest,
    Command,
    CreateBashSessionRequest,
    ReadFileRequest,
    UploadRequest,
    WriteFileRequest,
)

from codex_exec import AsyncSandbox
from codex_exec.adapters.swe_rex import CodexDeployment, CodexRuntime

from .conftest import OURS, start_server, stop_server


def test_its_own_scenarios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = os.environ.get("SWE_REX_TESTS")
    if not theirs:
        if os.environ.get("CI"):
            pytest.fail("SWE_REX_TESTS is not set; clients/python/run-tests fetches them")
        pytest.skip("SWE_REX_TESTS is not set")
    suite = tmp_path / "suite"
    suite.mkdir()
    (suite / "__init__.py").touch()
    shutil.copy(Path(theirs) / "test_execution.py", suite)
    shutil.copy(Path(__file__).parent / "swe_rex_fixtures.py", suite / "conftest.py")
    # The sessions start `python`, which not every machine has under this name.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    server, address = start_server(OURS)
    # Of a host name that does not exist, by their own client.
    unrelated = ["--deselect", "suite/test_execution.py::test_server_dead"]
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), "--asyncio-mode=auto", *unrelated]
    try:
        ran = subprocess.run(
            [*command, "-p", "no:cacheprovider", "-W", "ignore", str(suite)],
            cwd=tmp_path,
            env={**os.environ, "CODEX_TEST_SERVER": address},
            capture_output=True,
            text=True,
            timeout=170,
        )
    finally:
        stop_server(server)
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout + ran.stderr


Run = Callable[..., Awaitable[BashObservation]]


def in_session(address: str, work: Callable[[CodexRuntime, Run], Awaitable[None]], **options: Any) -> None:
    """Calls work with a runtime, and with a function that runs a command in its session."""

    async def main() -> None:
        async with await AsyncSandbox.connect(address, **options) as sandbox:
            runtime = CodexRuntime(sandbox)
            await runtime.create_session(CreateBashSessionRequest())

            async def run(command: str, **members: Any) -> BashObservation:
                return await runtime.run_in_session(BashAction(command=command, **{"timeout": 60, **members}))

            await work(runtime, run)
            await runtime.close()

    asyncio.run(asyncio.wait_for(main(), 120))


def test_output_after_a_timeout_is_not_taken_for_the_next_command(ours: str, tmp_path: Path) -> None:
    async def work(_: CodexRuntime, run: Run) -> None:
        (tmp_path / "gate").touch()
        waiting = f"while [ -e {tmp_path}/gate ]; do sleep 0.02; done; echo late; (exit 7)"
        with pytest.raises(CommandTimeoutError):
            await run(waiting, timeout=0.2)
        (tmp_path / "gate").unlink()
        # Its prompt with status 7 comes first.
        observed = await run("echo mine; (exit 3)", check="silent")
        assert (observed.output, observed.exit_code) == ("late\nmine\n", 3)

    in_session(ours, work)


@pytest.mark.parametrize("policy", [None, "read-only"])
def test_a_command_may_have_any_length_and_any_character(ours: str, policy: str | None) -> None:
    async def work(_: CodexRuntime, run: Run) -> None:
        text = "".join(chr(c) for c in range(1, 0x180)) + "日本語 🎉 'quoted' \"double\" $HOME `x` !! \\ " * 500
        quoted = "'" + text.replace("'", "'\\''") + "'"
        assert (await run(f"printf %s {quoted} | sha256sum | cut -c1-64")).output == _sha256(text) + "\n"
        assert (await run("cat <<'EOF'\n$x\n\tb\\\nEOF\necho end")).output == "$x\n\tb\\\nend\n"

    in_session(ours, work, policy=policy)


def _sha256(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()


def test_a_command_may_change_the_prompt_and_the_terminal(ours: str) -> None:
    async def work(_: CodexRuntime, run: Run) -> None:
        await run("PS1='(venv) '\"$PS1\"; PS2=more; PS0=before; stty sane")
        assert (await run("echo one")).output == "one\n"
        await run("stty sane")
        assert (await run("false || echo two")).output == "two\n"
        await run("PROMPT_COMMAND='true'")
        assert (await run("echo three; false", check="silent")).model_dump(include={"output", "exit_code"}) == {
            "output": "three\n",
            "exit_code": 1,
        }

    in_session(ours, work)


def test_state_stays_in_the_session(ours: str, tmp_path: Path) -> None:
    async def work(_: CodexRuntime, run: Run) -> None:
        await run(f"cd {tmp_path}; export VALUE=kept; alias greet='echo hello'; f() {{ return 5; }}; set -o pipefail")
        assert (await run("pwd; echo $VALUE; greet")).output == f"{tmp_path}\nkept\nhello\n"
        assert (await run("f", check="silent")).exit_code == 5
        assert (await run("false | true", check="silent")).exit_code == 1
        assert (await run("false", check="ignore")).exit_code is None
        with pytest.raises(NonZeroExitCodeError, match="the build broke: Command 'false' failed with exit code 1"):
            await run("false", error_msg="the build broke")

    in_session(ours, work)


def test_expected_text_ends_a_wait_and_the_status_follows(ours: str) -> None:
    async def work(_: CodexRuntime, run: Run) -> None:
        observed = await run("echo before; echo ready 12; echo after", expect=[r"ready (\d+)", "never"])
        assert observed.expect_string == r"ready (\d+)"
        assert (observed.output, observed.exit_code) == ("before\n\nafter\n", 0)
        with pytest.raises(NoExitCodeError, match="still running"):
            await run("echo ready; exec 3<&0; read line", expect=["ready"])
        observed = await run("typed", is_interactive_quit=True)
        assert (await run('echo "$line"')).output == "typed\n"

    in_session(ours, work)


def test_an_interrupt_ends_a_command_that_waits_forever_and_one_that_ignores_it(ours: str) -> None:
    async def work(runtime: CodexRuntime, run: Run) -> None:
        for command in ("sleep 600", "sh -c 'trap \"\" INT; echo trapped; while :; do sleep 600; done'"):
            with pytest.raises(CommandTimeoutError):
                await run(command, timeout=1)
            observed = await runtime.run_in_session(BashInterruptAction(timeout=1))
            assert observed.exit_code == 0
            assert (await run("echo usable")).output.endswith("usable\n")

    in_session(ours, work)


def test_a_shell_that_exits_says_so(ours: str) -> None:
    async def work(runtime: CodexRuntime, run: Run) -> None:
        with pytest.raises(SwerexException, match=r"session 'default': the shell exited with status 3"):
            await run("echo bye; exit 3")
        with pytest.raises(SwerexException, match="close it and create another"):
            await run("true")
        await runtime.close_session(CloseBashSessionRequest())
        await runtime.create_session(CreateBashSessionRequest())
        assert (await run("echo back")).output == "back\n"
        with pytest.raises(SessionExistsError):
            await runtime.create_session(CreateBashSessionRequest())

    in_session(ours, work)


def test_startup_files_are_sourced_in_time(ours: str, tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "good").write_text("PS1='$ '; PROMPT_COMMAND=; VALUE=sourced; echo loaded\n")
        (tmp_path / "slow").write_text("sleep 600\n")
        async with await AsyncSandbox.connect(ours) as sandbox:
            runtime = CodexRuntime(sandbox)
            good = CreateBashSessionRequest(startup_source=[str(tmp_path / "good")], startup_timeout=60)
            assert (await runtime.create_session(good)).output == "loaded\n"
            assert (await runtime.run_in_session(BashAction(command="echo $VALUE", timeout=60))).output == "sourced\n"
            slow = CreateBashSessionRequest(session="slow", startup_source=[str(tmp_path / "slow")])
            with pytest.raises(CommandTimeoutError):
                await runtime.create_session(slow)
            # It is killed, and its name is free.
            assert len([p for p in sandbox._processes.values() if p.running]) == 1
            slow.startup_source = []
            await runtime.create_session(slow)

    asyncio.run(asyncio.wait_for(main(), 120))


def test_commands_and_files(ours: str, tmp_path: Path) -> None:
    async def work(runtime: CodexRuntime, _: Run) -> None:
        failed = Command(command="echo out; echo err >&2; exit 4", shell=True, check=True, error_msg="no luck")
        with pytest.raises(NonZeroExitCodeError, match=r"no luck: .*exit code 4"):
            await runtime.execute(failed)
        shown = await runtime.execute(Command(command=["env"], env={"ONLY": "this"}, cwd=str(tmp_path)))
        assert shown.stdout == "ONLY=this\n"
        with pytest.raises(FileNotFoundError):
            await runtime.execute(Command(command="/no/such program"))
        await runtime.write_file(WriteFileRequest(path=str(tmp_path / "new/file"), content="a\r\nü"))
        assert (tmp_path / "new/file").read_bytes() == "a\r\nü".encode()
        assert (await runtime.read_file(ReadFileRequest(path=str(tmp_path / "new/file")))).content == "a\nü"
        latin = ReadFileRequest(path=str(tmp_path / "new/file"), encoding="ascii", errors="replace")
        assert (await runtime.read_file(latin)).content == "a\n\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"
        await runtime.upload(UploadRequest(source_path=str(tmp_path / "new/file"), target_path=str(tmp_path)))
        assert (tmp_path / "file").exists()

    in_session(ours, work)


def test_a_deployment_starts_a_server_and_ends_it() -> None:
    steps: list[str] = []

    class Hook(DeploymentHook):
        def on_custom_step(self, message: str) -> None:
            steps.append(message)

    async def main() -> None:
        deployment = CodexDeployment()
        deployment.add_hook(Hook())
        assert not await deployment.is_alive()
        with pytest.raises(DeploymentNotStartedError):
            _ = deployment.runtime
        await deployment.start()
        runtime = deployment.runtime
        assert await deployment.is_alive() and steps == ["Connecting to codex exec-server"]
        await runtime.create_session(CreateBashSessionRequest())
        await deployment.stop()
        assert not await deployment.is_alive() and not await runtime.is_alive()
        await deployment.stop()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_closed_session_leaves_no_process(ours: str, tmp_path: Path) -> None:
    async def work(runtime: CodexRuntime, run: Run) -> None:
        pid = int((await run("sleep 600 & echo $!")).output.splitlines()[-1])
        os.kill(pid, 0)
        await runtime.close_session(CloseBashSessionRequest())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    in_session(ours, work)
