// Deno, Bun, and what a browser has: the runtime's own WebSocket, and no module of Node.
import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { promisify } from "node:util";
import { WebSocket as NodeSocket } from "ws";
import * as api from "../dist/index.js";
import { directory, server } from "./support/servers.mjs";

const TOKEN = "correct-horse-battery";
async function guarded(t) {
  const file = join(directory(t), "token");
  writeFileSync(file, TOKEN, { mode: 0o600 });
  return (await server(t, { args: ["--ws-auth", "capability-token", "--ws-token-file", file] })).url;
}

const script = (url) => `
  import { Sandbox, TokenRefusedError, UnreachableError } from ${JSON.stringify(new URL("../dist/index.js", import.meta.url).href)};
  const sandbox = await Sandbox.connect(${JSON.stringify(url)}, { token: ${JSON.stringify(TOKEN)} });
  let bytes = 0;
  for await (const event of await sandbox.start("head -c 3000000 /dev/zero")) if (event.type === "output") bytes += event.data.length;
  await sandbox.files.write("file", new Uint8Array(700000).fill(65));
  const back = (await sandbox.files.read("file")).length;
  const result = await sandbox.run("cat; exit 3", { input: "ü" });
  await sandbox.close();
  const refused = await Sandbox.connect(${JSON.stringify(url)}, { token: "wrong-wrong-wrong-wrong" }).then(() => "no", (error) => error instanceof TokenRefusedError || error instanceof UnreachableError);
  const local = await Sandbox.local({ codex: ${JSON.stringify(process.env.CODEX_BIN ?? "codex")} });
  const here = (await local.run(["echo", "here"])).stdout;
  await local.close();
  console.log(JSON.stringify([bytes, back, result.stdout, result.exitCode, refused, here]));
`;

for (const [name, bin, args] of [["Deno", process.env.DENO_BIN, ["run", "-A"]], ["Bun", process.env.BUN_BIN, ["run"]]]) {
  test(`${name} runs commands, with a token`, { skip: bin ? false : `$${name.toUpperCase()}_BIN is not set` }, async (t) => {
    const url = await guarded(t);
    const file = join(directory(t), "script.mjs");
    writeFileSync(file, script(url));
    const { stdout } = await promisify(execFile)(bin, [...args, file], { timeout: 60_000 });
    assert.deepEqual(JSON.parse(stdout), [3_000_000, 700_000, "ü", 3, true, "here\n"]);
  });
}

test("no module of Node is imported before it is needed", () => {
  const dist = new URL("../dist/", import.meta.url);
  for (const file of readdirSync(dist).filter((name) => name.endsWith(".js"))) {
    const text = readFileSync(new URL(file, dist), "utf8");
    assert.doesNotMatch(text, /^import .* from "(?!\.\/)/m, `${file} imports a package at its top`);
    assert.doesNotMatch(text, /^import "(?!\.\/)/m, file);
  }
});

test("a browser's WebSocket works, without pauses and pings", async (t) => {
  const { url } = await server(t);
  const before = globalThis.WebSocket;
  globalThis.WebSocket = NodeSocket;
  t.after(() => { globalThis.WebSocket = before; });
  const sandbox = await api.Sandbox.connect(url, { webSocket: (address) => new NodeSocket(address), window: 100_000, keepAliveIdle: 50 });
  let bytes = 0;
  for await (const event of await sandbox.start("head -c 5000000 /dev/zero")) {
    if (event.type === "output") bytes += event.data.length;
    if (bytes % 3 === 0) await new Promise(setImmediate);
  }
  assert.equal(bytes, 5_000_000);
  await sandbox.close();
});

test("a page is refused by the server itself", async (t) => {
  const { url } = await server(t);
  const page = (address) => new NodeSocket(address, { origin: "https://page.example" });
  await assert.rejects(api.Sandbox.connect(url, { webSocket: page }), api.UnreachableError);
});
