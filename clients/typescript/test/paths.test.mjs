import assert from "node:assert/strict";
import { test } from "node:test";
import { joinUri, nameBytes, parentUri, toPath, toUri, uriBytes } from "../dist/paths.js";
import { InvalidPathError } from "../dist/index.js";
import { random, SEED } from "./support/random.mjs";

test("paths become URIs and come back", () => {
  assert.equal(toUri("/a b/ü"), "file:///a%20b/%C3%BC");
  assert.equal(toUri("x/../y", "file:///srv"), "file:///srv/y");
  assert.equal(toUri("../..", "file:///srv"), "file:///");
  assert.equal(toUri("file:///kept%FF"), "file:///kept%FF");
  assert.equal(toPath("file:///a%20b/%C3%BC"), "/a b/ü");
  assert.equal(toPath("file:///x%FF"), "file:///x%FF", "what is not UTF-8 stays a URI");
  assert.equal(parentUri("file:///a/b"), "file:///a");
  assert.deepEqual([...nameBytes("file:///a/b%FFc")], [98, 255, 99]);
});

test("any bytes but NUL survive the round trip", () => {
  const rng = random();
  for (let n = 0; n < 2000; n++) {
    const name = Uint8Array.from({ length: 1 + rng.below(20) }, () => 1 + rng.below(255)).filter((byte) => byte !== 0x2f);
    if (name.length === 0 || [".", ".."].includes(Buffer.from(name).toString())) continue;
    const uri = joinUri("file:///d", name);
    assert.match(uri, /^file:\/\/\/d\/[\x21-\x7e]+$/, `SEED=${SEED}`);
    assert.deepEqual(Buffer.from(nameBytes(uri)), Buffer.from(name), `SEED=${SEED}`);
    assert.deepEqual(Buffer.from(uriBytes(toUri(toPath(uri)))), Buffer.from(uriBytes(uri)), `SEED=${SEED}`);
  }
});

test("paths that cannot be one are refused here", () => {
  for (const bad of ["", "a\0b", "\ud800"]) assert.throws(() => toUri(bad, "file:///"), InvalidPathError);
  assert.throws(() => toUri("relative"), InvalidPathError);
});
