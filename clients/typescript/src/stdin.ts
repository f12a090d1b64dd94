/**
 * A process's stdin.
 *
 * Invariant: bytes reach the process in order, each once, whatever happens to the connection. Every write
 * has an id; on the next connection the client repeats, in order, the writes that the server has not
 * accepted, and the server ignores those that it already has.
 */
import { encodeBase64 } from "./base64.js";
import { Interrupted, type Channel } from "./channel.js";
import { StdinClosedError, UnsupportedError } from "./errors.js";
import type { Session } from "./session.js";

/** The largest single write, in bytes. */
const CHUNK = 64 << 10;
/** Writes at once. The server accepts 1 MiB ahead of the process. */
const IN_FLIGHT = 8;
const STARTING_RETRY = 20;
const CTRL_D = new Uint8Array([4]);

interface Write {
  id: string;
  bytes: Uint8Array;
  close: boolean;
  sent: boolean;
  done(error?: unknown): void;
}

export class Stdin {
  readonly #session: Session;
  readonly #process: string;
  readonly #tty: boolean;
  #queue: Write[] = [];
  #pumping = false;
  #closed = false;
  #failure: unknown;

  constructor(session: Session, process: string, tty: boolean) {
    this.#session = session;
    this.#process = process;
    this.#tty = tty;
  }

  /** Resolves once the server has accepted all bytes. */
  async write(bytes: Uint8Array, signal?: AbortSignal): Promise<void> {
    // Each round queues as much as may be in flight, so that a large write is not queued as a whole.
    const round = CHUNK * IN_FLIGHT;
    for (let at = 0; at < bytes.length; at += round) {
      const part = bytes.subarray(at, at + round);
      const writes: Promise<void>[] = [];
      for (let from = 0; from < part.length; from += CHUNK) {
        writes.push(this.#push(part.subarray(from, from + CHUNK), false, signal));
      }
      await settle(writes);
    }
  }

  /** Closes stdin after everything written so far; on a terminal it types the EOF character. */
  async close(signal?: AbortSignal): Promise<void> {
    if (this.#closed) return;
    if (this.#session.capabilities.processCloseStdin === true) {
      this.#closed = true;
      return this.#push(new Uint8Array(), true, signal);
    }
    if (this.#tty) return this.#push(CTRL_D, false, signal);
    throw new UnsupportedError(
      "the server cannot close a process's stdin (capability processCloseStdin); end the input in a way that the program understands, use a terminal, or terminate the process",
    );
  }

  /** The process has ended: nothing that waits will be accepted. */
  end(): void {
    this.#fail(new StdinClosedError(`process ${this.#process} takes no input: it has ended`));
  }

  #fail(error: unknown): void {
    this.#failure ??= error;
    const queue = this.#queue;
    this.#queue = [];
    for (const write of queue) write.done(this.#failure);
  }

  #push(bytes: Uint8Array, close: boolean, signal?: AbortSignal): Promise<void> {
    return new Promise((resolve, reject) => {
      if (signal?.aborted) return reject(signal.reason as Error);
      if (this.#failure !== undefined) return reject(this.#failure as Error);
      const aborted = () => {
        // What was sent stays in the queue, for its place in the order.
        if (!write.sent) this.#queue = this.#queue.filter((other) => other !== write);
        reject(signal!.reason as Error);
      };
      const write: Write = {
        id: this.#session.freshId("w"),
        bytes,
        close,
        sent: false,
        done: (error) => {
          signal?.removeEventListener("abort", aborted);
          if (error === undefined) resolve();
          else reject(error as Error);
        },
      };
      signal?.addEventListener("abort", aborted, { once: true });
      this.#queue.push(write);
      void this.#pump();
    });
  }

  async #pump(): Promise<void> {
    if (this.#pumping) return;
    this.#pumping = true;
    try {
      while (this.#queue.length > 0) await this.#serve(await this.#session.channel());
    } catch (error) {
      this.#fail(error);
    } finally {
      this.#pumping = false;
    }
  }

  /** Sends what is queued on one connection, until all is accepted or the connection ends. */
  async #serve(channel: Channel): Promise<void> {
    for (const write of this.#queue) write.sent = false;
    // Until the first is accepted only one is in flight, so that none overtakes one that has to wait.
    let limit = 1;
    const inFlight: { write: Write; response: Promise<unknown> }[] = [];
    for (;;) {
      while (inFlight.length < limit) {
        const write = this.#queue.find((candidate) => !candidate.sent);
        if (!write) break;
        write.sent = true;
        const params = {
          processId: this.#process,
          chunk: encodeBase64(write.bytes),
          writeId: write.id,
          ...(write.close ? { closeStdin: true } : {}),
        };
        const { response } = channel.request("process/write", params);
        response.catch(() => {});
        inFlight.push({ write, response });
      }
      const first = inFlight.shift();
      if (!first) return;
      let status: string;
      try {
        ({ status } = (await first.response) as { status: string });
      } catch (error) {
        if (error instanceof Interrupted) return;
        throw error;
      }
      if (status === "starting") {
        first.write.sent = false;
        await new Promise((resolve) => setTimeout(resolve, STARTING_RETRY));
      } else if (status === "accepted") {
        limit = IN_FLIGHT;
        this.#queue = this.#queue.filter((other) => other !== first.write);
        first.write.done();
      } else {
        const why = status === "unknownProcess" ? "the server no longer knows it" : "start it with stdin: true or pty: true to keep stdin open";
        throw new StdinClosedError(`process ${this.#process} takes no input: ${why}`);
      }
    }
  }
}

/** Waits for all, and then fails with the first failure: none is left unhandled. */
async function settle(writes: Promise<void>[]): Promise<void> {
  for (const result of await Promise.allSettled(writes)) {
    if (result.status === "rejected") throw result.reason;
  }
}
