"""Paths of the server's machine: native text here, ``file:`` URIs on the wire.

Invariant: bytes that are not UTF-8 survive both directions. Like ``os.fsdecode``, this package shows them
as lone surrogates, which ``os.fsencode`` turns back into the same bytes.
"""

from __future__ import annotations

import os
import posixpath
from typing import Union
from urllib.parse import quote_from_bytes, unquote_to_bytes

from ._errors import InvalidParamsError

PathLike = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]


def to_text(path: PathLike) -> str:
    """The path as text; bytes that are not UTF-8 become lone surrogates."""
    raw = os.fspath(path)
    if isinstance(raw, bytes):
        return raw.decode("utf-8", "surrogateescape")
    return raw


def to_bytes(path: str) -> bytes:
    """The bytes of a path on the server, which are UTF-8 whatever this machine's locale is."""
    return path.encode("utf-8", "surrogateescape")


def resolve(path: PathLike, base: str) -> str:
    """The absolute path; a relative one starts at ``base``. A ``file:`` URI is taken as it is."""
    text = to_text(path)
    if text.startswith("file://"):
        text = from_uri(text)
    if not text:
        raise InvalidParamsError("the path is empty; name a file or a directory")
    if "\0" in text:
        raise InvalidParamsError(f"the path {text!r} contains a NUL character")
    return posixpath.normpath(posixpath.join(base, text))


def to_uri(path: str) -> str:
    """The ``file:`` URI of an absolute path."""
    return "file://" + quote_from_bytes(to_bytes(path), safe="/-_.~!$&'()*+,;=:@")


def from_uri(uri: str) -> str:
    """The path that a ``file:`` URI names. Anything else is returned unchanged."""
    if not uri.startswith("file://"):
        return uri
    return unquote_to_bytes(uri[len("file://") :]).decode("utf-8", "surrogateescape")
