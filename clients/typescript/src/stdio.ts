/**
 * A command that speaks the protocol on its stdin and stdout, one message a line:
 * `codex exec-server --listen stdio`, here, over ssh, or behind `codex run --on env:ID`.
 */
import type { ChildProcess } from "node:child_process";
import { CommandEndedError } from "./errors.js";
import type { Dialer, Transport, TransportEvents } from "./transport.js";

const STDERR_TAIL = 4 << 10;
const LINE_LIMIT = 64 << 20;
/** How long a command may take to end once its stdin is closed, in milliseconds. */
const END_PATIENCE = 5000;

export class StdioDialer implements Dialer {
  readonly endpoint: string;
  readonly canResume = false;
  readonly keepAlive = false;
  readonly isCommand = true;
  readonly #argv: readonly string[];
  readonly #env: Record<string, string | undefined> | undefined;

  constructor(argv: readonly string[], env?: Record<string, string | undefined>) {
    this.#argv = argv;
    this.#env = env;
    this.endpoint = `the command ${argv[0]}`;
  }

  async dial(events: TransportEvents, signal: AbortSignal): Promise<Transport> {
    const { spawn } = await import("node:child_process");
    signal.throwIfAborted();
    const [program, ...args] = this.#argv;
    const child = spawn(program!, args, {
      stdio: ["pipe", "pipe", "pipe"],
      ...(this.#env ? { env: { ...process.env, ...this.#env } } : {}),
    });
    await new Promise<void>((resolve, reject) => {
      child.once("spawn", resolve);
      child.once("error", (error: Error & { code?: string }) => {
        const hint = error.code === "ENOENT" ? `; install codex, or pass the path of its program` : "";
        reject(new CommandEndedError(`cannot start ${program}: ${error.message}${hint}`, { cause: error }));
      });
    });
    return serve(child, program!, events);
  }
}

function serve(child: ChildProcess, program: string, events: TransportEvents): Transport {
  const stdin = child.stdin!;
  const stdout = child.stdout!;
  const stderr = child.stderr!;
  let tail = Buffer.alloc(0);
  stderr.on("data", (data: Buffer) => (tail = Buffer.concat([tail, data]).subarray(-STDERR_TAIL)));
  // A command that ends closes its stdin; `closed` reports that.
  stdin.on("error", () => {});
  child.on("error", () => {});

  let parts: Buffer[] = [];
  let length = 0;
  let paused = false;
  /** What arrived while paused: a chunk may hold several lines. */
  let held: Buffer[] = [];
  const take = (data: Buffer) => {
    let start = 0;
    while (!paused) {
      const end = data.indexOf(10, start);
      if (end < 0) break;
      const piece = data.subarray(start, end);
      const line = parts.length > 0 ? Buffer.concat([...parts, piece]) : piece;
      parts = [];
      length = 0;
      start = end + 1;
      if (line.length > 0) events.message(line);
    }
    if (start === data.length) return;
    if (paused) {
      held.push(data.subarray(start));
      return;
    }
    parts.push(data.subarray(start));
    length += data.length - start;
    if (length > LINE_LIMIT) child.kill("SIGKILL");
  };
  stdout.on("data", (data: Buffer) => (paused ? held.push(data) : take(data)));

  const ended = new Promise<void>((resolve) =>
    child.once("close", (code, killedBy) => {
      resolve();
      const how = killedBy ? `was killed by ${killedBy}` : `exited with ${code}`;
      const said = tail.toString().trim();
      events.closed(`the command ${program} ${how}${said ? `: ${said}` : ""}`);
    }),
  );
  return {
    canPause: true,
    send: (text) => void (stdin.writable && stdin.write(`${text}\n`)),
    pause: () => {
      paused = true;
      stdout.pause();
    },
    resume: () => {
      if (!paused) return;
      paused = false;
      const waiting = held;
      held = [];
      for (const data of waiting) paused ? held.push(data) : take(data);
      if (!paused) stdout.resume();
    },
    close: async () => {
      stdin.end();
      stdout.resume();
      const timer = setTimeout(() => child.kill("SIGKILL"), END_PATIENCE);
      await ended;
      clearTimeout(timer);
    },
  };
}
