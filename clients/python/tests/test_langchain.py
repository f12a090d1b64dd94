"""LangChain Deep Agents: the tools of an agent on our server, driven by a scripted model."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

pytest.importorskip("deepagents", reason="install codex-exec[langchain]")

from deepagents import create_deep_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, ToolMessage

from codex_exec import Sandbox
from codex_exec.adapters.langchain import CodexBackend


class ScriptedModel(GenericFakeChatModel):
    """Says what the script says, whatever the tools answer."""

    def bind_tools(self, tools: Any, **_: Any) -> ScriptedModel:
        return self


def call(name: str, **arguments: Any) -> AIMessage:
    return AIMessage(content="", tool_calls=[{"name": name, "args": arguments, "id": f"{name}-{len(arguments)}"}])


@pytest.fixture
def sandbox(ours: str, tmp_path: Path) -> Iterator[Sandbox]:
    with Sandbox.connect(ours, cwd=tmp_path, policy="workspace-write") as sandbox:
        yield sandbox


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_agent_works_in_the_sandbox(sandbox: Sandbox, tmp_path: Path, asynchronous: bool) -> None:
    script = [
        call("write_file", file_path=f"{tmp_path}/src/app.py", content="print('one')\nprint('two')\n"),
        call("edit_file", file_path=f"{tmp_path}/src/app.py", old_string="'two'", new_string="'three'"),
        call("read_file", file_path=f"{tmp_path}/src/app.py"),
        call("ls", path=str(tmp_path)),
        call("glob", pattern="**/*.py", path=str(tmp_path)),
        call("grep", pattern="three", path=str(tmp_path), output_mode="content"),
        call("execute", command=f"{sys.executable} src/app.py; echo warning >&2; exit 3"),
        AIMessage(content="done"),
    ]
    agent = create_deep_agent(model=ScriptedModel(messages=iter(script)), backend=CodexBackend(sandbox))
    question = {"messages": [("user", "write a program")]}
    state = asyncio.run(agent.ainvoke(question)) if asynchronous else agent.invoke(question)
    answers = [message for message in state["messages"] if isinstance(message, ToolMessage)]
    assert [answer.status for answer in answers] == ["success"] * 7
    read, listed, globbed, grepped, executed = (str(answer.content) for answer in answers[2:])
    assert "print('three')" in read and f"{tmp_path}/src" in listed
    assert f"{tmp_path}/src/app.py" in globbed and "print('three')" in grepped
    assert "one\nthree\nwarning\n" in executed
    assert answers[-1].artifact["exit_code"] == 3
    assert (tmp_path / "src/app.py").read_text() == "print('one')\nprint('three')\n"
    assert state["messages"][-1].content == "done"


def test_the_policy_confines_the_tools(sandbox: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> None:
    with Sandbox.connect(sandbox._sandbox._connection.dialer.url, policy="read-only") as confined:
        backend = CodexBackend(confined)
        target = tmp_path_factory.mktemp("outside") / "file"
        assert backend.write(str(target), "x").error
        assert backend.execute(f"touch {target}").exit_code != 0
        assert not target.exists()
        assert backend.upload_files([(str(target), b"x")])[0].error == "permission_denied"


def test_output_is_one_stream_and_bounded(sandbox: Sandbox) -> None:
    backend = CodexBackend(sandbox, max_output=1000)
    shown = backend.execute("echo out; echo err >&2; exit 5")
    assert (shown.output, shown.exit_code, shown.truncated) == ("out\nerr\n", 5, False)
    # What is dropped is read: the command ends.
    large = backend.execute("head -c 20000000 /dev/zero | tr '\\0' x; echo end")
    assert (large.output, large.exit_code, large.truncated) == ("x" * 1000, 0, True)
    broken = backend.execute("echo fine\nif")
    assert broken.exit_code != 0 and "fine" in broken.output and "yntax error" in broken.output


def test_a_timeout_kills_and_keeps_output(sandbox: Sandbox) -> None:
    shown = CodexBackend(sandbox).execute("echo before; exec sleep 600", timeout=1)
    assert shown.exit_code == 124 and shown.output.startswith("before\n") and "timed out after 1 s" in shown.output
    assert "timed out after 0.5 s" in CodexBackend(sandbox, timeout=0.5).execute("exec sleep 600").output
    assert CodexBackend(sandbox, timeout=0.001).execute("sleep 0.1; echo unhurried", timeout=0).output == "unhurried\n"


def test_cancelling_kills_the_command(sandbox: Sandbox, tmp_path: Path) -> None:
    backend = CodexBackend(sandbox)
    os.mkfifo(tmp_path / "up")

    def opened() -> BinaryIO:
        file = open(tmp_path / "up", "rb")
        assert file.readline() == b"up\n"
        return file

    async def main() -> None:
        task = asyncio.ensure_future(backend.aexecute("exec 3> up; echo up >&3; exec sleep 600"))
        with await asyncio.to_thread(opened) as file:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            # The command holds the other end.
            assert await asyncio.to_thread(file.read) == b""

    asyncio.run(asyncio.wait_for(main(), 60))


def test_transfers_tell_each_error(sandbox: Sandbox, tmp_path: Path) -> None:
    backend = CodexBackend(sandbox)
    data = bytes(range(256)) * 5000
    good, bad = f"{tmp_path}/deep/down/file", f"{tmp_path}/deep"
    assert [answer.error for answer in backend.upload_files([(good, data), (bad, b""), ("/proc/version", b"x")])] == [
        None,
        "is_directory",
        "permission_denied",
    ]
    answers = backend.download_files([good, f"{tmp_path}/none", bad, ""])
    assert [answer.error for answer in answers] == [None, "file_not_found", "is_directory", "invalid_path"]
    assert answers[0].content == data and answers[1].content is None


def test_its_id_is_the_session(sandbox: Sandbox) -> None:
    assert CodexBackend(sandbox).id == sandbox.session_id
