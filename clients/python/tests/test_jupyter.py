"""The cell magic `%%remote`, in a real IPython shell and in a kernel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("IPython", reason="install codex-exec[jupyter]")

from IPython.core.error import UsageError as MagicUsageError
from IPython.core.interactiveshell import InteractiveShell

from codex_exec import CommandFailedError, CommandTimeoutError, InvalidParamsError

from .conftest import OURS

EXTENSION = "codex_exec.adapters.jupyter"


@pytest.fixture(scope="session")
def ipython() -> InteractiveShell:
    return InteractiveShell.instance(history_load_length=0)


@pytest.fixture
def shell(ipython: InteractiveShell, ours: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    monkeypatch.setenv("CODEX_EXEC_SERVER_URL", ours)
    ipython.run_line_magic("load_ext", EXTENSION)
    yield ipython
    ipython.run_line_magic("unload_ext", EXTENSION)
    assert ipython.find_cell_magic("remote") is None


def run(shell: InteractiveShell, cell: str) -> Any:
    """Runs a cell, and raises what it raises."""
    return shell.run_cell(cell).raise_error()


def test_a_cell_prints_both_streams_and_sets_the_exit_code(shell: InteractiveShell, capsys: Any) -> None:
    run(shell, "%%remote\necho out\necho err >&2")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("out\n", "err\n")
    assert shell.user_ns["_exit_code"] == 0


def test_lines_appear_while_the_command_runs(shell: InteractiveShell, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")

    class Screen:
        """Lets the command go on once its first line was shown."""

        shown = ""

        def write(self, text: str) -> int:
            self.shown += text
            if text == "first":
                threading.Thread(target=(tmp_path / "go").write_text, args=["go\n"]).start()
            return len(text)

        def flush(self) -> None: ...

    screen, before = Screen(), sys.stdout
    sys.stdout = screen  # type: ignore[assignment]
    try:
        run(shell, f"%%remote --timeout 60\necho first; read line < {tmp_path}/go; echo second $line")
    finally:
        sys.stdout = before
    assert screen.shown == "first\nsecond go\n"


def test_another_exit_code_is_an_error_unless_the_cell_says_so(shell: InteractiveShell, capsys: Any) -> None:
    with pytest.raises(CommandFailedError, match="exited with 3"):
        run(shell, "%%remote\necho before; exit 3")
    assert shell.user_ns["_exit_code"] == 3
    run(shell, "%%remote --no-raise\nexit 4")
    assert shell.user_ns["_exit_code"] == 4


def test_a_timeout_kills_and_shows_what_there_is(shell: InteractiveShell, capsys: Any) -> None:
    with pytest.raises(CommandTimeoutError):
        run(shell, "%%remote --timeout 1\necho early; exec sleep 600")
    assert capsys.readouterr().out.startswith("early\n")


def test_a_cell_may_be_the_input_of_a_command(shell: InteractiveShell, tmp_path: Path, capsys: Any) -> None:
    directory = tmp_path / "with space"
    directory.mkdir()
    run(shell, f"%%remote --cwd '{directory}' {sys.executable} - --flag 'two words'\nimport os, sys\n"
               "print(os.getcwd(), sys.argv[1:])")
    assert capsys.readouterr().out == f"{directory} ['--flag', 'two words']\n"


def test_the_policy_holds(shell: InteractiveShell, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(CommandFailedError, match="the sandbox denied it something"):
        run(shell, f"%%remote --policy read-only --cwd {tmp_path}\necho x > file")
    run(shell, f"%%remote --policy workspace-write --cwd {tmp_path}\necho x > file")
    assert (tmp_path / "file").read_text() == "x\n"
    with pytest.raises(InvalidParamsError, match="unknown policy"):
        run(shell, "%%remote --policy everything\ntrue")


def test_another_server_may_be_named(shell: InteractiveShell, tmp_path: Path, capsys: Any) -> None:
    run(shell, f"%%remote --on local --cwd {tmp_path}\nps -o args= -p $PPID; pwd")
    assert capsys.readouterr().out.endswith(f"{tmp_path}\n")
    with pytest.raises(MagicUsageError):
        run(shell, "%%remote --timeout soon\ntrue")
    with pytest.raises(InvalidParamsError, match="invalid server address"):
        run(shell, "%%remote --on nowhere\ntrue")


def test_cells_share_a_connection_until_it_is_lost(shell: InteractiveShell, capsys: Any) -> None:
    magics = shell.find_cell_magic("remote")
    run(shell, "%%remote\ntrue")
    (first,) = magics._sandboxes.values()
    run(shell, "%%remote\ntrue")
    assert list(magics._sandboxes.values()) == [first]
    first.close()
    run(shell, "%%remote\necho again")
    assert capsys.readouterr().out == "again\n" and list(magics._sandboxes.values()) != [first]


def test_an_interrupt_kills_the_command(shell: InteractiveShell, ours: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "up")
    cell = f"%%remote\\nexec 3> {tmp_path}/up; echo up >&3; exec sleep 600"
    code = f"""
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "{EXTENSION}")
result = shell.run_cell("{cell}")
assert isinstance(result.error_in_exec, KeyboardInterrupt), result
shell.run_cell("%%remote\\necho usable").raise_error()
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "CODEX_BIN": OURS}
    )
    with open(tmp_path / "up", "rb") as up:
        assert up.readline() == b"up\n"
        child.send_signal(signal.SIGINT)
        # The command holds the other end.
        assert up.read() == b""
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 0 and out.endswith("usable\n"), out
