"""An interactive bash on a terminal that runs one command after the other.

```text
type ──▶ the command in pieces, `turn=N; eval` ──▶ output … ──▶ prompt <mark N:status>
```

Invariant: every prompt names the turn that it ends, so that output and status of a command are never taken for those of
another, even after a timeout. A command arrives through `eval` in quoted pieces: it may have any length, any number
of lines and any character, and no file is needed.
"""

from __future__ import annotations

import asyncio
import codecs
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from .._errors import RequestTimeoutError, StdinClosedError, UnknownProcessError
from .._events import Output
from .._process import AsyncProcess
from .._sandbox import AsyncSandbox

#: Bytes of a command in one typed line: each may become four, and a terminal takes lines of 4095.
PIECE = 960
#: Seconds for a shell to start and to read its own files.
START_TIMEOUT = 60.0
#: Seconds to wait for the last output of a shell that has exited, whose terminal a descendant may hold open.
END_GRACE = 1.0

_ESCAPES = re.compile(r"\x1b[@-_][0-?]*[ -/]*[@-~]")


class ShellEndedError(Exception):
    """The shell has exited, so that it runs no more commands."""


@dataclass(frozen=True)
class Match:
    """What a wait ended with: the text before it, and the pattern, or `None` and the status for a prompt."""

    output: str
    pattern: str | None
    status: int | None


class Bash:
    """A shell with a terminal of its own. One call at a time."""

    def __init__(self, process: AsyncProcess) -> None:
        self._process = process
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._nonce = uuid.uuid4().hex
        self._mark = re.compile(f"\x1e{self._nonce}:(\\d*):(\\d+)\x1e")
        self._text = ""
        self._turn = 0

    @classmethod
    async def start(cls, sandbox: AsyncSandbox) -> Bash:
        """Starts a shell in the directory of the sandbox."""
        # Without its editor of lines, which would change the settings of the terminal for each command.
        shell = cls(await sandbox.start(["bash", "--noediting", "-i"], pty=True, env={"TERM": "dumb"}))
        try:
            deadline = time.monotonic() + START_TIMEOUT
            shell._turn += 1
            await shell._type(f"set +o history; {shell._settings()}; __codex_exec_turn=1; stty -echo\n", deadline)
            # Before it, these lines as the terminal echoes them, and what the shell's own files print.
            await shell._until(deadline)
        except BaseException:
            shell._process.kill_soon()
            raise
        return shell

    def _settings(self) -> str:
        # Whatever a command changes (an activated environment, `stty sane`) is set again before each prompt; the
        # braces keep that out of what `set -x` shows.
        prompt = f"PS1='\\036{self._nonce}:$__codex_exec_turn:$?\\036' PS2= PS0="
        return f"PROMPT_COMMAND={_quoted(f'{{ stty -echo; {prompt}; }} 2>/dev/null')}"

    async def source(self, files: Sequence[str], deadline: float | None) -> str:
        """Sources files, which may set a prompt of their own, and returns their output."""
        lines = [f"source {file}" for file in files]
        await self.type_command("\n".join([*lines, self._settings()]), deadline)
        return (await self._until(deadline)).output

    async def type_command(self, command: str, deadline: float | None) -> None:
        """Types a command of the shell, of any length."""
        self._turn += 1
        raw = command.encode("utf-8", "surrogateescape")
        pieces = [_quoted(raw[at : at + PIECE]) for at in range(0, len(raw), PIECE)]
        joined = "\\\n".join(["__codex_exec_command=", *pieces])
        await self._type(f'{joined}\\\n; __codex_exec_turn={self._turn}; eval "$__codex_exec_command"\n', deadline)

    async def type_line(self, text: str, deadline: float | None) -> None:
        """Types a line for whichever program reads from the terminal."""
        await self._type(text + "\n", deadline)

    async def type_key(self, key: str, deadline: float | None) -> None:
        """Types a control character."""
        await self._type(key, deadline)

    async def _type(self, text: str, deadline: float | None) -> None:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            # A program that does not read makes this wait, as a full terminal does.
            await asyncio.wait_for(self._process.write(text.encode("utf-8", "surrogateescape")), left)
        except (asyncio.TimeoutError, TimeoutError) as error:
            raise RequestTimeoutError("the terminal takes no more input") from error
        except (StdinClosedError, UnknownProcessError) as error:
            raise ShellEndedError("the shell has exited") from error

    async def wait_command(self, deadline: float | None, patterns: Sequence[str] = ()) -> Match:
        """Waits for the prompt after the command that was typed last, or for a pattern."""
        return await self._until(deadline, patterns)

    async def kill_job(self, deadline: float | None) -> None:
        """Kills the job that was suspended last; what the shell says of it comes with the next command's output."""
        await self.type_command("kill -9 %%", deadline)
        said = await self._until(deadline)
        self._text = said.output + self._text

    async def wait_prompt(self, deadline: float | None, patterns: Sequence[str] = ()) -> Match:
        """Waits for any prompt, or for a pattern."""
        return await self._until(deadline, patterns, any_turn=True)

    async def _until(self, deadline: float | None, patterns: Sequence[str] = (), *, any_turn: bool = False) -> Match:
        expected = [re.compile(pattern, re.DOTALL) for pattern in patterns]
        searched = 0
        while True:
            # Where several match, the one that begins first.
            marks = (mark for mark in self._mark.finditer(self._text, searched) if any_turn or self._ends_turn(mark))
            found = [match for match in (next(marks, None), *(e.search(self._text) for e in expected)) if match]
            if found:
                match = min(found, key=lambda each: each.start())
                output = self._clean(self._text[: match.start()])
                self._text = self._text[match.end() :]
                if match.re is self._mark:
                    return Match(output, None, int(match.group(2)))
                return Match(output, match.re.pattern, None)
            # A mark may be here in part.
            searched = max(0, len(self._text) - 128)
            await self._receive(deadline)

    def _ends_turn(self, mark: re.Match[str]) -> bool:
        return mark.group(1) == str(self._turn)

    async def _receive(self, deadline: float | None) -> None:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not self._process.running:
            # Only output that has arrived is left; descendants may hold the terminal open.
            left = END_GRACE if left is None else min(left, END_GRACE)
        try:
            events = await self._process.next_events(timeout=left)
        except RequestTimeoutError:
            if self._process.running:
                raise
            events = []
        if not events:
            end = self._process.exit
            code = "an unknown status" if end is None else f"status {end.exit_code}"
            raise ShellEndedError(f"the shell exited with {code}; it printed {self._clean(self._text)!r}")
        self._text += "".join(self._decoder.decode(event.data) for event in events if isinstance(event, Output))

    def _clean(self, text: str) -> str:
        return _ESCAPES.sub("", self._mark.sub("", text)).replace("\r\n", "\n")

    async def kill(self) -> None:
        """Kills the shell and everything that it started."""
        await self._process.kill()
        await self._process.wait()


def _quoted(text: str | bytes) -> str:
    """A word of bash, on one line, that is these bytes."""
    raw = text.encode() if isinstance(text, str) else text
    plain = b"\\'"
    return "$'" + "".join(chr(c) if 32 <= c < 127 and c not in plain else f"\\x{c:02x}" for c in raw) + "'"
