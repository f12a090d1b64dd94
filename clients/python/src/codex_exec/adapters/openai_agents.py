"""OpenAI Agents SDK on a codex exec-server: `pip install 'codex-exec[openai-agents]'`.

```python
agent = Agent("coder", tools=tools(sandbox))
```

The shell tool and the apply-patch tool, with the sandbox in the place of this machine. What goes wrong there is an
output for the model; only a lost connection ends the run.
"""

from __future__ import annotations

from agents import (
    ApplyPatchTool,
    ShellCallOutcome,
    ShellCommandOutput,
    ShellCommandRequest,
    ShellResult,
    ShellTool,
    Tool,
    apply_diff,
)
from agents.editor import ApplyPatchOperation, ApplyPatchResult

from .._errors import CodexError, ConnectionLostError
from .._sandbox import AsyncSandbox

#: Seconds that a command gets if the model names none.
TIMEOUT = 10 * 60.0


class CodexShell:
    """The executor of a `ShellTool`: the commands of a call, one after the other, each a script for `/bin/sh`."""

    def __init__(self, sandbox: AsyncSandbox, *, timeout: float = TIMEOUT) -> None:
        self.sandbox = sandbox
        self.timeout = timeout

    async def __call__(self, request: ShellCommandRequest) -> ShellResult:
        action = request.data.action
        timeout = self.timeout if action.timeout_ms is None else action.timeout_ms / 1000
        output = [await self._run(command, timeout) for command in action.commands]
        return ShellResult(output=output, max_output_length=action.max_output_length)

    async def _run(self, command: str, timeout: float) -> ShellCommandOutput:
        try:
            result = await self.sandbox.run(command, timeout=timeout)
        except ConnectionLostError:
            raise
        except CodexError as error:
            return ShellCommandOutput(stderr=str(error), outcome=ShellCallOutcome("exit", 126), command=command)
        outcome = ShellCallOutcome("timeout") if result.timed_out else ShellCallOutcome("exit", result.exit_code)
        return ShellCommandOutput(result.stdout, result.stderr, outcome, command)


class CodexEditor:
    """The editor of an `ApplyPatchTool`: paths start at the directory of the sandbox."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        self.sandbox = sandbox

    async def create_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        """Writes a new file; one that exists stays as it is."""
        files = self.sandbox.files
        try:
            if await files.exists(operation.path):
                return _failed(f"{operation.path} exists; update it, or delete it first")
            await files.write(operation.path, apply_diff("", operation.diff or "", mode="create"))
        except ConnectionLostError:
            raise
        except (CodexError, ValueError) as error:
            return _failed(f"cannot create {operation.path}: {error}")
        return ApplyPatchResult(status="completed", output=f"A {operation.path}")

    async def update_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        """Changes a file, and renames it if the operation says so."""
        files = self.sandbox.files
        target = operation.move_to or operation.path
        try:
            # Bytes that are not UTF-8 pass through unchanged.
            before = (await files.read(operation.path)).decode("utf-8", "surrogateescape")
            after = apply_diff(before, operation.diff or "").encode("utf-8", "surrogateescape")
            if files.resolve(target) != files.resolve(operation.path):
                if await files.exists(target):
                    return _failed(f"cannot move {operation.path}: {target} exists")
                await files.write(target, after, mode=(await files.stat(operation.path)).mode)
                await files.remove(operation.path)
            else:
                await files.write(target, after)
        except ConnectionLostError:
            raise
        except (CodexError, ValueError) as error:
            return _failed(f"cannot update {operation.path}: {error}")
        return ApplyPatchResult(status="completed", output=f"M {target}")

    async def delete_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        """Removes a file."""
        try:
            await self.sandbox.files.remove(operation.path)
        except ConnectionLostError:
            raise
        except CodexError as error:
            return _failed(f"cannot delete {operation.path}: {error}")
        return ApplyPatchResult(status="completed", output=f"D {operation.path}")


def tools(sandbox: AsyncSandbox, *, timeout: float = TIMEOUT) -> list[Tool]:
    """The shell and the apply-patch tool for an agent whose machine is the sandbox."""
    return [ShellTool(executor=CodexShell(sandbox, timeout=timeout)), ApplyPatchTool(editor=CodexEditor(sandbox))]


def _failed(why: str) -> ApplyPatchResult:
    return ApplyPatchResult(status="failed", output=why)


__all__ = ["CodexEditor", "CodexShell", "tools"]
