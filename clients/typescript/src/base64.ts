/** Base64 and text, with the fastest means that the runtime has. */

interface BufferLike {
  from(data: string, encoding: "base64"): Uint8Array;
  from(data: ArrayBufferLike, offset: number, length: number): Uint8Array & { toString(encoding: string): string };
}

const NodeBuffer = (globalThis as { Buffer?: BufferLike }).Buffer;
const native = Uint8Array as unknown as { fromBase64?: (text: string) => Uint8Array };
const encoder = new TextEncoder();

/** Decodes base64. */
export function decodeBase64(text: string): Uint8Array {
  if (NodeBuffer) {
    const buffer = NodeBuffer.from(text, "base64");
    return new Uint8Array(buffer.buffer, buffer.byteOffset, buffer.byteLength);
  }
  if (native.fromBase64) return native.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

/** Encodes base64. */
export function encodeBase64(bytes: Uint8Array): string {
  if (NodeBuffer) return NodeBuffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength).toString("base64");
  const own = (bytes as unknown as { toBase64?: () => string }).toBase64;
  if (own) return own.call(bytes);
  let binary = "";
  for (let i = 0; i < bytes.length; i += 0x8000) {
    binary += String.fromCharCode(...bytes.subarray(i, i + 0x8000));
  }
  return btoa(binary);
}

/** Text as UTF-8; bytes as they are. */
export function toBytes(data: string | Uint8Array | ArrayBuffer): Uint8Array {
  if (typeof data === "string") return encoder.encode(data);
  return data instanceof Uint8Array ? data : new Uint8Array(data);
}

/** One array of all chunks. */
export function concat(chunks: readonly Uint8Array[]): Uint8Array {
  if (chunks.length === 1) return chunks[0]!;
  const all = new Uint8Array(chunks.reduce((sum, chunk) => sum + chunk.length, 0));
  let at = 0;
  for (const chunk of chunks) {
    all.set(chunk, at);
    at += chunk.length;
  }
  return all;
}
