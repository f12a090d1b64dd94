/**
 * A session with a server, over as many connections as it takes.
 *
 * ```text
 *   connected ──drop──▶ reconnecting ──resume──▶ connected
 *       │                    │ give up, or the server refuses
 *       └──close()──▶ closed ◀┘
 * ```
 *
 * Invariant: after a drop, requests that may be repeated are repeated, and all others fail with
 * `ConnectionLostError`; nothing waits longer than the reconnect policy says.
 */
import { Channel, Interrupted } from "./channel.js";
import {
  CodexError, CommandEndedError, ConnectionLostError, ProtocolViolationError, SessionAttachedError, TimedOutError, TokenRefusedError,
  UnsupportedError,
} from "./errors.js";
import type { Capabilities, EnvironmentInfo, InitializeParams, InitializeResponse } from "./models.js";
import type { Dialer, Transport } from "./transport.js";

/** How long and how often to reconnect. Times in milliseconds. */
export interface ReconnectOptions {
  /** Whether to reconnect. Default true. */
  enabled?: boolean;
  /** The longest wait before the first attempt; later ones double. Default 50. */
  firstDelay?: number;
  /** The longest wait before any attempt. Default 5,000. */
  maxDelay?: number;
  /** When to give up. Default 120,000: a server notices a silent socket after 90 s and keeps the session for 30 s. */
  giveUpAfter?: number;
  /** How long one attempt may take. Default 10,000. */
  attemptTimeout?: number;
}

/** Limits and times of a session. Times in milliseconds. */
export interface SessionOptions {
  /** The name of this client in the server's logs. Default `codex-exec-typescript`. */
  clientName?: string;
  /** How long connecting and `initialize` may take, each. Default 10,000. */
  connectTimeout?: number;
  /** How long a response may take; writes to stdin are exempt, since the process decides. Default 120,000. */
  requestTimeout?: number;
  /** Reconnecting after a drop. */
  reconnect?: ReconnectOptions;
  /** How long the server keeps the session without a connection; the server has a default and a limit. */
  detachTtl?: number;
  /** Ping after this much silence (default 10,000), and reconnect after `keepAliveTimeout` more (default 15,000). */
  keepAliveIdle?: number;
  keepAliveTimeout?: number;
}

export interface CallOptions {
  /** Stops waiting. The request may still have its effect. */
  signal?: AbortSignal | undefined;
  /** Whether the request may be sent again on the next connection. */
  repeat?: boolean;
  /** In milliseconds; 0 waits for ever. Default: `requestTimeout`. */
  timeout?: number;
  /** Only on this connection. */
  on?: Channel;
}

/** What a process or a subscription gets from its session. */
export interface Listener {
  notified?(method: string, params: Record<string, unknown>): void;
  reconnected?(): void;
  /** The session is over, for this reason. */
  ended?(error: CodexError): void;
}

type State = { is: "connected"; channel: Channel } | { is: "reconnecting" } | { is: "closed"; error: CodexError };

export class Session {
  readonly dialer: Dialer;
  readonly options: Required<Omit<SessionOptions, "detachTtl" | "reconnect">> & { reconnect: Required<ReconnectOptions> };
  /** The id of the session; absent from servers that cannot resume one. */
  id: string | undefined;
  info: Partial<EnvironmentInfo> = {};
  #initialize: InitializeParams;
  #state: State = { is: "reconnecting" };
  #waiting = new Set<() => void>();
  #listeners = new Map<string, Set<Listener>>();
  #all = new Set<Listener>();
  #closing = new AbortController();
  #holds = new Set<object>();
  #fresh = 0;
  readonly #prefix = randomId();

  private constructor(dialer: Dialer, options: SessionOptions, initialize: Partial<InitializeParams>) {
    this.dialer = dialer;
    const { reconnect, detachTtl, ...rest } = options;
    this.options = {
      clientName: "codex-exec-typescript",
      connectTimeout: 10_000,
      requestTimeout: 120_000,
      keepAliveIdle: 10_000,
      keepAliveTimeout: 15_000,
      ...defined(rest),
      reconnect: {
        enabled: true, firstDelay: 50, maxDelay: 5_000, giveUpAfter: 120_000, attemptTimeout: 10_000,
        ...defined(reconnect ?? {}),
      },
    };
    this.#initialize = {
      clientName: this.options.clientName,
      ...(detachTtl === undefined ? {} : { detachTtlMs: detachTtl }),
      ...initialize,
    };
  }

  /** Opens or resumes a session. One attempt: if no server replies, nothing has happened. */
  static async open(
    dialer: Dialer,
    options: SessionOptions = {},
    signal?: AbortSignal,
    initialize: Partial<InitializeParams> = {},
  ): Promise<Session> {
    const session = new Session(dialer, options, initialize);
    const channel = await session.#connect(1, session.options.connectTimeout, signal);
    session.#up(channel);
    return session;
  }

  get capabilities(): Partial<Capabilities> {
    return this.info.capabilities ?? {};
  }

  /** Fails with what to do if the server does not announce a capability. */
  require(capability: keyof Capabilities, what: string): void {
    if (this.capabilities[capability] !== true) {
      throw new UnsupportedError(`the server at ${this.dialer.endpoint} cannot ${what} (capability ${capability})`);
    }
  }

  /** An id that no other client of the session uses. */
  freshId(kind: string): string {
    return `${kind}${this.#prefix}${(this.#fresh++).toString(36)}`;
  }

  /** Whether the session is over for this client. */
  get closed(): boolean {
    return this.#state.is === "closed";
  }

  /** The current connection, waiting for the next one after a drop. */
  async channel(signal?: AbortSignal): Promise<Channel> {
    for (;;) {
      signal?.throwIfAborted();
      if (this.#state.is === "connected") return this.#state.channel;
      if (this.#state.is === "closed") throw this.#state.error;
      await new Promise<void>((resolve) => {
        const done = () => {
          this.#waiting.delete(done);
          signal?.removeEventListener("abort", done);
          resolve();
        };
        this.#waiting.add(done);
        signal?.addEventListener("abort", done, { once: true });
      });
    }
  }

  /** Calls a method. */
  async call<Result = object>(method: string, params: unknown, options: CallOptions = {}): Promise<Result> {
    for (;;) {
      const channel = options.on ?? (await this.channel(options.signal));
      try {
        return (await this.#request(channel, method, params, options)) as Result;
      } catch (error) {
        if (!(error instanceof Interrupted) || !options.repeat || options.on) throw error;
      }
    }
  }

  #request(channel: Channel, method: string, params: unknown, options: CallOptions): Promise<unknown> {
    const { signal, timeout = this.options.requestTimeout } = options;
    if (signal?.aborted) return Promise.reject(signal.reason as Error);
    const { id, response } = channel.request(method, params);
    if (signal === undefined && timeout === 0) return response;
    return new Promise((resolve, reject) => {
      const aborted = () => finish(() => reject(signal!.reason as Error));
      const timer =
        timeout === 0
          ? undefined
          : setTimeout(() => {
              const error = new TimedOutError(`${method}: no response within ${timeout} ms`, { method });
              finish(() => reject(error));
            }, timeout);
      const finish = (then: () => void) => {
        clearTimeout(timer);
        signal?.removeEventListener("abort", aborted);
        channel.forget(id);
        then();
      };
      signal?.addEventListener("abort", aborted, { once: true });
      response.then(
        (result) => finish(() => resolve(result)),
        (error: unknown) => finish(() => reject(error as Error)),
      );
    });
  }

  /** Listens to the notifications whose `key` member (`processId`, `searchId`, `watchId`) has this value. */
  listen(key: string, value: string | number, listener: Listener): () => void {
    const name = `${key}\0${value}`;
    const listeners = this.#listeners.get(name) ?? new Set();
    listeners.add(listener);
    this.#listeners.set(name, listeners);
    this.#all.add(listener);
    if (this.#state.is === "closed") {
      const { error } = this.#state;
      queueMicrotask(() => listener.ended?.(error));
    }
    return () => {
      listeners.delete(listener);
      this.#all.delete(listener);
      if (listeners.size === 0) this.#listeners.delete(name);
    };
  }

  /** Stops reading the connection until each holder has released it. Whether the transport can. */
  hold(holder: object): boolean {
    if (this.#state.is !== "connected" || !this.#state.channel.transport.canPause) return false;
    this.#holds.add(holder);
    this.#state.channel.transport.pause();
    return true;
  }

  release(holder: object): void {
    if (!this.#holds.delete(holder) || this.#holds.size > 0) return;
    if (this.#state.is === "connected") this.#state.channel.transport.resume();
  }

  /** Ends the connection. The server keeps the session for its detach period. */
  async close(error: CodexError = new ConnectionLostError("the sandbox is closed")): Promise<void> {
    const state = this.#state;
    this.#end(error);
    if (state.is === "connected") {
      state.channel.fail("the sandbox was closed");
      await state.channel.transport.close();
    }
  }

  #end(error: CodexError): void {
    if (this.#state.is === "closed") return;
    this.#state = { is: "closed", error };
    this.#closing.abort(error);
    this.#wake();
    for (const listener of [...this.#all]) listener.ended?.(error);
  }

  #wake(): void {
    for (const wake of [...this.#waiting]) wake();
  }

  #up(channel: Channel): void {
    this.#holds.clear();
    this.#state = { is: "connected", channel };
    this.#wake();
    // It may have ended while the session was being opened.
    if (channel.ended) this.#dropped(channel, "the connection ended");
  }

  /** Dials and initializes. */
  async #connect(epoch: number, limit: number, signal?: AbortSignal): Promise<Channel> {
    const timeout = new AbortController();
    const late = (what: string) => new TimedOutError(`${this.dialer.endpoint}: ${what} within ${limit} ms; is it an exec-server?`);
    let timer = setTimeout(() => timeout.abort(late("no connection")), limit);
    const stop = AbortSignal.any([timeout.signal, this.#closing.signal, ...(signal ? [signal] : [])]);
    let transport: Transport | undefined;
    let channel: Channel | undefined;
    let early: (string | Uint8Array)[] = [];
    let lastHeard = Date.now();
    let broken: CodexError | undefined;
    const receive = (data: string | Uint8Array) => {
      try {
        const message = channel!.receive(data);
        if (message) this.#notified(channel!, message);
      } catch (error) {
        if (!(error instanceof ProtocolViolationError)) throw error;
        broken = error;
        channel!.fail(error.message);
        this.#broken(channel!, error);
        void transport!.close();
      }
    };
    try {
      let ended: string | undefined;
      transport = await this.dialer.dial(
        {
          message: (data) => {
            lastHeard = Date.now();
            if (broken) return;
            if (channel) receive(data);
            else early.push(data);
          },
          alive: () => (lastHeard = Date.now()),
          closed: (reason) => {
            ended = reason;
            if (channel) this.#dropped(channel, reason);
          },
        },
        stop,
      );
      clearTimeout(timer);
      timer = setTimeout(() => timeout.abort(late("no response to initialize")), limit);
      channel = new Channel(transport, epoch);
      if (ended !== undefined) channel.fail(ended);
      const waiting = early;
      early = [];
      const request = this.#request(channel, "initialize", this.#initialize, { signal: stop, timeout: 0 });
      for (const data of waiting) receive(data);
      const response = (await request) as InitializeResponse;
      this.#check(response);
      channel.notify("initialized");
      if (response.environmentInfo === undefined || response.environmentInfo === null) {
        // An older server.
        const info = this.#request(channel, "environment/info", {}, { signal: stop, timeout: 0 });
        this.info = (await info.catch((error: unknown) => {
          if (error instanceof UnsupportedError) return {};
          throw error;
        })) as EnvironmentInfo;
      } else {
        this.info = response.environmentInfo;
      }
      if (this.dialer.keepAlive) this.#keepAlive(channel, () => lastHeard);
      return channel;
    } catch (error) {
      void transport?.close();
      if (broken) throw broken;
      if (error instanceof Interrupted && channel) {
        const type = this.dialer.isCommand ? CommandEndedError : ConnectionLostError;
        throw new type(`${this.dialer.endpoint} ended the connection before the session began: ${error.message}`, { cause: error });
      }
      throw error;
    } finally {
      clearTimeout(timer);
    }
  }

  #check(response: InitializeResponse): void {
    const id = response.sessionId ?? undefined;
    if (id !== undefined && typeof id !== "string") {
      throw new ProtocolViolationError(`${this.dialer.endpoint} is not an exec-server: it sent no session`);
    }
    const wanted = this.#initialize.resumeSessionId;
    if (wanted !== undefined && wanted !== null && id !== wanted) {
      throw new ProtocolViolationError("the server started a new session instead of resuming this one");
    }
    this.id = id;
  }

  #notified(channel: Channel, message: { method: string; params: Record<string, unknown>; id?: unknown }): void {
    const { method, params, id } = message;
    if (id !== undefined) return channel.refuse(id, method);
    if (method === "session/detached") {
      this.#end(new SessionAttachedError("another client took the session over"));
      return;
    }
    for (const key of KEYS) {
      const value = params[key];
      if (value === undefined) continue;
      const listeners = this.#listeners.get(`${key}\0${value as string}`);
      if (listeners) for (const listener of [...listeners]) listener.notified?.(method, params);
    }
  }

  #broken(channel: Channel, error: CodexError): void {
    if (this.#state.is === "connected" && this.#state.channel === channel) this.#end(error);
  }

  #dropped(channel: Channel, reason: string): void {
    channel.fail(reason);
    if (this.#state.is !== "connected" || this.#state.channel !== channel) return;
    const { reconnect } = this.options;
    const over = (why: string) => this.#end(new ConnectionLostError(`the session with ${this.dialer.endpoint} is lost: ${why}`));
    if (!reconnect.enabled) return over(`${reason}, and this client does not reconnect`);
    if (!this.dialer.canResume) return over(reason);
    if (this.id === undefined) return over(`${reason}, and the server does not support resuming sessions`);
    this.#state = { is: "reconnecting" };
    this.#initialize = { ...this.#initialize, resumeSessionId: this.id };
    if (this.#initialize.attach) this.#initialize = { ...this.#initialize, attach: { ...this.#initialize.attach, take: false } };
    void this.#reconnect(channel.epoch + 1, reason, over);
  }

  async #reconnect(epoch: number, reason: string, over: (why: string) => void): Promise<void> {
    const { firstDelay, maxDelay, giveUpAfter, attemptTimeout } = this.options.reconnect;
    const began = Date.now();
    for (let attempt = 0; ; attempt++) {
      const longest = Math.min(firstDelay * 2 ** Math.min(attempt, 20), maxDelay);
      const wait = longest * (0.5 + Math.random() / 2);
      const left = giveUpAfter - (Date.now() - began);
      if (wait > left) return over(`no connection within ${giveUpAfter} ms after the last one was lost (${reason})`);
      await sleep(wait, this.#closing.signal);
      if (this.closed) return;
      try {
        const channel = await this.#connect(epoch, Math.min(attemptTimeout, Math.max(left - wait, 1)));
        if (this.closed) return void channel.transport.close();
        // Before the connection is used, so that no event of it counts as the next one while older ones are missing.
        for (const listener of [...this.#all]) listener.reconnected?.();
        this.#up(channel);
        return;
      } catch (error) {
        if (this.closed) return;
        reason = error instanceof Error ? error.message : String(error);
        if (isPermanent(error)) return over(reason);
      }
    }
  }

  /** Pings a silent connection, and ends it if nothing comes back. */
  #keepAlive(channel: Channel, lastHeard: () => number): void {
    const { keepAliveIdle: idle, keepAliveTimeout: timeout } = this.options;
    const tick = Math.max(Math.min(idle, timeout) / 2, 10);
    let pinged = 0;
    let previous = Date.now();
    const check = () => {
      if (channel.ended || this.closed) return clearInterval(timer);
      const now = Date.now();
      // A blocked event loop hears nothing: what waits in the socket comes first.
      const blocked = now - previous > tick * 2;
      previous = now;
      if (this.#holds.size > 0) {
        // Not read, so nothing is heard; but the server has to see that this client is alive.
        channel.transport.ping?.();
        pinged = 0;
        return;
      }
      if (blocked) pinged = 0;
      if (now - lastHeard() < idle) {
        pinged = 0;
      } else if (pinged === 0) {
        pinged = now;
        if (channel.transport.ping) channel.transport.ping();
        else void channel.request("environment/status", {}).response.catch(() => {});
      } else if (now - pinged >= timeout) {
        clearInterval(timer);
        const reason = `the server was silent for ${idle + timeout} ms`;
        this.#dropped(channel, reason);
        void channel.transport.close();
      }
    };
    const timer = setInterval(check, tick);
    (timer as { unref?: () => void }).unref?.();
  }
}

/** The members by which notifications find their listener. */
const KEYS = ["processId", "searchId", "watchId"];

/** Whether no later attempt can succeed. */
function isPermanent(error: unknown): boolean {
  if (error instanceof SessionAttachedError) return false;
  return (
    error instanceof TokenRefusedError || error instanceof ProtocolViolationError ||
    (error instanceof CodexError && error.code !== undefined)
  );
}

function defined<T extends object>(object: T): T {
  return Object.fromEntries(Object.entries(object).filter(([, value]) => value !== undefined)) as T;
}

function randomId(): string {
  return [...crypto.getRandomValues(new Uint8Array(6))].map((byte) => byte.toString(16).padStart(2, "0")).join("") + "-";
}

function sleep(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(done, ms);
    function done() {
      clearTimeout(timer);
      signal.removeEventListener("abort", done);
      resolve();
    }
    signal.addEventListener("abort", done, { once: true });
  });
}
