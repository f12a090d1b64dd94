/**
 * Copies files and trees between this machine and the server. In Node, Deno and Bun.
 *
 * Invariants: names from the server are single components, so nothing is written outside the destination;
 * a local file appears when it is complete; a link is never written through.
 */
import { FileError, InvalidPathError, IsADirectoryError } from "./errors.js";
import type { Abortable, Files, RemotePath } from "./files.js";
import { joinUri, nameBytes, toPath, toUri } from "./paths.js";

/** What a copy did. */
export interface TransferReport {
  files: number;
  directories: number;
  bytes: number;
  /** Paths that were left out: special files, links to directories, and links that the server cannot make. */
  skipped: string[];
}

export interface TransferOptions extends Abortable {
  /** Called after each file. */
  onFile?: (path: string) => void;
}

/** Files at once. */
const PARALLEL = 4;

/** Copies a local file or tree to the server. */
export async function upload(
  files: Files, local: string, remote: RemotePath, canMode: boolean, canLink: boolean, options: TransferOptions,
): Promise<TransferReport> {
  const fs = await import("node:fs");
  const { signal } = options;
  const report: TransferReport = { files: 0, directories: 0, bytes: 0, skipped: [] };
  const lane = limiter(PARALLEL);

  const file = async (path: string | Buffer, uri: string, mode: number) => {
    const stream = fs.createReadStream(path, { highWaterMark: 256 << 10 });
    const counted = async function* () {
      for await (const chunk of stream as AsyncIterable<Buffer>) {
        report.bytes += chunk.length;
        yield chunk;
      }
    };
    try {
      await files.write(uri, counted(), { signal, ...(canMode ? { mode: mode & 0o777 } : {}) });
    } finally {
      stream.destroy();
    }
    report.files++;
    options.onFile?.(toPath(uri));
  };
  const tree = async (path: Buffer, uri: string): Promise<void> => {
    signal?.throwIfAborted();
    await files.makeDirectory(uri, { signal });
    report.directories++;
    const names = await fs.promises.readdir(path, { encoding: "buffer" });
    await all(names.map(async (name) => {
      const child = Buffer.concat([path, Buffer.from("/"), name]);
      const target = joinUri(uri, name);
      const stat = await fs.promises.lstat(child);
      if (stat.isDirectory()) return tree(child, target);
      if (stat.isFile()) return lane(() => file(child, target, stat.mode));
      if (stat.isSymbolicLink() && canLink) return lane(() => link(child, target));
      report.skipped.push(child.toString());
    }));
  };
  const link = async (path: Buffer, uri: string) => {
    const target = await fs.promises.readlink(path, { encoding: "buffer" });
    const text = target.toString();
    if (!Buffer.from(text).equals(target) && target[0] !== 0x2f) return void report.skipped.push(path.toString());
    await files.remove(uri, { signal, recursive: false });
    await files.symlink(uri, Buffer.from(text).equals(target) ? text : toUri(target), { signal });
    report.files++;
  };

  const stat = await fs.promises.stat(local);
  const uri = files.uri(remote);
  if (stat.isDirectory()) await tree(Buffer.from(local), uri);
  else if (stat.isFile()) await file(local, uri, stat.mode);
  else throw new FileError(`cannot upload ${local}: it is neither a regular file nor a directory`, { kind: "notARegularFile" });
  return report;
}

/** Copies a file or tree from the server to this machine. */
export async function download(files: Files, remote: RemotePath, local: string, options: TransferOptions): Promise<TransferReport> {
  const fs = await import("node:fs");
  const { signal } = options;
  const report: TransferReport = { files: 0, directories: 0, bytes: 0, skipped: [] };
  const lane = limiter(PARALLEL);

  const file = async (uri: string, path: Buffer, mode: number | null | undefined) => {
    // In the same directory, so that a rename puts it in place.
    const partial = Buffer.concat([path.subarray(0, path.lastIndexOf(0x2f) + 1), Buffer.from(`.${crypto.randomUUID()}.part`)]);
    const existing = await fs.promises.lstat(path).catch(() => undefined);
    if (existing?.isDirectory()) throw new IsADirectoryError(`cannot download to ${path.toString()}: it is a directory`);
    const handle = await fs.promises.open(partial, "wx", (mode ?? 0o666) & 0o777);
    try {
      const reader = files.stream(uri, { signal }).getReader();
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        for (let at = 0; at < value.length; ) at += (await handle.write(value, at)).bytesWritten;
        report.bytes += value.length;
      }
      await handle.close();
      await fs.promises.rename(partial, path);
    } catch (error) {
      await handle.close().catch(() => {});
      await fs.promises.unlink(partial).catch(() => {});
      throw error;
    }
    report.files++;
    options.onFile?.(path.toString());
  };
  const tree = async (uri: string, path: Buffer, root: boolean): Promise<void> => {
    signal?.throwIfAborted();
    const existing = await fs.promises.lstat(path).catch(() => undefined);
    if (existing?.isSymbolicLink() && !root) {
      throw new FileError(`cannot download to ${path.toString()}: it is a link`, { kind: "symlinkRefused" });
    }
    await fs.promises.mkdir(path, { recursive: true });
    report.directories++;
    const entries = await files.list(uri, { signal });
    await all(entries.map(async (entry) => {
      const name = nameBytes(entry.uri);
      if (name.length === 0 || name.includes(0x2f) || [".", ".."].includes(Buffer.from(name).toString())) {
        throw new InvalidPathError(`the server sent the name ${JSON.stringify(entry.name)}, which is not one of a file`);
      }
      const child = Buffer.concat([path, Buffer.from("/"), name]);
      const stat = await lane(() => files.stat(entry.uri, { signal }));
      if (stat.isDirectory && !stat.isSymlink) return tree(entry.uri, child, false);
      if (stat.isFile) return lane(() => file(entry.uri, child, stat.mode));
      report.skipped.push(entry.path);
    }));
  };

  const uri = files.uri(remote);
  const stat = await files.stat(uri, { signal });
  const path = Buffer.from(local.replace(/(?<=.)\/+$/, ""));
  if (stat.isDirectory) await tree(uri, path, true);
  else await file(uri, Buffer.from(path.includes(0x2f) ? path : `./${path.toString()}`), stat.mode);
  return report;
}

/** Runs at most `count` at once. */
function limiter(count: number): <T>(work: () => Promise<T>) => Promise<T> {
  let running = 0;
  const waiting: (() => void)[] = [];
  return async (work) => {
    if (running >= count) await new Promise<void>((resolve) => waiting.push(resolve));
    else running++;
    try {
      return await work();
    } finally {
      const next = waiting.shift();
      if (next) next();
      else running--;
    }
  };
}

/** Waits for all, and then fails with the first failure, so that nothing goes on behind the caller's back. */
async function all(work: Promise<unknown>[]): Promise<void> {
  const failed = (await Promise.allSettled(work)).find((result) => result.status === "rejected");
  if (failed) throw failed.reason;
}
