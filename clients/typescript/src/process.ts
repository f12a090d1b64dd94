/**
 * A process on the server.
 *
 * Its events wait in a window of bounded size. If the consumer does not take them, the process waits, as at
 * a full pipe; other processes go on (with servers that retain output until it is read; with others the
 * whole connection waits once `spillLimit` is full).
 */
import { toBytes } from "./base64.js";
import { Interrupted } from "./channel.js";
import {
  OutputLostError, ProcessError, TimedOutError, UnknownProcessError, UnsupportedError, type CodexError,
} from "./errors.js";
import type { ReadResponse, TerminalSize } from "./models.js";
import { Sequencer, type ExitStatus, type Need, type OutputStream, type ProcessEvent } from "./sequencer.js";
import type { Session } from "./session.js";
import { Stdin } from "./stdin.js";

/** Signals that a process can get. `interrupt` works on every server. */
export type SignalName =
  | "interrupt" | "terminate" | "kill" | "hangup" | "quit" | "user1" | "user2" | "stop" | "continue";

/** How to stop waiting. */
export interface WaitOptions {
  /** Stops waiting; the process goes on. */
  signal?: AbortSignal | undefined;
  /** Fails with `TimedOutError` after this many milliseconds; the process goes on. */
  timeout?: number | undefined;
}

/** How to leave a process behind. */
export interface DetachOptions {
  /** How long the server keeps it without a connection, in milliseconds. Default 24 h; the server has a limit. */
  ttl?: number;
  signal?: AbortSignal | undefined;
}

/** A process that keeps running after its client has left. Plain data that can be stored as JSON; pass it to `Sandbox.attach`. A holder of this value with the same credentials can take the session over. */
export interface DetachedProcess {
  url: string;
  sessionId: string;
  processId: string;
  tty: boolean;
  /** The number of the last event that this client saw. */
  afterSeq: number;
  /** The name that it was detached under. */
  name?: string;
}

/** Decisions of the sandbox that a process needs. */
export interface ProcessHost {
  readonly session: Session;
  detach(process: Process, name: string | undefined, options: DetachOptions): Promise<DetachedProcess>;
  forget(process: Process): void;
}

export interface ProcessState {
  id: string;
  tty: boolean;
  window: number;
  spillLimit: number;
  untilRead: boolean;
  after?: number;
  resync?: boolean;
}

/** How long to wait for a missing event before reading it, in milliseconds. */
const REORDER_PATIENCE = 200;

/** A process: iterate over it for its events, or take `stdout` and `stderr` as web streams. */
export class Process implements AsyncIterable<ProcessEvent> {
  /** Its id in the session. */
  readonly id: string;
  /** Whether it has a terminal. */
  readonly tty: boolean;
  /** The sandbox that the server used, such as `none` or `linuxSeccomp`. */
  sandboxType: string | undefined;
  /** How much of the sandbox the server's kernel enforces, if there is one. */
  sandboxAssurance: string | undefined;
  readonly #host: ProcessHost;
  readonly #sequencer: Sequencer;
  readonly #stdin: Stdin;
  readonly #spillLimit: number;
  readonly #unlisten: () => void;
  #waiters = new Set<() => void>();
  #consumers = 0;
  #reading = false;
  #soon: ReturnType<typeof setTimeout> | undefined;
  #failure: CodexError | undefined;
  #streams: { stdout: ReadableStream<Uint8Array>; stderr: ReadableStream<Uint8Array> } | undefined;
  #stopped = false;

  /** @internal */
  constructor(host: ProcessHost, state: ProcessState) {
    this.#host = host;
    this.id = state.id;
    this.tty = state.tty;
    this.#spillLimit = state.spillLimit;
    this.#sequencer = new Sequencer(state);
    this.#stdin = new Stdin(host.session, state.id, state.tty);
    this.#unlisten = host.session.listen("processId", state.id, {
      notified: (method, params) => this.#notified(method, params),
      reconnected: () => {
        this.#sequencer.reconnected();
        // The new connection is not up yet.
        queueMicrotask(() => this.#advance());
      },
      ended: (error) => this.fail(error),
    });
    if (state.resync) this.#advance();
  }

  /** How it ended, once that is known. */
  get exit(): ExitStatus | undefined {
    return this.#sequencer.exit;
  }

  /** Whether it has exited and its streams have ended. */
  get closed(): boolean {
    return this.#sequencer.closed;
  }

  /** Its events from here on, in order; ends after `closed`. One consumer at a time. */
  async *events(options: { signal?: AbortSignal | undefined } = {}): AsyncGenerator<ProcessEvent, void, undefined> {
    this.#consumers++;
    this.#sequencer.dropOldest = false;
    try {
      for (;;) {
        const event = await this.#next(options.signal);
        if (event === undefined) return;
        yield event;
        if (event.type === "closed") return;
      }
    } finally {
      this.#consumers--;
    }
  }

  [Symbol.asyncIterator](): AsyncGenerator<ProcessEvent, void, undefined> {
    return this.events();
  }

  /** Its output: stdout, or all of a terminal. Fails with `OutputLostError` where output is missing. */
  get stdout(): ReadableStream<Uint8Array> {
    return (this.#streams ??= this.#split()).stdout;
  }

  /** Its stderr. Read both streams, or cancel one: a full one makes the process wait. */
  get stderr(): ReadableStream<Uint8Array> {
    return (this.#streams ??= this.#split()).stderr;
  }

  /** Writes to stdin. Resolves once the server has accepted it, so that awaiting gives back-pressure. */
  write(data: string | Uint8Array, options: { signal?: AbortSignal | undefined } = {}): Promise<void> {
    return this.#stdin.write(toBytes(data), options.signal);
  }

  /** Closes stdin after everything written so far; on a terminal it types the EOF character. */
  closeStdin(options: { signal?: AbortSignal | undefined } = {}): Promise<void> {
    return this.#stdin.close(options.signal);
  }

  /** Its stdin as a web stream. Closing the stream closes stdin, aborting it leaves stdin open. */
  get stdin(): WritableStream<Uint8Array | string> {
    return new WritableStream({
      write: (chunk) => this.write(chunk),
      close: () => this.closeStdin(),
    });
  }

  /** Sets the size of its terminal. */
  async resize(rows: number, cols: number, options: { signal?: AbortSignal | undefined } = {}): Promise<TerminalSize> {
    this.#host.session.require("processResize", "resize a terminal");
    const params = { processId: this.id, rows, cols };
    const { size } = await this.#host.session.call<{ size?: TerminalSize }>("process/resize", params, { ...options, repeat: true });
    return size ?? { rows, cols };
  }

  /** Sends a signal to the process group. */
  async signal(signal: SignalName = "interrupt", options: { signal?: AbortSignal | undefined } = {}): Promise<void> {
    if (signal !== "interrupt" && this.#host.session.capabilities.processSignals !== true) {
      if (signal === "kill") return void (await this.terminate(options));
      throw new UnsupportedError(`the server cannot send the signal ${signal} (capability processSignals); use interrupt or kill`);
    }
    await this.#host.session.call("process/signal", { processId: this.id, signal }, options);
  }

  /** Kills the process, its group and every descendant. Returns whether it was running. */
  async terminate(options: { signal?: AbortSignal | undefined } = {}): Promise<boolean> {
    const params = { processId: this.id };
    const { running } = await this.#host.session.call<{ running: boolean }>("process/terminate", params, { ...options, repeat: true });
    return running;
  }

  /**
   * Waits until it has exited and its streams have ended. While no loop takes its events, the oldest output
   * beyond the window is dropped (the next loop gets `lost`), so that the process does not wait for ever.
   */
  async wait(options: WaitOptions = {}): Promise<ExitStatus> {
    if (this.#consumers === 0) {
      this.#sequencer.dropOldest = true;
      this.#advance();
    }
    const deadline = options.timeout === undefined ? undefined : Date.now() + options.timeout;
    while (!this.#sequencer.closed) {
      if (this.#failure) throw this.#failure;
      await this.#changed(options.signal, deadline);
      if (deadline !== undefined && Date.now() >= deadline && !this.#sequencer.closed) {
        throw new TimedOutError(`process ${this.id} still runs after ${options.timeout} ms`);
      }
    }
    return this.#sequencer.exit ?? { exitCode: -1, sandboxDenied: false };
  }

  /**
   * Leaves the process running when the sandbox closes. With a name, `Sandbox.attach(name)` and
   * `codex attach NAME` find it (in Node); without one, keep the result.
   */
  detach(name?: string, options: DetachOptions = {}): Promise<DetachedProcess> {
    return this.#host.detach(this, name, options);
  }

  /** The number of the last event that was taken. @internal */
  get taken(): number {
    return this.#sequencer.taken;
  }

  /** Whether it may still run. @internal */
  get running(): boolean {
    return !this.#sequencer.closed && this.#failure === undefined;
  }

  /** Ends it for this client. @internal */
  fail(error: CodexError): void {
    if (this.#failure || this.#sequencer.closed) return;
    this.#failure = error;
    this.#finish();
    this.#wake();
  }

  #notified(method: string, params: Record<string, unknown>): void {
    const seq = typeof params["seq"] === "number" ? params["seq"] : undefined;
    if (method === "process/output") {
      this.#sequencer.output(seq, params["stream"] as OutputStream, String(params["chunk"] ?? ""));
    } else if (method === "process/exited") {
      this.#sequencer.exited(seq, {
        exitCode: typeof params["exitCode"] === "number" ? params["exitCode"] : -1,
        sandboxDenied: params["sandboxDenied"] === true,
        endedBy: (params["endedBy"] as string | null | undefined) ?? undefined,
        usage: (params["usage"] as ExitStatus["usage"] | null) ?? undefined,
      });
    } else if (method === "process/closed") {
      this.#sequencer.closedAt(seq);
    }
    this.#advance();
  }

  /** After every change: wakes the consumer, reads what is missing, and holds the connection if it has to. */
  #advance(): void {
    this.#wake();
    const { session } = this.#host;
    if (this.#sequencer.closed) return this.#finish();
    if (this.#failure) return;
    if (!this.#sequencer.untilRead && !this.#sequencer.dropOldest) {
      if (this.#sequencer.waiting > this.#spillLimit) {
        if (!session.hold(this) && this.#sequencer.waiting > this.#spillLimit * 4) {
          this.fail(new OutputLostError(`the output of process ${this.id} is not read, and this runtime's WebSocket cannot wait; read it faster, or raise spillLimit`));
        }
      } else if (this.#sequencer.hasRoom) session.release(this);
    }
    if (this.#reading) return;
    const need = this.#sequencer.need();
    if (need === "now" || need === "acknowledge") void this.#read(need);
    else if (need === "soon") this.#soon ??= setTimeout(() => {
      this.#soon = undefined;
      if (!this.#reading && this.#sequencer.need() === "soon") void this.#read("now");
    }, REORDER_PATIENCE);
  }

  async #read(need: Need): Promise<void> {
    this.#reading = true;
    const params = this.#sequencer.read(need);
    try {
      const response = await this.#host.session.call<ReadResponse>("process/read", { processId: this.id, ...params });
      this.#sequencer.response(params.afterSeq, response);
      if (response.failure && !this.#sequencer.closed) {
        this.fail(new ProcessError(`process ${this.id} failed: ${response.failure}`, { kind: "internal" }));
      }
    } catch (error) {
      if (error instanceof UnknownProcessError) {
        if (!this.#sequencer.gone()) this.fail(error);
      } else if (!(error instanceof Interrupted || error instanceof TimedOutError)) {
        this.fail(error as CodexError);
      }
    } finally {
      this.#reading = false;
    }
    this.#advance();
  }

  async #next(signal: AbortSignal | undefined): Promise<ProcessEvent | undefined> {
    for (;;) {
      signal?.throwIfAborted();
      const event = this.#sequencer.shift();
      if (event) {
        // Room may have come about, for what was not kept or for the connection.
        if (event.type === "output" && !this.#sequencer.closed) this.#advance();
        return event;
      }
      if (this.#sequencer.closed) return undefined;
      if (this.#failure) throw this.#failure;
      await this.#changed(signal);
    }
  }

  /** Resolves at the next change, at the deadline; rejects if aborted. */
  #changed(signal?: AbortSignal, deadline?: number): Promise<void> {
    return new Promise((resolve, reject) => {
      if (signal?.aborted) return reject(signal.reason as Error);
      let timer: ReturnType<typeof setTimeout> | undefined;
      const done = () => {
        this.#waiters.delete(done);
        clearTimeout(timer);
        signal?.removeEventListener("abort", done);
        if (signal?.aborted) reject(signal.reason as Error);
        else resolve();
      };
      this.#waiters.add(done);
      if (deadline !== undefined) timer = setTimeout(done, Math.min(Math.max(deadline - Date.now(), 0), 0x7fffffff));
      signal?.addEventListener("abort", done, { once: true });
    });
  }

  #wake(): void {
    if (this.#waiters.size > 0) for (const wake of [...this.#waiters]) wake();
  }

  #finish(): void {
    if (this.#stopped) return;
    this.#stopped = true;
    clearTimeout(this.#soon);
    if (this.#sequencer.closed) this.#stdin.end();
    this.#host.session.release(this);
    this.#unlisten();
    this.#host.forget(this);
  }

  #split(): { stdout: ReadableStream<Uint8Array>; stderr: ReadableStream<Uint8Array> } {
    const events = this.events();
    const sides: Record<"stdout" | "stderr", { controller?: ReadableStreamDefaultController<Uint8Array>; open: boolean }> = {
      stdout: { open: true },
      stderr: { open: true },
    };
    let pulling: Promise<void> | undefined;
    // With both streams cancelled, output is discarded, so that the process goes on.
    const hungry = () =>
      Object.values(sides).every(({ open }) => !open) ||
      Object.values(sides).some(({ open, controller }) => open && (controller?.desiredSize ?? 0) > 0);
    const stuffed = () => Object.values(sides).some(({ open, controller }) => open && (controller?.desiredSize ?? 0) <= -(8 << 20));
    const end = (then: (controller: ReadableStreamDefaultController<Uint8Array>) => void) => {
      for (const side of Object.values(sides)) {
        if (side.open && side.controller) then(side.controller);
        side.open = false;
      }
    };
    const pump = async () => {
      try {
        while (hungry() && !stuffed()) {
          const { value, done } = await events.next();
          if (done || value.type === "closed") return end((controller) => controller.close());
          if (value.type === "lost") throw new OutputLostError(`output of process ${this.id} was lost`);
          if (value.type !== "output") continue;
          const side = sides[value.stream === "stderr" ? "stderr" : "stdout"];
          if (side.open && value.data.length > 0) side.controller!.enqueue(value.data);
        }
      } catch (error) {
        end((controller) => controller.error(error));
      }
    };
    const pull = () => (pulling ??= pump().finally(() => (pulling = undefined)));
    const stream = (side: (typeof sides)["stdout"]) =>
      new ReadableStream<Uint8Array>(
        {
          start: (controller) => void (side.controller = controller),
          // Not awaited: the next event may be the other stream's, whose consumer must be able to pull.
          pull: () => void pull(),
          cancel: () => {
            side.open = false;
            void pull();
          },
        },
        { highWaterMark: 64 << 10, size: (chunk) => chunk.length },
      );
    return { stdout: stream(sides.stdout), stderr: stream(sides.stderr) };
  }
}

