"""The asyncio surface: a connection to a server, and what can be done there."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, cast

from . import _names, _patch, _policy, _transfer
from ._connection import Connection
from ._errors import (
    CodexError,
    InvalidParamsError,
    ProcessExistsError,
    StdinClosedError,
    UnknownProcessError,
    UnknownSessionError,
    UsageError,
)
from ._files import AsyncFiles
from ._models import ExecParams, ResourceLimits
from ._paths import PathLike, from_uri, resolve, to_uri
from ._policy import Policy
from ._process import KILL_GRACE, WINDOW, AsyncProcess, LineCallback, OnCancel, OnFull, Result
from ._transport import Dialer, local_dialer, parse_address

Inherit = Literal["all", "core", "none"]
Command = str | Sequence[str]
#: Seconds to wait for the answers to the last requests of a sandbox that is closed.
CLOSE_GRACE = 5.0


class Local:
    """A server of its own on this machine; what :meth:`Sandbox.local` starts."""

    def __init__(self, program: str | None = None, arguments: Sequence[str] = ()) -> None:
        self.program = program
        self.arguments = list(arguments)


Address = str | Local


def command_line(command: Command) -> list[str]:
    """The argv of a command; text is a script for ``/bin/sh``."""
    argv = ["/bin/sh", "-c", command] if isinstance(command, str) else [str(word) for word in command]
    if not argv:
        raise InvalidParamsError("the command is empty")
    for word in argv:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise InvalidParamsError(
                f"the argument {word!r} is not valid Unicode, which the protocol cannot carry; "
                "use a shell with an escape, such as printf"
            ) from None
    return argv


class AsyncSandbox:
    """A connection to a server. Use it with ``async with``; leaving kills what was started and not detached."""

    def __init__(self, connection: Connection, *, policy: Policy = None, cwd: PathLike | None = None) -> None:
        self._connection = connection
        self._policy = policy
        self._processes: dict[str, AsyncProcess] = {}
        home = connection.info.get("cwd")
        base = from_uri(home) if isinstance(home, str) else "/"
        #: The directory that relative paths start at, and that commands run in.
        self.cwd = base if cwd is None else resolve(cwd, base)
        self.files = AsyncFiles(self)
        _policy.sandbox(policy, self.cwd)

    # Connecting

    @classmethod
    async def connect(
        cls,
        address: Address,
        *,
        policy: Policy = None,
        cwd: PathLike | None = None,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        registry: str | None = None,
        patience: float = 120.0,
        keep: float | None = None,
        name: str | None = None,
    ) -> AsyncSandbox:
        """Connects to ``ws://…``, ``wss://…``, ``unix:PATH``, ``env:ID``, ``stdio:COMMAND`` or ``local``.

        ``policy`` confines every command and file request. ``token`` defaults to
        ``$CODEX_EXEC_SERVER_TOKEN``. A lost connection is reestablished for ``patience`` seconds; the
        server keeps processes without a client for ``keep`` seconds (default: its own setting). ``name`` names
        the session for ``codex ps``.
        """
        dialer: Dialer
        if isinstance(address, Local):
            dialer = local_dialer(address.program, arguments=address.arguments)
        else:
            dialer = parse_address(address, token=token, tls=tls, registry=registry)
        connection = Connection(dialer, patience=patience, keep=keep, session_name=name)
        return await cls._open(connection, policy, cwd)

    @classmethod
    async def _open(cls, connection: Connection, policy: Policy, cwd: PathLike | None) -> AsyncSandbox:
        await connection.open()
        try:
            if "capabilities" not in connection.info:
                # An older server does not describe itself in the handshake.
                with contextlib.suppress(CodexError):
                    connection.info = await connection.call("environment/info")
            return cls(connection, policy=policy, cwd=cwd)
        except BaseException:
            await connection.close()
            raise

    @classmethod
    async def local(
        cls,
        *,
        policy: Policy = None,
        cwd: PathLike | None = None,
        program: str | None = None,
        arguments: Sequence[str] = (),
    ) -> AsyncSandbox:
        """Starts the installed ``codex`` (``program``, ``$CODEX_BIN``, or on ``PATH``) as a server over stdio."""
        return await cls.connect(Local(program, arguments), policy=policy, cwd=cwd)

    @classmethod
    async def attach(cls, name: str, *, token: str | None = None, take: bool = False) -> AsyncProcess:
        """Reattaches to a process that was detached under this name.

        The process has a connection of its own: close it with ``await process.sandbox.close()``, which
        leaves the process running. ``take`` detaches other clients first.
        """
        saved = _names.load(name)
        attach = {"role": "holder", "take": True} if take else None
        dialer = parse_address(saved.url, token=token)
        connection = Connection(dialer, session_id=saved.session_id, attach=attach)
        try:
            sandbox = await cls._open(connection, None, None)
        except UnknownSessionError as error:
            _names.remove(name)
            raise UnknownSessionError(
                f"{name!r} is gone: its session expired or the server was restarted; the name is free again"
            ) from error
        process = AsyncProcess(
            sandbox,
            connection,
            saved.process_id,
            [],
            pty=saved.tty,
            acknowledges=connection.has("processRetainUntilRead"),
            after=saved.after_seq,
        )
        process.detached = True
        process._attaching = True
        process._events.resync()
        sandbox._processes[process.id] = process
        try:
            if connection.has("processList"):
                listed = await connection.call("process/list", {})
                found = [p for p in listed.get("processes", []) if p.get("processId") == process.id]
                if not found:
                    _names.remove(name)
                    raise UnknownProcessError(f"{name!r} has ended, and its output was already read")
                process.argv = list(found[0].get("argv", []))
        except BaseException:
            await sandbox.close()
            raise
        return process

    async def close(self) -> None:
        """Kills what this sandbox started and did not detach, and closes the connection."""
        connection = self._connection
        if not connection.closed and connection.owned:
            last = [
                connection.post("process/terminate", {"processId": process.id})
                for process in self._processes.values()
                if not process.detached and not process._events.ended
            ]
            if last:
                await asyncio.wait(last, timeout=CLOSE_GRACE)
                for future in last:
                    if future.done() and not future.cancelled():
                        future.exception()
        await connection.close()

    async def __aenter__(self) -> AsyncSandbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def info(self) -> Mapping[str, Any]:
        """What the server says about itself: shell, version, platform, capabilities."""
        return self._connection.info

    @property
    def session_id(self) -> str | None:
        """The id of the session."""
        return self._connection.session_id

    def has(self, capability: str) -> bool:
        """Whether the server announces a capability, such as ``"fsSearch"``."""
        return self._connection.has(capability)

    async def request(self, method: str, params: Mapping[str, Any] | None = None) -> Any:
        """Sends any request of the protocol and returns its result."""
        return await self._connection.request(method, params)

    # Commands

    async def start(
        self,
        command: Command,
        *,
        pty: bool = False,
        size: tuple[int, int] | None = None,
        stdin: bool = False,
        cwd: PathLike | None = None,
        env: Mapping[str, str] | None = None,
        inherit: Inherit = "all",
        limits: Mapping[str, int] | None = None,
        window: int = WINDOW,
        on_full: OnFull = "wait",
    ) -> AsyncProcess:
        """Starts a command: a list of words, or a script for ``/bin/sh``.

        ``pty`` gives it a terminal of ``size`` (rows, columns). ``stdin`` keeps its input open for
        ``write``; otherwise it is empty. ``inherit`` says which variables of the server it gets (secrets
        never), ``env`` adds more. ``limits`` are those of the protocol (``memoryBytes``, ``pids`` …). The
        server keeps ``window`` bytes of output that were not taken; then the process waits, or with
        ``on_full="drop"`` loses its oldest output.
        """
        argv = command_line(command)
        connection = self._connection
        where = self.cwd if cwd is None else resolve(cwd, self.cwd)
        params: ExecParams = {
            "processId": uuid.uuid4().hex,
            "argv": argv,
            "cwd": to_uri(where),
            "env": {**({"TERM": "xterm-256color"} if pty else {}), **(env or {})},
            "tty": pty,
            "pipeStdin": stdin and not pty,
        }
        if inherit != "none":
            params["envPolicy"] = {
                "inherit": inherit,
                "ignoreDefaultExcludes": False,
                "exclude": [],
                "set": {},
                "includeOnly": [],
            }
        if size is not None:
            params["size"] = {"rows": size[0], "cols": size[1]}
        confined = _policy.sandbox(self._policy, self.cwd)
        if confined is not None:
            params["sandbox"] = confined
        if limits:
            connection.require("processLimits", "limits of processes")
            params["limits"] = cast(ResourceLimits, dict(limits))
        until_read = on_full == "wait" and connection.has("processRetainUntilRead")
        if until_read:
            params["retain"] = {"bytes": max(window, 1), "onFull": "wait", "until": "read"}
        elif connection.has("processRetain"):
            params["retain"] = {"bytes": max(window, 1), "onFull": on_full}
        connection.check_usable()
        process = AsyncProcess(
            self,
            connection,
            params["processId"],
            argv,
            pty=pty,
            acknowledges=until_read,
            on_full=on_full,
        )
        self._processes[process.id] = process
        resumes = connection.resumes
        future = connection.post("process/start", params, repeatable=True)
        try:
            result = await future
        except ProcessExistsError:
            if connection.resumes == resumes:
                process._forget()
                raise
            result = {}  # The first request took effect, and its response was lost.
        except BaseException:
            # A cancelled start may have begun: this comes after it, whatever becomes of it.
            process.kill_soon()
            process._forget()
            raise
        if isinstance(result, dict):
            process.sandbox_type = result.get("sandboxType")
            process.sandbox_assurance = result.get("sandboxAssurance")
        return process

    async def run(
        self,
        command: Command,
        *,
        timeout: float | None = None,
        check: bool = False,
        input: bytes | str | None = None,
        on_stdout: LineCallback | None = None,
        on_stderr: LineCallback | None = None,
        capture: bool = True,
        pty: bool = False,
        cwd: PathLike | None = None,
        env: Mapping[str, str] | None = None,
        inherit: Inherit = "all",
        limits: Mapping[str, int] | None = None,
        on_cancel: OnCancel = "kill",
    ) -> Result:
        """Runs a command to its end.

        ``timeout`` (seconds) kills it; the result has what it wrote until then, and ``timed_out``. ``check``
        raises :class:`CommandFailedError` unless it exits with 0 in time. ``input`` is written to its stdin.
        ``on_stdout`` and ``on_stderr`` are called with each line, without its end. ``capture=False`` keeps no
        output. If the calling task is cancelled, the command is killed, or with ``on_cancel="leave"`` goes on
        until the sandbox is closed.
        """
        if input is not None:
            # Without it the command would wait for the end of its input forever.
            self._connection.require("processCloseStdin", "input with an end")
        begun = time.monotonic()
        process = await self.start(
            command,
            pty=pty,
            stdin=input is not None,
            cwd=cwd,
            env=env,
            inherit=inherit,
            limits=limits,
        )
        collector = process._collector
        collector.capture = capture
        collector.listen(on_stdout, on_stderr)
        feeding = None if input is None else asyncio.ensure_future(_feed(process, input))
        try:
            deadline = None if timeout is None else begun + timeout
            timed_out = not await process._collect(deadline)
            if timed_out:
                process.kill_soon()
                # Bounded: a server that has gone cannot make this hang.
                with contextlib.suppress(CodexError):
                    await process._collect(time.monotonic() + KILL_GRACE)
                collector.finish()
            if feeding is not None and feeding.done():
                feeding.result()
        except BaseException:
            if on_cancel == "kill":
                process.kill_soon()
                process._forget()
            raise
        finally:
            if feeding is not None:
                feeding.cancel()
        result = collector.result(process, timed_out=timed_out)
        return result.check() if check else result

    # Trees and patches

    async def upload(self, source: PathLike, destination: PathLike) -> int:
        """Copies a local file or directory to the server; returns the bytes copied.

        Each file appears when it is complete, where the server can do that. Links are copied as links.
        """
        return await _transfer.upload(self, source, destination)

    async def download(self, source: PathLike, destination: PathLike) -> int:
        """Copies a file or directory of the server to this machine; returns the bytes copied."""
        return await _transfer.download(self, source, destination)

    async def apply_patch(self, text: str) -> list[str]:
        """Applies a patch (``*** Begin Patch`` …); returns ``A path``, ``M path``, ``D path``.

        A patch that does not fit changes nothing and raises :class:`PatchError`.
        """
        return await _patch.apply(self.files, text)

    def _sandbox_member(self) -> dict[str, Any]:
        confined = _policy.sandbox(self._policy, self.cwd)
        return {} if confined is None else {"sandbox": confined}

    def __repr__(self) -> str:
        return f"<AsyncSandbox {self._connection.dialer.url} session={self.session_id}>"


async def _feed(process: AsyncProcess, data: bytes | str) -> None:
    """Writes the input of a command that may not read all of it."""
    try:
        await process.write(data)
        await process.close_stdin()
    except (StdinClosedError, UnknownProcessError):
        pass


__all__ = ["Address", "AsyncSandbox", "Command", "Inherit", "Local", "UsageError"]
