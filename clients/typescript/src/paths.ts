/**
 * Paths on the server, as `file:` URIs.
 *
 * A path is given as an absolute path, a path relative to the sandbox's directory, or a `file:` URI; names
 * that are not UTF-8 have only the last form. Every path that this package returns can be passed back.
 */
import { InvalidPathError } from "./errors.js";

const utf8 = new TextDecoder("utf-8", { fatal: true });
const encoder = new TextEncoder();

/** The `file:` URI of a path, relative paths being below `base` (a URI). */
export function toUri(path: string | Uint8Array, base?: string): string {
  if (typeof path !== "string") return bytesToUri(path, base);
  if (path.startsWith("file:///")) return path;
  if (path.includes("\0")) throw new InvalidPathError(`invalid path ${JSON.stringify(path)}: it has a NUL character`);
  if (/\p{Surrogate}/u.test(path)) {
    throw new InvalidPathError(`invalid path ${JSON.stringify(path)}: it is not Unicode; pass bytes or a file: URI`);
  }
  return bytesToUri(encoder.encode(path), base);
}

function bytesToUri(path: Uint8Array, base?: string): string {
  if (path.length === 0) throw new InvalidPathError("invalid path: it is empty");
  if (path.includes(0)) throw new InvalidPathError("invalid path: it has a NUL byte");
  const encoded = encodeBytes(path);
  if (path[0] === 0x2f) return normalize(`file://${encoded}`);
  if (base === undefined) {
    throw new InvalidPathError(`relative path ${decodeURIComponentLossy(encoded)}, and the server names no directory; pass an absolute path`);
  }
  return normalize(`${base.replace(/\/$/, "")}/${encoded}`);
}

/** Resolves `.`, `..` and repeated slashes in the text, as the server does. */
function normalize(uri: string): string {
  const out: string[] = [];
  for (const part of uri.slice("file://".length).split("/")) {
    if (part === "" || part === ".") continue;
    if (part === "..") out.pop();
    else out.push(part);
  }
  return `file:///${out.join("/")}`;
}

function encodeBytes(bytes: Uint8Array): string {
  let out = "";
  for (const byte of bytes) {
    const plain =
      (byte >= 0x61 && byte <= 0x7a) || (byte >= 0x40 && byte <= 0x5a) || (byte >= 0x2d && byte <= 0x39) ||
      byte === 0x5f || byte === 0x7e;
    out += plain ? String.fromCharCode(byte) : `%${byte.toString(16).toUpperCase().padStart(2, "0")}`;
  }
  return out;
}

/** The bytes of a `file:` URI's path. */
export function uriBytes(uri: string): Uint8Array {
  const path = uri.startsWith("file://") ? uri.slice("file://".length) : uri;
  const out: number[] = [];
  for (let i = 0; i < path.length; ) {
    const hex = path[i] === "%" ? path.slice(i + 1, i + 3) : "";
    if (/^[0-9a-fA-F]{2}$/.test(hex)) {
      out.push(parseInt(hex, 16));
      i += 3;
    } else {
      const char = String.fromCodePoint(path.codePointAt(i)!);
      out.push(...encoder.encode(char));
      i += char.length;
    }
  }
  return new Uint8Array(out);
}

/** The native path of a URI, or the URI itself if the path is not UTF-8. */
export function toPath(uri: string): string {
  try {
    return utf8.decode(uriBytes(uri));
  } catch {
    return uri;
  }
}

/** The URI of a name (or a relative path) in a directory. */
export function joinUri(directory: string, name: string | Uint8Array): string {
  return toUri(name, directory);
}

/** The last component of a URI, as bytes. */
export function nameBytes(uri: string): Uint8Array {
  return uriBytes(uri.slice(uri.lastIndexOf("/") + 1));
}

/** The directory above. */
export function parentUri(uri: string): string {
  return normalize(`${uri}/..`);
}

function decodeURIComponentLossy(text: string): string {
  return new TextDecoder().decode(uriBytes(text));
}
