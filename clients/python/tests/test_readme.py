"""Every example of the README runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
NOTEBOOKS = re.findall(r"```ipython\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_of_the_readme_run(number: int, ours: str, tmp_path: Path) -> None:
    code = compile(EXAMPLES[number], f"README example {number}", "exec")
    exec(code, {"__name__": "readme", "workspace": tmp_path, "server": ours})


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5 and len(NOTEBOOKS) == 1


def test_the_cells_of_the_readme_run(ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    monkeypatch.setenv("CODEX_EXEC_SERVER_URL", ours)
    shell = InteractiveShell.instance()
    for cell in NOTEBOOKS[0].split("\n\n"):
        shell.run_cell(cell).raise_error()
    shell.run_line_magic("unload_ext", "codex_exec.adapters.jupyter")
