"""One session with a server: requests, notifications, reconnecting.

```text
request() ─▶ pending, outbox ─▶ write task ─▶ transport
                                                 │
futures ◀─ pending ◀───────── read task ◀────────┘ ─▶ notification handlers
```

Invariant: every request ends once: with its response, with an error, or, if the connection is lost, by being
sent again on the next one (only requests whose repetition has no further effect). A request is in the
outbox before :meth:`Connection.request` waits for the first time, so a cancelled caller knows that a
later request about the same process comes after it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import json
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from ._errors import (
    CodexError,
    ConnectionLostError,
    ProtocolViolationError,
    RequestTimeoutError,
    SessionAttachedError,
    UnsupportedError,
    UsageError,
    from_wire,
)
from ._models import REPEATABLE, Capability
from ._transport import Dialer, Transport

#: Seconds for one attempt to connect, the handshake included.
ATTEMPT_TIMEOUT = 10.0
#: Seconds before the first attempt to reconnect, and the most before any other.
FIRST_DELAY = 0.05
MAX_DELAY = 5.0

Handler = Callable[[dict[str, Any]], None]


class Resumed(Protocol):
    """What has to know that the session has a new connection, or has ended."""

    def on_resumed(self) -> None: ...

    def on_failed(self, error: CodexError) -> None: ...


class _Pending:
    __slots__ = ("future", "message", "method", "repeatable", "sent")

    def __init__(self, method: str, message: str, future: asyncio.Future[Any], repeatable: bool) -> None:
        self.method = method
        self.message = message
        self.future = future
        self.repeatable = repeatable
        self.sent = False


class Connection:
    """A session, over as many connections as it takes."""

    def __init__(
        self,
        dialer: Dialer,
        *,
        client_name: str = "codex-exec-python",
        patience: float = 120.0,
        keep: float | None = None,
        session_id: str | None = None,
        session_name: str | None = None,
        attach: Mapping[str, Any] | None = None,
    ) -> None:
        self.dialer = dialer
        self.session_id: str | None = session_id
        self.info: dict[str, Any] = {}
        self._client_name = client_name
        self._patience = patience
        self.keep = keep
        self._session_name = session_name
        self._attach = attach
        self._ids = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._outbox: collections.deque[str] = collections.deque()
        self._wake = asyncio.Event()
        self._handlers: dict[tuple[str, Any], Handler] = {}
        self._listeners: set[Resumed] = set()
        self._transport: Transport | None = None
        self._main: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self._error: CodexError | None = None
        self._closing = False
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        #: How often the session was resumed.
        self.resumes = 0
        #: Bytes that consumers have not taken, of processes whose server does not wait for them.
        self.held: set[object] = set()
        self._room = asyncio.Event()
        self._room.set()
        self._changed = asyncio.Event()

    # Life

    async def open(self) -> None:
        """Connects once; raises what went wrong."""
        transport = await self._attempt()
        # Before the first await of a caller: what is posted from now on goes to this transport.
        self._transport = transport
        self._main = asyncio.ensure_future(self._run(transport))

    async def _attempt(self) -> Transport:
        try:
            return await asyncio.wait_for(self._dial_and_greet(), ATTEMPT_TIMEOUT)
        except (asyncio.TimeoutError, TimeoutError) as error:
            if isinstance(error, CodexError):
                raise
            raise RequestTimeoutError(
                f"{self.dialer.url} did not answer within {ATTEMPT_TIMEOUT:.0f} s; "
                "it may not be a codex exec-server"
            ) from error

    async def _dial_and_greet(self) -> Transport:
        transport = await self.dialer.dial()
        try:
            await self._greet(transport)
        except BaseException:
            with contextlib.suppress(Exception):
                await transport.close()
            raise
        return transport

    async def _greet(self, transport: Transport) -> None:
        params: dict[str, Any] = {"clientName": self._client_name}
        if self.session_id is not None:
            params["resumeSessionId"] = self.session_id
        elif self._session_name is not None:
            params["sessionName"] = self._session_name
        if self.keep is not None:
            params["detachTtlMs"] = int(self.keep * 1000)
        if self._attach is not None:
            params["attach"] = dict(self._attach)
        greeting = {"id": "initialize", "method": "initialize", "params": params}
        await transport.send(json.dumps(greeting))
        while True:
            message = self._parse(await transport.recv())
            if "method" in message:
                if message.get("id") == "initialize":
                    raise ProtocolViolationError(f"{self.dialer.url} is not a codex exec-server: it echoes")
                continue  # An event of the resumed session; it is read again later.
            if message.get("id") not in ("initialize", -1):
                raise ProtocolViolationError(f"{self.dialer.url} answered a request that was not sent")
            if "error" in message:
                raise from_wire("initialize", message["error"])
            break
        result = message.get("result")
        if not isinstance(result, dict):
            raise ProtocolViolationError(
                f"{self.dialer.url} is not a codex exec-server: its response to initialize is not an object"
            )
        session = result.get("sessionId")
        if self.session_id is None:
            self.session_id = session if isinstance(session, str) else None
        info = result.get("environmentInfo")
        if isinstance(info, dict):
            self.info = info
        await transport.send('{"method":"initialized"}')

    def _parse(self, raw: str | bytes) -> dict[str, Any]:
        try:
            message = json.loads(raw)
        except ValueError as error:
            raise ProtocolViolationError(
                f"{self.dialer.url} is not a codex exec-server: it sent something that is not JSON"
            ) from error
        if not isinstance(message, dict):
            raise ProtocolViolationError(f"{self.dialer.url} sent a message that is not an object")
        return message

    async def _run(self, transport: Transport) -> None:
        """Serves the transport; replaces it when it is lost."""
        while True:
            self._transport = transport
            error = await self._serve(transport)
            self._transport = None
            if self._closing:
                self._fail(ConnectionLostError(f"the connection to {self.dialer.url} was closed"))
                return
            self._outbox.clear()
            for number, pending in list(self._pending.items()):
                if pending.sent and not pending.repeatable:
                    del self._pending[number]
                    self._reject(
                        pending,
                        ConnectionLostError(
                            f"{pending.method}: the connection was lost before the answer; "
                            f"whether it took effect is unknown ({error})",
                            method=pending.method,
                        ),
                    )
            if not self.dialer.resumable or self.session_id is None or not isinstance(
                error, ConnectionLostError
            ):
                self._fail(error)
                return
            try:
                transport = await self._reconnect(error)
            except CodexError as fatal:
                self._fail(fatal)
                return
            self._transport = transport
            # In the order of their ids, and before anything newer.
            self._outbox.clear()
            for pending in self._pending.values():
                pending.sent = True
                self._outbox.append(pending.message)
            self._wake.set()
            self.resumes += 1
            self._changed.set()
            for listener in list(self._listeners):
                listener.on_resumed()

    async def _reconnect(self, lost: CodexError) -> Transport:
        deadline = time.monotonic() + self._patience
        delay = FIRST_DELAY
        last: CodexError = lost
        while True:
            pause = delay * random.uniform(0.5, 1)
            if time.monotonic() + pause > deadline:
                raise ConnectionLostError(
                    f"the connection to {self.dialer.url} was lost, and reconnecting failed for "
                    f"{self._patience:.0f} s: {last}"
                )
            await asyncio.sleep(pause)
            delay = min(delay * 2, MAX_DELAY)
            try:
                return await self._attempt()
            except SessionAttachedError as error:
                last = error  # The server still waits for the old connection.
            except (ConnectionError, TimeoutError) as error:
                if not isinstance(error, CodexError) or error.kind == "tokenRefused":
                    raise
                last = error

    async def _serve(self, transport: Transport) -> CodexError:
        """Writes and reads until either ends; returns why."""
        writer = asyncio.ensure_future(self._write(transport))
        reader = asyncio.ensure_future(self._read(transport))
        try:
            done, _ = await asyncio.wait({writer, reader}, return_when=asyncio.FIRST_COMPLETED)
            # Messages that had arrived before the end are still read.
            if reader not in done and not self._closing:
                await asyncio.wait({reader}, timeout=1)
            for task in (reader, writer):
                if task.done() and not task.cancelled():
                    error = task.exception()
                    if isinstance(error, CodexError):
                        return error
                    if error is not None:
                        return ProtocolViolationError(f"the connection to {self.dialer.url} failed: {error!r}")
            return ConnectionLostError(f"the connection to {self.dialer.url} ended")
        finally:
            for task in (writer, reader):
                task.cancel()
            await asyncio.gather(writer, reader, return_exceptions=True)
            with contextlib.suppress(Exception):
                await transport.close()

    async def _write(self, transport: Transport) -> None:
        while True:
            while self._outbox:
                await transport.send(self._outbox.popleft())
            if self._closing:
                return
            self._wake.clear()
            await self._wake.wait()

    async def _read(self, transport: Transport) -> None:
        while True:
            if self.held and not self._pending:
                # A consumer is slow, and the server would drop what this client does not keep: stop
                # reading, unless a response is awaited.
                self._room.clear()
                await self._room.wait()
            self._dispatch(self._parse(await transport.recv()))

    def release(self, process: object) -> None:
        """A consumer has caught up."""
        self.held.discard(process)
        self._room.set()

    def _dispatch(self, message: dict[str, Any]) -> None:
        method = message.get("method")
        if method is not None:
            if "id" in message:
                self._refuse(message["id"], method)
                return
            params = message.get("params")
            if isinstance(params, dict):
                key = (method, params.get("processId", params.get("watchId", params.get("searchId"))))
                handler = self._handlers.get(key)
                if handler is not None:
                    handler(params)
            return
        number = message.get("id")
        pending = self._pending.pop(number, None) if isinstance(number, int) else None
        if pending is None or pending.future.done():
            return
        if "error" in message:
            pending.future.set_exception(from_wire(pending.method, message["error"]))
        else:
            pending.future.set_result(message.get("result"))

    def _refuse(self, number: Any, method: str) -> None:
        if method == "network/policyRequest":
            # This client has no one to ask.
            answer: dict[str, Any] = {"result": {"decision": {"type": "deny", "reason": "not_allowed"}}}
        else:
            answer = {"error": {"code": -32601, "message": f"this client does not know {method}"}}
        self._outbox.append(json.dumps({"id": number, **answer}))
        self._wake.set()

    def _reject(self, pending: _Pending, error: CodexError) -> None:
        if not pending.future.done():
            pending.future.set_exception(error)
            # It may have no reader: its caller was cancelled or has gone.
            pending.future.exception()

    def _fail(self, error: CodexError) -> None:
        self._error = error
        self._transport = None
        self._changed.set()
        pending, self._pending = self._pending, {}
        for one in pending.values():
            self._reject(one, error)
        for listener in list(self._listeners):
            listener.on_failed(error)

    async def close(self) -> None:
        """Sends what is queued and closes the connection; the session stays for its detach period."""
        if os.getpid() != self._pid:
            return
        self._closing = True
        self._wake.set()
        self._room.set()
        main, self._main = self._main, None
        if main is None:
            return
        if self._transport is None:
            main.cancel()
        done, _ = await asyncio.wait({main}, timeout=5)
        if not done:
            main.cancel()
            await asyncio.wait({main}, timeout=5)
        for task in list(self._background):
            task.cancel()
        if self._error is None:
            self._fail(ConnectionLostError(f"the connection to {self.dialer.url} was closed"))

    async def drop(self) -> None:
        """Ends the transport as a failing network would; the session is resumed."""
        if self._transport is not None:
            await self._transport.close()

    @property
    def owned(self) -> bool:
        """Whether this process and this event loop made the connection."""
        return os.getpid() == self._pid

    async def change_keep(self, keep: float) -> None:
        """Sets how long the server keeps the session without a client; that takes a new connection."""
        self.keep = keep
        while once := [p.future for p in self._pending.values() if p.sent and not p.repeatable]:
            await asyncio.wait(once)
        before = self.resumes
        await self.drop()
        while self.resumes == before and self._error is None:
            self._changed.clear()
            await self._changed.wait()
        self.check_usable()

    @property
    def closed(self) -> bool:
        return self._closing or self._error is not None

    # Requests

    def check_usable(self) -> None:
        """Raises if this connection cannot be used from here."""
        if os.getpid() != self._pid:
            raise UsageError(
                "this connection was made before the process forked; connect again in the new process"
            )
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop is not self._loop:
            raise UsageError(
                "this connection belongs to another event loop; connect again in this one, or use "
                "codex_exec.Sandbox, which works from any thread"
            )
        if self._error is not None:
            raise type(self._error)(self._error.message, kind=self._error.kind, code=self._error.code)
        if self._closing:
            raise UsageError("the connection is closed")

    def post(
        self, method: str, params: Mapping[str, Any] | None = None, *, repeatable: bool | None = None
    ) -> asyncio.Future[Any]:
        """Queues a request; the future has its result. Does not wait."""
        self.check_usable()
        number = next(self._ids)
        body: dict[str, Any] = {"id": number, "method": method}
        if params is not None:
            body["params"] = params
        message = json.dumps(body, separators=(",", ":"))
        future: asyncio.Future[Any] = self._loop.create_future()
        pending = _Pending(method, message, future, method in REPEATABLE if repeatable is None else repeatable)
        self._room.set()
        self._pending[number] = pending
        if self._transport is not None:
            pending.sent = True
            self._outbox.append(message)
            self._wake.set()
        return future

    async def request(
        self, method: str, params: Mapping[str, Any] | None = None, *, repeatable: bool | None = None
    ) -> Any:
        """Sends a request and returns its result."""
        return await self.post(method, params, repeatable=repeatable)

    async def call(
        self, method: str, params: Mapping[str, Any] | None = None, *, repeatable: bool | None = None
    ) -> dict[str, Any]:
        """Like :meth:`request`, for the results that are objects."""
        result = await self.request(method, params, repeatable=repeatable)
        if not isinstance(result, dict):
            raise ProtocolViolationError(f"the response to {method} is not an object", method=method)
        return result

    def has(self, capability: str) -> bool:
        """Whether the server announces the capability."""
        capabilities = self.info.get("capabilities")
        return isinstance(capabilities, dict) and capabilities.get(capability) is True

    def require(self, capability: Capability, what: str) -> None:
        """Raises a clear error if the server lacks the capability."""
        if not self.has(capability):
            version = self.info.get("executorVersion") or "an unknown version"
            raise UnsupportedError(
                f"{self.dialer.url} does not offer {what} (capability {capability}); its server is {version}"
            )

    # Notifications

    def subscribe(self, method: str, key: Any, handler: Handler) -> None:
        self._handlers[method, key] = handler

    def unsubscribe(self, method: str, key: Any) -> None:
        self._handlers.pop((method, key), None)

    def listen(self, listener: Resumed) -> None:
        self._listeners.add(listener)

    def unlisten(self, listener: Resumed) -> None:
        self._listeners.discard(listener)

    def spawn(self, work: Awaitable[Any]) -> asyncio.Task[Any]:
        """Runs work in the background; its failure is not an event."""

        async def quiet() -> None:
            with contextlib.suppress(CodexError):
                await work

        task = asyncio.ensure_future(quiet())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task
