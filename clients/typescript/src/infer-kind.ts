/**
 * Infers the kinds of errors from servers that send none: another implementation, and older versions of
 * this one. This is the only place that reads an error's message.
 */

type Pattern = "" | { starts: string } | { ends: string } | { contains: string };
type Meaning = string | ((errno: number) => string);

/** Method (`*`: any, `fs/`: every file method), code, message, kind. The first row that matches decides. */
const TABLE: readonly (readonly [string, number, Pattern, Meaning])[] = [
  ["*", -32601, "", "methodNotFound"],
  ["*", -32010, "", "sessionAttached"],
  ["*", -32600, { starts: "client must " }, "notInitialized"],
  ["initialize", -32600, { starts: "unknown session id" }, "unknownSession"],
  ["initialize", -32600, { starts: "initialize " }, "alreadyInitialized"],
  ["process/start", -32600, { ends: "already exists" }, "processExists"],
  ["process/start", -32600, { ends: "already in use" }, "processExists"],
  ["process/start", -32603, { contains: "working directory" }, ofChdir],
  ["process/start", -32603, { contains: "candidates found in PATH" }, "programNotFound"],
  ["process/start", -32603, "", ofExec],
  ["process/start", -32602, { starts: "working directory " }, "workingDirectoryDenied"],
  // A read fails with this code only for an unknown process.
  ["process/read", -32600, "", "unknownProcess"],
  ["*", -32600, { starts: "unknown process id" }, "unknownProcess"],
  ["fs/", -32004, { starts: "unknown file handle" }, "unknownFileHandle"],
  ["fs/", -32004, "", "pathNotFound"],
  ["fs/", -32600, { starts: "file handle " }, "idInUse"],
  ["fs/", -32600, { ends: " is not a file" }, "notARegularFile"],
  ["fs/", -32600, "", ofIo],
  ["fs/", -32603, "", ofIo],
  ["http/request", -32603, "", "httpFailed"],
  ["*", -32602, "", "invalidParams"],
];

/** The kind that a code and a message imply, if they imply one. */
export function inferKind(method: string, code: number, message: string): string | undefined {
  for (const [methods, rowCode, pattern, meaning] of TABLE) {
    const included = methods === "*" || methods === method || (methods === "fs/" && method.startsWith("fs/"));
    if (rowCode !== code || !included || !matches(pattern, message)) continue;
    if (typeof meaning === "string") return meaning;
    const errno = systemError(message);
    if (errno !== undefined) return meaning(errno);
  }
  return undefined;
}

function matches(pattern: Pattern, message: string): boolean {
  if (pattern === "") return true;
  if ("starts" in pattern) return message.startsWith(pattern.starts);
  if ("ends" in pattern) return message.endsWith(pattern.ends);
  return message.includes(pattern.contains);
}

/** The system error at the end of a Rust program's message: `… (os error 2)`. Numbers are those of Linux. */
function systemError(message: string): number | undefined {
  const found = /\(os error (\d+)\)$/.exec(message);
  return found ? Number(found[1]) : undefined;
}

const LIMITS = new Set([7, 11, 12, 23, 24]); // E2BIG EAGAIN ENOMEM ENFILE EMFILE

function ofExec(errno: number): string {
  if (errno === 2) return "programNotFound";
  if (LIMITS.has(errno)) return errno === 7 ? "invalidParams" : "limitReached";
  return [1, 8, 13, 20, 21, 26, 36, 40].includes(errno) ? "programNotExecutable" : "ioError";
}

function ofChdir(errno: number): string {
  if (errno === 2 || errno === 20) return "workingDirectoryMissing";
  if (errno === 13 || errno === 1) return "workingDirectoryDenied";
  return LIMITS.has(errno) ? "limitReached" : "ioError";
}

function ofIo(errno: number): string {
  const known: Record<number, string> = {
    1: "permissionDenied", 2: "pathNotFound", 13: "permissionDenied", 16: "busy", 17: "alreadyExists",
    18: "crossDevice", 20: "notADirectory", 21: "isADirectory", 26: "busy", 27: "tooLarge", 28: "diskFull",
    30: "readOnlyFileSystem", 36: "invalidPath", 39: "directoryNotEmpty", 40: "invalidPath",
    95: "unsupported", 122: "quotaExceeded",
  };
  return known[errno] ?? (LIMITS.has(errno) ? "limitReached" : "ioError");
}
