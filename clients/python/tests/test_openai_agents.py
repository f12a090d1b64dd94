"""OpenAI Agents SDK: its shell and apply-patch tools on our server, driven by its scripted model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agents", reason="install codex-exec[openai-agents]")

import websockets.asyncio.server as ws_server
from agents import Agent, RunConfig, Runner
from agents.editor import ApplyPatchOperation
from agents.testing import ScriptedModel, assistant_message
from openai.types.responses import ResponseApplyPatchToolCall, ResponseFunctionShellToolCall

from codex_exec import AsyncSandbox, ConnectionLostError
from codex_exec.adapters.openai_agents import CodexEditor, tools

from .conftest import fake_server, greet


def shell(number: int, *commands: str, **action: Any) -> ResponseFunctionShellToolCall:
    return ResponseFunctionShellToolCall.model_validate(
        {
            "type": "shell_call",
            "id": f"item-{number}",
            "call_id": f"call-{number}",
            "status": "completed",
            "action": {"commands": list(commands), "timeout_ms": None, "max_output_length": None, **action},
        }
    )


def patch(number: int, kind: str, path: str, diff: str = "") -> ResponseApplyPatchToolCall:
    operation = {"type": kind, "path": path, **({} if kind == "delete_file" else {"diff": diff})}
    return ResponseApplyPatchToolCall.model_validate(
        {
            "type": "apply_patch_call",
            "id": f"item-{number}",
            "call_id": f"call-{number}",
            "status": "completed",
            "operation": operation,
        }
    )


async def run_agent(sandbox: AsyncSandbox, *calls: Any) -> list[dict[str, Any]]:
    """Lets a model make the calls, and returns what it was told."""
    model = ScriptedModel([*([call] for call in calls), [assistant_message("done")]])
    agent = Agent("coder", model=model, tools=tools(sandbox))
    result = await Runner.run(agent, "write a program", run_config=RunConfig(tracing_disabled=True))
    assert result.final_output == "done"
    model.assert_complete()
    return [item.raw_item for item in result.new_items if item.type == "tool_call_output_item"]  # type: ignore[misc]


def on(address: str, work: Callable[[AsyncSandbox], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with await AsyncSandbox.connect(address, **options) as sandbox:
            await work(sandbox)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_agent_works_in_the_sandbox(ours: str, tmp_path: Path) -> None:
    async def work(sandbox: AsyncSandbox) -> None:
        outputs = await run_agent(
            sandbox,
            patch(1, "create_file", "src/app.sh", "+echo one\n+echo two\n"),
            patch(2, "update_file", "src/app.sh", "@@\n echo one\n-echo two\n+echo three\n"),
            shell(3, "sh src/app.sh; exit 3", "echo warning >&2"),
            patch(4, "delete_file", "src/app.sh"),
        )
        assert [output["type"] for output in outputs] == [
            "apply_patch_call_output",
            "apply_patch_call_output",
            "shell_call_output",
            "apply_patch_call_output",
        ]
        assert [output.get("status") for output in outputs] == ["completed"] * 4
        first, second = outputs[2]["output"]
        assert (first["stdout"], first["outcome"]) == ("one\nthree\n", {"type": "exit", "exit_code": 3})
        assert (second["stderr"], second["outcome"]) == ("warning\n", {"type": "exit", "exit_code": 0})
        assert not (tmp_path / "src/app.sh").exists()

    on(ours, work, cwd=tmp_path, policy="workspace-write")


def test_a_timeout_is_an_outcome_with_the_output_until_then(ours: str) -> None:
    async def work(sandbox: AsyncSandbox) -> None:
        (output,) = await run_agent(sandbox, shell(1, "echo before; exec sleep 600", "echo next", timeout_ms=1000))
        first, second = output["output"]
        assert (first["stdout"], first["outcome"]["type"]) == ("before\n", "timeout")
        assert second["stdout"] == "next\n"

    on(ours, work)


def test_output_is_cut_where_the_model_says(ours: str) -> None:
    async def work(sandbox: AsyncSandbox) -> None:
        (output,) = await run_agent(sandbox, shell(1, "head -c 100000 /dev/zero | tr '\\0' x", max_output_length=50))
        assert output["max_output_length"] == 50 and len(output["output"][0]["stdout"]) <= 50

    on(ours, work)


def test_what_does_not_fit_is_told_to_the_model_and_changes_nothing(ours: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"one\r\n\xff two\r\n")

    async def work(sandbox: AsyncSandbox) -> None:
        outputs = await run_agent(
            sandbox,
            patch(1, "create_file", "file", "+other\n"),
            patch(2, "update_file", "file", "@@\n-absent\n+present\n"),
            patch(3, "update_file", "missing", "@@\n-a\n+b\n"),
            patch(4, "delete_file", "missing"),
            patch(5, "create_file", "/proc/version", "+x\n"),
        )
        assert [output["status"] for output in outputs] == ["failed"] * 5
        assert "file exists; update it" in outputs[0]["output"] and "missing" in outputs[2]["output"]
        assert (tmp_path / "file").read_bytes() == b"one\r\n\xff two\r\n"
        # Line ends and bytes that are not UTF-8 stay as they are.
        (output,) = await run_agent(sandbox, patch(6, "update_file", "file", "@@\n-one\n+1\n"))
        assert output["status"] == "completed"
        assert (tmp_path / "file").read_bytes() == b"1\r\n\xff two\r\n"

    on(ours, work, cwd=tmp_path)


def test_an_update_may_move_the_file(ours: str, tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("old\n")
    (tmp_path / "tool").chmod(0o755)
    (tmp_path / "taken").write_text("mine\n")

    async def work(sandbox: AsyncSandbox) -> None:
        editor = CodexEditor(sandbox)
        onto = ApplyPatchOperation("update_file", "tool", "@@\n-old\n+new\n", move_to="taken")
        assert (await editor.update_file(onto)).status == "failed"
        away = ApplyPatchOperation("update_file", "tool", "@@\n-old\n+new\n", move_to="bin/tool")
        assert (await editor.update_file(away)).output == "M bin/tool"
        assert (tmp_path / "bin/tool").read_text() == "new\n" and (tmp_path / "bin/tool").stat().st_mode & 0o111
        assert not (tmp_path / "tool").exists() and (tmp_path / "taken").read_text() == "mine\n"

    on(ours, work, cwd=tmp_path)


def test_the_policy_confines_the_tools(ours: str, tmp_path: Path) -> None:
    async def work(sandbox: AsyncSandbox) -> None:
        denied, shown = await run_agent(sandbox, patch(1, "create_file", "file", "+x\n"), shell(2, "echo x > file"))
        assert denied["status"] == "failed" and shown["output"][0]["outcome"]["exit_code"] != 0
        assert not (tmp_path / "file").exists()

    on(ours, work, cwd=tmp_path, policy="read-only")


def test_a_lost_connection_ends_the_run_and_is_not_told_to_the_model() -> None:
    async def script(connection: ws_server.ServerConnection) -> None:
        await greet(connection, capabilities={})
        await connection.recv()
        await connection.close()

    async def main() -> None:
        async with fake_server(script) as address:
            sandbox = await AsyncSandbox.connect(address, patience=0)
            with pytest.raises(ConnectionLostError):
                await CodexEditor(sandbox).delete_file(ApplyPatchOperation("delete_file", "file"))
            await sandbox.close()

    asyncio.run(asyncio.wait_for(main(), 60))
