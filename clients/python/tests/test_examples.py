"""Every example runs: the agent, the CI job and the notebook."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, cwd=cwd)


def test_every_example_is_tested() -> None:
    assert sorted(path.name for path in EXAMPLES.iterdir()) == ["agent.py", "ci_job.py", "notebook.ipynb"]


@pytest.mark.parametrize("local", [False, True])
def test_the_agent_solves_its_task(ours: str, local: bool) -> None:
    ran = run(str(EXAMPLES / "agent.py"), *([] if local else [ours]))
    assert ran.returncode == 0, ran.stderr
    first, source, patched, second, answer = ran.stdout.splitlines()
    assert first.startswith('run -> {"exit_code": 1,') and "$2" in source
    assert patched == 'apply_patch -> {"changed": ["M greet.sh"]}'
    assert second.startswith('run -> {"exit_code": 0,') and "first" in answer


def test_the_agent_reads_errors_instead_of_ending(ours: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import agent
    from codex_exec import Sandbox

    with Sandbox.connect(ours, cwd=tmp_path) as sandbox:
        assert agent.call(sandbox, {"tool": "apply_patch", "patch": agent.PATCH})["kind"] == "patch"


def test_the_ci_job_uploads_runs_and_fetches(ours: str, tmp_path: Path) -> None:
    (tmp_path / "checkout").mkdir()
    build = "mkdir -p dist && echo $CI > dist/report && pwd > dist/pwd && exit $1\n"
    (tmp_path / "checkout" / "build.sh").write_text(build)
    job = [str(EXAMPLES / "ci_job.py"), "--on", ours, "--source", "checkout", "--fetch", "dist", "--fetch", "none"]
    for status in (0, 7):
        ran = run(*job, "--", "sh", "build.sh", str(status), cwd=tmp_path)
        assert ran.returncode == status, ran.stderr
        assert f"$ sh build.sh {status}\n" in ran.stdout
        assert (tmp_path / "dist" / "report").read_text() == "true\n"
        # What it left on the machine is gone.
        assert not Path((tmp_path / "dist" / "pwd").read_text().strip()).exists()


def test_the_ci_job_has_exit_codes_of_its_own(ours: str, tmp_path: Path) -> None:
    job = str(EXAMPLES / "ci_job.py")
    late = run(job, "--on", ours, "--timeout", "1", "--", "sh", "-c", "echo early; exec sleep 600", cwd=tmp_path)
    assert late.returncode == 124 and "early\n" in late.stdout and "killed after 1.0 s" in late.stderr
    nowhere = run(job, "--on", "ws://127.0.0.1:1", "--", "true", cwd=tmp_path)
    assert nowhere.returncode == 125 and "nothing listens" in nowhere.stderr


def test_the_notebook_runs(ours: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="install codex-exec[test]")
    nbclient = pytest.importorskip("nbclient", reason="install codex-exec[test]")
    monkeypatch.setenv("CODEX_EXEC_SERVER_URL", ours)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "outputs are not checked in"
    client = nbclient.NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env={**os.environ})
    shown = ["".join(output.get("text", "") or output["data"]["text/plain"] for output in cell.outputs)
             for cell in notebook.cells if cell.cell_type == "code"]
    assert shown[:4] == ["", "step 1\nstep 2\nstep 3\n", "denied: Read-only file system\n", ""]
    assert shown[4] == "3" and ast.literal_eval(shown[5]) == ["far", "away"]
