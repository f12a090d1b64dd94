"""The sequencer delivers each event once and in order, whatever is lost, repeated or read."""

from __future__ import annotations

import base64
import random
from typing import Any

import pytest

from codex_exec._events import Closed, Event, Exited, Lost, Output, Sequencer


def chunk(seq: int, data: bytes) -> dict[str, Any]:
    return {"seq": seq, "stream": "stdout", "chunk": base64.b64encode(data).decode()}


class ModelServer:
    """A process with its events; answers reads as the protocol says."""

    def __init__(self, rng: random.Random) -> None:
        self.events: list[Any] = [rng.randbytes(rng.randrange(1, 20)) for _ in range(rng.randrange(0, 40))]
        self.events.insert(rng.randrange(len(self.events) + 1), "exit")
        self.events.append("closed")
        self.published = 0

    def notification(self, seq: int) -> tuple[str, dict[str, Any]]:
        event = self.events[seq - 1]
        if event == "exit":
            return "process/exited", {"seq": seq, "exitCode": 3}
        if event == "closed":
            return "process/closed", {"seq": seq}
        return "process/output", chunk(seq, event)

    def read(self, after: int, max_bytes: int) -> dict[str, Any]:
        chunks: list[dict[str, Any]] = []
        size = 0
        for seq in range(after + 1, self.published + 1):
            event = self.events[seq - 1]
            if isinstance(event, bytes):
                if chunks and size + len(event) > max_bytes:
                    break
                size += len(event)
                chunks.append(chunk(seq, event))
        exited = "exit" in self.events[: self.published]
        return {
            "chunks": chunks,
            "nextSeq": chunks[-1]["seq"] + 1 if chunks else self.published + 1,
            "exited": exited,
            "exitCode": 3 if exited else None,
            "closed": self.published == len(self.events),
        }


@pytest.mark.parametrize("case", range(300))
def test_every_event_is_delivered_once_and_in_order(case: int, seed: int) -> None:
    rng = random.Random(seed + case)
    server, sequencer = ModelServer(rng), Sequencer()
    got: list[Event] = []
    sent = 0
    while not (sequencer.ended and not sequencer.queue):
        step = rng.random()
        if step < 0.4 and server.published < len(server.events):
            server.published += 1
        elif step < 0.6 and sent < server.published:
            sent += 1
            sequencer.notify(*server.notification(sent))
        elif step < 0.7 and sent < server.published:
            # The connection is lost with some notifications; the session is resumed.
            sent = server.published
            sequencer.resync()
        elif step < 0.75 and sent:
            sequencer.notify(*server.notification(rng.randrange(1, sent + 1)))
        elif sequencer.needs_read:
            after = sequencer.next - 1
            response = server.read(after, rng.choice([1, 16, 1000]))
            if rng.random() < 0.3 and sent < server.published:
                sent += 1
                sequencer.notify(*server.notification(sent))
            sequencer.apply_read(after, response)
        while sequencer.queue and rng.random() < 0.7:
            got.append(sequencer.take()[1])
    assert b"".join(e.data for e in got if isinstance(e, Output)) == b"".join(
        e for e in server.events if isinstance(e, bytes)
    )
    assert [e for e in got if isinstance(e, Exited)] == [Exited(3)]
    assert isinstance(got[-1], Closed)
    assert not any(isinstance(e, Lost) for e in got)
    assert sequencer.queued_bytes == 0


def test_dropped_output_is_reported_as_lost() -> None:
    sequencer = Sequencer()
    sequencer.resync()
    sequencer.apply_read(0, {"chunks": [chunk(5, b"x")], "nextSeq": 6, "exited": False, "droppedBytes": 70})
    assert [event for _, event in sequencer.queue] == [Lost(70), Output("stdout", b"x")]


def test_a_gap_without_a_count_is_reported_as_lost() -> None:
    sequencer = Sequencer()
    sequencer.resync()
    sequencer.apply_read(0, {"chunks": [chunk(5, b"x")], "nextSeq": 6, "exited": False})
    assert [event for _, event in sequencer.queue] == [Lost(None), Output("stdout", b"x")]
