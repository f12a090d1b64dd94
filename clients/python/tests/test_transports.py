"""Unix sockets, stdio, and a machine behind a rendezvous."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from codex_exec import Sandbox, UnsupportedError

from .conftest import OURS, start_server, stop_server


def test_a_unix_socket(tmp_path: Path) -> None:
    server, address = start_server(OURS, listen=f"unix:{tmp_path}/socket")
    try:
        assert address.startswith("unix:")
        with Sandbox.connect(f"unix:{tmp_path}/socket") as sandbox:
            assert sandbox.run(["echo", "hi"]).stdout == "hi\n"
    finally:
        stop_server(server)


def test_local_runs_in_this_directory_and_ends_with_its_sandbox(tmp_path: Path) -> None:
    with Sandbox.local(cwd=tmp_path) as sandbox:
        assert sandbox.run(["pwd"]).stdout == f"{tmp_path}\n"
        sleeper = sandbox.start("echo $$; exec sleep 600")
        pid = int(sleeper.next_events(1)[0].text)  # type: ignore[union-attr]
        assert os.path.exists(f"/proc/{pid}")
        with pytest.raises(UnsupportedError, match="cannot be detached"):
            sleeper.detach("name")
    # Closing waits for the server, which kills what it started before it ends.
    assert not os.path.exists(f"/proc/{pid}")


def test_connect_takes_a_sandbox_that_is_connected() -> None:
    with Sandbox.connect(Sandbox.local()) as sandbox:
        assert sandbox.run(["true"]).ok


def test_an_environment_behind_a_rendezvous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = str(tmp_path / "data")
    service = subprocess.Popen(
        [OURS, "rendezvous", "serve", "--listen", "127.0.0.1:0", "--data", data],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    machine: subprocess.Popen[str] | None = None
    try:
        assert service.stdout is not None
        registry = service.stdout.readline().strip()
        create = [OURS, "rendezvous", "token", "create", "--data", data, "--environment", "laptop"]
        token = subprocess.run(
            [*create, "--can", "register,connect"], check=True, capture_output=True, text=True
        ).stdout.strip()
        # On the other machine, codex is on PATH.
        programs = tmp_path / "bin"
        programs.mkdir()
        (programs / "codex").symlink_to(os.path.abspath(OURS))
        monkeypatch.setenv("CODEX_API_KEY", token)
        machine = subprocess.Popen(
            [OURS, "exec-server", "--remote", registry, "--environment-id", "laptop"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "RUST_LOG": "info"},
        )
        assert machine.stderr is not None
        for line in machine.stderr:
            if "connected to the rendezvous" in line:
                break
        with Sandbox.connect("env:laptop", registry=registry, cwd=tmp_path) as sandbox:
            assert sandbox.run(["echo", "far away"]).stdout == "far away\n"
            sandbox.files.write("file", bytes(3 << 20))
            assert len(sandbox.files.read("file")) == 3 << 20
    finally:
        for process in (machine, service):
            if process is not None:
                process.kill()
                process.communicate()
