"""Applies patches in the format that agents write.

```text
*** Begin Patch
*** Update File: src/app.py
@@ def greet():
-print("Hi")
+print("Hello")
*** End Patch
```

Invariant: every section is checked against the files before the first byte is written, so a patch that does
not fit changes nothing. Only lines that a hunk removes or inserts change.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ._errors import CodexError, PatchError, PathNotFoundError

if TYPE_CHECKING:
    from ._files import AsyncFiles

_BEGIN, _END = "*** Begin Patch", "*** End Patch"
_ADD, _DELETE, _UPDATE = "*** Add File: ", "*** Delete File: ", "*** Update File: "
_MOVE, _END_OF_FILE = "*** Move to: ", "*** End of File"


@dataclass
class Hunk:
    """A change at one position: ``lines`` are pairs of ``" "``, ``"-"`` or ``"+"`` and a text."""

    headers: list[str] = field(default_factory=list)
    lines: list[tuple[str, str]] = field(default_factory=list)
    at_end: bool = False


@dataclass
class Section:
    """The change of one file; ``action`` is ``A``, ``M`` or ``D``."""

    action: str
    path: str
    move_to: str | None = None
    added: list[str] = field(default_factory=list)
    hunks: list[Hunk] = field(default_factory=list)


def parse(text: str) -> list[Section]:
    """The sections of a patch."""
    lines = [line.removesuffix("\r") for line in text.strip("\n").split("\n")]
    while lines and not lines[0].strip():
        lines.pop(0)
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines or lines[0].strip() != _BEGIN:
        raise PatchError(f"a patch starts with `{_BEGIN}`")
    if len(lines) < 2 or lines[-1].strip() != _END:
        raise PatchError(f"a patch ends with `{_END}`")
    sections: list[Section] = []
    for number, line in enumerate(lines[1:-1], start=2):
        marker = line.lstrip()
        current = sections[-1] if sections else None
        if path := _after(marker, _ADD, number):
            sections.append(Section("A", path))
        elif path := _after(marker, _DELETE, number):
            sections.append(Section("D", path))
        elif path := _after(marker, _UPDATE, number):
            sections.append(Section("M", path))
        elif path := _after(marker, _MOVE, number):
            if current is None or current.action != "M" or current.hunks:
                raise PatchError(f"line {number}: `{_MOVE.strip()}` belongs right after `{_UPDATE.strip()}`")
            current.move_to = path
        elif current is None or current.action == "D":
            if line.strip():
                raise PatchError(f"line {number}: expected a section such as `{_UPDATE}PATH`, found: {line}")
        elif current.action == "A":
            if line.startswith("+"):
                current.added.append(line[1:])
            elif line.strip():
                raise PatchError(f"line {number}: a line of an added file starts with +, found: {line}")
        else:
            _hunk_line(current, line, number)
    if not sections:
        raise PatchError("the patch is empty")
    for section in sections:
        if section.action == "M" and not section.hunks and section.move_to is None:
            raise PatchError(f"the update of {section.path} has no hunk; start one with `@@`")
    return sections


def _after(line: str, marker: str, number: int) -> str | None:
    if not line.startswith(marker.rstrip()):
        return None
    path = line[len(marker.rstrip()) :].strip()
    if not path:
        raise PatchError(f"line {number}: `{marker.strip()}` needs a path")
    return path


def _hunk_line(section: Section, line: str, number: int) -> None:
    hunk = section.hunks[-1] if section.hunks else None
    if line.startswith("@@"):
        header = line[2:].strip()
        if hunk is None or hunk.lines:
            hunk = Hunk()
            section.hunks.append(hunk)
        if header:
            hunk.headers.append(header)
        return
    if line.strip() == _END_OF_FILE:
        if hunk is None:
            raise PatchError(f"line {number}: `{_END_OF_FILE}` belongs after the lines of a hunk")
        hunk.at_end = True
        return
    if hunk is None or hunk.at_end:
        hunk = Hunk()
        section.hunks.append(hunk)
    if not line:
        hunk.lines.append((" ", ""))
    elif line[0] in " -+":
        hunk.lines.append((line[0], line[1:]))
    else:
        raise PatchError(f"line {number}: expected a line that starts with a space, - or +, found: {line}")


_KIN = {ord(c): "-" for c in "‐‑‒–—―−"}
_KIN.update({ord(c): "'" for c in "‘’‚‛"})
_KIN.update({ord(c): '"' for c in "“”„‟"})
_KIN.update({c: " " for c in (0xA0, *range(0x2002, 0x200B), 0x202F, 0x205F, 0x3000)})

#: From the exact comparison to the most tolerant one.
_TOLERANCES: list[Callable[[str], str]] = [
    lambda line: line,
    lambda line: line.rstrip(),
    lambda line: line.strip(),
    lambda line: line.translate(_KIN).strip(),
]


def _find(lines: list[str], wanted: list[str], start: int, *, at_end: bool) -> int | None:
    for tolerance in _TOLERANCES:
        want = [tolerance(line) for line in wanted]
        have = [tolerance(line) for line in lines]
        last = len(lines) - len(wanted)
        places = range(last, last + 1) if at_end else range(start, last + 1)
        for place in places:
            if place >= start and have[place : place + len(wanted)] == want:
                return place
    return None


def update(path: str, content: bytes, hunks: list[Hunk]) -> bytes:
    """The content with the hunks applied."""
    # Bytes that are not UTF-8 pass through unchanged.
    text = content.decode("utf-8", "surrogateescape")
    pieces = text.split("\n")
    ended = pieces[-1] == ""
    if ended:
        pieces.pop()
    lines = [piece.removesuffix("\r") for piece in pieces]
    crlf = [piece.endswith("\r") for piece in pieces]
    complete = len(crlf) if ended else len(crlf) - 1
    usual = sum(crlf) * 2 > complete
    if not ended and crlf:
        # A last line without an end gets the usual one if something follows it now.
        crlf[-1] = usual
    out: list[tuple[str, bool]] = []
    at = 0
    for number, hunk in enumerate(hunks, start=1):
        start = at
        for header in hunk.headers:
            found = _find(lines, [header], start, at_end=False)
            if found is None:
                raise PatchError(f"{path}, hunk {number}: its `@@` line was not found: {header}")
            start = found + 1
        old = [line for sign, line in hunk.lines if sign != "+"]
        if not old:
            place: int | None = len(lines) if hunk.at_end or not hunk.headers else start
        else:
            place = _find(lines, old, start, at_end=hunk.at_end)
        if place is None:
            looked = "\n".join(old)
            raise PatchError(f"{path}, hunk {number}: its lines were not found after line {start}:\n{looked}")
        out.extend(zip(lines[at:place], crlf[at:place], strict=True))
        at = place
        for sign, line in hunk.lines:
            if sign == "+":
                out.append((line, usual))
            else:
                if sign == " ":
                    out.append((lines[at], crlf[at]))
                at += 1
    out.extend(zip(lines[at:], crlf[at:], strict=True))
    ended = ended or not content
    joined = "".join(
        line + ("\r\n" if windows else "\n") for line, windows in out
    )
    if not ended and joined:
        joined = joined.removesuffix("\n").removesuffix("\r")
    return joined.encode("utf-8", "surrogateescape")


async def apply(files: AsyncFiles, text: str) -> list[str]:
    """Checks the whole patch, then writes; returns a line per file."""
    sections = parse(text)
    # The tree as the sections so far have changed it: None is a file that is gone.
    tree: dict[str, bytes | None] = {}

    async def read(path: str, shown: str) -> bytes:
        if path not in tree:
            try:
                tree[path] = await files.read(path)
            except PathNotFoundError:
                tree[path] = None
            except CodexError as error:
                raise PatchError(f"cannot read {shown}: {error}") from error
        content = tree[path]
        if content is None:
            raise PatchError(f"{shown} does not exist")
        return content

    steps: list[tuple[str, str, bytes | None, str]] = []
    # Permission bits of files that are moved, where the server tells them.
    modes: dict[str, int | None] = {}
    for section in sections:
        path = files.resolve(section.path)
        if section.action == "A":
            content = "".join(line + "\n" for line in section.added).encode("utf-8", "surrogateescape")
            tree[path] = content
            steps.append(("write", path, content, f"A {section.path}"))
        elif section.action == "D":
            await read(path, section.path)
            tree[path] = None
            steps.append(("remove", path, None, f"D {section.path}"))
        else:
            content = update(section.path, await read(path, section.path), section.hunks)
            if section.move_to is None:
                tree[path] = content
                steps.append(("write", path, content, f"M {section.path}"))
            else:
                target = files.resolve(section.move_to)
                tree[path], tree[target] = None, content
                try:
                    modes[target] = modes.get(path) or (await files.stat(path)).mode
                except PathNotFoundError:
                    modes[target] = modes.get(path)  # A file that an earlier section adds.
                steps.append(("write", target, content, f"M {section.move_to}"))
                if target != path:
                    steps.append(("remove", path, None, ""))
    applied: list[str] = []
    for action, path, content_, line in steps:
        try:
            if action == "write":
                assert content_ is not None
                await files.write(path, content_, mode=modes.get(path))
            else:
                await files.remove(path)
        except CodexError as error:
            done = ", ".join(applied) or "nothing"
            raise PatchError(
                f"cannot {action} {posixpath.basename(path)}: {error}; applied before that: {done}",
                applied=applied,
            ) from error
        if line:
            applied.append(line)
    return applied
