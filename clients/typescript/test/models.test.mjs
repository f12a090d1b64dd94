import assert from "node:assert/strict";
import { existsSync, readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { test } from "node:test";
import { ERROR_CLASSES } from "../dist/index.js";
import { generate, typeOf } from "../tools/generate.mjs";

const path = process.env.CODEX_SCHEMA ?? fileURLToPath(new URL("../../../docs/protocol/schema.json", import.meta.url));
const schema = existsSync(path) ? JSON.parse(readFileSync(path, "utf8")) : undefined;
const missing = schema ? false : `${path} is missing`;
if (missing && process.env.CI) throw new Error(missing);

test("src/models.ts is generated from the schema, and fresh", { skip: missing }, () => {
  const fresh = generate(schema) === readFileSync(new URL("../src/models.ts", import.meta.url), "utf8");
  assert.ok(fresh, "run npm run generate");
});

test("every kind of the schema has a class", { skip: missing }, () => {
  assert.deepEqual(Object.keys(ERROR_CLASSES).sort(), [...schema.$defs.ErrorKind.enum].sort());
});

test("schemas become types, and what is not known is refused", () => {
  const rows = [
    [{ type: "integer", minimum: 0 }, "number"],
    [{ type: ["string", "null"] }, "string | null"],
    [{ anyOf: [{ const: "a" }, { type: "string" }] }, '"a" | (string & {})'],
    [{ type: "array", items: { $ref: "#/$defs/A" } }, "A[]"],
    [{ type: "array", items: { type: ["string", "null"] } }, "Array<string | null>"],
    [{ type: "object", additionalProperties: { type: "string" } }, "Record<string, string>"],
    [{ type: "object", properties: { a: { type: "boolean" }, "b-c": true }, required: ["a"] }, '{\n  a: boolean;\n  "b-c"?: unknown;\n}'],
    [{ $ref: "#/$defs/A", type: "object", properties: { t: { const: 1 } }, required: ["t"] }, "(A) & {\n  t: 1;\n}"],
  ];
  for (const [given, type] of rows) assert.equal(typeOf(given), type);
  for (const bad of [{ allOf: [] }, { type: "tuple" }, { $ref: "other.json" }, { not: {} }]) assert.throws(() => typeOf(bad), JSON.stringify(bad));
});
