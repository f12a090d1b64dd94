/**
 * Puts the events of one process in order, each once. Pure: no clock, no socket.
 *
 * ```text
 *   notifications ──┐                                  ┌─▶ queue (in order) ─▶ consumer
 *                   ├─▶ early: numbers ≥ next ─ drain ─┤
 *   read responses ─┘                                  └─▶ next
 * ```
 *
 * Invariants: every number below `next` was queued, or is the number of the exit, or was reported as lost.
 * No read acknowledges output that the consumer has not taken (unless it never takes any), so a client that
 * dies or detaches leaves the rest at the server.
 * The response to a read is the authority on what exists: a number that it skips is no output.
 */
import { decodeBase64 } from "./base64.js";
import type { ReadResponse, Usage } from "./models.js";

/** Which stream output came from; `pty` is both of a process with a terminal. */
export type OutputStream = "stdout" | "stderr" | "pty";

/** How a process ended. */
export interface ExitStatus {
  /** The exit code; 128 + N if signal N killed it. */
  exitCode: number;
  /** Whether the sandbox denied something to it. */
  sandboxDenied: boolean;
  /** Why it ended, if not by itself: a limit (`wall`, `oom`, …), `signal`, `terminate` or `server`. */
  endedBy?: string | undefined;
  /** What it used, if the server says so. */
  usage?: Usage | undefined;
}

/** An event of a process, in the order of the server's numbers. `closed` is the last. */
export type ProcessEvent =
  | { type: "output"; stream: OutputStream; data: Uint8Array }
  /** The process exited. Output of its descendants may follow. */
  | ({ type: "exited" } & ExitStatus)
  /** Output is missing here; `bytes` if the server counted it. */
  | { type: "lost"; bytes: number | undefined }
  | { type: "closed" };

type Early = { is: "output"; stream: OutputStream; data: Uint8Array } | { is: "exited" } | { is: "closed" };

/** What an event costs besides its bytes, so that tiny chunks fill the window, too. */
const OVERHEAD = 128;
/** Bytes of the first read on a connection: small, so that reading makes progress on short-lived ones. */
const FIRST_READ = 64 << 10;
const LARGEST_READ = 8 << 20;
/** Bytes after which the client acknowledges; well below what a server retains. */
const ACKNOWLEDGE_AFTER = 1 << 20;

/** Whether a `process/read` is needed: now, to acknowledge, unless the missing events arrive soon, or not. */
export type Need = "now" | "acknowledge" | "soon" | undefined;

export class Sequencer {
  /** The lowest number that is not in the queue yet. */
  next: number;
  exit: ExitStatus | undefined;
  closed = false;
  /** The server retains output until a read acknowledges it, so that what has no room can be read again. */
  readonly untilRead: boolean;
  /** Drop the oldest output in place of waiting for a consumer that has never come. */
  dropOldest = false;
  readonly #window: number;
  #queue: { event: ProcessEvent; seq: number }[] = [];
  /** The number of the last event that the consumer took. */
  taken: number;
  #head = 0;
  #cost = 0;
  #early = new Map<number, Early>();
  #earlyCost = 0;
  #exitQueued = false;
  #exitNumbered = false;
  /** Numbers below this exist, but no notification of them will come. */
  #missingUntil = 0;
  #resync: boolean;
  #readBytes = FIRST_READ;
  #unacknowledged = 0;

  constructor(options: { window: number; untilRead: boolean; after?: number; resync?: boolean }) {
    this.#window = options.window;
    this.untilRead = options.untilRead;
    this.taken = options.after ?? 0;
    this.next = this.taken + 1;
    this.#resync = options.resync ?? false;
  }

  /** The next event for the consumer. */
  shift(): ProcessEvent | undefined {
    const item = this.#queue[this.#head];
    if (item === undefined) return undefined;
    this.#queue[this.#head++] = undefined as never;
    if (this.#head > 1024 && this.#head * 2 > this.#queue.length) {
      this.#queue = this.#queue.slice(this.#head);
      this.#head = 0;
    }
    const { event, seq } = item;
    this.taken = seq;
    if (event.type === "output") {
      this.#cost -= event.data.length + OVERHEAD;
      this.#unacknowledged += event.data.length;
    }
    return event;
  }

  /** Bytes that wait for the consumer, in order or not. */
  get waiting(): number {
    return this.#cost + this.#earlyCost;
  }

  /** Whether the consumer has taken enough to read on: a read acknowledges all that is queued. */
  get hasRoom(): boolean {
    return this.dropOldest || (this.untilRead ? this.#cost === 0 : this.#cost <= this.#window / 2);
  }

  need(): Need {
    if (this.closed) return undefined;
    if (this.untilRead && this.#unacknowledged >= Math.min(ACKNOWLEDGE_AFTER, this.#window / 2)) return "acknowledge";
    if (!this.hasRoom) return undefined;
    if (this.#resync || this.#missingUntil > this.next) return "now";
    return this.#early.size > 0 ? "soon" : undefined;
  }

  /** Params of the next read. */
  read(need: Need): { afterSeq: number; maxBytes: number } {
    this.#unacknowledged = 0;
    if (need === "acknowledge") return { afterSeq: this.dropOldest ? this.next - 1 : this.taken, maxBytes: 1 };
    return { afterSeq: this.next - 1, maxBytes: Math.max(Math.min(this.#readBytes, this.#window >> 2), 1) };
  }

  /** Starts to resynchronize: notifications of the old connection are gone. */
  reconnected(): void {
    this.#resync = true;
    this.#readBytes = FIRST_READ;
  }

  output(seq: number | undefined, stream: OutputStream, chunk: string): void {
    const at = seq ?? this.next;
    if (this.closed || at < this.next || this.#early.has(at)) return;
    const full = this.waiting > 0 && this.waiting + chunk.length * 0.75 > this.#window;
    if (full && this.untilRead && !this.dropOldest) {
      this.#missingUntil = Math.max(this.#missingUntil, at + 1);
      return;
    }
    this.#hold(at, stream, chunk);
    this.#drain();
  }

  exited(seq: number | undefined, status: ExitStatus): void {
    if (this.closed) return;
    this.exit ??= status;
    if (seq === undefined) return this.#queueExit();
    this.#exitNumbered = true;
    if (seq < this.next) return this.#queueExit();
    this.#early.set(seq, { is: "exited" });
    this.#drain();
  }

  /** The close has the last number. Without a number, a read finds out what came before it. */
  closedAt(seq: number | undefined): void {
    if (this.closed) return;
    if (seq === undefined || seq < this.next) {
      this.#resync = true;
      return;
    }
    this.#early.set(seq, { is: "closed" });
    this.#drain();
  }

  /** The response to a read after number `after`. */
  response(after: number, response: ReadResponse): void {
    if (this.closed) return;
    this.#readBytes = Math.min(this.#readBytes * 2, LARGEST_READ);
    if (response.exited && !this.exit) {
      this.exit = {
        exitCode: response.exitCode ?? -1,
        sandboxDenied: response.sandboxDenied ?? false,
        endedBy: response.endedBy ?? undefined,
        usage: response.usage ?? undefined,
      };
    }
    let dropped = response.droppedBytes ?? 0;
    let from = after + 1;
    const chunks = response.chunks ?? [];
    for (const { seq, stream, chunk } of chunks) {
      this.#gap(from, seq, dropped, false);
      dropped = 0;
      from = seq + 1;
      if (seq < this.next || this.#early.has(seq)) continue;
      this.#hold(seq, stream, chunk);
      this.#drain();
    }
    if (chunks.length > 0) {
      // More may follow, and the place of an exit without a number is known only at the end.
      if (this.exit && !this.#exitQueued && !this.#exitNumbered) this.#resync = true;
      return;
    }
    // There is no output after `after`: every number before the server's next is the exit, the close, or lost.
    this.#resync = false;
    this.#gap(from, response.nextSeq ?? from, dropped, response.closed ?? false);
    if (this.exit && !this.#exitQueued && !this.#exitNumbered) this.#queueExit();
    if (response.closed) {
      this.#drainAll();
      this.#close();
    }
  }

  /** The server no longer knows the process. Whether its end was seen. */
  gone(): boolean {
    const known = this.closed || [...this.#early.values()].some((early) => early.is === "closed");
    if (known) this.#drainAll();
    return known;
  }

  /** Skips the numbers from `from` to before `end` that are not known: they are the exit, the close, or lost. */
  #gap(from: number, end: number, dropped: number, closed: boolean): void {
    const start = Math.max(from, this.next);
    let unknown = Math.max(end - start, 0);
    let close = closed;
    for (const [seq, early] of this.#early) {
      if (seq < start || seq >= end) continue;
      unknown--;
      if (early.is === "closed") close = false;
    }
    const exit = this.exit !== undefined && !this.#exitQueued && !this.#exitNumbered;
    const explained = Number(exit) + Number(close);
    if ((dropped > 0 && start < end) || unknown > explained) this.#push({ type: "lost", bytes: dropped || undefined }, start - 1);
    if (exit && unknown > 0 && !closed && start < end && dropped === 0) this.#queueExit();
    while (this.next < end && !this.closed) {
      if (!this.#early.has(this.next)) this.next++;
      this.#drain();
    }
  }

  #hold(seq: number, stream: OutputStream, chunk: string): void {
    const data = decodeBase64(chunk);
    this.#early.set(seq, { is: "output", stream, data });
    this.#earlyCost += data.length + OVERHEAD;
  }

  #drain(): void {
    for (let early = this.#early.get(this.next); early && !this.closed; early = this.#early.get(this.next)) {
      this.#early.delete(this.next);
      this.#enqueue(early, this.next++);
    }
  }

  #drainAll(): void {
    for (const seq of [...this.#early.keys()].sort((a, b) => a - b)) {
      const early = this.#early.get(seq);
      if (!early || this.closed) continue;
      this.#early.delete(seq);
      this.next = seq + 1;
      this.#enqueue(early, seq);
    }
  }

  #enqueue(early: Early, seq: number): void {
    if (early.is === "exited") return this.#queueExit();
    if (early.is === "closed") return this.#close();
    const { stream, data } = early;
    const cost = data.length + OVERHEAD;
    this.#earlyCost -= cost;
    this.#cost += cost;
    this.#push({ type: "output", stream, data }, seq);
    if (!this.dropOldest) return;
    this.#unacknowledged += data.length;
    if (this.#cost > this.#window) this.#dropOldestOutput();
  }

  #push(event: ProcessEvent, seq = this.next - 1): void {
    this.#queue.push({ event, seq });
  }

  #dropOldestOutput(): void {
    let bytes = 0;
    let last = this.taken;
    const kept: { event: ProcessEvent; seq: number }[] = [];
    for (const item of this.#queue.slice(this.#head)) {
      const { event, seq } = item;
      if (event.type === "output" && this.#cost > this.#window / 2) {
        this.#cost -= event.data.length + OVERHEAD;
        bytes += event.data.length;
        last = seq;
      } else if (event.type === "lost" && kept.length === 0) {
        bytes += event.bytes ?? 0;
      } else {
        kept.push(item);
      }
    }
    this.#queue = [{ event: { type: "lost", bytes }, seq: last }, ...kept];
    this.#head = 0;
  }

  #queueExit(): void {
    if (this.#exitQueued || !this.exit) return;
    this.#exitQueued = true;
    this.#push({ type: "exited", ...this.exit });
  }

  #close(): void {
    if (this.closed) return;
    this.#queueExit();
    this.closed = true;
    this.#early.clear();
    this.#earlyCost = 0;
    this.#push({ type: "closed" });
  }
}
