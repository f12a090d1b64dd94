import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import * as api from "../dist/index.js";
import { serverError } from "../dist/errors.js";
import { inferKind } from "../dist/infer-kind.js";

const documented = [...readFileSync(new URL("../../../docs/protocol/errors.md", import.meta.url), "utf8").matchAll(/^\| `(\w+)` \|/gm)].map((row) => row[1]);

test("every documented kind has a class of its own, and no other kind has", () => {
  assert.ok(documented.length > 50);
  assert.deepEqual(Object.keys(api.ERROR_CLASSES).sort(), [...new Set(documented)].sort());
  assert.equal(new Set(Object.values(api.ERROR_CLASSES)).size, documented.length);
});

test("an error has the class of its kind, and an unknown kind that of its code", () => {
  const sent = serverError("fs/open", { code: -32603, message: "x", data: { kind: "diskFull" } });
  assert.ok(sent instanceof api.DiskFullError && sent instanceof api.FileError && sent.kind === "diskFull");
  const later = serverError("fs/open", { code: -32004, message: "x", data: { kind: "constructor" } });
  assert.ok(later instanceof api.PathNotFoundError);
  assert.equal(later.kind, "constructor");
  assert.equal(serverError("x", { code: 1, message: "?" }).kind, "unknown");
});

test("errors without a kind are recognized", () => {
  const rows = [
    ["process/read", -32600, "client must call initialize before using exec methods", "notInitialized"],
    ["initialize", -32600, "unknown session id nope", "unknownSession"],
    ["process/start", -32600, "process a already exists", "processExists"],
    ["process/start", -32603, "No such file or directory (os error 2)", "programNotFound"],
    ["process/start", -32603, "Permission denied (os error 13)", "programNotExecutable"],
    ["process/start", -32603, "cannot start `x`: cannot enter the working directory: No such file or directory (os error 2)", "workingDirectoryMissing"],
    ["process/start", -32603, "nul byte found in provided data", undefined],
    ["process/read", -32600, "unknown process id none", "unknownProcess"],
    ["process/resize", -32601, "not implemented", "methodNotFound"],
    ["fs/readFile", -32004, "No such file or directory (os error 2)", "pathNotFound"],
    ["fs/readFile", -32600, "path `/srv` is not a file", "notARegularFile"],
    ["fs/readFile", -32600, "Permission denied (os error 13)", "permissionDenied"],
    ["fs/remove", -32603, "Directory not empty (os error 39)", "directoryNotEmpty"],
    ["fs/writeFile", -32603, "No space left on device (os error 28)", "diskFull"],
    ["fs/readBlock", -32004, "unknown file handle `h`", "unknownFileHandle"],
    ["fs/walk", -32600, "filesystem walk limits must be greater than zero", undefined],
    ["environment/info", -32600, "process a already exists", undefined],
  ];
  for (const [method, code, message, kind] of rows) assert.equal(inferKind(method, code, message), kind, message);
});
