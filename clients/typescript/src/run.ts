/** The result of `Sandbox.run`. */
import { concat } from "./base64.js";
import { CodexError } from "./errors.js";
import type { ExitStatus, OutputStream } from "./sequencer.js";

/** A command's result. */
export class RunResult {
  /** The exit code; 128 + N if signal N killed it; -1 if the timeout passed and the server did not say. */
  readonly exitCode: number;
  /** Whether the timeout passed; output up to then is here. */
  readonly timedOut: boolean;
  /** Whether the sandbox denied something. */
  readonly sandboxDenied: boolean;
  /** Why it ended, if not by itself. */
  readonly endedBy: string | undefined;
  /** Whether output is missing: never with a server that retains output until it is read. */
  readonly outputLost: boolean;
  readonly #chunks: Record<"stdout" | "stderr", readonly Uint8Array[]>;

  /** @internal */
  constructor(exit: ExitStatus | undefined, chunks: Record<"stdout" | "stderr", readonly Uint8Array[]>, timedOut: boolean, lost: boolean) {
    this.exitCode = exit?.exitCode ?? -1;
    this.sandboxDenied = exit?.sandboxDenied ?? false;
    this.endedBy = exit?.endedBy;
    this.timedOut = timedOut;
    this.outputLost = lost;
    this.#chunks = chunks;
  }

  /** Stdout (all output of a terminal) as UTF-8, with U+FFFD for what is not. */
  get stdout(): string {
    return decode(this.#chunks.stdout);
  }

  /** Stderr as UTF-8. */
  get stderr(): string {
    return decode(this.#chunks.stderr);
  }

  get stdoutBytes(): Uint8Array {
    return concat(this.#chunks.stdout);
  }

  get stderrBytes(): Uint8Array {
    return concat(this.#chunks.stderr);
  }
}

/** A command failed, and `check` was set. */
export class CommandFailedError extends CodexError {
  readonly result: RunResult;

  constructor(command: string, result: RunResult) {
    const how = result.timedOut ? "timed out" : `exited with ${result.exitCode}`;
    const tail = result.stderr.trimEnd().slice(-2000);
    super(`${command} ${how}${tail ? `: ${tail}` : ""}`, { kind: result.timedOut ? "timedOut" : "commandFailed" });
    this.result = result;
  }
}

/** Collects output, and passes it on as text without cutting characters. */
export class Collector {
  readonly chunks: Record<"stdout" | "stderr", Uint8Array[]> = { stdout: [], stderr: [] };
  readonly #to: Record<"stdout" | "stderr", ((text: string) => void) | undefined>;
  readonly #decoders = { stdout: new TextDecoder(), stderr: new TextDecoder() };

  constructor(onStdout: ((text: string) => void) | undefined, onStderr: ((text: string) => void) | undefined) {
    this.#to = { stdout: onStdout, stderr: onStderr };
  }

  add(stream: OutputStream, data: Uint8Array): void {
    const side = stream === "stderr" ? "stderr" : "stdout";
    this.chunks[side].push(data);
    this.#pass(side, this.#to[side] && this.#decoders[side].decode(data, { stream: true }));
  }

  end(): void {
    for (const side of ["stdout", "stderr"] as const) this.#pass(side, this.#to[side] && this.#decoders[side].decode());
  }

  #pass(side: "stdout" | "stderr", text: string | undefined): void {
    if (text) this.#to[side]?.(text);
  }
}

const decode = (chunks: readonly Uint8Array[]) => new TextDecoder("utf-8", { ignoreBOM: true }).decode(concat(chunks));
