"""The fixtures of SWE-ReX's own test_execution.py, with our runtime in the place of its server.

test_swe_rex.py copies this file beside it, as conftest.py.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest_asyncio
from swerex.runtime.abstract import BashAction, Command, CreateBashSessionRequest

from codex_exec.adapters.swe_rex import CodexDeployment, CodexRuntime


class _Action(BashAction):
    timeout: float | None = 60


class _Command(Command):
    timeout: float | None = 60


@pytest_asyncio.fixture
async def remote_runtime() -> AsyncIterator[CodexRuntime]:
    deployment = CodexDeployment(os.environ["CODEX_TEST_SERVER"])
    await deployment.start()
    yield deployment.runtime
    await deployment.stop()


@pytest_asyncio.fixture
async def runtime_with_default_session(remote_runtime: CodexRuntime) -> CodexRuntime:
    await remote_runtime.create_session(CreateBashSessionRequest())
    return remote_runtime
