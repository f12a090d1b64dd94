// env:ID, through the installed codex, a registry and a relay of our own.
import assert from "node:assert/strict";
import { execFileSync, spawn } from "node:child_process";
import { once } from "node:events";
import { join } from "node:path";
import { test } from "node:test";
import * as api from "../dist/index.js";
import { CODEX, directory, until } from "./support/servers.mjs";

test("an environment behind a rendezvous is reached through codex", async (t) => {
  const data = directory(t);
  const start = (args, env = {}) => {
    const child = spawn(CODEX, args, { stdio: ["ignore", "pipe", "pipe"], env: { ...process.env, CODEX_HOME: data, ...env } });
    const exited = once(child, "exit");
    t.after(async () => {
      child.kill("SIGTERM");
      await exited;
    });
    child.stderr.resume();
    return child;
  };
  const rendezvous = start(["rendezvous", "serve", "--listen", "127.0.0.1:0", "--data", join(data, "db")]);
  let said = "";
  rendezvous.stdout.on("data", (text) => (said += text));
  await until(() => said.includes("\n"), "the rendezvous listens");
  const registry = /http:\/\/127\.0\.0\.1:\d+/.exec(said)[0];
  const token = execFileSync(CODEX, ["rendezvous", "token", "create", "--data", join(data, "db"), "--environment", "box", "--can", "register,connect"], { encoding: "utf8" }).trim().split(/\s+/).at(-1);
  start(["exec-server", "--remote", registry, "--environment-id", "box"], { CODEX_API_KEY: token });
  const before = { ...process.env };
  Object.assign(process.env, { CODEX_API_KEY: token, CODEX_HOME: data });
  t.after(() => { process.env = before; });
  const bridge = { codex: CODEX, remoteCodex: CODEX, registry };
  let sandbox;
  await until(async () => {
    sandbox = await api.Sandbox.connect("env:box", { bridge, cwd: data }).catch((error) => assert.ok(error instanceof api.ConnectionError, error));
    return sandbox !== undefined;
  }, "the environment is online");
  t.after(() => sandbox.close());
  assert.equal((await sandbox.run(["echo", "through"])).stdout, "through\n");
  const content = Buffer.alloc(1_500_000, "relay");
  await sandbox.files.write("file", content);
  assert.deepEqual(Buffer.from(await sandbox.files.read("file")), content);
  await assert.rejects((await sandbox.start(["sleep", "9"])).detach("x"), api.UnsupportedError);
  await assert.rejects(api.Sandbox.connect("env:other", { bridge }), api.CommandEndedError);
});
