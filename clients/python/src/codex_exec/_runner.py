"""The background event loop behind the synchronous surface.

One daemon thread per process, started when it is first needed. A call from any other thread blocks until its
coroutine has ended; Ctrl-C cancels the coroutine, waits until it has cleaned up, and goes on as
``KeyboardInterrupt``. So it works in notebooks, whose own loop is running, and in plain scripts.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from ._errors import UsageError

T = TypeVar("T")

#: Seconds that a cancelled coroutine gets to clean up before Ctrl-C goes on.
CANCEL_GRACE = 5.0


class Runner:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="codex-exec", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs the coroutine on the loop and returns its result."""
        if os.getpid() != self.pid:
            work.close()
            raise UsageError(
                "this sandbox was made before the process forked; connect again in the new process"
            )
        if threading.current_thread() is self._thread:
            work.close()
            raise UsageError("a callback on the client's own loop cannot block; use AsyncSandbox there")
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise
        except BaseException as error:
            if not future.done():
                # KeyboardInterrupt, or another exception of a signal handler.
                ended = threading.Event()
                self.loop.call_soon_threadsafe(_cancel, self.loop, future, ended)
                ended.wait(CANCEL_GRACE)
            raise error


def _cancel(loop: asyncio.AbstractEventLoop, future: concurrent.futures.Future[Any], ended: threading.Event) -> None:
    future.cancel()
    # The coroutine's clean-up is queued by the cancellation; this comes after its first steps.
    loop.call_soon(lambda: loop.call_soon(lambda: loop.call_soon(ended.set)))


_lock = threading.Lock()
_runner: Runner | None = None


def runner() -> Runner:
    """The runner of this process."""
    global _runner
    with _lock:
        if _runner is None or _runner.pid != os.getpid():
            _runner = Runner()
        return _runner


def _after_fork() -> None:
    # The lock may have been held by a thread that does not exist in the child.
    global _lock, _runner
    _lock = threading.Lock()
    _runner = None


os.register_at_fork(after_in_child=_after_fork)
