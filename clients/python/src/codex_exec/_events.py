"""Puts the events of one process in order, each once. Pure: no task, no clock, no socket.

```text
notifications ──▶ seq == next? ──▶ queue ──▶ consumer ──▶ acknowledge
                      │ no: ask for a read
read responses ───────┘
```

Invariant: every number below ``next`` was queued, or is the number of the exit or the close, or was reported as
lost. A read's response is the authority on what exists: a number that it skips is no output.
"""

from __future__ import annotations

import base64
import binascii
import collections
from dataclasses import dataclass
from typing import Any, Literal, Union

from ._errors import CodexError, ProtocolViolationError

StreamName = Literal["stdout", "stderr", "pty"]


@dataclass(frozen=True)
class Output:
    """Bytes that the process wrote; ``stream`` is ``stdout``, ``stderr`` or ``pty``."""

    stream: StreamName
    data: bytes

    @property
    def text(self) -> str:
        """The bytes as UTF-8; a character that is cut, or is not UTF-8, becomes U+FFFD."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True)
class Exited:
    """The process has exited; output of its descendants may follow."""

    exit_code: int
    sandbox_denied: bool = False
    #: Why the process ended, if not by itself: ``wall``, ``oom``, ``signal``, ``terminate`` …
    ended_by: str | None = None


@dataclass(frozen=True)
class Closed:
    """The streams have ended; the last event."""


@dataclass(frozen=True)
class Lost:
    """The server dropped output before it was read; ``count`` is ``None`` if it does not say how much."""

    count: int | None


Event = Union[Output, Exited, Closed, Lost]


class Sequencer:
    """The events of one process."""

    def __init__(self, *, after: int = 0) -> None:
        self.next = after + 1
        self.queue: collections.deque[tuple[int, Event]] = collections.deque()
        self.queued_bytes = 0
        self.exit: Exited | None = None
        self.ended = False
        self.error: CodexError | None = None
        self._exit_queued = False
        self._resync = False
        self._seen = after

    @property
    def needs_read(self) -> bool:
        """Whether something is missing that only a read can bring."""
        return not self.ended and self.error is None and (self._resync or self._seen >= self.next)

    def resync(self) -> None:
        """Notifications may have been lost: read until there is nothing more."""
        self._resync = True

    def fail(self, error: CodexError) -> None:
        """The session is lost; what is queued can still be taken."""
        if not self.ended and self.error is None:
            self.error = error

    def notify(self, method: str, params: dict[str, Any]) -> None:
        """Takes a notification."""
        seq = params.get("seq")
        if not isinstance(seq, int):
            # A server of the first revision does not number exits; a read has the rest.
            self._resync = True
            return
        if seq < self.next or self.ended:
            return
        if seq > self.next:
            self._seen = max(self._seen, seq)
            return
        if method == "process/output":
            self._push_output(seq, params)
        elif method == "process/exited":
            self._note_exit(params)
            self._push_exit(seq)
        else:
            self._push_closed(seq)
        self.next = seq + 1

    def apply_read(self, after: int, response: dict[str, Any]) -> None:
        """Takes the response to a read of everything after ``after``."""
        try:
            chunks, next_seq = response["chunks"], int(response["nextSeq"])
            dropped = int(response.get("droppedBytes") or 0)
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolViolationError("the response to process/read is incomplete") from error
        if response.get("exited"):
            self._note_exit(response)
        if dropped and after + 1 == self.next:
            self.queue.append((after, Lost(dropped)))
        for chunk in chunks:
            seq = chunk["seq"]
            if seq < self.next or self.ended:
                continue
            exit_numbers = 1 if self.exit is not None and not self._exit_queued else 0
            if seq - self.next > exit_numbers and not dropped:
                self.queue.append((seq - 1, Lost(None)))
            self._push_output(seq, chunk)
            self.next = seq + 1
            dropped = 0
        self.next = max(self.next, next_seq)
        if not chunks:
            self._resync = False
            if response.get("exited"):
                self._push_exit(self.next - 1)
            if response.get("closed"):
                self._push_closed(self.next - 1)
            failure = response.get("failure")
            if failure and not response.get("closed"):
                self.fail(ProtocolViolationError(f"the server lost the process: {failure}"))

    def take(self) -> tuple[int, Event]:
        """The next event and its number; call only if the queue is not empty."""
        seq, event = self.queue.popleft()
        if isinstance(event, Output):
            self.queued_bytes -= len(event.data)
        return seq, event

    def _push_output(self, seq: int, params: dict[str, Any]) -> None:
        try:
            data = base64.b64decode(params["chunk"])
        except (KeyError, TypeError, binascii.Error) as error:
            raise ProtocolViolationError("the server sent output that is not base64") from error
        stream = params.get("stream", "stdout")
        self.queue.append((seq, Output(stream, data)))
        self.queued_bytes += len(data)

    def _note_exit(self, params: dict[str, Any]) -> None:
        if self.exit is None:
            code = params.get("exitCode")
            self.exit = Exited(
                code if isinstance(code, int) else -1,
                bool(params.get("sandboxDenied")),
                params.get("endedBy"),
            )

    def _push_exit(self, seq: int) -> None:
        if not self._exit_queued and self.exit is not None:
            self._exit_queued = True
            self.queue.append((seq, self.exit))

    def _push_closed(self, seq: int) -> None:
        if not self.ended:
            if self.exit is None:
                self.exit = Exited(-1)
            self._push_exit(seq)
            self.ended = True
            self.queue.append((seq, Closed()))
