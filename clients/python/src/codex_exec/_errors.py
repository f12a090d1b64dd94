"""Exceptions, one class per kind of error.

A server sends ``error.data.kind``; :func:`from_wire` turns it into the class of that kind. Servers that send
no kinds are handled in one place, :func:`_infer`. Nothing else in this package looks at a message.
"""

from __future__ import annotations

import errno
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._process import Result


class CodexError(Exception):
    """Base of every exception of this package.

    ``kind`` is the kind from the protocol (``docs/protocol/errors.md``), such as ``"pathNotFound"``; ``code``
    the JSON-RPC code, or ``None`` if the failure is on this side; ``method`` the request that failed.
    """

    kind: str = "internal"

    def __init__(
        self,
        message: str,
        *,
        kind: str | None = None,
        code: int | None = None,
        method: str | None = None,
        data: Any = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        if kind is not None:
            self.kind = kind
        self.code = code
        self.method = method
        self.data = data

    def __str__(self) -> str:
        return self.message

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.message!r}, kind={self.kind!r})"


class ServerError(CodexError):
    """The server answered with an error that has no class of its own."""


class InvalidRequestError(ServerError):
    """The request makes no sense in the state that the server is in."""

    kind = "refused"


class MalformedMessageError(InvalidRequestError):
    """The message is not one of the protocol, or exceeds a limit."""

    kind = "malformedMessage"


class NotInitializedError(InvalidRequestError):
    """A method was called before the handshake."""

    kind = "notInitialized"


class AlreadyInitializedError(InvalidRequestError):
    """The handshake was repeated."""

    kind = "alreadyInitialized"


class InvalidParamsError(ServerError, ValueError):
    """A parameter has an impossible value."""

    kind = "invalidParams"


class UnsupportedError(ServerError):
    """The server, or the transport, does not offer this."""

    kind = "unsupported"


class MethodNotFoundError(UnsupportedError):
    """The server does not know the method."""

    kind = "methodNotFound"


class SessionError(ServerError):
    """The session cannot be used."""


class UnknownSessionError(SessionError):
    """The session has ended, or never existed."""

    kind = "unknownSession"


class SessionAttachedError(SessionError):
    """Another connection holds the session."""

    kind = "sessionAttached"


class SessionEndedError(SessionError):
    """The session ended before the process began."""

    kind = "sessionEnded"


class ViewOnlyError(SessionError):
    """The connection may only read."""

    kind = "viewOnly"


class ProcessError(ServerError):
    """A process cannot be started or used."""


class ProcessExistsError(ProcessError):
    """The session has a process of this id."""

    kind = "processExists"


class UnknownProcessError(ProcessError, ProcessLookupError):
    """The session has no process of this id, or no longer."""

    kind = "unknownProcess"


class NoTerminalError(ProcessError):
    """The process has no terminal."""

    kind = "noTerminal"


class StdinClosedError(ProcessError, BrokenPipeError):
    """The process takes no input; start it with ``stdin=True`` or ``pty=True``."""

    kind = "stdinClosed"


class ProgramNotFoundError(ProcessError, FileNotFoundError):
    """There is no such program, or not the interpreter that it names."""

    kind = "programNotFound"


class ProgramNotExecutableError(ProcessError, PermissionError):
    """The program exists and cannot be executed."""

    kind = "programNotExecutable"


class WorkingDirectoryMissingError(ProcessError, FileNotFoundError):
    """The working directory does not exist, or is not a directory."""

    kind = "workingDirectoryMissing"


class WorkingDirectoryDeniedError(ProcessError, PermissionError):
    """The working directory cannot be entered."""

    kind = "workingDirectoryDenied"


class PolicyError(ServerError):
    """A policy does not permit the request."""


class SandboxUnavailableError(PolicyError):
    """The sandbox cannot be enforced on the server's machine; nothing ran."""

    kind = "sandboxUnavailable"


class OperatorPolicyError(PolicyError, PermissionError):
    """The policy of the server's operator permits it to no client."""

    kind = "operatorPolicy"


class DeniedBySandboxError(PolicyError, PermissionError):
    """The sandbox does not permit what the file request asks."""

    kind = "deniedBySandbox"


class FileError(ServerError):
    """A file request failed."""

    kind = "ioError"


class PathNotFoundError(FileError, FileNotFoundError):
    """The path does not exist."""

    kind = "pathNotFound"


class UnknownFileHandleError(FileError):
    """No open file handle has this id."""

    kind = "unknownFileHandle"


class IdInUseError(FileError):
    """A file handle, search or watch of this id is open."""

    kind = "idInUse"


class PermissionDeniedError(FileError, PermissionError):
    """The system does not permit it."""

    kind = "permissionDenied"


class AlreadyExistsError(FileError, FileExistsError):
    """Something of that name exists."""

    kind = "alreadyExists"


class NotDirectoryError(FileError, NotADirectoryError):
    """A component of the path is not a directory."""

    kind = "notADirectory"


class DirectoryError(FileError, IsADirectoryError):
    """A directory where none is expected."""

    kind = "isADirectory"


class NotARegularFileError(FileError):
    """A directory, FIFO, socket or device where a regular file is needed."""

    kind = "notARegularFile"


class DirectoryNotEmptyError(FileError):
    """The directory is not empty."""

    kind = "directoryNotEmpty"


class SymlinkRefusedError(FileError):
    """A symbolic link where links are refused."""

    kind = "symlinkRefused"


class InvalidPathError(FileError):
    """Too many levels of symbolic links, or a name that is too long."""

    kind = "invalidPath"


class ReadOnlyFileSystemError(FileError, PermissionError):
    """The file system is mounted read-only."""

    kind = "readOnlyFileSystem"


class CrossDeviceError(FileError):
    """The two paths are on different file systems."""

    kind = "crossDevice"


class BusyError(FileError):
    """It is in use."""

    kind = "busy"


class TooLargeError(FileError):
    """The file is larger than one answer carries, or than the file system takes."""

    kind = "tooLarge"


class DiskFullError(FileError):
    """No space is left on the device."""

    kind = "diskFull"


class QuotaExceededError(FileError):
    """The user's disk quota is used up."""

    kind = "quotaExceeded"


class PreservedError(FileError):
    """The directory is the root, a home directory or a mount point, or contains one."""

    kind = "preserved"


class DrainingError(ServerError):
    """The server takes no new sessions, because it is being stopped."""

    kind = "draining"


class LimitReachedError(ServerError):
    """A limit of the session, the server or the system is reached."""

    kind = "limitReached"


class CancelledRequestError(ServerError):
    """The request was cancelled."""

    kind = "cancelled"


class HttpFailedError(ServerError):
    """``http/request`` got no answer, or not all of it."""

    kind = "httpFailed"


class InvalidConfigError(ServerError):
    """A configuration file of the server cannot be used."""

    kind = "invalidConfig"


class ConnectError(CodexError, ConnectionError):
    """No connection, or no longer one."""

    kind = "unreachable"


class ConnectRefusedError(ConnectError, ConnectionRefusedError):
    """Nothing listens at the address."""

    kind = "connectionRefused"


class TokenRefusedError(ConnectError):
    """The server refused the token."""

    kind = "tokenRefused"


class EnvironmentOfflineError(ConnectError):
    """The registry knows the environment, and its server is not connected."""

    kind = "environmentOffline"


class EnvironmentNotFoundError(ConnectError):
    """The registry does not know the environment."""

    kind = "environmentNotFound"


class CommandEndedError(ConnectError):
    """The command behind ``stdio:`` ended before the session began."""

    kind = "commandEnded"


class ConnectionLostError(ConnectError):
    """The connection ended before the answer came, or was closed."""

    kind = "connectionLost"


class RequestTimeoutError(CodexError, TimeoutError):
    """No answer came in time."""

    kind = "timedOut"


class OutputLostError(CodexError):
    """Output was dropped before it could be read."""

    kind = "outputLost"


class ProtocolViolationError(CodexError):
    """The peer does not speak the protocol, or broke it."""

    kind = "protocolViolation"


class UsageError(CodexError, RuntimeError):
    """This package was used in a way that cannot work: after a fork, from another event loop, after close."""

    kind = "usage"


class PatchError(CodexError, ValueError):
    """The patch does not parse or does not fit; nothing was changed unless ``applied`` says otherwise."""

    kind = "patch"

    def __init__(self, message: str, *, applied: list[str] | None = None) -> None:
        super().__init__(message)
        self.applied = applied or []


class CommandFailedError(CodexError):
    """``check=True``, and the command did not succeed. ``result`` has its output."""

    kind = "commandFailed"

    def __init__(self, message: str, result: Result) -> None:
        super().__init__(message)
        self.result = result


class CommandTimeoutError(CommandFailedError, TimeoutError):
    """``check=True``, and the command did not end in time. ``result`` has its output until then."""

    kind = "commandTimedOut"


def _classes(base: type[CodexError]) -> dict[str, type[CodexError]]:
    found: dict[str, type[CodexError]] = {}
    for sub in base.__subclasses__():
        if "kind" in sub.__dict__:
            found[sub.kind] = sub
        found.update(_classes(sub))
    return found


#: The class of each kind.
BY_KIND: dict[str, type[CodexError]] = _classes(CodexError)
BY_KIND["ioError"] = FileError
BY_KIND["refused"] = InvalidRequestError
BY_KIND["internal"] = ServerError

#: The class of a code, for kinds that this version does not know.
BY_CODE: dict[int, type[CodexError]] = {
    -32600: InvalidRequestError,
    -32601: MethodNotFoundError,
    -32602: InvalidParamsError,
    -32603: ServerError,
    -32004: PathNotFoundError,
    -32010: SessionAttachedError,
}

_OS_ERROR = re.compile(r"\(os error (\d+)\)$")

_ERRNO_KINDS = {
    errno.ENOENT: "pathNotFound",
    errno.EACCES: "permissionDenied",
    errno.EPERM: "permissionDenied",
    errno.EEXIST: "alreadyExists",
    errno.ENOTDIR: "notADirectory",
    errno.EISDIR: "isADirectory",
    errno.ENOTEMPTY: "directoryNotEmpty",
    errno.ELOOP: "invalidPath",
    errno.ENAMETOOLONG: "invalidPath",
    errno.EROFS: "readOnlyFileSystem",
    errno.EXDEV: "crossDevice",
    errno.EBUSY: "busy",
    errno.ETXTBSY: "busy",
    errno.EFBIG: "tooLarge",
    errno.ENOSPC: "diskFull",
    errno.EDQUOT: "quotaExceeded",
}


def _infer(method: str, code: int, message: str) -> str | None:
    """The kind of an error from a server that sends none, by its code and, where that is not enough, its words."""
    found = _OS_ERROR.search(message)
    number = int(found.group(1)) if found else None
    if code == -32601:
        return "methodNotFound"
    if code == -32010:
        return "sessionAttached"
    if code == -32602:
        return "invalidParams"
    if code == -32004:
        return "unknownFileHandle" if message.startswith("unknown file handle") else "pathNotFound"
    if code == -32600 and message.startswith("client must "):
        return "notInitialized"
    if method == "initialize" and code == -32600 and message.startswith("unknown session id"):
        return "unknownSession"
    if method == "process/read" and code == -32600:
        return "unknownProcess"
    if method == "process/start":
        if code == -32600 and message.endswith(("already exists", "already in use")):
            return "processExists"
        if code == -32603 and "working directory" in message:
            return "workingDirectoryMissing" if number == errno.ENOENT else "workingDirectoryDenied"
        if code == -32603 and ("candidates found in PATH" in message or number == errno.ENOENT):
            return "programNotFound"
        if code == -32603 and number is not None:
            return "programNotExecutable"
    if method.startswith("fs/"):
        if message.startswith("Operation not permitted"):
            return "deniedBySandbox"
        if message.endswith(" is not a file"):
            return "notARegularFile"
        if number is not None:
            return _ERRNO_KINDS.get(number, "ioError")
    if method == "http/request" and code == -32603:
        return "httpFailed"
    return None


def from_wire(method: str, error: Any) -> CodexError:
    """The exception for the ``error`` of a response to ``method``."""
    if not isinstance(error, dict):
        return ProtocolViolationError(f"the response to {method} has an invalid error", method=method)
    code = error.get("code")
    code = code if isinstance(code, int) else -32603
    message = str(error.get("message") or f"{method} failed with code {code}")
    data = error.get("data")
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str):
        kind = _infer(method, code, message)
    cls = BY_KIND.get(kind or "") or BY_CODE.get(code, ServerError)
    return cls(message, kind=kind, code=code, method=method, data=data)

__all__ = [
    "AlreadyExistsError",
    "AlreadyInitializedError",
    "BusyError",
    "CancelledRequestError",
    "CodexError",
    "CommandEndedError",
    "CommandFailedError",
    "CommandTimeoutError",
    "ConnectError",
    "ConnectRefusedError",
    "ConnectionLostError",
    "CrossDeviceError",
    "DeniedBySandboxError",
    "DirectoryError",
    "DirectoryNotEmptyError",
    "DiskFullError",
    "DrainingError",
    "EnvironmentNotFoundError",
    "EnvironmentOfflineError",
    "FileError",
    "HttpFailedError",
    "IdInUseError",
    "InvalidConfigError",
    "InvalidParamsError",
    "InvalidPathError",
    "InvalidRequestError",
    "LimitReachedError",
    "MalformedMessageError",
    "MethodNotFoundError",
    "NoTerminalError",
    "NotARegularFileError",
    "NotDirectoryError",
    "NotInitializedError",
    "OperatorPolicyError",
    "OutputLostError",
    "PatchError",
    "PathNotFoundError",
    "PermissionDeniedError",
    "PolicyError",
    "PreservedError",
    "ProcessError",
    "ProcessExistsError",
    "ProgramNotExecutableError",
    "ProgramNotFoundError",
    "ProtocolViolationError",
    "QuotaExceededError",
    "ReadOnlyFileSystemError",
    "RequestTimeoutError",
    "SandboxUnavailableError",
    "ServerError",
    "SessionAttachedError",
    "SessionEndedError",
    "SessionError",
    "StdinClosedError",
    "SymlinkRefusedError",
    "TokenRefusedError",
    "TooLargeError",
    "UnknownFileHandleError",
    "UnknownProcessError",
    "UnknownSessionError",
    "UnsupportedError",
    "UsageError",
    "ViewOnlyError",
    "WorkingDirectoryDeniedError",
    "WorkingDirectoryMissingError",
]
