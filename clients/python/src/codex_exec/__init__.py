"""Run commands and work with files on a codex exec-server.

```python
from codex_exec import Sandbox

with Sandbox.local(policy="workspace-write") as sb:
    result = sb.run(["make", "test"], timeout=600, on_stdout=print)
```

`Sandbox` is synchronous, `AsyncSandbox` has the same surface for asyncio. Errors are exceptions by kind, all
below `CodexError`.
"""

from . import _errors
from ._errors import *  # noqa: F403
from ._events import Closed, Event, Exited, Lost, Output
from ._files import AsyncFiles, Change, Changes, Entry, Match, SearchResult, Stat, WalkResult
from ._policy import Policy
from ._process import AsyncProcess, Result
from ._sandbox import AsyncSandbox, Local
from ._sync import Files, Process, Sandbox

__all__ = [
    "AsyncFiles",
    "AsyncProcess",
    "AsyncSandbox",
    "Change",
    "Changes",
    "Closed",
    "Entry",
    "Event",
    "Exited",
    "Files",
    "Local",
    "Lost",
    "Match",
    "Output",
    "Policy",
    "Process",
    "Result",
    "Sandbox",
    "SearchResult",
    "Stat",
    "WalkResult",
]
__all__ += _errors.__all__
