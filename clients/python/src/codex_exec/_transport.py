"""Ways to reach a server: websocket, Unix socket, the stdin and stdout of a command.

A :class:`Dialer` opens a :class:`Transport`, which carries one JSON text per message. Failures to connect
become exceptions by kind here.
"""

from __future__ import annotations

import asyncio
import collections
import os
import shlex
import shutil
import ssl
from collections.abc import Mapping, Sequence
from typing import Protocol
from urllib.parse import urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection, connect, unix_connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI

from ._errors import (
    CodexError,
    CommandEndedError,
    ConnectError,
    ConnectionLostError,
    ConnectRefusedError,
    InvalidParamsError,
    ProtocolViolationError,
    RequestTimeoutError,
    TokenRefusedError,
    UnsupportedError,
)

#: Bytes of the longest message, as the server limits them.
MAX_MESSAGE = 80 << 20
#: Seconds of silence before a ping, and then for its reply.
PING_INTERVAL = 20.0
PING_TIMEOUT = 60.0
#: Bytes of a command's stderr that an error shows.
STDERR_TAIL = 4096
#: Seconds that a command gets to end after its stdin is closed.
STOP_GRACE = 5.0


class Transport(Protocol):
    """A connection that carries whole messages."""

    async def send(self, message: str) -> None: ...

    async def recv(self) -> str | bytes:
        """The next message; raises :class:`ConnectionLostError` at the end."""
        ...

    async def close(self) -> None: ...


class Dialer(Protocol):
    """An address that can be dialled."""

    @property
    def url(self) -> str:
        """The address, without secrets."""
        ...

    @property
    def resumable(self) -> bool:
        """Whether a session outlives its connection."""
        ...

    async def dial(self) -> Transport: ...


class _WebSocket:
    def __init__(self, ws: ClientConnection, url: str) -> None:
        self._ws = ws
        self._url = url

    async def send(self, message: str) -> None:
        try:
            await self._ws.send(message)
        except ConnectionClosed as error:
            raise self._lost(error) from error

    async def recv(self) -> str | bytes:
        try:
            return await self._ws.recv(decode=False)
        except ConnectionClosed as error:
            raise self._lost(error) from error

    async def close(self) -> None:
        await self._ws.close()

    def _lost(self, error: ConnectionClosed) -> CodexError:
        received = error.rcvd
        why = received.reason or f"code {received.code}" if received else "without a closing handshake"
        return ConnectionLostError(f"connection to {self._url} ended: {why}")


def _without_secrets(url: str) -> str:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if ":" in host:
        host = f"[{host}]"
    port = f":{parts.port}" if parts.port else ""
    return urlunsplit((parts.scheme, host + port, parts.path, "", ""))


class WebSocketDialer:
    """Dials ``ws://``, ``wss://``, or a websocket on a Unix socket (``path``)."""

    resumable = True

    def __init__(
        self,
        url: str,
        *,
        path: str | None = None,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._target = url
        self._path = path
        self._token = token
        self._tls = tls
        try:
            self.url = f"unix:{path}" if path else _without_secrets(url)
        except ValueError as error:
            raise InvalidParamsError(f"invalid server address {url!r}: {error}") from error

    async def dial(self) -> Transport:
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        where = self.url
        try:
            if self._path is not None:
                ws = await unix_connect(
                    self._path,
                    "ws://localhost/",
                    additional_headers=headers,
                    compression=None,
                    max_size=MAX_MESSAGE,
                    max_queue=64,
                    ping_interval=PING_INTERVAL,
                    ping_timeout=PING_TIMEOUT,
                    close_timeout=2,
                    user_agent_header="codex-exec-python",
                )
            else:
                ws = await connect(
                    self._target,
                    additional_headers=headers,
                    compression=None,
                    max_size=MAX_MESSAGE,
                    max_queue=64,
                    ping_interval=PING_INTERVAL,
                    ping_timeout=PING_TIMEOUT,
                    close_timeout=2,
                    ssl=self._tls,
                    user_agent_header="codex-exec-python",
                )
        except InvalidStatus as error:
            status = error.response.status_code
            if status in (401, 407) or (status == 403 and self._token):
                raise TokenRefusedError(
                    f"{where} refused the token (HTTP {status}); it is missing, unknown, expired or revoked",
                    code=status,
                ) from error
            if status in (502, 503, 504):
                # A proxy whose server is starting; a client that had a session tries again.
                raise ConnectError(f"the server at {where} is not available (HTTP {status})", code=status) from error
            raise ProtocolViolationError(
                f"{where} is not a codex exec-server: it answered HTTP {status} instead of a websocket",
                code=status,
            ) from error
        except InvalidURI as error:
            raise InvalidParamsError(f"invalid server address {where!r}: {error}") from error
        except InvalidHandshake as error:
            if isinstance(error.__cause__, EOFError):
                raise ConnectError(f"{where} closed the connection before it answered") from error
            raise ProtocolViolationError(f"{where} is not a codex exec-server: {error}") from error
        except ConnectionRefusedError as error:
            raise ConnectRefusedError(
                f"nothing listens at {where}; start a server there with `codex exec-server --listen`"
            ) from error
        except FileNotFoundError as error:
            raise ConnectRefusedError(f"there is no socket at {where}; is the server running?") from error
        except TimeoutError as error:
            raise RequestTimeoutError(f"{where} did not answer in time") from error
        except ssl.SSLError as error:
            raise ConnectError(f"cannot connect to {where}: {error}") from error
        except (OSError, EOFError, ValueError) as error:
            raise ConnectError(f"cannot connect to {where}: {error}") from error
        return _WebSocket(ws, where)


class _Stdio:
    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        assert process.stdin and process.stdout and process.stderr
        self._process = process
        self._url = url
        self._stdin, self._stdout = process.stdin, process.stdout
        self._tail: collections.deque[bytes] = collections.deque()
        self._drain = asyncio.ensure_future(self._keep_tail(process.stderr))

    async def _keep_tail(self, stderr: asyncio.StreamReader) -> None:
        size = 0
        while chunk := await stderr.read(STDERR_TAIL):
            self._tail.append(chunk)
            size += len(chunk)
            while size - len(self._tail[0]) >= STDERR_TAIL:
                size -= len(self._tail.popleft())

    async def send(self, message: str) -> None:
        try:
            self._stdin.write(message.encode() + b"\n")
            await self._stdin.drain()
        except (OSError, RuntimeError) as error:
            raise await self._lost() from error

    async def recv(self) -> str | bytes:
        try:
            line = await self._stdout.readline()
        except (OSError, ValueError) as error:
            raise await self._lost() from error
        if not line.endswith(b"\n"):
            raise await self._lost()
        return line

    async def _lost(self) -> CodexError:
        # The command has closed its stdout or its stdin; its status and last words follow at once.
        await asyncio.wait([self._drain, asyncio.ensure_future(self._process.wait())], timeout=1)
        said = b"".join(self._tail)[-STDERR_TAIL:].decode("utf-8", "replace").strip()
        status = self._process.returncode
        how = "closed its stdout" if status is None else f"ended with exit code {status}"
        return CommandEndedError(f"{self._url} {how}" + (f": {said}" if said else ""))

    async def close(self) -> None:
        """Closes stdin, which ends the server and what it started, and reaps the command."""
        self._stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_GRACE)
        except (TimeoutError, asyncio.TimeoutError):
            try:
                self._process.kill()
            except ProcessLookupError:
                pass
            await self._process.wait()
        finally:
            if self._process.returncode is None:
                # Cancelled while it waited: do not leave the command behind.
                try:
                    self._process.kill()
                except ProcessLookupError:
                    pass
            self._drain.cancel()
            # The pipe transports close here and not in a destructor, which may run after the loop.
            transport = getattr(self._process, "_transport", None)
            if transport is not None:
                transport.close()


class StdioDialer:
    """Starts a command that speaks the protocol on its stdin and stdout."""

    resumable = False

    def __init__(self, argv: Sequence[str], url: str, env: Mapping[str, str] | None = None) -> None:
        self._argv = list(argv)
        self._env = dict(env) if env is not None else None
        self.url = url

    async def dial(self) -> Transport:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=MAX_MESSAGE,
                env=self._env,
                # A Ctrl-C in the terminal is for this program, which ends the server in its own time.
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise CommandEndedError(
                f"cannot find `{self._argv[0]}`; install codex, or set CODEX_BIN to its path"
            ) from error
        except OSError as error:
            raise CommandEndedError(f"cannot start `{self._argv[0]}`: {error}") from error
        return _Stdio(process, self.url)


def codex_program(program: str | None = None) -> str:
    """The ``codex`` program: the argument, else ``$CODEX_BIN``, else the one on ``PATH``."""
    return program or os.environ.get("CODEX_BIN") or shutil.which("codex") or "codex"


def local_dialer(program: str | None = None, *, arguments: Sequence[str] = ()) -> Dialer:
    """A server of its own on this machine, over stdio."""
    argv = [codex_program(program), "exec-server", "--listen", "stdio", *arguments]
    return StdioDialer(argv, "local")


def environment_dialer(environment: str, *, registry: str | None, program: str | None) -> Dialer:
    """A machine behind a rendezvous, with ``codex run`` as the bridge.

    ``codex`` finds the machine, encrypts, and survives dropped connections; on the other machine it starts a
    server of its own for this connection.
    """
    argv = [codex_program(program), "run", "--on", f"env:{environment}"]
    if registry:
        argv += ["--registry", registry]
    argv += ["--", "codex", "exec-server", "--listen", "stdio"]
    return StdioDialer(argv, f"env:{environment}")


def parse_address(
    address: str,
    *,
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
    registry: str | None = None,
    program: str | None = None,
) -> Dialer:
    """The dialer of an address: ``ws://``, ``wss://``, ``unix:``, ``stdio:``, ``env:`` or ``local``."""
    if address == "local":
        return local_dialer(program)
    scheme, colon, rest = address.partition(":")
    if scheme in ("ws", "wss") and rest.startswith("//"):
        token = token or os.environ.get("CODEX_EXEC_SERVER_TOKEN") or None
        return WebSocketDialer(address, token=token, tls=tls)
    if scheme == "unix" and rest:
        return WebSocketDialer("ws://localhost/", path=rest, token=token)
    if scheme == "stdio" and rest:
        try:
            argv = shlex.split(rest)
        except ValueError as error:
            raise InvalidParamsError(f"cannot parse the command in {address!r}: {error}") from error
        return StdioDialer(argv, f"stdio:{argv[0]}")
    if scheme == "env" and rest:
        return environment_dialer(rest, registry=registry, program=program)
    if scheme == "vsock" and colon:
        raise UnsupportedError(
            f"{address}: this client does not dial vsock; use stdio: with a program that does"
        )
    raise InvalidParamsError(
        f"invalid server address {address!r}: expected ws://HOST:PORT, wss://HOST, unix:PATH, "
        "stdio:COMMAND, env:ID or local"
    )
