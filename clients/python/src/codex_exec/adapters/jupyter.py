"""Cells of a notebook on another machine: `pip install 'codex-exec[jupyter]'`.

```
%load_ext codex_exec.adapters.jupyter
```

```
%%remote --on ws://gpu:4500 --timeout 600 --policy workspace-write
make test
```

A cell is a script for `/bin/sh`, or the input of a command: `%%remote python3 -`. Its lines appear as they are
written, and interrupting the kernel kills the command. Its exit code is in `_exit_code`; one that is not 0 is an error,
so that the notebook stops there, unless the cell says `--no-raise`.
"""

from __future__ import annotations

import argparse
import atexit
import os
import shlex
import sys
from typing import NoReturn

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from .._sync import Sandbox

#: The name of the magic.
NAME = "remote"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; {self.format_usage()}")


def _parser() -> _Parser:
    parser = _Parser(prog=f"%%{NAME}", description="Run the cell on a codex exec-server.", add_help=False)
    parser.add_argument("--on", help="server, as for Sandbox.connect (default: $CODEX_EXEC_SERVER_URL, or local)")
    parser.add_argument("--timeout", type=float, help="kill the command after this many seconds")
    parser.add_argument("--policy", help="read-only, workspace-write or full-access")
    parser.add_argument("--cwd", help="directory on the server, and workspace of the policy")
    parser.add_argument("--no-raise", action="store_true", help="go on whatever the exit code is")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="run this with the cell as its input")
    return parser


class Remote:
    """The magic. Cells with the same server, policy and directory share a connection."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._parser = _parser()
        # Shown for `%%remote?`.
        self.__doc__ = self._parser.format_help()
        self._sandboxes: dict[tuple[str, str | None, str | None], Sandbox] = {}

    def __call__(self, line: str, cell: str) -> None:
        options = self._parser.parse_args(shlex.split(line))
        address = options.on or os.environ.get("CODEX_EXEC_SERVER_URL") or "local"
        # As after `!command`; unknown until the command has ended.
        self._shell.user_ns["_exit_code"] = None
        result = self._connected(address, options.policy, options.cwd).run(
            options.command or cell,
            input=cell if options.command else None,
            timeout=options.timeout,
            on_stdout=lambda text: print(text),
            on_stderr=lambda text: print(text, file=sys.stderr),
            capture=False,
        )
        self._shell.user_ns["_exit_code"] = result.exit_code
        if not options.no_raise:
            result.check()

    def _connected(self, address: str, policy: str | None, cwd: str | None) -> Sandbox:
        key = (address, policy, cwd)
        sandbox = self._sandboxes.get(key)
        if sandbox is None or sandbox._sandbox._connection.closed:
            sandbox = self._sandboxes[key] = Sandbox.connect(address, policy=policy, cwd=cwd)
        return sandbox

    def close(self) -> None:
        """Closes the connections, and kills what still runs there."""
        sandboxes, self._sandboxes = self._sandboxes, {}
        for sandbox in sandboxes.values():
            sandbox.close()


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Defines the magic, for `%load_ext`."""
    remote = Remote(shell)
    shell.magics_manager.register_function(remote, "cell", NAME)
    atexit.register(remote.close)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Removes the magic and closes its connections, for `%unload_ext`."""
    remote = shell.magics_manager.magics["cell"].pop(NAME)
    atexit.unregister(remote.close)
    remote.close()


__all__ = ["Remote", "load_ipython_extension", "unload_ipython_extension"]
