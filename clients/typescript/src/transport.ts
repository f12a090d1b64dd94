/** What carries messages: a websocket, or the stdin and stdout of a command. */

/** An open connection. Messages are JSON texts. */
export interface Transport {
  /** Queues a message. Does nothing once the connection has ended. */
  send(text: string): void;
  /** Stops reading, if the transport can; messages then wait in the kernel and at the server. */
  pause(): void;
  /** Reads again. */
  resume(): void;
  /** Whether {@link pause} has an effect. */
  readonly canPause: boolean;
  /** Sends a ping, whose reply calls `alive`; absent if the transport has none. */
  ping?(): void;
  /** Ends the connection; resolves once the peer can see that. */
  close(): Promise<void>;
}

/** What a connection reports. `closed` comes once, last. */
export interface TransportEvents {
  /** A message: bytes where the transport has them, which saves decoding output twice. */
  message(data: string | Uint8Array): void;
  /** The peer sent something, if only a pong. */
  alive(): void;
  /** The connection has ended. */
  closed(reason: string): void;
}

/** Opens connections to one server. Implement it for a transport of your own. */
export interface Dialer {
  /** The server's address for errors; never has a secret. */
  readonly endpoint: string;
  /** Whether the server keeps a session without a connection, so that the client can resume it. */
  readonly canResume: boolean;
  /** Whether silence means that the connection is dead. */
  readonly keepAlive: boolean;
  /** Whether the connection is a command, whose end before the session begins has a kind of its own. */
  readonly isCommand?: boolean;
  /** Opens a connection. Rejects with a `CodexError`. */
  dial(events: TransportEvents, signal: AbortSignal): Promise<Transport>;
}
