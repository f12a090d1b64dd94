"""Every example of the README runs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_of_the_readme_run(number: int, ours: str, tmp_path: Path) -> None:
    code = compile(EXAMPLES[number], f"README example {number}", "exec")
    exec(code, {"__name__": "readme", "workspace": tmp_path, "server": ours})


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5


def test_the_api_reference_is_generated(tmp_path: Path) -> None:
    import sys

    command = [sys.executable, "-m", "pdoc", "--output-directory", str(tmp_path), "codex_exec"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    page = (tmp_path / "codex_exec.html").read_text()
    assert "AsyncSandbox" in page and "apply_patch" in page
