"""Copies files and trees between this machine and the server.

Contents go in blocks through a handle, links as links, permission bits where the server can set them. Special
files are skipped, as ``codex cp`` does.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import stat as stats
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ._errors import CodexError, PathNotFoundError, UnsupportedError
from ._files import BLOCK
from ._paths import PathLike, to_bytes, to_text

if TYPE_CHECKING:
    from ._sandbox import AsyncSandbox

#: Files on their way at a time.
FILES_IN_FLIGHT = 8
#: Levels that one walk of a server's tree goes down.
WALK_DEPTH = 64


async def upload(sandbox: AsyncSandbox, source: PathLike, destination: PathLike) -> int:
    local = to_bytes(to_text(source))
    target = sandbox.files.resolve(destination)
    if not os.path.isdir(local):
        await _make_parents(sandbox, target)
        return await _upload_file(sandbox, local, target)
    gate = asyncio.Semaphore(FILES_IN_FLIGHT)
    tasks: list[asyncio.Task[int]] = []

    async def one(path: bytes, to: str) -> int:
        async with gate:
            return await _upload_file(sandbox, path, to)

    try:
        for folder, directories, files in os.walk(local):
            inside = os.path.relpath(folder, local)
            there = target if inside == b"." else posixpath.join(target, to_text(inside))
            await sandbox.files.make_dir(there)
            for name in [*directories, *files]:
                path = os.path.join(folder, name)
                kind = os.lstat(path).st_mode
                if stats.S_ISREG(kind) or stats.S_ISLNK(kind):
                    tasks.append(asyncio.ensure_future(one(path, posixpath.join(there, to_text(name)))))
        return sum(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _make_parents(sandbox: AsyncSandbox, target: str) -> None:
    parent = posixpath.dirname(target)
    if not await sandbox.files.exists(parent):
        await sandbox.files.make_dir(parent)


async def _upload_file(sandbox: AsyncSandbox, local: bytes, target: str) -> int:
    found = os.lstat(local)
    if stats.S_ISLNK(found.st_mode):
        link = to_text(os.readlink(local))
        try:
            await sandbox.files.symlink(target, link)
        except UnsupportedError:
            raise
        except CodexError as error:
            if error.kind != "alreadyExists":
                raise
            await sandbox.files.remove(target)
            await sandbox.files.symlink(target, link)
        return 0

    def blocks() -> Iterator[bytes]:
        with open(local, "rb") as file:
            while block := file.read(BLOCK):
                yield block

    mode = found.st_mode & 0o777
    if found.st_size <= BLOCK:
        with open(local, "rb") as file:
            content = file.read()
        can_mode = sandbox.has("fsAtomicWrite")
        await sandbox.files.write(target, content, mode=mode if can_mode else None, parents=False)
        return len(content)
    return await sandbox.files.write_blocks(target, blocks, mode=mode)


async def download(sandbox: AsyncSandbox, source: PathLike, destination: PathLike) -> int:
    there = sandbox.files.resolve(source)
    local = to_bytes(to_text(destination))
    if not (await sandbox.files.stat(there)).is_dir:
        return await _download_file(sandbox, there, local)
    total = 0
    gate = asyncio.Semaphore(FILES_IN_FLIGHT)
    tasks: list[asyncio.Task[int]] = []

    async def one(path: str, to: bytes) -> int:
        async with gate:
            return await _download_file(sandbox, path, to)

    try:
        folders = [(there, local)]
        while folders:
            folder, to = folders.pop()
            os.makedirs(to, exist_ok=True)
            for entry in await sandbox.files.list(folder):
                target = os.path.join(to, to_bytes(entry.name))
                if entry.is_dir:
                    if not (await sandbox.files.stat(entry.path)).is_symlink:
                        folders.append((entry.path, target))
                elif entry.is_file:
                    tasks.append(asyncio.ensure_future(one(entry.path, target)))
        total += sum(await asyncio.gather(*tasks))
        return total
    finally:
        for task in tasks:
            task.cancel()


async def _download_file(sandbox: AsyncSandbox, source: str, local: bytes) -> int:
    """Downloads beside the destination and renames, so that a failure leaves the old file."""
    folder = os.path.dirname(local) or b"."
    if os.path.isdir(local):
        local = os.path.join(local, to_bytes(posixpath.basename(source)))
        folder = os.path.dirname(local)
    found = await sandbox.files.stat(source)
    handle, fresh = tempfile.mkstemp(prefix=b".codex-", suffix=b".tmp", dir=folder)
    try:
        total = 0
        with os.fdopen(handle, "wb") as file:
            if found.size or not found.is_file:
                async for block in sandbox.files.read_blocks(source):
                    file.write(block)
                    total += len(block)
        mode = found.mode if found.mode is not None else 0o666 & ~_umask()
        os.chmod(fresh, mode & 0o777)
        os.replace(fresh, local)
        return total
    except BaseException:
        os.unlink(fresh)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


__all__ = ["PathNotFoundError", "download", "upload"]
