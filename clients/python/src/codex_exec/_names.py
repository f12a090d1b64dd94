"""Names of detached processes: the files that ``codex attach``, ``ps`` and ``kill`` use as well.

One file per name, ``$XDG_STATE_HOME/codex/sessions/NAME.json``, readable by its owner only: anyone who knows a
session's id and can connect can take it over. It contains no token.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ._errors import InvalidParamsError, UnknownSessionError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class Saved:
    name: str
    url: str
    session_id: str
    process_id: str
    tty: bool
    after_seq: int


def check(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidParamsError(
            f"invalid name {name!r}: expected up to 64 letters, digits, -, _ and ., not starting with - or ."
        )


def directory() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if state.startswith("/") else Path.home() / ".local" / "state"
    return base / "codex" / "sessions"


def save(name: str, *, url: str, session_id: str, process_id: str, tty: bool, after_seq: int) -> None:
    check(name)
    folder = directory()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    text = json.dumps(
        {
            "url": url,
            "sessionId": session_id,
            "processId": process_id,
            "tty": tty,
            "afterSeq": after_seq,
        },
        indent=2,
    )
    fresh = folder / f".{name}.{os.getpid()}"
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text + "\n")
    os.replace(fresh, folder / f"{name}.json")


def load(name: str) -> Saved:
    check(name)
    path = directory() / f"{name}.json"
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise UnknownSessionError(f"no detached process named {name!r}; `codex ps` lists the names") from None
    try:
        saved = json.loads(text)
        return Saved(
            name=name,
            url=saved["url"],
            session_id=saved["sessionId"],
            process_id=saved["processId"],
            tty=bool(saved.get("tty")),
            after_seq=int(saved.get("afterSeq", 0)),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidParamsError(f"{path} is not a valid session file; remove it") from error


def remove(name: str) -> None:
    (directory() / f"{name}.json").unlink(missing_ok=True)
