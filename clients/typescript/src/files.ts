/** Files on the server. Paths: see `paths.ts`. */
import { concat, decodeBase64, encodeBase64, toBytes } from "./base64.js";
import { Interrupted, type Channel } from "./channel.js";
import { ConnectionLostError, PathNotFoundError, TooLargeError, UnsupportedError } from "./errors.js";
import type {
  Capabilities, FsChange, FsGetMetadataResponse, FsGlobResponse, FsPathError, FsReadDirectoryResponse, FsSearchFile, FsSearchLine,
  FsSearchParams, FsSearchResponse, FsWalkResponse, SandboxContext,
} from "./models.js";
import { joinUri, toPath, toUri, uriBytes } from "./paths.js";
import type { Session } from "./session.js";

/** A path on the server: absolute, relative to the sandbox's directory, a `file:` URI, or bytes. */
export type RemotePath = string | Uint8Array;
/** What can be written to a file. */
export type Content = string | Uint8Array | ArrayBuffer | Blob | ReadableStream<Uint8Array> | AsyncIterable<Uint8Array>;

export interface Abortable {
  /** Stops waiting; a request that was sent may still have its effect. */
  signal?: AbortSignal | undefined;
}

export interface WriteOptions extends Abortable {
  /** Readers see the old file or the new one. Default: true for more than one request, where the server can. */
  atomic?: boolean;
  /** Permission bits of a file that is created. */
  mode?: number;
  /** Create missing directories above. Default false. */
  parents?: boolean;
}

/** An entry of a directory or a tree. */
export interface Entry {
  /** The name, with U+FFFD for bytes that are not UTF-8. */
  name: string;
  /** The path, to be passed back: native, or a `file:` URI if it is not UTF-8. */
  path: string;
  /** The exact path as a `file:` URI. */
  uri: string;
  isDirectory: boolean;
  isFile: boolean;
}

/** The metadata of a path. */
export type Stat = FsGetMetadataResponse;

export interface SearchOptions extends Abortable, Partial<Omit<FsSearchParams, "path" | "pattern" | "sandbox" | "searchId">> {
  /** Where to search. Default: the sandbox's directory. */
  path?: RemotePath;
}

/** A line that matched, or one around it. */
export interface SearchMatch extends FsSearchLine {
  /** The file, to be passed back. */
  path: string;
}

export interface WatchOptions extends Abortable {
  /** Everything below, too. Default true. */
  recursive?: boolean;
  /** How long the server collects changes, in milliseconds. Default 100. */
  debounceMs?: number;
}

/** A change, or the notice that some were missed (`overflow`: read the whole tree again). */
export type WatchEvent = { type: "changed"; path: string; kind: FsChange["kind"] } | { type: "overflow" };

export interface WalkOptions extends Abortable {
  /** Levels below the root whose directories are still read. Default 64, the most. */
  maxDepth?: number;
  /** Default 10,000, the most. */
  maxDirectories?: number;
  /** Default 50,000, the most. */
  maxEntries?: number;
  followDirectorySymlinks?: boolean;
  pruneHiddenDirectories?: boolean;
}

/** A tree: what is in it, what could not be read, and whether a limit left something out. */
export interface Tree {
  entries: Entry[];
  errors: FsPathError[];
  truncated: boolean;
}

/** The size of a block, and how many are in flight. */
const BLOCK = 256 << 10;
const IN_FLIGHT = 8;
/** The largest file of one request. */
const WHOLE_FILE = 16 << 20;
const SMALLEST_BLOCK = 4 << 10;

export class Files {
  readonly #session: Session;
  readonly #base: string | undefined;
  readonly #sandbox: SandboxContext | undefined;

  /** @internal */
  constructor(session: Session, base: string | undefined, sandbox: SandboxContext | undefined) {
    this.#session = session;
    this.#base = base;
    this.#sandbox = sandbox;
  }

  /** The `file:` URI of a path. */
  uri(path: RemotePath): string {
    return toUri(path, this.#base);
  }

  /** Reads a whole file. */
  async read(path: RemotePath, options: Abortable = {}): Promise<Uint8Array> {
    const chunks: Uint8Array[] = [];
    for await (const chunk of this.#blocks(this.uri(path), options.signal)) chunks.push(chunk);
    return concat(chunks);
  }

  /** Reads a whole file as UTF-8. */
  async readText(path: RemotePath, options: Abortable = {}): Promise<string> {
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(await this.read(path, options));
  }

  /** Reads a file as a stream. After a dropped connection it goes on at the same place, if it is still the same file. */
  stream(path: RemotePath, options: Abortable = {}): ReadableStream<Uint8Array> {
    const blocks = this.#blocks(this.uri(path), options.signal);
    return new ReadableStream<Uint8Array>(
      {
        pull: async (controller) => {
          const { value, done } = await blocks.next();
          if (done) controller.close();
          else controller.enqueue(value);
        },
        cancel: async () => void (await blocks.return()),
      },
      { highWaterMark: 0 },
    );
  }

  /** Writes a file: creates it, or replaces its content. */
  async write(path: RemotePath, content: Content, options: WriteOptions = {}): Promise<void> {
    const uri = this.uri(path);
    if (options.parents) await this.makeDirectory(joinUri(uri, ".."), options);
    const bytes =
      typeof content === "string" || content instanceof Uint8Array || content instanceof ArrayBuffer ? toBytes(content) : undefined;
    if (bytes && bytes.length <= BLOCK) return this.#writeWhole(uri, bytes, options);
    const source = bytes ? [bytes] : content instanceof Blob ? content.stream() : (content as AsyncIterable<Uint8Array>);
    await this.#writeBlocks(uri, iterate(source), options);
  }

  /** Lists a directory, sorted by name. Links are described by their targets. */
  async list(path: RemotePath = ".", options: Abortable = {}): Promise<Entry[]> {
    const uri = this.uri(path);
    const { entries } = await this.#call<FsReadDirectoryResponse>("fs/readDirectory", { path: uri }, options, true);
    return entries.map(({ fileName, fileNameUri, isDirectory, isFile }) => {
      const entry = fileNameUri ?? joinUri(uri, fileName);
      return { name: fileName, uri: entry, path: toPath(entry), isDirectory, isFile };
    });
  }

  /** The metadata of a path: of the target, if it is a link. */
  stat(path: RemotePath, options: Abortable & { followSymlinks?: boolean } = {}): Promise<Stat> {
    const { followSymlinks } = options;
    const params = { path: this.uri(path), ...(followSymlinks === undefined ? {} : { followSymlinks }) };
    return this.#call("fs/getMetadata", params, options, true);
  }

  /** Whether the path exists. */
  async exists(path: RemotePath, options: Abortable = {}): Promise<boolean> {
    try {
      await this.stat(path, options);
      return true;
    } catch (error) {
      if (error instanceof PathNotFoundError) return false;
      throw error;
    }
  }

  /** Removes a file, or a tree. By default a missing path is not an error. */
  async remove(path: RemotePath, options: Abortable & { recursive?: boolean; force?: boolean } = {}): Promise<void> {
    const { recursive = true, force = true } = options;
    // Repeated, it would miss what it has removed itself.
    await this.#call("fs/remove", { path: this.uri(path), recursive, force }, options, force);
  }

  /** Makes a directory and, by default, those above; then it may exist. */
  async makeDirectory(path: RemotePath, options: Abortable & { recursive?: boolean } = {}): Promise<void> {
    const { recursive = true } = options;
    await this.#call("fs/createDirectory", { path: this.uri(path), recursive }, options, recursive);
  }

  /** Copies a file, a link or, with `recursive`, a tree. */
  async copy(from: RemotePath, to: RemotePath, options: Abortable & { recursive?: boolean } = {}): Promise<void> {
    const { recursive = false } = options;
    await this.#call("fs/copy", { sourcePath: this.uri(from), destinationPath: this.uri(to), recursive }, options, true);
  }

  /** Renames within one file system. */
  async rename(from: RemotePath, to: RemotePath, options: Abortable & { overwrite?: boolean } = {}): Promise<void> {
    this.#session.require("fsRenameLinkMode", "rename files");
    const { overwrite = true } = options;
    await this.#call("fs/rename", { sourcePath: this.uri(from), destinationPath: this.uri(to), overwrite }, options, false);
  }

  /** Makes a symbolic link; `target` is kept as it is. */
  async symlink(path: RemotePath, target: string, options: Abortable = {}): Promise<void> {
    this.#session.require("fsRenameLinkMode", "make links");
    await this.#call("fs/symlink", { path: this.uri(path), target }, options, false);
  }

  /** Sets permission bits. */
  async setMode(path: RemotePath, mode: number, options: Abortable = {}): Promise<void> {
    this.#session.require("fsRenameLinkMode", "set permission bits");
    await this.#call("fs/setMode", { path: this.uri(path), mode }, options, true);
  }

  /** The path with every link resolved. */
  async canonicalize(path: RemotePath, options: Abortable = {}): Promise<string> {
    const { path: real } = await this.#call<{ path: string }>("fs/canonicalize", { path: this.uri(path) }, options, true);
    return toPath(real);
  }

  /** Lists a tree, breadth-first, without its root. Names that are not UTF-8 are in `errors`. */
  async walk(path: RemotePath = ".", options: WalkOptions = {}): Promise<Tree> {
    const {
      signal, maxDepth = 64, maxDirectories = 10_000, maxEntries = 50_000, followDirectorySymlinks = false, pruneHiddenDirectories = false,
    } = options;
    const walk = { maxDepth, maxDirectories, maxEntries, followDirectorySymlinks, pruneHiddenDirectories };
    const tree = await this.#call<FsWalkResponse>("fs/walk", { path: this.uri(path), options: walk }, { signal }, true);
    return { ...tree, errors: tree.errors ?? [], entries: tree.entries.map(walkEntry) };
  }

  /** Finds names below a directory by git-style patterns. */
  async glob(
    patterns: string | string[],
    options: Abortable & { path?: RemotePath; exclude?: string[]; hidden?: boolean; respectGitignore?: boolean; directories?: boolean; maxResults?: number } = {},
  ): Promise<Tree> {
    this.#session.require("fsGlob", "find files by pattern");
    const { signal, path = ".", ...rest } = options;
    const params = { path: this.uri(path), patterns: [patterns].flat(), ...rest };
    const tree = await this.#call<FsGlobResponse>("fs/glob", params, { signal }, true);
    return { ...tree, errors: tree.errors ?? [], entries: tree.entries.map(walkEntry) };
  }

  /** Searches file contents for a regular expression (or text, with `literal`). Matches come as they are found, at most `maxMatches` (1,000). */
  async *search(pattern: string, options: SearchOptions = {}): AsyncGenerator<SearchMatch, FsSearchResponse, undefined> {
    this.#session.require("fsSearch", "search files");
    const { signal, path = ".", ...rest } = options;
    const searchId = this.#session.freshId("s");
    const found: FsSearchFile[] = [];
    let wake = () => {};
    const unlisten = this.#session.listen("searchId", searchId, {
      notified: (method, { files }) => {
        if (method !== "fs/search/matches") return;
        // Bounded by `maxMatches`.
        found.push(...(files as FsSearchFile[]));
        wake();
      },
    });
    let finished = false;
    try {
      const params = { searchId, path: this.uri(path), pattern, ...rest };
      // A search is not repeated: matches that were taken would come again.
      const response = this.#call<FsSearchResponse>("fs/search", params, { signal }, false, 0).finally(() => {
        finished = true;
        wake();
      });
      response.catch(() => {});
      for (;;) {
        for (let file = found.shift(); file; file = found.shift()) {
          for (const line of file.lines) yield { ...line, path: toPath(file.path) };
        }
        if (finished) return await response;
        await new Promise<void>((resolve) => (wake = resolve));
      }
    } finally {
      unlisten();
      if (!finished) this.#session.call("fs/cancelSearch", { searchId }, { repeat: false }).catch(() => {});
    }
  }

  /** Reports changes until the signal aborts or the loop ends. It begins with the first `next()`; after a dropped connection it reports `overflow`. */
  async *watch(path: RemotePath, options: WatchOptions = {}): AsyncGenerator<WatchEvent, void, undefined> {
    this.#session.require("fsWatch", "watch files");
    const { signal, recursive = true, debounceMs } = options;
    const watchId = (Files.#watches = (Files.#watches + 1) % 0x7fffffff);
    const queue: WatchEvent[] = [];
    let failure: unknown;
    let over = false;
    let wake = () => {};
    const overflow = () => {
      queue.length = 0;
      queue.push({ type: "overflow" });
      wake();
    };
    const params = { watchId, path: this.uri(path), recursive, ...(debounceMs === undefined ? {} : { debounceMs }) };
    const begin = () => this.#call("fs/watch", params, { signal }, true);
    const fail = (error: unknown) => {
      failure = error;
      over = true;
      wake();
    };
    const unlisten = this.#session.listen("watchId", watchId, {
      notified: (method, { changes, overflow: missed, ended }) => {
        if (method !== "fs/changed") return;
        if (missed || queue.length > 10_000) overflow();
        else for (const { path: changed, kind } of changes as FsChange[]) queue.push({ type: "changed", path: toPath(changed), kind });
        if (ended) over = true;
        wake();
      },
      reconnected: () => queueMicrotask(() => begin().then(overflow, fail)),
      ended: fail,
    });
    const aborted = () => fail(signal!.reason);
    signal?.addEventListener("abort", aborted, { once: true });
    try {
      await begin();
      for (;;) {
        for (let event = queue.shift(); event; event = queue.shift()) yield event;
        if (failure !== undefined) throw failure;
        if (over) return;
        await new Promise<void>((resolve) => (wake = resolve));
      }
    } finally {
      signal?.removeEventListener("abort", aborted);
      unlisten();
      if (!this.#session.closed) this.#session.call("fs/unwatch", { watchId }, { repeat: true }).catch(() => {});
    }
  }

  static #watches = 0;

  #call<Result>(method: string, params: object, options: Abortable, repeat: boolean, timeout?: number): Promise<Result> {
    const sandboxed = this.#sandbox ? { ...params, sandbox: this.#sandbox } : params;
    return this.#session.call<Result>(method, sandboxed, { signal: options.signal, repeat, ...(timeout === undefined ? {} : { timeout }) });
  }

  #can(name: keyof Capabilities): boolean {
    return this.#session.capabilities[name] === true;
  }

  async *#blocks(uri: string, signal?: AbortSignal): AsyncGenerator<Uint8Array, void, undefined> {
    const before = await this.stat(uri, { signal });
    if (this.#sandbox && !this.#can("sandboxedFileStreaming")) {
      const { dataBase64 } = await this.#call<{ dataBase64: string }>("fs/readFile", { path: uri }, { signal }, true);
      yield decodeBase64(dataBase64);
      return;
    }
    let delivered = 0;
    let block = BLOCK;
    for (let first = true; ; first = false) {
      signal?.throwIfAborted();
      if (!first) {
        const now = await this.stat(uri, { signal });
        if (now.size !== before.size || now.modifiedAtMs !== before.modifiedAtMs || now.inode !== before.inode) {
          throw new ConnectionLostError(`${toPath(uri)} changed while the connection was down; read it again`);
        }
      }
      const channel = await this.#session.channel(signal);
      const handleId = this.#session.freshId("h");
      let done = false;
      try {
        // The blocks go right behind the open; the server keeps their order.
        const open = this.#on(channel, "fs/open", { handleId, path: uri, ...(this.#sandbox ? { sandbox: this.#sandbox } : {}) }, signal);
        const inFlight: { offset: number; response: Promise<{ chunk: string; eof: boolean }> }[] = [];
        let requested = delivered;
        const ahead = () => {
          // A small file has one block, and a large one as many as fit.
          while (inFlight.length < IN_FLIGHT && (inFlight.length === 0 || requested < (before.size ?? 0))) {
            const response = this.#on<{ chunk: string; eof: boolean }>(channel, "fs/readBlock", { handleId, offset: requested, len: block }, signal);
            response.catch(() => {});
            inFlight.push({ offset: requested, response });
            requested += block;
          }
        };
        const len = block;
        ahead();
        await open;
        for (let next = inFlight.shift(); next; next = inFlight.shift()) {
          const { chunk, eof } = await next.response;
          const bytes = decodeBase64(chunk);
          delivered += bytes.length;
          if (eof || bytes.length < len) done = true;
          else ahead();
          if (bytes.length > 0) yield bytes;
          if (done) return;
        }
      } catch (error) {
        if (!(error instanceof Interrupted)) throw error;
        // Smaller blocks make progress even on short-lived connections.
        block = Math.max(block >> 1, SMALLEST_BLOCK);
      } finally {
        if (!channel.ended) this.#on(channel, "fs/close", { handleId }).catch(() => {});
      }
    }
  }

  #on<Result>(channel: Channel, method: string, params: object, signal?: AbortSignal): Promise<Result> {
    return this.#session.call<Result>(method, params, { on: channel, signal });
  }

  async #writeWhole(uri: string, bytes: Uint8Array, options: WriteOptions): Promise<void> {
    const { atomic = false, mode } = options;
    if (atomic || mode !== undefined) this.#session.require("fsAtomicWrite", atomic ? "replace files atomically" : "set permission bits");
    const params = {
      path: uri,
      dataBase64: encodeBase64(bytes),
      ...(atomic ? { atomic } : {}),
      ...(mode === undefined ? {} : { mode }),
    };
    await this.#call("fs/writeFile", params, options, true);
  }

  async #writeBlocks(uri: string, source: AsyncIterable<Uint8Array>, options: WriteOptions): Promise<void> {
    const { signal, mode } = options;
    const canAtomic = this.#can("fsAtomicWrite");
    const { atomic = canAtomic } = options;
    if (atomic || mode !== undefined) this.#session.require("fsAtomicWrite", atomic ? "replace files atomically" : "set permission bits");
    if (!this.#can("fileWriteStreaming") || (this.#sandbox && !this.#can("sandboxedFileStreaming"))) {
      const chunks: Uint8Array[] = [];
      let size = 0;
      for await (const chunk of source) {
        size += chunk.length;
        if (size > WHOLE_FILE) throw new TooLargeError(`cannot write ${toPath(uri)}: the server takes no more than ${WHOLE_FILE} bytes in one request, and cannot write in blocks`);
        chunks.push(chunk);
      }
      return this.#writeWhole(uri, concat(chunks), options);
    }
    const keep = this.#can("fsKeepHandles") && !this.#sandbox;
    const handleId = this.#session.freshId("h");
    const channel = keep ? undefined : await this.#session.channel(signal);
    const call = (method: string, params: object, stop: AbortSignal | undefined) =>
      this.#session.call(method, params, { signal: stop, ...(channel ? { on: channel } : { repeat: true }) });
    const open = {
      handleId,
      path: uri,
      mode: atomic ? "replaceAtomic" : "replace",
      ...(mode === undefined ? {} : { permissions: mode }),
      ...(keep ? { keep } : {}),
      ...(this.#sandbox ? { sandbox: this.#sandbox } : {}),
    };
    let closed = false;
    try {
      await call("fs/open", open, signal);
      const inFlight: Promise<unknown>[] = [];
      let offset = 0;
      for await (const block of blocksOf(source)) {
        signal?.throwIfAborted();
        if (inFlight.length >= IN_FLIGHT) await inFlight.shift();
        const write = call("fs/writeBlock", { handleId, offset, chunk: encodeBase64(block) }, signal);
        write.catch(() => {});
        inFlight.push(write);
        offset += block.length;
      }
      await Promise.all(inFlight);
      closed = true;
      await call("fs/close", { handleId, ...(atomic ? { commit: true } : {}) }, signal);
    } catch (error) {
      if (error instanceof Interrupted) {
        const state = atomic ? "the old file stays" : "the server has a part of it";
        throw new ConnectionLostError(`cannot write ${toPath(uri)}: the connection was lost and the server does not keep open files; ${state}`, { cause: error });
      }
      throw error;
    } finally {
      // Without a commit: the old file stays.
      if (!closed && !this.#session.closed) call("fs/close", { handleId }, undefined).catch(() => {});
    }
  }
}

function walkEntry({ path, kind }: { path: string; kind: string }): Entry {
  const name = new TextDecoder().decode(uriBytes(path.slice(path.lastIndexOf("/") + 1)));
  return { name, uri: path, path: toPath(path), isDirectory: kind === "directory", isFile: kind === "file" };
}

async function* iterate(source: Iterable<Uint8Array> | AsyncIterable<Uint8Array> | ReadableStream<Uint8Array>): AsyncGenerator<Uint8Array> {
  if (!(source instanceof ReadableStream)) return yield* source;
  // Not every browser iterates over streams.
  const reader = source.getReader();
  let ended = false;
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) {
        ended = true;
        return;
      }
      yield value;
    }
  } finally {
    if (!ended) await reader.cancel().catch(() => {});
    reader.releaseLock();
  }
}

/** Cuts and joins chunks to blocks of one size. */
async function* blocksOf(source: AsyncIterable<Uint8Array>): AsyncGenerator<Uint8Array> {
  let parts: Uint8Array[] = [];
  let size = 0;
  for await (let chunk of source) {
    if (!(chunk instanceof Uint8Array)) throw new UnsupportedError("a file's content has to be bytes: pass a stream of Uint8Array");
    while (size + chunk.length >= BLOCK) {
      const head = chunk.subarray(0, BLOCK - size);
      yield concat([...parts, head]);
      chunk = chunk.subarray(head.length);
      parts = [];
      size = 0;
    }
    if (chunk.length > 0) {
      parts.push(chunk);
      size += chunk.length;
    }
  }
  if (size > 0) yield concat(parts);
}
