"""SWE-ReX on a codex exec-server: `pip install 'codex-exec[swe-rex]'`.

```python
deployment = CodexDeployment(policy="workspace-write")
await deployment.start()
await deployment.runtime.create_session(CreateBashSessionRequest())
```

Nothing is installed on the other machine but `codex`, and bash for sessions. What differs from a `LocalRuntime`: a
command killed by signal N has the exit code 128 + N, a command's stdin is empty, and what a command of a session
leaves behind (its status, late output) is never taken for the next one's.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import posixpath
import time
from typing import Any

from swerex.deployment.abstract import AbstractDeployment
from swerex.deployment.hooks.abstract import CombinedDeploymentHook, DeploymentHook
from swerex.exceptions import (
    BashIncorrectSyntaxError,
    CommandTimeoutError,
    DeploymentNotStartedError,
    NoExitCodeError,
    NonZeroExitCodeError,
    SessionDoesNotExistError,
    SessionExistsError,
    SwerexException,
)
from swerex.runtime.abstract import (
    AbstractRuntime,
    BashAction,
    BashInterruptAction,
    BashObservation,
    CloseBashSessionRequest,
    CloseBashSessionResponse,
    CloseResponse,
    Command,
    CommandResponse,
    CreateBashSessionRequest,
    CreateBashSessionResponse,
    IsAliveResponse,
    ReadFileRequest,
    ReadFileResponse,
    UploadRequest,
    UploadResponse,
    WriteFileRequest,
    WriteFileResponse,
)

from .._errors import CodexError, RequestTimeoutError
from .._sandbox import Address, AsyncSandbox, Local
from ._bash import Bash, Match, ShellEndedError

#: Seconds for a command to end once what it was expected to print is there.
EXIT_CODE_TIMEOUT = 1.0
_INTERRUPT, _SUSPEND = "\x03", "\x1a"


class _Session:
    """A shell, and the lock that lets one action at it at a time."""

    def __init__(self, sandbox: AsyncSandbox, shell: Bash) -> None:
        self._sandbox = sandbox
        self._shell = shell
        self._lock = asyncio.Lock()

    async def run(self, action: BashAction | BashInterruptAction) -> BashObservation:
        async with self._lock:
            try:
                if isinstance(action, BashInterruptAction):
                    return await self._interrupt(action)
                if action.is_interactive_command or action.is_interactive_quit:
                    return await self._talk(action)
                return await self._command(action)
            except ShellEndedError as error:
                raise SwerexException(f"session {action.session!r}: {error}; close it and create another") from error

    async def _command(self, action: BashAction) -> BashObservation:
        await self._check_syntax(action.command)
        deadline = _deadline(action.timeout)
        try:
            await self._shell.type_command(action.command, deadline)
            match = await self._shell.wait_command(deadline, action.expect)
        except RequestTimeoutError as error:
            raise _timed_out(action) from error
        observed = _observation(match)
        if match.pattern is not None and action.check != "ignore":
            await self._complete(observed, action)
        if action.check == "ignore":
            observed.exit_code = None
        elif action.check == "raise" and observed.exit_code != 0:
            message = f"Command {action.command!r} failed with exit code {observed.exit_code}. Here is the output:\n"
            raise NonZeroExitCodeError(_explained(action.error_msg, message + repr(observed.output)))
        return observed

    async def _complete(self, observed: BashObservation, action: BashAction) -> None:
        """Adds the status of a command whose expected output came before its end."""
        try:
            end = await self._shell.wait_command(_deadline(EXIT_CODE_TIMEOUT))
        except RequestTimeoutError as error:
            if action.check == "raise":
                raise NoExitCodeError(
                    f"{action.command!r} printed {observed.expect_string!r} and is still running; use "
                    "is_interactive_command or check='ignore'"
                ) from error
            return
        observed.output += end.output
        observed.exit_code = end.status

    async def _talk(self, action: BashAction) -> BashObservation:
        deadline = _deadline(action.timeout)
        try:
            await self._shell.type_line(action.command, deadline)
            match = await self._shell.wait_prompt(deadline, action.expect)
        except RequestTimeoutError as error:
            raise _timed_out(action) from error
        observed = _observation(match)
        observed.exit_code = 0
        return observed

    async def _interrupt(self, action: BashInterruptAction) -> BashObservation:
        keys = [_INTERRUPT] * action.n_retry
        for number, key in enumerate([*keys, _SUSPEND]):
            deadline = _deadline(action.timeout)
            try:
                await self._shell.type_key(key, deadline)
                match = await self._shell.wait_prompt(deadline, action.expect)
                if number == len(keys):
                    # What ignores an interrupt was suspended instead, so that the shell can kill it.
                    await self._shell.kill_job(deadline)
            except RequestTimeoutError:
                continue
            return BashObservation(output=match.output.strip(), exit_code=0, expect_string=match.pattern or "")
        raise CommandTimeoutError(f"session {action.session!r}: the command ignores interrupts and cannot be suspended")

    async def _check_syntax(self, command: str) -> None:
        checked = await self._sandbox.run(["bash", "-n"], input=command + "\n")
        if checked.exit_code != 0:
            raise BashIncorrectSyntaxError(
                f"bash cannot parse {command!r}: {checked.stderr.strip()}",
                extra_info={"bash_stdout": checked.stdout, "bash_stderr": checked.stderr},
            )

    async def close(self) -> None:
        await self._shell.kill()


class CodexRuntime(AbstractRuntime):
    """Commands, shells and files of a sandbox that is connected; closing it leaves the sandbox open."""

    def __init__(self, sandbox: AsyncSandbox, *, logger: logging.Logger | None = None) -> None:
        self.sandbox = sandbox
        self.logger = logger or logging.getLogger("codex_exec.swe_rex")
        self._sessions: dict[str, _Session] = {}
        self._starting: set[str] = set()

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
        """Asks the server."""
        try:
            await asyncio.wait_for(self.sandbox.request("environment/info"), timeout)
        except (CodexError, asyncio.TimeoutError, TimeoutError) as error:
            return IsAliveResponse(is_alive=False, message=str(error) or "the server does not answer")
        return IsAliveResponse(is_alive=True)

    async def create_session(self, request: CreateBashSessionRequest) -> CreateBashSessionResponse:
        """Starts a bash in the sandbox's directory; `startup_timeout` is for its `startup_source` alone."""
        name = request.session
        if name in self._sessions or name in self._starting:
            raise SessionExistsError(f"session {name} already exists")
        self._starting.add(name)
        try:
            shell = await Bash.start(self.sandbox)
            try:
                output = await shell.source(request.startup_source, _deadline(request.startup_timeout))
            except BaseException as error:
                await asyncio.shield(shell.kill())
                if isinstance(error, RequestTimeoutError):
                    raise CommandTimeoutError(f"session {name!r}: startup_source did not end in time") from error
                if isinstance(error, ShellEndedError):
                    raise SwerexException(f"session {name!r}: {error}") from error
                raise
        finally:
            self._starting.discard(name)
        self._sessions[name] = _Session(self.sandbox, shell)
        return CreateBashSessionResponse(output=output)

    async def run_in_session(self, action: BashAction | BashInterruptAction) -> BashObservation:
        """Runs a command in a shell, types a line for a program there, or interrupts it."""
        return await self._session(action.session).run(action)

    async def close_session(self, request: CloseBashSessionRequest) -> CloseBashSessionResponse:
        """Kills a shell and what it started."""
        session = self._session(request.session)
        del self._sessions[request.session]
        await session.close()
        return CloseBashSessionResponse()

    def _session(self, name: str) -> _Session:
        if name not in self._sessions:
            raise SessionDoesNotExistError(f"session {name!r} does not exist")
        return self._sessions[name]

    async def execute(self, command: Command) -> CommandResponse:
        """Runs a command of its own, like `subprocess.run`."""
        words = [command.command] if isinstance(command.command, str) else list(command.command)
        if command.shell:
            words = ["/bin/sh", "-c", *words]
        if command.merge_output_streams:
            words = ["/bin/sh", "-c", 'exec "$@" 2>&1', "sh", *words]
        result = await self.sandbox.run(
            words,
            timeout=command.timeout,
            cwd=command.cwd,
            env=command.env,
            inherit="all" if command.env is None else "none",
        )
        if result.timed_out:
            raise CommandTimeoutError(f"Timeout ({command.timeout}s) exceeded while running command")
        response = CommandResponse(
            stdout=result.stdout_bytes.decode(errors="backslashreplace"),
            stderr=result.stderr_bytes.decode(errors="backslashreplace"),
            exit_code=result.exit_code,
        )
        if command.check and result.exit_code != 0:
            message = f"Command {command.command!r} failed with exit code {result.exit_code}. "
            message += f"Stdout:\n{response.stdout!r}\nStderr:\n{response.stderr!r}"
            raise NonZeroExitCodeError(_explained(command.error_msg, message))
        return response

    async def read_file(self, request: ReadFileRequest) -> ReadFileResponse:
        """The text of a file, with line ends as `Path.read_text` gives them."""
        raw = io.BytesIO(await self.sandbox.files.read(request.path))
        with io.TextIOWrapper(raw, encoding=request.encoding or "utf-8", errors=request.errors) as text:
            return ReadFileResponse(content=text.read())

    async def write_file(self, request: WriteFileRequest) -> WriteFileResponse:
        """Writes a file and makes its directory."""
        await self.sandbox.files.write(request.path, request.content)
        return WriteFileResponse()

    async def upload(self, request: UploadRequest) -> UploadResponse:
        """Copies a file or a directory of this machine; a file goes into a directory that exists."""
        target = request.target_path
        if not os.path.isdir(request.source_path):
            files = self.sandbox.files
            if await files.exists(target) and (await files.stat(target)).is_dir:
                target = posixpath.join(target, os.path.basename(request.source_path))
        await self.sandbox.upload(request.source_path, target)
        return UploadResponse()

    async def close(self) -> CloseResponse:
        """Kills the shells."""
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            await session.close()
        return CloseResponse()


class CodexDeployment(AbstractDeployment):
    """Connects to a server, or starts one on this machine, and stops what runs there at the end."""

    def __init__(self, address: Address | None = None, *, logger: logging.Logger | None = None, **options: Any) -> None:
        """`address` and `options` are those of `AsyncSandbox.connect`; without an address, a server of its own."""
        self.logger = logger or logging.getLogger("codex_exec.swe_rex")
        self._address: Address = Local() if address is None else address
        self._options = options
        self._hooks = CombinedDeploymentHook()
        self._runtime: CodexRuntime | None = None

    def add_hook(self, hook: DeploymentHook) -> None:
        """Adds something that hears of the steps of `start`."""
        self._hooks.add_hook(hook)

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
        """Whether it was started and its server answers."""
        if self._runtime is None:
            return IsAliveResponse(is_alive=False, message="the deployment is not started")
        return await self._runtime.is_alive(timeout=timeout)

    async def start(self, *args: Any, **kwargs: Any) -> None:
        """Connects."""
        if self._runtime is not None:
            return
        self._hooks.on_custom_step("Connecting to codex exec-server")
        sandbox = await AsyncSandbox.connect(self._address, **self._options)
        self._runtime = CodexRuntime(sandbox, logger=self.logger)

    async def stop(self, *args: Any, **kwargs: Any) -> None:
        """Kills what runs there, and closes the connection."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            await runtime.sandbox.close()

    @property
    def runtime(self) -> CodexRuntime:
        """The runtime of a deployment that was started."""
        if self._runtime is None:
            raise DeploymentNotStartedError
        return self._runtime


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _observation(match: Match) -> BashObservation:
    return BashObservation(output=match.output, exit_code=match.status, expect_string=match.pattern or "")


def _timed_out(action: BashAction) -> CommandTimeoutError:
    return CommandTimeoutError(f"timeout after {action.timeout} seconds while running command {action.command!r}")


def _explained(what: str, message: str) -> str:
    return f"{what}: {message}" if what else message


__all__ = ["CodexDeployment", "CodexRuntime"]
