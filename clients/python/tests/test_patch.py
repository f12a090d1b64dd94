"""Patches: parsed, checked as a whole, and applied to the lines they name."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from codex_exec import PatchError, Sandbox
from codex_exec._patch import parse, update


def patched(content: bytes, hunks: str) -> bytes:
    text = f"*** Begin Patch\n*** Update File: f\n{hunks}\n*** End Patch"
    return update("f", content, parse(text)[0].hunks)


@pytest.mark.parametrize("case", range(200))
def test_a_random_edit_is_reproduced_by_its_hunk(case: int, seed: int) -> None:
    rng = random.Random(seed + case)
    end = rng.choice(["\n", "\r\n"])
    old = [f"line {number}" for number in range(rng.randrange(1, 30))]
    hunk, new = ["@@"], []
    for line in old:
        action = rng.choice(["keep", "keep", "remove", "insert", "replace"])
        if action == "remove":
            hunk.append(f"-{line}")
        elif action == "replace":
            hunk += [f"-{line}", f"+new {line}"]
            new.append(f"new {line}")
        else:
            hunk.append(f" {line}")
            new.append(line)
            if action == "insert":
                hunk.append(f"+after {line}")
                new.append(f"after {line}")
    last = rng.choice(["", end])
    content = (end.join(old) + last).encode()
    expected = (end.join(new) + (last if new else "")).encode()
    # One line without an end does not say which ending the file uses.
    if len(old) == 1 and not last and end == "\r\n":
        expected = expected.replace(b"\r\n", b"\n")
    assert patched(content, "\n".join(hunk)) == expected


def test_hunks_are_found_with_tolerance_and_leave_context_as_it_is() -> None:
    content = "def f():\n    x = “1” \n    return x\n".encode()
    assert patched(content, '@@ def f():\n x = "1"\n-    return x\n+    return 2') == (
        "def f():\n    x = “1” \n    return 2\n".encode()
    )


def test_bytes_that_are_not_utf8_survive() -> None:
    assert patched(b"\xff\xfe\nold\n", "@@\n-old\n+new") == b"\xff\xfe\nnew\n"


@pytest.mark.parametrize(
    "text",
    ["", "hello", "*** Begin Patch", "*** Begin Patch\n*** End Patch", "*** Begin Patch\nx\n*** End Patch",
     "*** Begin Patch\n*** Update File: f\n*** End Patch", "*** Begin Patch\n*** Add File:\n*** End Patch"],
)
def test_text_that_is_no_patch_is_refused(text: str) -> None:
    with pytest.raises(PatchError):
        parse(text)


def test_a_patch_that_does_not_fit_changes_nothing(ours: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one\n")
    text = (
        "*** Begin Patch\n*** Add File: new\n+x\n*** Update File: a\n@@\n-one\n+two\n"
        "*** Update File: a\n@@\n-three\n+four\n*** End Patch"
    )
    with Sandbox.connect(ours, cwd=tmp_path) as sandbox:
        with pytest.raises(PatchError, match="a, hunk 1"):
            sandbox.apply_patch(text)
        assert (tmp_path / "a").read_text() == "one\n"
        assert not (tmp_path / "new").exists()
        fitting = text.replace("-three", "-two")
        assert sandbox.apply_patch(fitting) == ["A new", "M a", "M a"]
        assert (tmp_path / "a").read_text() == "four\n"
        (tmp_path / "a").chmod(0o755)
        moved = "*** Begin Patch\n*** Update File: a\n*** Move to: d/b\n*** Delete File: new\n*** End Patch"
        assert sandbox.apply_patch(moved) == ["M d/b", "D new"]
        assert not (tmp_path / "a").exists() and not (tmp_path / "new").exists()
        assert (tmp_path / "d" / "b").stat().st_mode & 0o777 == 0o755
        assert (tmp_path / "d" / "b").read_text() == "four\n"
