/**
 * Requests and responses on one connection.
 *
 * Invariant: every request gets exactly one result: from the peer, or from `fail` when the connection ends.
 */
import { ConnectionLostError, ProtocolViolationError, serverError, type CodexError } from "./errors.js";
import type { Transport } from "./transport.js";

interface Pending {
  method: string;
  resolve(result: unknown): void;
  reject(error: CodexError): void;
}

/** The connection ended before the response came. */
export class Interrupted extends ConnectionLostError {}

export interface Notification {
  method: string;
  params: Record<string, unknown>;
}

export class Channel {
  readonly transport: Transport;
  /** The number of the session's connection, from 1. */
  readonly epoch: number;
  #next = 1;
  #pending = new Map<number, Pending>();
  #ended: string | undefined;

  constructor(transport: Transport, epoch: number) {
    this.transport = transport;
    this.epoch = epoch;
  }

  get ended(): boolean {
    return this.#ended !== undefined;
  }

  /** Sends a request. Requests sent one after the other arrive in that order. */
  request(method: string, params: unknown): { id: number; response: Promise<unknown> } {
    const id = this.#next++;
    const response = new Promise<unknown>((resolve, reject) => {
      if (this.#ended !== undefined) return reject(interrupted(method, this.#ended));
      this.#pending.set(id, { method, resolve, reject });
      this.transport.send(JSON.stringify({ id, method, params }));
    });
    return { id, response };
  }

  /** Forgets a request: its response is ignored. */
  forget(id: number): void {
    this.#pending.delete(id);
  }

  notify(method: string, params?: unknown): void {
    this.transport.send(JSON.stringify(params === undefined ? { method } : { method, params }));
  }

  /** Refuses a request of the server. */
  refuse(id: unknown, method: string): void {
    this.transport.send(JSON.stringify({ id, error: { code: -32601, message: `this client does not answer ${method}` } }));
  }

  /** Delivers a message; returns a notification or a request to the caller. Throws if it is not a message. */
  receive(data: string | Uint8Array): (Notification & { id?: unknown }) | undefined {
    const message = parse(data);
    if (typeof message["method"] === "string") {
      const params = message["params"];
      const isObject = typeof params === "object" && params !== null && !Array.isArray(params);
      return { method: message["method"], params: isObject ? (params as Record<string, unknown>) : {}, id: message["id"] };
    }
    const id = message["id"];
    const pending = typeof id === "number" ? this.#pending.get(id) : undefined;
    if (pending === undefined) {
      if (!("id" in message)) throw new ProtocolViolationError("the peer sent an object that is not a message");
      return undefined;
    }
    this.#pending.delete(id as number);
    const error = message["error"] as { code?: unknown; message?: unknown; data?: unknown } | undefined;
    const result = message["result"];
    if (error) {
      const code = typeof error.code === "number" ? error.code : 0;
      pending.reject(serverError(pending.method, { code, message: String(error.message ?? ""), data: error.data }));
    } else if (typeof result === "object" && result !== null && !Array.isArray(result)) {
      pending.resolve(result);
    } else {
      pending.reject(new ProtocolViolationError(`the result of ${pending.method} is not an object`, { method: pending.method }));
    }
    return undefined;
  }

  /** Ends every request. */
  fail(reason: string): void {
    if (this.#ended !== undefined) return;
    this.#ended = reason;
    const pending = [...this.#pending.values()];
    this.#pending.clear();
    for (const { method, reject } of pending) reject(interrupted(method, reason));
  }
}

function interrupted(method: string, reason: string): Interrupted {
  return new Interrupted(`${method}: ${reason} before the response came; the request may have had its effect`, {
    kind: "connectionLost",
    method,
  });
}

const decoder = new TextDecoder();

function parse(data: string | Uint8Array): Record<string, unknown> {
  let message: unknown;
  try {
    // A Buffer's own method is faster than a TextDecoder.
    const text = typeof data === "string" ? data : "utf8Slice" in data ? String(data) : decoder.decode(data);
    message = JSON.parse(text);
  } catch (cause) {
    throw new ProtocolViolationError("the peer sent something that is not JSON; is it an exec-server?", { cause });
  }
  if (typeof message !== "object" || message === null || Array.isArray(message)) {
    throw new ProtocolViolationError("the peer sent JSON that is not a message; is it an exec-server?");
  }
  return message as Record<string, unknown>;
}
