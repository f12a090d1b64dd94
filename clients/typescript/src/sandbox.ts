/** A sandbox: a session with a server, a policy, and a directory. */
import { toBytes } from "./base64.js";
import { loadDetached, removeDetached, saveDetached } from "./detached.js";
import { CodexError, InvalidParamsError, ProcessExistsError, UnsupportedError } from "./errors.js";
import { Files, type Content, type RemotePath } from "./files.js";
import type { EnvironmentInfo, EnvPolicy, ExecParams, ExecResponse, Methods, ProcessInfo, ResourceLimits, Retain, SandboxContext, SessionInfo } from "./models.js";
import { applyPatch, type PatchChange } from "./patch.js";
import { toUri } from "./paths.js";
import { sandboxContext, type Policy } from "./policy.js";
import { Process, type DetachedProcess, type DetachOptions, type ProcessHost } from "./process.js";
import { Collector, CommandFailedError, RunResult } from "./run.js";
import { Session, type SessionOptions } from "./session.js";
import { StdioDialer } from "./stdio.js";
import { download, upload, type TransferOptions, type TransferReport } from "./transfer.js";
import type { Dialer } from "./transport.js";
import { redact, WebSocketDialer, type WebSocketOptions } from "./websocket.js";

/** How to reach an environment behind a rendezvous: through the installed `codex`. */
export interface BridgeOptions {
  /** The program here. Default `codex`. It signs in as it does for `codex run --on env:ID`. */
  codex?: string;
  /** The program on the environment's machine. Default `codex`. */
  remoteCodex?: string;
  /** The registry. Default `$CODEX_REGISTRY_URL`. */
  registry?: string;
}

/** Options of a sandbox. */
export interface SandboxOptions extends SessionOptions, WebSocketOptions {
  /** What commands and file requests may do. Default: what the server's user can do. */
  policy?: Policy;
  /** The directory for commands and relative paths. Default: the server's own. */
  cwd?: string;
  /** For `env:ID`. */
  bridge?: BridgeOptions;
  /** Output of one process that waits for its consumer here, in bytes. Default 8 MiB. */
  window?: number;
  /** The same with servers that do not retain output until it is read; then the connection waits. Default 64 MiB. */
  spillLimit?: number;
  /** Stops connecting. */
  signal?: AbortSignal;
}

/** Options of `Sandbox.local`. */
export interface LocalOptions extends Omit<SandboxOptions, "bridge" | keyof WebSocketOptions> {
  /** The program. Default `codex`. */
  codex?: string;
  /** Further arguments of `codex exec-server`, such as `--read-only`. */
  args?: string[];
  /** Variables of the server, besides this process's own. */
  serverEnv?: Record<string, string | undefined>;
}

/** A command: a list of arguments, or a script for `/bin/sh -c`. */
export type Command = string | readonly string[];

/** Options of a command. */
export interface StartOptions {
  /** Default: the sandbox's directory. */
  cwd?: string;
  /** Variables besides those of `envPolicy`. */
  env?: Record<string, string>;
  /** What of the server's environment it inherits. Default: all, except what looks like a secret. `null`: nothing. */
  envPolicy?: Partial<EnvPolicy> | null;
  /** Run it in a terminal, of this size if given. */
  pty?: boolean | { rows: number; cols: number };
  /** Keep stdin open for `write`. A terminal always does. */
  stdin?: boolean;
  /** In place of the sandbox's policy. */
  policy?: Policy;
  /** Limits, enforced by the server: `{ memoryBytes, wallMs, pids, … }`. */
  limits?: ResourceLimits;
  /** How much output the server retains. Default: 8 MiB, and the process waits. */
  retain?: { bytes: number; onFull: "wait" | "drop" };
  /** Its id in the session. Default: a new one. */
  processId?: string;
  /** What the program sees as its name. */
  arg0?: string;
  /** Gives up starting it; a process that has started nevertheless is killed. */
  signal?: AbortSignal | undefined;
}

/** Options of `Sandbox.run`. */
export interface RunOptions extends Omit<StartOptions, "stdin"> {
  /** Kill it after this many milliseconds; the result has what it wrote until then. */
  timeout?: number;
  /** What goes to stdin, which is then closed. */
  input?: Content;
  onStdout?: (text: string) => void;
  onStderr?: (text: string) => void;
  /** Throw `CommandFailedError` unless it exits with 0. */
  check?: boolean;
  /** What happens to the command when `signal` aborts: `kill` (default), or `detach` leaves it running. */
  onAbort?: "kill" | "detach";
}

/** How long `run` waits for the end of a command that it has killed, and `close` for the answers, in milliseconds. */
const KILL_GRACE = 5000;
const RETAIN = 8 << 20;
const DETACH_TTL = 24 * 3600 * 1000;

export class Sandbox {
  /** Files on the server. */
  readonly files: Files;
  readonly #session: Session;
  readonly #options: SandboxOptions;
  readonly #url: string;
  readonly #cwd: string | undefined;
  readonly #processes = new Map<string, Process>();
  readonly #kept = new Set<string>();
  readonly #host: ProcessHost;
  #background = new Set<Promise<unknown>>();

  private constructor(session: Session, url: string, options: SandboxOptions) {
    this.#session = session;
    this.#options = options;
    this.#url = url;
    const home = session.info.cwd ?? undefined;
    this.#cwd = options.cwd === undefined ? home : toUri(options.cwd, home);
    this.files = new Files(session, this.#cwd, this.#policy(options.policy));
    this.#host = {
      session,
      detach: (process, name, how) => this.#detach(process, name, how),
      forget: (process) => void this.#processes.delete(process.id),
    };
  }

  /**
   * Connects to a server: `ws://HOST:PORT`, `wss://HOST`, `unix:PATH`, `env:ID` (through the installed
   * `codex`), `stdio:COMMAND`, or a dialer of your own. One attempt; later drops are survived.
   */
  static async connect(to: string | Dialer, options: SandboxOptions = {}): Promise<Sandbox> {
    const [dialer, url] = typeof to === "string" ? [dialerOf(to, options), to] : [to, to.endpoint];
    return new Sandbox(await Session.open(dialer, sessionOptions(options), options.signal), url, options);
  }

  /** Starts the installed `codex` on this machine and talks to it over stdio; it ends with the sandbox. */
  static async local(options: LocalOptions = {}): Promise<Sandbox> {
    const { codex = "codex", args = [], serverEnv } = options;
    const dialer = new StdioDialer([codex, "exec-server", "--listen", "stdio", ...args], serverEnv);
    return new Sandbox(await Session.open(dialer, sessionOptions(options), options.signal), "local", options);
  }

  /** Reattaches to a detached process, by its name or by what `detach` returned. Close its `sandbox` in the end. */
  static async attach(detached: string | DetachedProcess, options: SandboxOptions = {}): Promise<{ sandbox: Sandbox; process: Process }> {
    const found = typeof detached === "string" ? await loadDetached(detached) : detached;
    const resume = { resumeSessionId: found.sessionId };
    const session = await Session.open(dialerOf(found.url, options), sessionOptions(options), options.signal, resume);
    const sandbox = new Sandbox(session, found.url, options);
    const process = sandbox.process(found.processId, { afterSeq: found.afterSeq, tty: found.tty });
    // A client that only looks on must not kill it when it closes.
    sandbox.#kept.add(process.id);
    if (found.name !== undefined) {
      const name = found.name;
      void process.wait().then(() => removeDetached(name)).catch(() => {});
    }
    return { sandbox, process };
  }

  /** What the server is and can do. */
  get info(): Partial<EnvironmentInfo> {
    return this.#session.info;
  }

  /** The id of the session, if the server has sessions. */
  get sessionId(): string | undefined {
    return this.#session.id;
  }

  /** Whether the sandbox is closed, by `close` or because the session was lost. */
  get closed(): boolean {
    return this.#session.closed;
  }

  /** Starts a command. Iterate over the result for its events. */
  async start(command: Command, options: StartOptions = {}): Promise<Process> {
    return this.#start(command, options);
  }

  /** Runs a command to its end. */
  async run(command: Command, options: RunOptions = {}): Promise<RunResult> {
    const { timeout, input, check = false, onAbort = "kill", signal } = options;
    // Otherwise a program that reads to the end of its input would never end.
    if (input !== undefined && !options.pty) this.#session.require("processCloseStdin", "close a process's stdin, which input needs");
    const collector = new Collector(options.onStdout, options.onStderr);
    const process = await this.#start(command, { ...options, stdin: input !== undefined });
    const deadline = new AbortController();
    const timer = timeout === undefined ? undefined : setTimeout(() => deadline.abort(TIMED_OUT), Math.min(timeout, 0x7fffffff));
    const stop = signal ? AbortSignal.any([signal, deadline.signal]) : deadline.signal;
    let lost = false;
    const consume = async (until: AbortSignal) => {
      for await (const event of process.events({ signal: until })) {
        if (event.type === "output") collector.add(event.stream, event.data);
        else if (event.type === "lost") lost = true;
      }
    };
    let feedFailed: unknown;
    const feeding = input === undefined ? undefined : feed(process, input, stop).catch((error: unknown) => (feedFailed = error));
    let timedOut = false;
    try {
      await consume(stop);
    } catch (error) {
      if (signal?.aborted) {
        if (onAbort === "kill") this.#kill(process);
        else this.#kept.add(process.id);
        throw error;
      }
      if (!deadline.signal.aborted) {
        if (process.running) this.#kill(process);
        throw error;
      }
      timedOut = true;
      // What it wrote before it died is still to come; but not for ever, should the connection be down.
      this.#kill(process);
      const grace = AbortSignal.timeout(KILL_GRACE);
      await consume(signal ? AbortSignal.any([grace, signal]) : grace).catch((late: unknown) => {
        if (signal?.aborted) throw late;
      });
    } finally {
      clearTimeout(timer);
    }
    collector.end();
    // A program may exit without reading its input; that is its own affair. What this client could not do is not.
    if (feeding && !timedOut) await Promise.race([feeding, Promise.resolve()]);
    if (feedFailed instanceof UnsupportedError || (feedFailed !== undefined && !(feedFailed instanceof CodexError) && !stop.aborted)) throw feedFailed;
    const result = new RunResult(process.exit, collector.chunks, timedOut, lost);
    if (check && (timedOut || result.exitCode !== 0)) throw new CommandFailedError(typeof command === "string" ? command : command.join(" "), result);
    return result;
  }

  /** A process of this session, by its id: one that this client started, or one that it found with `processes`. */
  process(id: string, options: { afterSeq?: number; tty?: boolean } = {}): Process {
    const known = this.#processes.get(id);
    if (known) return known;
    const { afterSeq = 0, tty = false } = options;
    return this.#track(id, tty, this.#session.capabilities.processRetainUntilRead === true, { after: afterSeq, resync: true });
  }

  /** The processes of this session. */
  async processes(options: { signal?: AbortSignal } = {}): Promise<ProcessInfo[]> {
    this.#session.require("processList", "list processes");
    return (await this.#session.call<{ processes: ProcessInfo[] }>("process/list", {}, { ...options, repeat: true })).processes;
  }

  /** The sessions of this client's principal that have processes. */
  async sessions(options: { signal?: AbortSignal } = {}): Promise<SessionInfo[]> {
    this.#session.require("sessionSharing", "list sessions");
    return (await this.#session.call<{ sessions: SessionInfo[] }>("session/list", {}, { ...options, repeat: true })).sessions;
  }

  /** Copies a local file or tree to the server. Survives dropped connections where the server keeps handles. */
  upload(local: string, remote: RemotePath, options: TransferOptions = {}): Promise<TransferReport> {
    const can = this.#session.capabilities;
    return upload(this.files, local, remote, can.fsAtomicWrite === true, can.fsRenameLinkMode === true, options);
  }

  /** Copies a file or tree from the server to this machine. */
  download(remote: RemotePath, local: string, options: TransferOptions = {}): Promise<TransferReport> {
    return download(this.files, remote, local, options);
  }

  /** Applies a patch (`*** Begin Patch` …) once all of it fits. Returns the changed files. */
  applyPatch(text: string, options: { signal?: AbortSignal } = {}): Promise<PatchChange[]> {
    return applyPatch(this.files, text, this.#session.capabilities.fsAtomicWrite === true, options);
  }

  /** Calls any method of the protocol. With `repeat` it is sent again if the connection is lost before the response. */
  call<Method extends keyof Methods>(
    method: Method,
    params: Methods[Method]["params"],
    options: { signal?: AbortSignal; repeat?: boolean } = {},
  ): Promise<Methods[Method]["result"]> {
    return this.#session.call(method, params, options);
  }

  /** Kills the processes that were not detached, and closes the connection. */
  async close(): Promise<void> {
    if (!this.#session.closed) {
      for (const process of [...this.#processes.values()]) if (!this.#kept.has(process.id)) this.#kill(process);
      const answers = Promise.allSettled([...this.#background]);
      let timer: ReturnType<typeof setTimeout> | undefined;
      await Promise.race([answers, new Promise((resolve) => (timer = setTimeout(resolve, KILL_GRACE)))]);
      clearTimeout(timer);
    }
    await this.#session.close();
  }

  [Symbol.asyncDispose](): Promise<void> {
    return this.close();
  }

  #policy(policy: Policy | undefined, cwd = this.#cwd): SandboxContext | undefined {
    return sandboxContext(policy, cwd);
  }

  async #start(command: Command, options: StartOptions): Promise<Process> {
    const { signal } = options;
    signal?.throwIfAborted();
    const argv = typeof command === "string" ? ["/bin/sh", "-c", command] : [...command];
    const cwd = options.cwd === undefined ? this.#cwd : toUri(options.cwd, this.#cwd);
    if (cwd === undefined) throw new InvalidParamsError("the server names no working directory; pass the option cwd");
    const can = this.#session.capabilities;
    const id = options.processId ?? this.#session.freshId("p");
    const tty = options.pty !== undefined && options.pty !== false;
    const size = typeof options.pty === "object" ? options.pty : undefined;
    if (size) this.#session.require("processResize", "set the size of a terminal");
    if (options.limits) this.#session.require("processLimits", "limit a process");
    if (options.retain) this.#session.require("processRetain", "retain a given amount of output");
    const wait = (options.retain?.onFull ?? "wait") === "wait";
    const untilRead = wait && can.processRetainUntilRead === true;
    const retain: Retain | undefined = untilRead
      ? { bytes: options.retain?.bytes ?? RETAIN, onFull: "wait", until: "read" }
      : options.retain;
    const envPolicy: EnvPolicy = { inherit: "all", ignoreDefaultExcludes: false, exclude: [], set: {}, includeOnly: [], ...options.envPolicy };
    const sandbox = "policy" in options ? this.#policy(options.policy, cwd) : this.#policy(this.#options.policy, this.#cwd);
    const params: ExecParams = {
      processId: id,
      argv,
      cwd,
      env: options.env ?? {},
      ...(options.envPolicy === null ? {} : { envPolicy }),
      tty,
      pipeStdin: options.stdin === true,
      ...(options.arg0 === undefined ? {} : { arg0: options.arg0 }),
      ...(sandbox ? { sandbox } : {}),
      ...(size ? { size } : {}),
      ...(retain ? { retain } : {}),
      ...(options.limits ? { limits: options.limits } : {}),
    };
    if (this.#processes.has(id)) throw new ProcessExistsError(`the session has a process of the id ${id}`);
    // Before the request, so that no event is missed.
    const process = this.#track(id, tty, untilRead, {});
    try {
      const response = await this.#call(params, signal);
      process.sandboxType = response.sandboxType ?? undefined;
      process.sandboxAssurance = response.sandboxAssurance ?? undefined;
      return process;
    } catch (error) {
      // It may start, or have started. Requests that name one process take effect in order.
      if (signal?.aborted) this.#kill(process);
      process.fail(error instanceof CodexError ? error : new CodexError("not started", { cause: error }));
      throw error;
    }
  }

  async #call(params: ExecParams, signal: AbortSignal | undefined): Promise<ExecResponse> {
    let repeated = false;
    for (;;) {
      const channel = await this.#session.channel(signal);
      try {
        return await this.#session.call<ExecResponse>("process/start", params, { signal, on: channel });
      } catch (error) {
        // The first request had its effect, and only its response was lost: no other client uses this id.
        if (repeated && error instanceof ProcessExistsError) return { processId: params.processId } as ExecResponse;
        if (!channel.ended || signal?.aborted) throw error;
        repeated = true;
      }
    }
  }

  #track(id: string, tty: boolean, untilRead: boolean, from: { after?: number; resync?: boolean }): Process {
    const { window = 8 << 20, spillLimit = 64 << 20 } = this.#options;
    const process = new Process(this.#host, { id, tty, untilRead, window, spillLimit, ...from });
    this.#processes.set(id, process);
    return process;
  }

  /** Kills a process without waiting for it. */
  #kill(process: Process): void {
    if (this.#session.closed) return;
    const killing: Promise<unknown> = process.terminate().catch(() => {}).finally(() => this.#background.delete(killing));
    this.#background.add(killing);
  }

  async #detach(process: Process, name: string | undefined, options: DetachOptions): Promise<DetachedProcess> {
    const { sessionId } = this;
    if (!this.#session.dialer.canResume || sessionId === undefined) {
      throw new UnsupportedError(`cannot detach from ${this.#session.dialer.endpoint}: its session ends with the connection; connect to ws:// or unix:`);
    }
    const { ttl = DETACH_TTL, signal } = options;
    // The period is given to initialize; a guest of the session can do that while this connection goes on.
    if (this.#session.capabilities.sessionSharing === true && this.#session.capabilities.sessionDetachTtl === true) {
      const guest = await Session.open(this.#session.dialer, { ...sessionOptions(this.#options), detachTtl: ttl }, signal, {
        resumeSessionId: sessionId,
        attach: { role: "control" },
      });
      await guest.close();
    } else if (options.ttl !== undefined) {
      this.#session.require("sessionSharing", "change how long it keeps a session");
    }
    const url = this.#url.startsWith("ws") ? redact(this.#url) : this.#url;
    const detached = { url, sessionId, processId: process.id, tty: process.tty, afterSeq: process.taken };
    if (name !== undefined) await saveDetached(name, detached);
    this.#kept.add(process.id);
    return name === undefined ? detached : { ...detached, name };
  }
}

const TIMED_OUT = Symbol("timed out");

async function feed(process: Process, input: Content, signal: AbortSignal): Promise<void> {
  if (typeof input === "string" || input instanceof Uint8Array || input instanceof ArrayBuffer) {
    await process.write(toBytes(input), { signal });
  } else {
    const stream = input instanceof Blob ? input.stream() : input;
    for await (const chunk of stream as AsyncIterable<Uint8Array>) await process.write(chunk, { signal });
  }
  await process.closeStdin({ signal });
}

function sessionOptions(options: SessionOptions): SessionOptions {
  const { clientName, connectTimeout, requestTimeout, reconnect, detachTtl, keepAliveIdle, keepAliveTimeout } = options;
  return { clientName, connectTimeout, requestTimeout, reconnect, detachTtl, keepAliveIdle, keepAliveTimeout } as SessionOptions;
}

function dialerOf(url: string, options: SandboxOptions): Dialer {
  if (/^wss?:\/\//.test(url) || url.startsWith("unix:")) {
    const env = (globalThis as { process?: { env?: Record<string, string | undefined> } }).process?.env;
    const token = options.token ?? env?.["CODEX_EXEC_SERVER_TOKEN"];
    return new WebSocketDialer(url, { token, tls: options.tls, webSocket: options.webSocket });
  }
  if (url.startsWith("env:") && url.length > "env:".length) {
    const { codex = "codex", remoteCodex = "codex", registry } = options.bridge ?? {};
    const where = ["--on", url, ...(registry === undefined ? [] : ["--registry", registry])];
    return new StdioDialer([codex, "run", ...where, "--", remoteCodex, "exec-server", "--listen", "stdio"]);
  }
  if (url.startsWith("stdio:")) {
    const argv = url.slice("stdio:".length).trim().split(/\s+/);
    if (argv[0]) return new StdioDialer(argv);
  }
  throw new InvalidParamsError(`invalid server ${JSON.stringify(redact(url))}: expected ws://HOST:PORT, wss://HOST, unix:PATH, env:ID or stdio:COMMAND`);
}
