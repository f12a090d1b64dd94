"""The synchronous surface: the asyncio one on a background loop, method by method."""

from __future__ import annotations

import builtins
import ssl
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from ._errors import CodexError, RequestTimeoutError
from ._events import Event, Exited
from ._files import AsyncFiles, Changes, Entry, SearchResult, Stat, WalkResult
from ._paths import PathLike
from ._policy import Policy
from ._process import KILL_GRACE, WINDOW, AsyncProcess, LineCallback, OnCancel, OnFull, Result
from ._runner import Runner, runner
from ._sandbox import Address, AsyncSandbox, Command, Inherit, Local, _feed

_END = object()


def _iterate(runs: Runner, items: AsyncIterator[Any]) -> Iterator[Any]:
    """Iterates over an asynchronous generator of the background loop."""

    async def step() -> Any:
        try:
            return await items.__anext__()
        except StopAsyncIteration:
            return _END

    try:
        while (item := runs.call(step())) is not _END:
            yield item
    finally:
        close = getattr(items, "aclose", None)
        if close is not None:
            runs.call(close())


class Process:
    """A process on the server. Iterate over it for its events; one consumer at a time."""

    def __init__(self, process: AsyncProcess, sandbox: Sandbox) -> None:
        self._process = process
        self._runner = sandbox._runner
        self.sandbox = sandbox

    @property
    def id(self) -> str:
        """Its id in the session."""
        return self._process.id

    @property
    def argv(self) -> list[str]:
        """The command line."""
        return self._process.argv

    @property
    def pty(self) -> bool:
        """Whether it has a terminal."""
        return self._process.pty

    @property
    def sandbox_type(self) -> str | None:
        """The sandbox that the server uses for it: ``none``, ``linuxSeccomp`` …"""
        return self._process.sandbox_type

    @property
    def sandbox_assurance(self) -> str | None:
        """How strongly the sandbox is enforced, if there is one."""
        return self._process.sandbox_assurance

    @property
    def detached(self) -> bool:
        """Whether it goes on when the sandbox is closed."""
        return self._process.detached

    @property
    def exit(self) -> Exited | None:
        """How it exited, once that is known."""
        return self._process.exit

    @property
    def running(self) -> bool:
        """Whether no exit is known yet."""
        return self._process.running

    def __iter__(self) -> Iterator[Event]:
        return self.events()

    def events(self) -> Iterator[Event]:
        """The events that were not taken yet, until the streams have ended."""
        while batch := self._runner.call(self._process.next_events(1)):
            yield from batch

    def next_events(self, count: int = 256, *, timeout: float | None = None) -> list[Event]:
        """Takes up to ``count`` events, at least one; an empty list after the last."""
        return self._runner.call(self._process.next_events(count, timeout=timeout))

    def wait(self, timeout: float | None = None) -> Result:
        """Waits until it has exited and its streams have ended; see :meth:`AsyncProcess.wait`."""
        return self._runner.call(self._process.wait(timeout))

    def write(self, data: bytes | str, *, close: bool = False) -> None:
        """Writes to stdin; ``close`` closes it afterwards."""
        self._runner.call(self._process.write(data, close=close))

    def close_stdin(self) -> None:
        """Closes stdin; on a terminal, types the end-of-file character."""
        self._runner.call(self._process.close_stdin())

    def resize(self, rows: int, cols: int) -> None:
        """Sets the size of its terminal."""
        self._runner.call(self._process.resize(rows, cols))

    def signal(self, signal: str | int) -> None:
        """Sends a signal to the process group: ``"interrupt"``, ``signal.SIGTERM`` …"""
        self._runner.call(self._process.signal(signal))

    def kill(self) -> bool:
        """Kills the process, its group and every descendant. False if it had exited."""
        return self._runner.call(self._process.kill())

    def kill_soon(self) -> None:
        """Queues :meth:`kill` without waiting for its result."""
        self._runner.loop.call_soon_threadsafe(self._process.kill_soon)

    def detach(self, name: str, *, keep: float = 24 * 3600) -> None:
        """Leaves it running under a name when the sandbox is closed; see :meth:`AsyncProcess.detach`."""
        self._runner.call(self._process.detach(name, keep=keep))

    def __repr__(self) -> str:
        return repr(self._process).replace("AsyncProcess", "Process")


class Files:
    """Files of the server; relative paths start at the sandbox's ``cwd``."""

    def __init__(self, files: AsyncFiles, runs: Runner) -> None:
        self._files = files
        self._runner = runs

    def resolve(self, path: PathLike) -> str:
        """The absolute path on the server."""
        return self._files.resolve(path)

    def read(self, path: PathLike) -> bytes:
        """The content of a file, of any size."""
        return self._runner.call(self._files.read(path))

    def read_text(self, path: PathLike, encoding: str = "utf-8") -> str:
        """The content of a text file."""
        return self._runner.call(self._files.read_text(path, encoding))

    def read_blocks(self, path: PathLike, *, start: int = 0) -> Iterator[bytes]:
        """The content from a byte on, in blocks; continues after a lost connection."""
        return _iterate(self._runner, self._files.read_blocks(path, start=start))

    def write(self, path: PathLike, data: bytes | str, *, mode: int | None = None, parents: bool = True) -> None:
        """Replaces the content of a file, or creates it with its ``parents``; ``mode`` is for a new file."""
        self._runner.call(self._files.write(path, data, mode=mode, parents=parents))

    def write_blocks(self, path: PathLike, blocks: Any, *, mode: int | None = None) -> int:
        """Writes a file from blocks; see :meth:`AsyncFiles.write_blocks`."""
        return self._runner.call(self._files.write_blocks(path, blocks, mode=mode))

    def list(self, path: PathLike = ".") -> builtins.list[Entry]:
        """The entries of a directory, sorted; links are described by their targets."""
        return self._runner.call(self._files.list(path))

    def stat(self, path: PathLike) -> Stat:
        """What a path is; raises :class:`PathNotFoundError` if it is nothing."""
        return self._runner.call(self._files.stat(path))

    def exists(self, path: PathLike) -> bool:
        """Whether a path exists."""
        return self._runner.call(self._files.exists(path))

    def remove(self, path: PathLike, *, recursive: bool = False, missing_ok: bool = False) -> None:
        """Removes a file, a link, or a directory: an empty one, or with ``recursive`` all of it."""
        self._runner.call(self._files.remove(path, recursive=recursive, missing_ok=missing_ok))

    def make_dir(self, path: PathLike, *, parents: bool = True) -> None:
        """Makes a directory; with ``parents`` also those above it, and one that exists is fine."""
        self._runner.call(self._files.make_dir(path, parents=parents))

    def copy(self, source: PathLike, destination: PathLike, *, recursive: bool = False) -> None:
        """Copies a file, a link or with ``recursive`` a directory on the server."""
        self._runner.call(self._files.copy(source, destination, recursive=recursive))

    def rename(self, source: PathLike, destination: PathLike, *, overwrite: bool = True) -> None:
        """Renames a path within its file system."""
        self._runner.call(self._files.rename(source, destination, overwrite=overwrite))

    def symlink(self, path: PathLike, target: str) -> None:
        """Makes a symbolic link at ``path``; ``target`` is kept as it is."""
        self._runner.call(self._files.symlink(path, target))

    def set_mode(self, path: PathLike, mode: int) -> None:
        """Sets permission bits."""
        self._runner.call(self._files.set_mode(path, mode))

    def walk(
        self,
        path: PathLike = ".",
        *,
        max_depth: int = 64,
        max_entries: int = 50_000,
        follow_links: bool = False,
        hidden: bool = True,
    ) -> WalkResult:
        """Lists a tree breadth-first, without its root."""
        return self._runner.call(
            self._files.walk(
                path, max_depth=max_depth, max_entries=max_entries, follow_links=follow_links, hidden=hidden
            )
        )

    def glob(
        self,
        patterns: str | Sequence[str],
        path: PathLike = ".",
        *,
        exclude: Sequence[str] = (),
        gitignore: bool = True,
        hidden: bool = False,
        directories: bool = False,
        max_results: int = 10_000,
    ) -> WalkResult:
        """Finds paths by pattern: ``*`` stops at a slash, ``**`` does not."""
        return self._runner.call(
            self._files.glob(
                patterns,
                path,
                exclude=exclude,
                gitignore=gitignore,
                hidden=hidden,
                directories=directories,
                max_results=max_results,
            )
        )

    def search(
        self,
        pattern: str,
        path: PathLike = ".",
        *,
        literal: bool = False,
        ignore_case: bool = False,
        word: bool = False,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        gitignore: bool = True,
        hidden: bool = False,
        context: int = 0,
        max_matches: int = 1000,
    ) -> SearchResult:
        """Finds lines by a regular expression, or by text with ``literal``, below a path."""
        return self._runner.call(
            self._files.search(
                pattern,
                path,
                literal=literal,
                ignore_case=ignore_case,
                word=word,
                include=include,
                exclude=exclude,
                gitignore=gitignore,
                hidden=hidden,
                context=context,
                max_matches=max_matches,
            )
        )

    def watch(
        self, path: PathLike = ".", *, recursive: bool = True, debounce: float = 0.1
    ) -> Iterator[Changes]:
        """Yields changes of a file or a tree, in batches; see :meth:`AsyncFiles.watch`."""
        return _iterate(self._runner, self._files.watch(path, recursive=recursive, debounce=debounce))


class Sandbox:
    """A connection to a server. Use it with ``with``; leaving kills what was started and not detached."""

    def __init__(self, sandbox: AsyncSandbox, runs: Runner) -> None:
        self._sandbox = sandbox
        self._runner = runs
        self.files = Files(sandbox.files, runs)

    @property
    def cwd(self) -> str:
        """The directory that relative paths start at, and that commands run in."""
        return self._sandbox.cwd

    @classmethod
    def connect(
        cls,
        address: Address | Sandbox,
        *,
        policy: Policy = None,
        cwd: PathLike | None = None,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        registry: str | None = None,
        patience: float = 120.0,
        keep: float | None = None,
        name: str | None = None,
    ) -> Sandbox:
        """Connects to ``ws://…``, ``wss://…``, ``unix:PATH``, ``env:ID``, ``stdio:COMMAND`` or ``local``.

        See :meth:`AsyncSandbox.connect` for the parameters.
        """
        if isinstance(address, Sandbox):
            return address
        runs = runner()
        connecting = AsyncSandbox.connect(
            address,
            policy=policy,
            cwd=cwd,
            token=token,
            tls=tls,
            registry=registry,
            patience=patience,
            keep=keep,
            name=name,
        )
        return cls(runs.call(connecting), runs)

    @classmethod
    def local(
        cls,
        *,
        policy: Policy = None,
        cwd: PathLike | None = None,
        program: str | None = None,
        arguments: Sequence[str] = (),
    ) -> Sandbox:
        """Starts the installed ``codex`` (``program``, ``$CODEX_BIN``, or on ``PATH``) as a server over stdio."""
        return cls.connect(Local(program, arguments), policy=policy, cwd=cwd)

    @classmethod
    def attach(cls, name: str, *, token: str | None = None, take: bool = False) -> Process:
        """Reattaches to a process that was detached under this name; see :meth:`AsyncSandbox.attach`."""
        runs = runner()
        process = runs.call(AsyncSandbox.attach(name, token=token, take=take))
        return Process(process, cls(process.sandbox, runs))

    def close(self) -> None:
        """Kills what this sandbox started and did not detach, and closes the connection."""
        self._runner.call(self._sandbox.close())

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def info(self) -> Mapping[str, Any]:
        """What the server says about itself: shell, version, platform, capabilities."""
        return self._sandbox.info

    @property
    def session_id(self) -> str | None:
        """The id of the session."""
        return self._sandbox.session_id

    def has(self, capability: str) -> bool:
        """Whether the server announces a capability, such as ``"fsSearch"``."""
        return self._sandbox.has(capability)

    def request(self, method: str, params: Mapping[str, Any] | None = None) -> Any:
        """Sends any request of the protocol and returns its result."""
        return self._runner.call(self._sandbox.request(method, params))

    def start(
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
    ) -> Process:
        """Starts a command: a list of words, or a script for ``/bin/sh``; see :meth:`AsyncSandbox.start`."""
        starting = self._sandbox.start(
            command,
            pty=pty,
            size=size,
            stdin=stdin,
            cwd=cwd,
            env=env,
            inherit=inherit,
            limits=limits,
            window=window,
            on_full=on_full,
        )
        return Process(self._runner.call(starting), self)

    def run(
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
        """Runs a command to its end; see :meth:`AsyncSandbox.run`.

        The callbacks run in the calling thread. Ctrl-C kills the command, or with ``on_cancel="leave"`` does
        not.
        """
        if on_stdout is None and on_stderr is None:
            return self._runner.call(
                self._sandbox.run(
                    command,
                    timeout=timeout,
                    check=check,
                    input=input,
                    capture=capture,
                    pty=pty,
                    cwd=cwd,
                    env=env,
                    inherit=inherit,
                    limits=limits,
                    on_cancel=on_cancel,
                )
            )
        return self._run_with_callbacks(
            command, timeout, check, input, on_stdout, on_stderr, capture, pty, cwd, env, inherit, limits, on_cancel
        )

    def _run_with_callbacks(
        self,
        command: Command,
        timeout: float | None,
        check: bool,
        input: bytes | str | None,
        on_stdout: LineCallback | None,
        on_stderr: LineCallback | None,
        capture: bool,
        pty: bool,
        cwd: PathLike | None,
        env: Mapping[str, str] | None,
        inherit: Inherit,
        limits: Mapping[str, int] | None,
        on_cancel: OnCancel,
    ) -> Result:
        if input is not None:
            self._sandbox._connection.require("processCloseStdin", "input with an end")
        deadline = None if timeout is None else time.monotonic() + timeout
        process = self.start(
            command, pty=pty, stdin=input is not None, cwd=cwd, env=env, inherit=inherit, limits=limits
        )
        collector = process._process._collector
        collector.capture = capture
        collector.listen(on_stdout, on_stderr)
        timed_out = False
        try:
            if input is not None:
                self._runner.call(_feed_soon(process._process, input))
            while True:
                left = None if deadline is None else max(deadline - time.monotonic(), 0)
                try:
                    batch = process.next_events(timeout=left)
                except RequestTimeoutError:
                    if timed_out:
                        break
                    timed_out = True
                    process.kill_soon()
                    deadline = time.monotonic() + KILL_GRACE
                    continue
                except CodexError:
                    if timed_out:
                        break
                    raise
                if not batch:
                    break
                collector.feed(batch)
            collector.finish()
        except BaseException:
            if on_cancel == "kill":
                process.kill_soon()
            raise
        result = collector.result(process._process, timed_out=timed_out)
        return result.check() if check else result

    def upload(self, source: PathLike, destination: PathLike) -> int:
        """Copies a local file or directory to the server; returns the bytes copied."""
        return self._runner.call(self._sandbox.upload(source, destination))

    def download(self, source: PathLike, destination: PathLike) -> int:
        """Copies a file or directory of the server to this machine; returns the bytes copied."""
        return self._runner.call(self._sandbox.download(source, destination))

    def apply_patch(self, text: str) -> list[str]:
        """Applies a patch (``*** Begin Patch`` …); returns ``A path``, ``M path``, ``D path``."""
        return self._runner.call(self._sandbox.apply_patch(text))

    def __repr__(self) -> str:
        return repr(self._sandbox).replace("AsyncSandbox", "Sandbox")


async def _feed_soon(process: AsyncProcess, data: bytes | str) -> None:
    process._connection.spawn(_feed(process, data))
