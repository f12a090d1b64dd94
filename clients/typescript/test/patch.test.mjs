import assert from "node:assert/strict";
import { test } from "node:test";
import { applyHunks, parsePatch } from "../dist/patch.js";
import { PatchError } from "../dist/index.js";
import { random, SEED } from "./support/random.mjs";

const parse = (hunks) => parsePatch(`*** Begin Patch\n*** Update File: f\n${hunks}\n*** End Patch`)[0].hunks;
const apply = (content, hunks) => Buffer.from(applyHunks("f", Buffer.from(content), parse(hunks))).toString();

test("hunks are found in order, after their headers, at the end", () => {
  assert.equal(apply("a\nb\na\nb\n", "@@\n-a\n+1\n@@\n-a\n+2"), "1\nb\n2\nb\n");
  assert.equal(apply("a\nb\na\n", "@@ b\n-a\n+2"), "a\nb\n2\n");
  assert.equal(apply("a\nb\n", "@@ a\n+x"), "a\nx\nb\n");
  assert.equal(apply("", "@@\n+x"), "x\n");
  assert.equal(apply("a\nb\na\n", "@@\n-a\n+z\n*** End of File"), "a\nb\nz\n");
  assert.throws(() => apply("a\nb\n", "@@\n-a\n+z\n*** End of File"), /end of the file/);
});

test("line endings stay, and so does a missing newline at the end", () => {
  assert.equal(apply("a\r\nb\r\n", "@@\n a\n-b\n+c"), "a\r\nc\r\n");
  assert.equal(apply("a\nb", "@@\n-b\n+c"), "a\nc");
  assert.equal(apply("a\r\nb", "@@\n a\n+x"), "a\r\nx\r\nb");
});

test("context matches leniently and stays as it is; other encodings survive", () => {
  assert.equal(apply("say “hi” – ok\nb\n", '@@\n say "hi" - ok\n-b\n+ü'), "say “hi” – ok\nü\n");
  const latin1 = Buffer.from("caf\xe9\nb\n", "latin1");
  assert.deepEqual(Buffer.from(applyHunks("f", latin1, parse("@@\n-b\n+c"))), Buffer.from("caf\xe9\nc\n", "latin1"));
  assert.throws(() => applyHunks("f", latin1, parse("@@\n-café\n+c")), PatchError, "bytes that are not UTF-8 match nothing");
});

test("editing a file of unique lines equals editing their list", () => {
  const rng = random();
  for (let n = 0; n < 2000; n++) {
    const lines = Array.from({ length: 2 + rng.below(10) }, (_, i) => `${i}-${rng.below(2)}`);
    const end = rng.pick(["\n", "\r\n"]);
    const ended = rng.chance(0.5);
    const text = (list) => list.join(end) + (ended && list.length > 0 ? end : "");
    let hunk = "@@";
    const expected = [];
    for (const line of lines) {
      const edit = rng.below(4);
      hunk += edit === 0 || edit === 2 ? `\n-${line}` : `\n ${line}`;
      if (edit === 1 || edit === 2) hunk += `\n+new ${line}`;
      if (edit === 1 || edit === 3) expected.push(line);
      if (edit === 1 || edit === 2) expected.push(`new ${line}`);
    }
    assert.equal(apply(text(lines), hunk), text(expected), `SEED=${SEED}`);
  }
});

test("a patch that is not one is refused with its line", () => {
  for (const bad of ["", "x", "*** Begin Patch", "*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Update File: f\n*** End Patch",
    "*** Begin Patch\n*** Add File: \n*** End Patch", "*** Begin Patch\nnoise\n*** End Patch"]) {
    assert.throws(() => parsePatch(bad), PatchError, JSON.stringify(bad));
  }
});
