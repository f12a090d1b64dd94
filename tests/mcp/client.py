"""The official MCP client of the Python SDK against `codex mcp`, over stdio and streamable HTTP.

Usage: client.py PATH-OF-CODEX. Needs the package `mcp`; tests/mcp/run installs it.
"""

import asyncio
import base64
import contextlib
import pathlib
import re
import subprocess
import sys
import tempfile

from mcp import ClientSession, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

TOOLS = {"run", "output", "write", "kill", "list", "read_file", "write_file", "edit", "search", "glob", "ls"}
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def text(result):
    return "".join(block.text for block in result.content if block.type == "text")


async def call(session, name, **arguments):
    result = await session.call_tool(name, arguments)
    assert not result.is_error, f"{name}: {text(result)}"
    return result


async def fails(session, name, **arguments):
    result = await session.call_tool(name, arguments)
    assert result.is_error, f"{name} should fail: {text(result)}"
    return text(result)


async def check(session, root, network):
    names = {tool.name for tool in (await session.list_tools()).tools}
    assert names == (TOOLS | {"fetch"} if network else TOOLS), names

    # A short command ends within the call; its output and exit code are in the result.
    done = await call(session, "run", command="echo hello; echo oops >&2; exit 3")
    assert "hello" in text(done) and "oops" in text(done), text(done)
    assert done.structured_content["exit_code"] == 3 and not done.structured_content["running"]
    done = await call(session, "run", argv=["cat"], stdin="through a pipe")
    assert "through a pipe" in text(done), text(done)

    # A long one returns early with a handle, and loses nothing.
    started = await call(session, "run", command="echo one; read line; echo got $line", keep_stdin=True, wait_seconds=0.2)
    handle = started.structured_content["handle"]
    assert started.structured_content["running"] and handle in text(started)
    answered = text(await call(session, "write", handle=handle, text="two\n", wait_seconds=20))
    while "exited with code 0" not in answered:
        answered += text(await call(session, "output", handle=handle, wait_seconds=20))
    assert "got two" in answered, answered
    assert handle in text(await call(session, "list"))

    # Much output: both ends, and the way to the rest.
    big = await call(session, "run", command="seq 1 100000", max_output_bytes=2000)
    assert text(big).startswith("1\n2\n") and "\n100000\n" in text(big) and "left out" in text(big)
    seen, offset = "", 0
    while True:
        piece = await call(session, "output", handle=big.structured_content["handle"], offset=offset, max_output_bytes=1 << 20)
        seen += piece.content[0].text
        offset = piece.structured_content["next_offset"]
        if offset == piece.structured_content["total_bytes"]:
            break
    assert seen == "".join(f"{n}\n" for n in range(1, 100001))

    # Progress while a command runs, a kill, and a client that gives up.
    reports = []

    async def report(progress, total, message):
        reports.append(message)

    slow = asyncio.create_task(
        session.call_tool("run", {"command": "echo working; sleep 1000", "wait_seconds": 5}, progress_callback=report)
    )
    slow = await slow
    assert any("working" in message for message in reports), reports
    killed = await call(session, "kill", handle=slow.structured_content["handle"])
    assert killed.structured_content["exit_code"] == 137, killed.structured_content
    assert "no command has the handle" in await fails(session, "output", handle="p999")

    # Files: write, edit, read by lines and bytes, search, glob, ls.
    await call(session, "write_file", path="src/a.txt", content="alpha\nbeta\ngamma\n")
    assert (root / "src/a.txt").read_text() == "alpha\nbeta\ngamma\n"
    patch = "*** Begin Patch\n*** Update File: src/a.txt\n@@\n alpha\n-beta\n+BETA\n gamma\n*** End Patch"
    assert "M src/a.txt" in text(await call(session, "edit", patch=patch))
    lines = await call(session, "read_file", path="src/a.txt", start_line=2, lines=1)
    assert lines.content[0].text == "BETA\n" and "start_line 3" in text(lines), text(lines)
    piece = await call(session, "read_file", path="src/a.txt", offset=6, length=4)
    assert piece.content[0].text == "BETA" and "offset 10" in text(piece), text(piece)
    assert "src/a.txt:2:BETA" in text(await call(session, "search", pattern="B.TA"))
    assert "src/a.txt" in text(await call(session, "glob", patterns=["**/*.txt"]))
    assert "src/\n" in text(await call(session, "ls"))
    (root / "dot.png").write_bytes(PIXEL)
    image = (await call(session, "read_file", path="dot.png")).content[0]
    assert image.type == "image" and image.mime_type == "image/png" and base64.b64decode(image.data) == PIXEL

    # Resources.
    listed = {resource.name: resource.uri for resource in (await session.list_resources()).resources}
    read = await session.read_resource(listed["src/a.txt"])
    assert read.contents[0].text == "alpha\nBETA\ngamma\n"
    assert (await session.list_resource_templates()).resource_templates

    # What a model gets wrong is an error that it can read, and arguments cannot change the policy.
    assert "unknown field" in await fails(session, "run", command="true", sandbox={"type": "disabled"})
    assert "either command" in await fails(session, "run")
    await fails(session, "read_file", path="missing")
    with contextlib.suppress(MCPError):
        unknown = await session.call_tool("no_such_tool", {})
        assert unknown.is_error
    outside = root.parent / "outside.txt"
    for refused in (
        await session.call_tool("write_file", {"path": str(outside), "content": "x"}),
        await session.call_tool("run", {"command": f"echo x > {outside}"}),
    ):
        assert refused.is_error or refused.structured_content["exit_code"] != 0, text(refused)
    assert not outside.exists()


def policy(directory):
    file = directory / "policy.json"
    file.write_text('{"type":"workspace-write","exclude_slash_tmp":true,"exclude_tmpdir_env_var":true}')
    return str(file)


async def over_stdio(codex, directory):
    root = directory / "stdio"
    root.mkdir()
    arguments = ["mcp", "--cwd", str(root), "--sandbox", policy(directory)]
    async with stdio_client(StdioServerParameters(command=codex, args=arguments)) as (read, write):
        async with ClientSession(read, write) as session:
            await session.initialize()
            await check(session, root, network=False)
    print("stdio: ok")


async def over_http(codex, directory):
    root = directory / "http"
    root.mkdir()
    arguments = [codex, "mcp", "--cwd", str(root), "--sandbox", policy(directory), "--http", "127.0.0.1:0"]
    server = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    try:
        line = server.stderr.readline()
        url = re.search(r"http://\S+", line)
        assert url, line
        async with streamable_http_client(url[0]) as (read, write):
            async with ClientSession(read, write) as session:
                await session.initialize()
                await check(session, root, network=False)
    finally:
        server.terminate()
        server.wait()
    print("http: ok")


def main():
    with tempfile.TemporaryDirectory(dir=pathlib.Path.home()) as directory:
        asyncio.run(over_stdio(sys.argv[1], pathlib.Path(directory)))
        asyncio.run(over_http(sys.argv[1], pathlib.Path(directory)))


main()
