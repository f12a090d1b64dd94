"""Files of the server's machine."""

from __future__ import annotations

import asyncio
import base64
import builtins
import collections
import itertools
import posixpath
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ._errors import (
    CodexError,
    ConnectionLostError,
    PathNotFoundError,
    UnknownFileHandleError,
    UnsupportedError,
)
from ._paths import PathLike, from_uri, resolve, to_uri

if TYPE_CHECKING:
    from ._sandbox import AsyncSandbox

#: Bytes of a block, the most that the protocol allows.
BLOCK = 1 << 20
#: Blocks on their way at a time.
BLOCKS_IN_FLIGHT = 8
#: Bytes up to which a file is sent in one request.
WHOLE_FILE = 8 << 20
#: Attempts at a transfer that has to begin anew after each lost connection.
ATTEMPTS = 20
#: Batches of changes that a slow consumer of a watch may leave waiting.
WATCH_QUEUE = 256


@dataclass(frozen=True)
class Stat:
    """What a path is. Times are seconds since 1970, 0 if unknown; other members ``None`` if unknown."""

    path: str
    is_dir: bool
    is_file: bool
    is_symlink: bool
    size: int
    created: float
    modified: float
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    inode: int | None = None


@dataclass(frozen=True)
class Entry:
    """A name in a directory, or a path of a walk."""

    name: str
    path: str
    is_dir: bool
    is_file: bool


@dataclass(frozen=True)
class WalkResult:
    """A tree. ``truncated``: a limit left something out; ``errors``: what could not be read, and why."""

    entries: list[Entry]
    truncated: bool = False
    errors: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Match:
    """A line that matches, or one of its context. ``ranges`` are bytes of the line's UTF-8 form."""

    path: str
    line_number: int
    text: str
    is_match: bool
    ranges: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class SearchResult:
    """The lines found. ``truncated``: there are more."""

    matches: list[Match]
    truncated: bool = False
    errors: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Change:
    """A changed path; ``kind`` is ``created``, ``modified``, ``removed`` or what the server says."""

    path: str
    kind: str


@dataclass(frozen=True)
class Changes:
    """Changes of a watched tree. ``overflow``: some were lost, read the tree again; ``ended``: why this is the last."""

    changes: list[Change]
    overflow: bool = False
    ended: str | None = None


class AsyncFiles:
    """Files of the server; relative paths start at the sandbox's ``cwd``."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        self._sandbox = sandbox
        self._watch_ids = itertools.count(1)

    def resolve(self, path: PathLike) -> str:
        """The absolute path on the server."""
        return resolve(path, self._sandbox.cwd)

    async def _call(
        self, method: str, params: dict[str, Any], *, repeatable: bool | None = None
    ) -> dict[str, Any]:
        params.update(self._sandbox._sandbox_member())
        return await self._sandbox._connection.call(method, params, repeatable=repeatable)

    def _path(self, path: PathLike) -> dict[str, Any]:
        return {"path": to_uri(self.resolve(path))}

    # Contents

    async def read(self, path: PathLike) -> bytes:
        """The content of a file, of any size."""
        connection = self._sandbox._connection
        if self._sandbox._sandbox_member() and not connection.has("sandboxedFileStreaming"):
            return base64.b64decode((await self._call("fs/readFile", self._path(path)))["dataBase64"])
        return b"".join([block async for block in self.read_blocks(path)])

    async def read_text(self, path: PathLike, encoding: str = "utf-8") -> str:
        """The content of a text file."""
        return (await self.read(path)).decode(encoding)

    async def read_blocks(self, path: PathLike, *, start: int = 0) -> AsyncIterator[bytes]:
        """The content from a byte on, in blocks; continues after a lost connection."""
        connection = self._sandbox._connection
        offset, attempts = start, 0
        while True:
            handle = uuid.uuid4().hex
            waiting: collections.deque[asyncio.Future[Any]] = collections.deque()
            resumes = connection.resumes
            try:
                # Pipelined: the server reads through a handle only after it has opened it.
                params = {**self._path(path), "handleId": handle, **self._sandbox._sandbox_member()}
                opened = connection.post("fs/open", params, repeatable=False)
                at = offset
                waiting.append(self._post_read(handle, at))
                await opened
                while waiting:
                    # After the first block, so that a small file takes one round trip.
                    result = await waiting.popleft()
                    data = base64.b64decode(result["chunk"])
                    if result.get("eof"):
                        if data:
                            offset += len(data)
                            yield data
                        return
                    while len(waiting) < BLOCKS_IN_FLIGHT:
                        at += BLOCK
                        waiting.append(self._post_read(handle, at))
                    offset += len(data)
                    attempts = 0
                    yield data
                    if len(data) < BLOCK:
                        # Shorter than asked and not the end: what was requested ahead has the wrong offsets.
                        break
            except (ConnectionLostError, UnknownFileHandleError) as error:
                lost = isinstance(error, ConnectionLostError) or connection.resumes != resumes
                attempts += 1
                if not lost or attempts > ATTEMPTS or connection.closed:
                    raise
            finally:
                for future in waiting:
                    future.add_done_callback(_ignore)
                if not connection.closed:
                    connection.post("fs/close", {"handleId": handle}, repeatable=False).add_done_callback(_ignore)

    def _post_read(self, handle: str, offset: int) -> asyncio.Future[Any]:
        params = {"handleId": handle, "offset": offset, "len": BLOCK}
        return self._sandbox._connection.post("fs/readBlock", params, repeatable=False)

    async def write(
        self, path: PathLike, data: bytes | str, *, mode: int | None = None, parents: bool = True
    ) -> None:
        """Replaces the content of a file, or creates it with its ``parents``; ``mode`` is for a new file."""
        raw = data.encode() if isinstance(data, str) else bytes(data)

        async def blocks() -> AsyncIterator[bytes]:
            for at in range(0, len(raw), BLOCK):
                yield raw[at : at + BLOCK]

        try:
            await self._write(path, raw, blocks, mode)
        except PathNotFoundError:
            if not parents:
                raise
            await self.make_dir(posixpath.dirname(self.resolve(path)))
            await self._write(path, raw, blocks, mode)

    async def _write(self, path: PathLike, raw: bytes, blocks: Any, mode: int | None) -> None:
        if len(raw) <= WHOLE_FILE:
            params = {**self._path(path), "dataBase64": base64.b64encode(raw).decode()}
            if mode is not None:
                self._sandbox._connection.require("fsAtomicWrite", "the mode of a new file")
                params["mode"] = mode
            # The whole content: writing it again changes nothing further.
            await self._call("fs/writeFile", params, repeatable=True)
        else:
            await self.write_blocks(path, blocks, mode=mode)

    async def write_blocks(self, path: PathLike, blocks: Any, *, mode: int | None = None) -> int:
        """Writes a file from blocks of at most 1 MiB; returns its length.

        ``blocks`` is a function that returns an iterator over them, asynchronous or not, from the beginning: a
        transfer whose connection is lost may have to start again. Where the server can, the file is replaced
        at once when all is there.
        """
        connection = self._sandbox._connection
        confined = bool(self._sandbox._sandbox_member())
        if not connection.has("fileWriteStreaming") and not connection.has("fsAtomicWrite"):
            raw = b"".join([block async for block in _each(blocks())])
            params = {**self._path(path), "dataBase64": base64.b64encode(raw).decode()}
            await self._call("fs/writeFile", params, repeatable=True)
            return len(raw)
        keep = connection.has("fsKeepHandles") and not confined
        for attempt in itertools.count(1):
            resumes = connection.resumes
            try:
                return await self._write_once(path, _each(blocks()), mode, keep)
            except (ConnectionLostError, UnknownFileHandleError) as error:
                lost = isinstance(error, ConnectionLostError) or connection.resumes != resumes
                if keep or not lost or attempt >= ATTEMPTS or connection.closed:
                    raise
        raise AssertionError("unreachable")

    async def _write_once(
        self, path: PathLike, blocks: AsyncIterator[bytes], mode: int | None, keep: bool
    ) -> int:
        connection = self._sandbox._connection
        atomic = connection.has("fsAtomicWrite")
        handle = uuid.uuid4().hex
        params = {**self._path(path), "handleId": handle, "mode": "replaceAtomic" if atomic else "replace"}
        if mode is not None and atomic:
            params["permissions"] = mode
        if keep:
            params["keep"] = True
        waiting: collections.deque[asyncio.Future[Any]] = collections.deque()
        offset = 0
        try:
            # What is cancelled here may have been opened.
            await self._call("fs/open", params, repeatable=keep)
            async for block in blocks:
                body = {"handleId": handle, "offset": offset, "chunk": base64.b64encode(block).decode()}
                waiting.append(connection.post("fs/writeBlock", body, repeatable=keep))
                offset += len(block)
                if len(waiting) >= BLOCKS_IN_FLIGHT:
                    await waiting.popleft()
            while waiting:
                await waiting.popleft()
            closing: dict[str, Any] = {"handleId": handle}
            if atomic:
                closing["commit"] = True
            await connection.request("fs/close", closing, repeatable=keep)
            return offset
        except BaseException:
            for future in waiting:
                future.add_done_callback(_ignore)
            if not connection.closed:
                connection.post("fs/close", {"handleId": handle}, repeatable=True).add_done_callback(_ignore)
            raise

    # Names

    async def list(self, path: PathLike = ".") -> builtins.list[Entry]:
        """The entries of a directory, sorted; links are described by their targets."""
        base = self.resolve(path)
        result = await self._call("fs/readDirectory", {"path": to_uri(base)})
        entries = []
        for item in result.get("entries", []):
            uri = item.get("fileNameUri")
            full = from_uri(uri) if isinstance(uri, str) else posixpath.join(base, item["fileName"])
            entries.append(
                Entry(posixpath.basename(full), full, bool(item["isDirectory"]), bool(item["isFile"]))
            )
        return entries

    async def stat(self, path: PathLike) -> Stat:
        """What a path is; raises :class:`PathNotFoundError` if it is nothing."""
        full = self.resolve(path)
        it = await self._call("fs/getMetadata", {"path": to_uri(full)})
        return Stat(
            path=full,
            is_dir=bool(it["isDirectory"]),
            is_file=bool(it["isFile"]),
            is_symlink=bool(it.get("isSymlink")),
            size=int(it.get("size", 0)),
            created=it.get("createdAtMs", 0) / 1000,
            modified=it.get("modifiedAtMs", 0) / 1000,
            mode=it.get("mode"),
            uid=it.get("uid"),
            gid=it.get("gid"),
            inode=it.get("inode"),
        )

    async def exists(self, path: PathLike) -> bool:
        """Whether a path exists."""
        try:
            await self.stat(path)
        except PathNotFoundError:
            return False
        return True

    async def remove(self, path: PathLike, *, recursive: bool = False, missing_ok: bool = False) -> None:
        """Removes a file, a link, or a directory: an empty one, or with ``recursive`` all of it."""
        params = {**self._path(path), "recursive": recursive, "force": missing_ok}
        await self._call("fs/remove", params, repeatable=missing_ok)

    async def make_dir(self, path: PathLike, *, parents: bool = True) -> None:
        """Makes a directory; with ``parents`` also those above it, and one that exists is fine."""
        await self._call(
            "fs/createDirectory", {**self._path(path), "recursive": parents}, repeatable=parents
        )

    async def copy(self, source: PathLike, destination: PathLike, *, recursive: bool = False) -> None:
        """Copies a file, a link or with ``recursive`` a directory on the server."""
        params = {
            "sourcePath": to_uri(self.resolve(source)),
            "destinationPath": to_uri(self.resolve(destination)),
            "recursive": recursive,
        }
        await self._call("fs/copy", params)

    async def rename(self, source: PathLike, destination: PathLike, *, overwrite: bool = True) -> None:
        """Renames a path within its file system."""
        self._sandbox._connection.require("fsRenameLinkMode", "fs/rename")
        params = {
            "sourcePath": to_uri(self.resolve(source)),
            "destinationPath": to_uri(self.resolve(destination)),
            "overwrite": overwrite,
        }
        await self._call("fs/rename", params)

    async def symlink(self, path: PathLike, target: str) -> None:
        """Makes a symbolic link at ``path``; ``target`` is kept as it is."""
        self._sandbox._connection.require("fsRenameLinkMode", "fs/symlink")
        await self._call("fs/symlink", {**self._path(path), "target": target})

    async def set_mode(self, path: PathLike, mode: int) -> None:
        """Sets permission bits."""
        self._sandbox._connection.require("fsRenameLinkMode", "fs/setMode")
        await self._call("fs/setMode", {**self._path(path), "mode": mode})

    # Finding

    async def walk(
        self,
        path: PathLike = ".",
        *,
        max_depth: int = 64,
        max_entries: int = 50_000,
        follow_links: bool = False,
        hidden: bool = True,
    ) -> WalkResult:
        """Lists a tree breadth-first, without its root. ``hidden=False`` does not look into hidden directories."""
        options = {
            "maxDepth": max_depth,
            "maxDirectories": 10_000,
            "maxEntries": max_entries,
            "followDirectorySymlinks": follow_links,
            "pruneHiddenDirectories": not hidden,
        }
        result = await self._call("fs/walk", {**self._path(path), "options": options})
        return WalkResult(
            [_entry(item) for item in result.get("entries", [])],
            bool(result.get("truncated")),
            _errors(result),
        )

    async def glob(
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
        self._sandbox._connection.require("fsGlob", "fs/glob")
        params = {
            **self._path(path),
            "patterns": [patterns] if isinstance(patterns, str) else list(patterns),
            "exclude": list(exclude),
            "respectGitignore": gitignore,
            "hidden": hidden,
            "directories": directories,
            "maxResults": max_results,
        }
        result = await self._call("fs/glob", params)
        return WalkResult(
            [_entry(item) for item in result.get("entries", [])],
            bool(result.get("truncated")),
            _errors(result),
        )

    async def search(
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
        self._sandbox._connection.require("fsSearch", "fs/search")
        params = {
            **self._path(path),
            "pattern": pattern,
            "literal": literal,
            "caseInsensitive": ignore_case,
            "word": word,
            "include": list(include),
            "exclude": list(exclude),
            "respectGitignore": gitignore,
            "hidden": hidden,
            "beforeContext": context,
            "afterContext": context,
            "maxMatches": max_matches,
        }
        result = await self._call("fs/search", params)
        matches = [
            Match(
                from_uri(file["path"]),
                line["lineNumber"],
                line["text"],
                line.get("kind") == "match",
                [(r["start"], r["end"]) for r in line.get("ranges", [])],
            )
            for file in result.get("files", [])
            for line in file["lines"]
        ]
        return SearchResult(matches, bool(result.get("truncated")), _errors(result))

    async def watch(
        self, path: PathLike = ".", *, recursive: bool = True, debounce: float = 0.1
    ) -> AsyncIterator[Changes]:
        """Yields changes of a file or a tree, in batches. Leave the loop to end the watch.

        After a lost connection the watch is set up again, and the next batch has ``overflow``. The first
        batch is empty: it says that the watch has begun.
        """
        self._sandbox._connection.require("fsWatch", "fs/watch")
        watch = _Watch(self, path, recursive, debounce)
        try:
            await watch.begin()
            yield Changes([])
            while True:
                changes = await watch.next()
                yield changes
                if changes.ended is not None:
                    return
        finally:
            watch.end()


class _Watch:
    """A watch of a connection, set up again on the next one."""

    def __init__(self, files: AsyncFiles, path: PathLike, recursive: bool, debounce: float) -> None:
        self._files = files
        self._connection = files._sandbox._connection
        self._id = next(files._watch_ids)
        self._params = {
            **files._path(path),
            "watchId": self._id,
            "recursive": recursive,
            "debounceMs": int(debounce * 1000),
            **files._sandbox._sandbox_member(),
        }
        self._queue: collections.deque[Changes] = collections.deque()
        self._wake = asyncio.Event()
        self._error: CodexError | None = None

    async def begin(self) -> None:
        self._connection.subscribe("fs/changed", self._id, self._on_changed)
        await self._connection.request("fs/watch", self._params, repeatable=True)
        self._connection.listen(self)

    async def next(self) -> Changes:
        while not self._queue:
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        return self._queue.popleft()

    def _push(self, changes: Changes) -> None:
        if len(self._queue) >= WATCH_QUEUE:
            self._queue.clear()
            changes = Changes(changes.changes, True, changes.ended)
        self._queue.append(changes)
        self._wake.set()

    def _on_changed(self, params: dict[str, Any]) -> None:
        changes = [Change(from_uri(c["path"]), c["kind"]) for c in params.get("changes", [])]
        self._push(Changes(changes, bool(params.get("overflow")), params.get("ended")))

    def on_resumed(self) -> None:
        self._connection.spawn(self._again())

    async def _again(self) -> None:
        try:
            await self._connection.request("fs/watch", self._params, repeatable=True)
        except ConnectionLostError:
            return
        except CodexError as error:
            self._push(Changes([], True, error.message))
            return
        self._push(Changes([], True))

    def on_failed(self, error: CodexError) -> None:
        self._error = error
        self._wake.set()

    def end(self) -> None:
        self._connection.unsubscribe("fs/changed", self._id)
        self._connection.unlisten(self)
        if not self._connection.closed:
            self._connection.post("fs/unwatch", {"watchId": self._id}).add_done_callback(_ignore)


def _entry(item: dict[str, Any]) -> Entry:
    path = from_uri(item["path"])
    kind = item.get("kind")
    return Entry(posixpath.basename(path), path, kind == "directory", kind == "file")


def _errors(result: dict[str, Any]) -> list[tuple[str, str]]:
    return [(from_uri(e["path"]), e["message"]) for e in result.get("errors", [])]


def _ignore(future: asyncio.Future[Any]) -> None:
    """Takes the outcome of a request that has no reader, so that asyncio does not report it."""
    if not future.cancelled():
        future.exception()


async def _each(blocks: Any) -> AsyncIterator[bytes]:
    if hasattr(blocks, "__aiter__"):
        async for block in blocks:
            yield block
    else:
        for block in blocks:
            yield block


__all__ = [
    "AsyncFiles",
    "Change",
    "Changes",
    "Entry",
    "Match",
    "SearchResult",
    "Stat",
    "UnsupportedError",
    "WalkResult",
]
