"""The generated models are fresh, and the exceptions cover every kind."""

from __future__ import annotations

import importlib.util
import inspect
import json
from pathlib import Path

import codex_exec
from codex_exec import _errors
from codex_exec._models import ERROR_KINDS

PACKAGE = Path(__file__).resolve().parent.parent


def test_generated_models_are_fresh(request: object) -> None:
    spec = importlib.util.spec_from_file_location("generate", PACKAGE / "tools" / "generate.py")
    assert spec and spec.loader
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    text = generate.generate(json.loads(generate.SCHEMA.read_text()))
    assert text == generate.MODELS.read_text(), "run clients/python/tools/generate.py"


def test_every_kind_has_an_exception() -> None:
    missing = {kind for kind in ERROR_KINDS if kind not in _errors.BY_KIND}
    assert not missing - {"unknown"}, missing


def test_both_surfaces_have_the_same_methods_and_parameters() -> None:
    for sync, asynchronous in (
        (codex_exec.Sandbox, codex_exec.AsyncSandbox),
        (codex_exec.Process, codex_exec.AsyncProcess),
        (codex_exec.Files, codex_exec.AsyncFiles),
    ):
        names = {n for n in dir(asynchronous) if not n.startswith("_")} - {"on_resumed", "on_failed"}
        assert names <= {n for n in dir(sync) if not n.startswith("_")} | {"cwd", "files", "sandbox"}
        for name in sorted(names):
            left, right = getattr(sync, name), getattr(asynchronous, name)
            if callable(left) and callable(right):
                assert list(inspect.signature(left).parameters) == list(inspect.signature(right).parameters), name
                defaults = [p.default for p in inspect.signature(left).parameters.values()]
                assert defaults == [p.default for p in inspect.signature(right).parameters.values()], name
