// Every example of the README runs.
import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { chmodSync, mkdirSync, readFileSync, symlinkSync, writeFileSync } from "node:fs";
import { dirname, join, resolve } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import ts from "typescript";
import { CODEX, directory, server } from "./support/servers.mjs";

const readme = readFileSync(new URL("../README.md", import.meta.url), "utf8");
const examples = [...readme.matchAll(/^```ts( connect)?\n(.*?)^```$/gms)].map(([, connect, code]) => ({ connect: !!connect, code }));
const outputs = [/^3 hello\n oops/, /true begun\n[\s\S]*4 \d+\n12\n/, /42[\s\S]*exit code 0[\s\S]*100000 0/, /built/, /\[ 'M src\/a.txt' \][\s\S]*(changed|overflow)/];

test("the README has the examples that are checked here", () => assert.equal(examples.length, outputs.length));

examples.forEach(({ connect, code }, n) => {
  test(`example ${n + 1} of the README`, async (t) => {
    const home = directory(t);
    mkdirSync(join(home, "node_modules"));
    mkdirSync(join(home, "bin"));
    symlinkSync(fileURLToPath(new URL("..", import.meta.url)), join(home, "node_modules/codex-exec"));
    writeFileSync(join(home, "bin/codex"), `#!/bin/sh\nexec ${resolve(CODEX)} "$@"\n`);
    chmodSync(join(home, "bin/codex"), 0o755);
    const url = connect ? (await server(t)).url : "";
    const given = `const url = ${JSON.stringify(url)}, directory = ${JSON.stringify(home)};\n`;
    // Node 20 has no `await using`; the compiler has.
    const { outputText } = ts.transpileModule(given + code, { compilerOptions: { module: "ESNext", target: "ES2022" } });
    writeFileSync(join(home, "example.mjs"), outputText);
    const env = { ...process.env, PATH: `${join(home, "bin")}:${dirname(process.execPath)}:${process.env.PATH}`, XDG_STATE_HOME: home };
    const { stdout } = await promisify(execFile)(process.execPath, ["example.mjs"], { cwd: home, env, timeout: 60_000 });
    assert.match(stdout, outputs[n]);
  });
});
