"""A process on the server: its events, its input, its end."""

from __future__ import annotations

import asyncio
import base64
import codecs
import signal as signals
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from . import _names
from ._connection import Connection
from ._errors import (
    CodexError,
    CommandFailedError,
    CommandTimeoutError,
    InvalidParamsError,
    OutputLostError,
    RequestTimeoutError,
    StdinClosedError,
    UnknownProcessError,
    UnsupportedError,
)
from ._events import Closed, Event, Exited, Lost, Output, Sequencer

if TYPE_CHECKING:
    from ._sandbox import AsyncSandbox

#: Bytes that the server keeps for a consumer; beyond that the process waits.
WINDOW = 8 << 20
#: Bytes taken by the consumer after which the client tells the server so.
ACKNOWLEDGE_AFTER = 1 << 20
#: Bytes of a process's output in memory after which a client of a server that cannot wait stops reading.
HOLD_AFTER = 32 << 20
#: Bytes of the first read on a connection, and of the largest.
FIRST_READ = 64 << 10
LARGEST_READ = 8 << 20
#: Bytes of one piece of input, and pieces on their way at a time.
WRITE_CHUNK = 256 << 10
WRITES_IN_FLIGHT = 4
#: Seconds to wait for the rest of the output of a command that was killed because its time was up.
KILL_GRACE = 10.0
#: Bytes of a line without an end after which a callback gets what is there.
LONGEST_LINE = 1 << 20

OnCancel = Literal["kill", "leave"]
OnFull = Literal["wait", "drop"]
LineCallback = Callable[[str], object]

_SIGNALS = {
    signals.SIGINT: "interrupt",
    signals.SIGTERM: "terminate",
    signals.SIGKILL: "kill",
    signals.SIGHUP: "hangup",
    signals.SIGQUIT: "quit",
    signals.SIGUSR1: "user1",
    signals.SIGUSR2: "user2",
    signals.SIGSTOP: "stop",
    signals.SIGCONT: "continue",
}


@dataclass(frozen=True)
class Result:
    """How a command ended, and what it wrote."""

    argv: list[str] = field(repr=False)
    #: 128 + N if signal N killed the command; ``None`` if the end is not known (after a timeout).
    exit_code: int | None
    stdout_bytes: bytes = field(repr=False)
    stderr_bytes: bytes = field(repr=False)
    #: The ``timeout`` expired and the command was killed; the output until then is here.
    timed_out: bool = False
    #: The sandbox probably caused the failure.
    sandbox_denied: bool = False
    #: Why the command ended, if not by itself.
    ended_by: str | None = None

    @property
    def stdout(self) -> str:
        """``stdout_bytes`` as UTF-8; what is not becomes U+FFFD. A terminal's output is here too."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """``stderr_bytes`` as UTF-8; what is not becomes U+FFFD."""
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        """The command exited with 0, in time."""
        return self.exit_code == 0 and not self.timed_out

    def check(self) -> Result:
        """Raises :class:`CommandFailedError` unless the command succeeded."""
        if self.ok:
            return self
        shown = " ".join(self.argv)
        shown = shown if len(shown) <= 200 else shown[:200] + "…"
        if self.timed_out:
            raise CommandTimeoutError(f"`{shown}` did not end in time and was killed", self)
        tail = self.stderr.strip()[-500:]
        denied = "; the sandbox denied it something" if self.sandbox_denied else ""
        said = f": {tail}" if tail else ""
        raise CommandFailedError(f"`{shown}` exited with {self.exit_code}{denied}{said}", self)


class Lines:
    """Cuts a stream into lines for a callback."""

    def __init__(self, callback: LineCallback) -> None:
        self._callback = callback
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, data: bytes, *, final: bool = False) -> None:
        self._rest += self._decoder.decode(data, final)
        *lines, self._rest = self._rest.split("\n")
        for line in lines:
            self._callback(line.removesuffix("\r"))
        if self._rest and (final or len(self._rest) > LONGEST_LINE):
            rest, self._rest = self._rest, ""
            self._callback(rest)


class Collector:
    """Gathers the output of a process, and calls back for each line."""

    def __init__(self) -> None:
        self.parts: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        self.lines: dict[str, Lines | None] = {"stdout": None, "stderr": None}
        self.capture = True

    def listen(self, on_stdout: LineCallback | None, on_stderr: LineCallback | None) -> None:
        self.lines["stdout"] = Lines(on_stdout) if on_stdout else None
        self.lines["stderr"] = Lines(on_stderr) if on_stderr else None

    def feed(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Output):
                stream = "stderr" if event.stream == "stderr" else "stdout"
                if self.capture:
                    self.parts[stream].append(event.data)
                lines = self.lines[stream]
                if lines is not None:
                    lines.feed(event.data)

    def finish(self) -> None:
        for lines in self.lines.values():
            if lines is not None:
                lines.feed(b"", final=True)

    def result(self, process: AsyncProcess, *, timed_out: bool) -> Result:
        end = process.exit
        by_limit = end is not None and end.ended_by in ("wall", "idle")
        return Result(
            argv=process.argv,
            exit_code=end.exit_code if end else None,
            stdout_bytes=b"".join(self.parts["stdout"]),
            stderr_bytes=b"".join(self.parts["stderr"]),
            timed_out=timed_out or by_limit,
            sandbox_denied=bool(end and end.sandbox_denied),
            ended_by=end.ended_by if end else None,
        )


class AsyncProcess:
    """A process on the server. Iterate over it for its events; one consumer at a time.

    The server keeps output until this consumer has taken it, and the process waits if the consumer is slow.
    """

    def __init__(
        self,
        sandbox: AsyncSandbox,
        connection: Connection,
        process_id: str,
        argv: list[str],
        *,
        pty: bool,
        acknowledges: bool,
        on_full: OnFull = "wait",
        after: int = 0,
    ) -> None:
        self.sandbox = sandbox
        self.id = process_id
        self.argv = argv
        self.pty = pty
        #: The sandbox that the server uses for it: ``none``, ``linuxSeccomp`` …
        self.sandbox_type: str | None = None
        self.sandbox_assurance: str | None = None
        self.detached = False
        self._connection = connection
        self._events = Sequencer(after=after)
        self._acknowledges = acknowledges
        self._on_full = on_full
        self._attaching = False
        self._wake = asyncio.Event()
        self._lock = asyncio.Lock()
        self._collector = Collector()
        self._consumed = after
        self._unacknowledged = 0
        self._acknowledging: asyncio.Task[Any] | None = None
        self._read_bytes = FIRST_READ
        self._writer = uuid.uuid4().hex
        self._writes = 0
        for method in ("process/output", "process/exited", "process/closed"):
            connection.subscribe(method, process_id, self._on_event(method))
        connection.listen(self)

    # What the connection reports

    def _on_event(self, method: str) -> Callable[[dict[str, Any]], None]:
        def handle(params: dict[str, Any]) -> None:
            self._events.notify(method, params)
            self._wake.set()
            if self._events.queued_bytes > HOLD_AFTER and not self._acknowledges:
                self._connection.held.add(self)

        return handle

    def on_resumed(self) -> None:
        self._read_bytes = FIRST_READ
        self._events.resync()
        self._wake.set()

    def on_failed(self, error: CodexError) -> None:
        self._events.fail(error)
        self._wake.set()

    def _forget(self) -> None:
        for method in ("process/output", "process/exited", "process/closed"):
            self._connection.unsubscribe(method, self.id)
        self._connection.unlisten(self)
        self._connection.release(self)
        self.sandbox._processes.pop(self.id, None)

    # Events

    @property
    def exit(self) -> Exited | None:
        """How it exited, once that is known."""
        return self._events.exit

    @property
    def running(self) -> bool:
        """Whether no exit is known yet."""
        return self._events.exit is None and self._events.error is None

    def __aiter__(self) -> AsyncIterator[Event]:
        return self.events()

    async def events(self) -> AsyncIterator[Event]:
        """The events that were not taken yet, until the streams have ended."""
        while batch := await self.next_events(1):
            for event in batch:
                yield event

    async def next_events(self, count: int = 256, *, timeout: float | None = None) -> list[Event]:
        """Takes up to ``count`` events, at least one; an empty list after the last.

        Raises :class:`RequestTimeoutError` if none comes in time. A timeout or a cancellation loses nothing.
        """
        if timeout is None:
            return await self._next_events(count)
        try:
            return await asyncio.wait_for(self._next_events(count), max(timeout, 0.001))
        except (asyncio.TimeoutError, TimeoutError) as error:
            if isinstance(error, CodexError):
                raise
            raise RequestTimeoutError(f"no event of process {self.id} within {timeout} s") from error

    async def _next_events(self, count: int) -> list[Event]:
        async with self._lock:
            events = self._events
            while not events.queue:
                if events.error is not None:
                    raise events.error
                if events.ended:
                    return []
                if events.needs_read:
                    await self._read()
                    continue
                self._wake.clear()
                await self._wake.wait()
            # From here on nothing waits, so a cancelled caller has taken nothing.
            batch: list[Event] = []
            size = 0
            while events.queue and len(batch) < count and size < ACKNOWLEDGE_AFTER:
                seq, event = events.take()
                if isinstance(event, Lost) and self._on_full == "wait" and not self._attaching:
                    how_much = "output" if event.count is None else f"{event.count} bytes of output"
                    raise OutputLostError(f"the server dropped {how_much} of process {self.id}")
                self._consumed = seq
                size += len(event.data) if isinstance(event, Output) else 0
                batch.append(event)
                if isinstance(event, Closed):
                    self._forget()
            self._attaching = False
            self._took(size)
            return batch

    def _took(self, size: int) -> None:
        self._unacknowledged += size
        if self._connection.held and self._events.queued_bytes < HOLD_AFTER // 2:
            self._connection.release(self)
        if (
            self._acknowledges
            and self._unacknowledged >= ACKNOWLEDGE_AFTER
            and not self._events.ended
            and self._acknowledging is None
        ):
            self._unacknowledged = 0
            self._acknowledging = self._connection.spawn(self._acknowledge(self._consumed))
            self._acknowledging.add_done_callback(lambda _: setattr(self, "_acknowledging", None))

    async def _acknowledge(self, seq: int) -> None:
        params = {"processId": self.id, "afterSeq": seq, "maxBytes": 1}
        response = await self._connection.call("process/read", params)
        self._events.apply_read(seq, response)
        self._wake.set()

    async def _read(self) -> None:
        after = self._events.next - 1
        params = {"processId": self.id, "afterSeq": after, "maxBytes": self._read_bytes}
        try:
            response = await self._connection.call("process/read", params)
        except UnknownProcessError as error:
            self._events.fail(error)
            return
        self._read_bytes = min(self._read_bytes * 2, LARGEST_READ)
        self._events.apply_read(after, response)

    async def wait(self, timeout: float | None = None) -> Result:
        """Waits until it has exited and its streams have ended.

        The result has the output that was not iterated over. If the timeout expires, raises
        :class:`RequestTimeoutError`; the process goes on, and a later call returns all of the output.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if not await self._collect(deadline):
            raise RequestTimeoutError(f"process {self.id} has not ended within {timeout} s")
        return self._collector.result(self, timed_out=False)

    async def _collect(self, deadline: float | None) -> bool:
        """Collects output until the end, or until the deadline: then it returns False."""
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            try:
                batch = await self.next_events(timeout=left)
            except RequestTimeoutError:
                return False
            if not batch:
                self._collector.finish()
                return True
            self._collector.feed(batch)

    # Control

    async def write(self, data: bytes | str, *, close: bool = False) -> None:
        """Writes to stdin, and waits until the server has taken all of it; ``close`` closes stdin after it."""
        raw = data.encode() if isinstance(data, str) else bytes(data)
        if close:
            self._connection.require("processCloseStdin", "closing stdin")
        chunks = [raw[at : at + WRITE_CHUNK] for at in range(0, len(raw), WRITE_CHUNK)]
        if close and not chunks:
            chunks = [b""]
        waiting: list[asyncio.Future[Any]] = []
        try:
            for number, chunk in enumerate(chunks):
                if len(waiting) >= WRITES_IN_FLIGHT:
                    self._written(await waiting.pop(0))
                self._writes += 1
                params: dict[str, Any] = {
                    "processId": self.id,
                    "chunk": base64.b64encode(chunk).decode(),
                    "writeId": f"{self._writer}-{self._writes}",
                }
                if close and number == len(chunks) - 1:
                    params["closeStdin"] = True
                # The id makes the server accept a repetition without writing it twice.
                waiting.append(self._connection.post("process/write", params, repeatable=True))
            while waiting:
                self._written(await waiting.pop(0))
        finally:
            for future in waiting:
                future.cancel()

    def _written(self, result: Any) -> None:
        status = result.get("status") if isinstance(result, dict) else None
        if status == "accepted":
            return
        if status == "unknownProcess":
            raise UnknownProcessError(f"process {self.id} is gone; nothing was written")
        raise StdinClosedError(
            f"process {self.id} takes no input ({status}); start it with stdin=True or pty=True"
        )

    async def close_stdin(self) -> None:
        """Closes stdin; on a terminal, types the end-of-file character."""
        await self.write(b"", close=True)

    async def resize(self, rows: int, cols: int) -> None:
        """Sets the size of its terminal."""
        self._connection.require("processResize", "resizing terminals")
        await self._connection.request("process/resize", {"processId": self.id, "rows": rows, "cols": cols})

    async def signal(self, signal: str | int) -> None:
        """Sends a signal to the process group: ``"interrupt"``, ``signal.SIGTERM`` …"""
        if isinstance(signal, int):
            try:
                name = _SIGNALS[signals.Signals(signal)]
            except (KeyError, ValueError):
                raise InvalidParamsError(f"signal {signal} cannot be sent to a remote process") from None
        else:
            name = signal
        if name != "interrupt" and not self._connection.has("processSignals"):
            if name != "kill":
                raise UnsupportedError(f"the server sends no signal `{name}`, only `interrupt` and `kill`")
            await self.kill()
            return
        # A second interrupt may mean more than the first, so it is not repeated after a lost connection.
        repeatable = name in ("kill", "stop", "continue")
        params = {"processId": self.id, "signal": name}
        await self._connection.request("process/signal", params, repeatable=repeatable)

    async def kill(self) -> bool:
        """Kills the process, its group and every descendant. False if it had exited."""
        result = await self._connection.call("process/terminate", {"processId": self.id})
        return bool(result.get("running"))

    def kill_soon(self) -> None:
        """Queues :meth:`kill` without waiting for it; works in a task that is being cancelled."""
        if not self._connection.closed:
            future = self._connection.post("process/terminate", {"processId": self.id})
            # Its result and its failure are of no use to anyone.
            future.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def detach(self, name: str, *, keep: float = 24 * 3600) -> None:
        """Leaves it running under a name when the sandbox is closed; ``keep`` is in seconds.

        Reattach with :meth:`AsyncSandbox.attach` or ``codex attach NAME``. Until then it waits if it writes
        more than the server keeps, unless it was started with ``on_full="drop"``.
        """
        _names.check(name)
        connection = self._connection
        if not connection.dialer.resumable or connection.session_id is None:
            raise UnsupportedError(
                f"{connection.dialer.url}: a session over stdin and stdout ends with its connection, so a "
                "process cannot be detached; connect to a server by ws://, wss:// or unix:"
            )
        if connection.keep != keep:
            connection.require("sessionDetachTtl", "keeping a session without a client")
            await connection.change_keep(keep)
        _names.save(
            name,
            url=connection.dialer.url,
            session_id=connection.session_id,
            process_id=self.id,
            tty=self.pty,
            after_seq=self._consumed,
        )
        self.detached = True

    def __repr__(self) -> str:
        state = "running" if self.running else "ended" if self._events.error is None else "lost"
        return f"<AsyncProcess {self.id} {state} {self.argv!r}>"
