"""LangChain Deep Agents on a codex exec-server: `pip install 'codex-exec[langchain]'`.

```python
agent = create_deep_agent(model=model, backend=CodexBackend(sandbox))
```

Commands and transfers are the server's; the tools that list, read, search and edit files are those of
`BaseSandbox`, which need Python on the other machine. All of it is confined by the policy of the sandbox.
"""

from __future__ import annotations

import asyncio
import time

from deepagents.backends.protocol import (
    ExecuteResponse,
    FileDownloadResponse,
    FileOperationError,
    FileUploadResponse,
)
from deepagents.backends.sandbox import BaseSandbox

from .._errors import CodexError, InvalidParamsError, InvalidPathError, NotARegularFileError, RequestTimeoutError
from .._events import Output
from .._process import KILL_GRACE, AsyncProcess
from .._sandbox import AsyncSandbox
from .._sync import Sandbox

#: Seconds that a command gets if the model names none.
TIMEOUT = 30 * 60
#: Bytes of a command's output that are kept; a model reads less, but the tools for files list more.
MAX_OUTPUT = 32 << 20
#: The exit code of `timeout(1)`.
TIMED_OUT = 124


class CodexBackend(BaseSandbox):
    """The sandbox of an agent. It stays open when the agent is done; close it where it was connected."""

    def __init__(self, sandbox: Sandbox, *, timeout: float = TIMEOUT, max_output: int = MAX_OUTPUT) -> None:
        self.sandbox = sandbox
        self._timeout = timeout
        self._max_output = max_output

    @property
    def id(self) -> str:
        """The id of the session on the server."""
        return self.sandbox.session_id or "codex-exec"

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Runs a script for `/bin/sh`; stdout and stderr are one stream. A `timeout` of 0 is none."""
        return self.sandbox._runner.call(self._execute(command, timeout))

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Like `execute`; cancelling it kills the command."""
        work = asyncio.run_coroutine_threadsafe(self._execute(command, timeout), self.sandbox._runner.loop)
        return await asyncio.wrap_future(work)

    async def _execute(self, command: str, timeout: int | None) -> ExecuteResponse:
        limit = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + limit if limit > 0 else None
        sandbox: AsyncSandbox = self.sandbox._sandbox
        # The first line is executed before the rest is parsed, so that syntax errors are in the output too.
        process = await sandbox.start(f"exec 2>&1\n{command}")
        output = _Head(self._max_output)
        try:
            await _drain(process, output, deadline)
        except RequestTimeoutError:
            await process.kill()
            await _drain(process, output, time.monotonic() + KILL_GRACE)
            said = f"\nError: command timed out after {limit} seconds and was killed"
            return ExecuteResponse(output.text() + said, TIMED_OUT, output.truncated)
        finally:
            if process.running:
                process.kill_soon()
        end = process.exit
        return ExecuteResponse(output.text(), None if end is None else end.exit_code, output.truncated)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Writes files, with their directories; an error stops none of the others."""
        return [self._upload(path, content) for path, content in files]

    def _upload(self, path: str, content: bytes) -> FileUploadResponse:
        try:
            self.sandbox.files.write(path, content)
        except CodexError as error:
            return FileUploadResponse(path=path, error=self._file_error(path, error))
        return FileUploadResponse(path=path)

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """Reads files; an error stops none of the others."""
        return [self._download(path) for path in paths]

    def _download(self, path: str) -> FileDownloadResponse:
        try:
            return FileDownloadResponse(path=path, content=self.sandbox.files.read(path))
        except CodexError as error:
            return FileDownloadResponse(path=path, error=self._file_error(path, error))

    def _file_error(self, path: str, error: CodexError) -> FileOperationError | str:
        if isinstance(error, FileNotFoundError):
            return "file_not_found"
        if isinstance(error, PermissionError):
            return "permission_denied"
        if isinstance(error, (InvalidPathError, InvalidParamsError, NotADirectoryError)):
            return "invalid_path"
        if isinstance(error, (IsADirectoryError, NotARegularFileError)) and self._is_directory(path):
            return "is_directory"
        return str(error)

    def _is_directory(self, path: str) -> bool:
        try:
            return self.sandbox.files.stat(path).is_dir
        except CodexError:
            return False


class _Head:
    """The beginning of an output; what is beyond its size is read and dropped, so that the command goes on."""

    def __init__(self, size: int) -> None:
        self._parts: list[bytes] = []
        self._left = size
        self.truncated = False

    def feed(self, data: bytes) -> None:
        self.truncated |= len(data) > self._left
        if self._left:
            self._parts.append(data[: self._left])
            self._left -= len(self._parts[-1])

    def text(self) -> str:
        return b"".join(self._parts).decode("utf-8", "replace")


async def _drain(process: AsyncProcess, output: _Head, deadline: float | None) -> None:
    while events := await process.next_events(timeout=None if deadline is None else deadline - time.monotonic()):
        for event in events:
            if isinstance(event, Output):
                output.feed(event.data)


__all__ = ["CodexBackend"]
