"""The loop of a coding agent: a model asks for commands and patches, a sandbox does them, until the tests pass.

    python3 examples/agent.py [ADDRESS]     # default: a server of its own on this machine

The model here is a script, so that the example needs no account; `Model.reply` is where yours is called.
"""

import json
import sys
import tempfile
from typing import Any

from codex_exec import CodexError, Sandbox

TASK = "Make test.sh pass."
PATCH = """*** Begin Patch
*** Update File: greet.sh
@@
-echo "Hello, $2"
+echo "Hello, $1"
*** End Patch"""


class Model:
    """Looks at the conversation and returns the next step: a tool with its arguments, or the answer."""

    script = (
        {"tool": "run", "command": "sh test.sh"},
        {"tool": "run", "command": "cat greet.sh"},
        {"tool": "apply_patch", "patch": PATCH},
        {"tool": "run", "command": "sh test.sh"},
        {"answer": "greet.sh used the second argument instead of the first."},
    )

    def reply(self, conversation: list[dict[str, Any]]) -> dict[str, Any]:
        return self.script[sum(message["role"] == "model" for message in conversation)]


def call(sandbox: Sandbox, step: dict[str, Any]) -> dict[str, Any]:
    """Does what the model asks for. What goes wrong is for the model to read, not the end of the loop."""
    try:
        if step["tool"] == "run":
            result = sandbox.run(step["command"], timeout=60)
            output = (result.stdout + result.stderr)[-4000:]
            return {"exit_code": result.exit_code, "timed_out": result.timed_out, "output": output}
        return {"changed": sandbox.apply_patch(step["patch"])}
    except CodexError as error:
        return {"error": str(error), "kind": error.kind}


def solve(sandbox: Sandbox, task: str, model: Model) -> str:
    """Lets the model work on the task, and returns its answer."""
    conversation: list[dict[str, Any]] = [{"role": "user", "content": task}]
    while True:
        step = model.reply(conversation)
        conversation.append({"role": "model", "content": json.dumps(step)})
        if "answer" in step:
            return str(step["answer"])
        observed = call(sandbox, step)
        print(step["tool"], "->", json.dumps(observed))
        conversation.append({"role": "tool", "content": json.dumps(observed)})


def main(address: str, workspace: str) -> None:
    # The policy confines whatever the model thinks of: it writes below the workspace and has no network.
    with Sandbox.connect(address, cwd=workspace, policy="workspace-write") as sandbox:
        sandbox.files.write("greet.sh", 'echo "Hello, $2"\n')
        sandbox.files.write("test.sh", 'test "$(sh greet.sh World)" = "Hello, World"\n')
        print(solve(sandbox, TASK, Model()))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(sys.argv[1] if len(sys.argv) > 1 else "local", directory)
