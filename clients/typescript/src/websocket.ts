/**
 * Websockets: the package `ws` in Node, which can send a token; the runtime's own elsewhere.
 *
 * Browsers cannot set the header `Authorization`, and the server refuses every request with an `Origin`. A
 * page therefore reaches a server only through a proxy of yours that authenticates the user, removes
 * `Origin` and adds the header.
 */
import { ConnectionRefusedError, ProtocolViolationError, TokenRefusedError, UnreachableError, type CodexError } from "./errors.js";
import type { Dialer, Transport, TransportEvents } from "./transport.js";

/** How to open a websocket. */
export interface WebSocketOptions {
  /** Sent as `Authorization: Bearer …`. Default `$CODEX_EXEC_SERVER_TOKEN`, where there are variables. */
  token?: string | undefined;
  /** Certificates for `wss://` in Node: those to trust besides the system's, and the client's own. In PEM. */
  tls?: { ca?: string | string[]; cert?: string; key?: string } | undefined;
  /** Opens the websocket in place of this package, for example with a subprotocol that your proxy expects. */
  webSocket?: ((url: string) => WebSocket) | undefined;
}

const MAX_MESSAGE = 80 << 20;

export class WebSocketDialer implements Dialer {
  readonly endpoint: string;
  readonly canResume = true;
  readonly keepAlive = true;
  readonly #url: string;
  readonly #options: WebSocketOptions;

  constructor(url: string, options: WebSocketOptions) {
    this.#url = url;
    this.#options = options;
    this.endpoint = url.startsWith("unix:") ? url : redact(url);
  }

  async dial(events: TransportEvents, signal: AbortSignal): Promise<Transport> {
    const { webSocket, token } = this.#options;
    if (webSocket) return this.#native(webSocket(this.#url), events, signal);
    const runtime = globalThis as { process?: { versions?: { node?: string; bun?: string; deno?: string } }; Deno?: unknown };
    const versions = runtime.process?.versions;
    if (versions?.node && !versions.bun && !runtime.Deno) return this.#node(events, signal);
    if (this.#url.startsWith("unix:")) {
      throw new UnreachableError(`cannot connect to ${this.endpoint}: only Node reaches Unix sockets; use ws:// or Sandbox.local()`);
    }
    if (token === undefined) return this.#native(new WebSocket(this.#url), events, signal);
    if (!versions?.bun && !runtime.Deno) {
      throw new TokenRefusedError(
        `cannot send a token to ${this.endpoint}: a browser's WebSocket has no headers; connect through a proxy that adds it, and pass no token`,
      );
    }
    // Bun and Deno take headers in place of the subprotocols.
    const headers = { headers: { authorization: `Bearer ${token}` } };
    const Socket = WebSocket as unknown as new (url: string, options: object) => WebSocket;
    return this.#native(new Socket(this.#url, headers), events, signal);
  }

  async #node(events: TransportEvents, signal: AbortSignal): Promise<Transport> {
    const { default: Socket } = await import("ws");
    const { token, tls } = this.#options;
    const unix = this.#url.startsWith("unix:");
    const socket = new Socket(unix ? `ws+unix:${this.#url.slice("unix:".length).replace(/^\/\//, "")}:/` : this.#url, {
      perMessageDeflate: false,
      maxPayload: MAX_MESSAGE,
      // The messages are parsed as JSON anyway.
      skipUTF8Validation: true,
      ...(token === undefined || unix ? {} : { headers: { authorization: `Bearer ${token}` } }),
      ...tls,
    });
    socket.binaryType = "nodebuffer";
    await new Promise<void>((resolve, reject) => {
      const stop = (error: unknown) => {
        socket.on("error", () => {});
        socket.terminate();
        reject(error as Error);
      };
      const aborted = () => stop(signal.reason);
      if (signal.aborted) return aborted();
      signal.addEventListener("abort", aborted, { once: true });
      socket.once("open", () => {
        signal.removeEventListener("abort", aborted);
        resolve();
      });
      socket.once("unexpected-response", (_request, response) => stop(this.#refused(response.statusCode ?? 0)));
      socket.once("error", (error) => stop(this.#failed(error)));
    });
    let reason = "the server closed the connection";
    socket.on("message", (data) => events.message(data as Uint8Array));
    socket.on("pong", () => events.alive());
    socket.on("ping", () => events.alive());
    socket.on("error", (error) => (reason = error.message));
    socket.once("close", () => events.closed(reason));
    // Output arrives in small frames. Joined by the kernel, they are fewer events.
    return {
      canPause: true,
      send: (text) => socket.readyState === socket.OPEN && socket.send(text),
      pause: () => socket.pause(),
      resume: () => socket.resume(),
      ping: () => socket.readyState === socket.OPEN && socket.ping(),
      close: () =>
        new Promise((resolve) => {
          if (socket.readyState === socket.CLOSED) return resolve();
          const timer = setTimeout(() => socket.terminate(), 1000);
          socket.once("close", () => {
            clearTimeout(timer);
            resolve();
          });
          socket.resume();
          socket.close();
        }),
    };
  }

  async #native(socket: WebSocket, events: TransportEvents, signal: AbortSignal): Promise<Transport> {
    socket.binaryType = "arraybuffer";
    await new Promise<void>((resolve, reject) => {
      const aborted = () => {
        socket.close();
        reject(signal.reason as Error);
      };
      if (signal.aborted) return aborted();
      signal.addEventListener("abort", aborted, { once: true });
      socket.onopen = () => {
        signal.removeEventListener("abort", aborted);
        resolve();
      };
      // The runtime does not say why, so that pages cannot look around in a network.
      socket.onerror = socket.onclose = () => {
        reject(
          new UnreachableError(
            `cannot open a websocket to ${this.endpoint}; check the address and the token (a browser needs a proxy that removes Origin)`,
          ),
        );
      };
    });
    socket.onmessage = ({ data }: MessageEvent<string | ArrayBuffer>) =>
      events.message(typeof data === "string" ? data : new Uint8Array(data));
    let closed: () => void;
    const ended = new Promise<void>((resolve) => (closed = resolve));
    socket.onerror = null;
    socket.onclose = ({ reason }) => {
      closed();
      events.closed(reason || "the server closed the connection");
    };
    return {
      canPause: false,
      send: (text) => socket.readyState === WebSocket.OPEN && socket.send(text),
      pause: () => {},
      resume: () => {},
      close: () => {
        socket.close();
        return Promise.race([ended, new Promise<void>((resolve) => setTimeout(resolve, 1000))]);
      },
    };
  }

  #refused(status: number): CodexError {
    if (status === 401 || status === 403) {
      return new TokenRefusedError(`${this.endpoint} refused the token or requires one (HTTP ${status}); pass the option token`);
    }
    if (status === 503) return new UnreachableError(`${this.endpoint} has too many connections (HTTP 503); try again later`);
    return new ProtocolViolationError(`${this.endpoint} is not an exec-server: it answered the upgrade with HTTP ${status}`);
  }

  #failed(error: Error & { code?: string }): CodexError {
    const message = `cannot connect to ${this.endpoint}: ${error.message || error.code}`;
    if (error.code === "ECONNREFUSED" || error.code === "ENOENT") {
      return new ConnectionRefusedError(`${message}; is the server running?`, { cause: error });
    }
    const notHttp = error.code?.startsWith("HPE_") || /Sec-WebSocket|Upgrade header|Parse Error/.test(error.message);
    if (notHttp) return new ProtocolViolationError(`${message}; is it an exec-server?`, { cause: error });
    return new UnreachableError(message, { cause: error });
  }
}

/** The URL without user, password, query and fragment, which may be secrets. */
export function redact(url: string): string {
  try {
    const parsed = new URL(url);
    return `${parsed.protocol}//${parsed.host}${parsed.pathname === "/" ? "" : parsed.pathname}`;
  } catch {
    return url.replace(/[?#].*$/s, "");
  }
}
