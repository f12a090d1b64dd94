"""A CI job on another machine: upload the checkout, run the job there, fetch what it made.

    python3 examples/ci_job.py --on ws://builder:4500 --timeout 1800 --fetch dist -- make test dist

Its exit code is that of the job, 124 after a timeout, 125 if the machine cannot be used, as CI systems expect.
"""

import argparse
import shlex
import sys

from codex_exec import CodexError, Sandbox


def run_job(options: argparse.Namespace) -> int:
    with Sandbox.connect(options.on) as machine:
        directory = machine.run(["mktemp", "-d"], check=True).stdout.rstrip("\n")
        try:
            # Confined to its directory, so that jobs do not disturb each other.
            with Sandbox.connect(options.on, cwd=directory, policy=options.policy) as sandbox:
                return run_in(sandbox, options)
        finally:
            machine.files.remove(directory, recursive=True)


def run_in(sandbox: Sandbox, options: argparse.Namespace) -> int:
    print(f"uploaded {sandbox.upload(options.source, '.')} bytes to {sandbox.cwd}")
    print("$", shlex.join(options.command), flush=True)
    result = sandbox.run(
        options.command,
        timeout=options.timeout,
        capture=False,
        env={"CI": "true"},
        on_stdout=lambda line: print(line, flush=True),
        on_stderr=lambda line: print(line, file=sys.stderr, flush=True),
    )
    for path in options.fetch:
        # Also after a failure: reports of tests are wanted most then.
        if sandbox.files.exists(path):
            sandbox.download(path, path)
    if result.timed_out:
        print(f"the job was killed after {options.timeout} s", file=sys.stderr)
        return 124
    return 125 if result.exit_code is None else result.exit_code


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a CI job on a codex exec-server.")
    parser.add_argument("--on", default="local", help="server, as for Sandbox.connect")
    parser.add_argument("--source", default=".", help="directory to upload")
    parser.add_argument("--policy", default="workspace-write")
    parser.add_argument("--timeout", type=float, default=3600)
    parser.add_argument("--fetch", action="append", default=[], metavar="PATH", help="file or directory to download")
    parser.add_argument("command", nargs="+")
    try:
        return run_job(parser.parse_args())
    except CodexError as error:
        print(f"ci_job: {error}", file=sys.stderr)
        return 125


if __name__ == "__main__":
    sys.exit(main())
