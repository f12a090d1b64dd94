// Servers that are not one, old ones, refused tokens, dropped connections, cancellation at every await.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import http from "node:http";
import net from "node:net";
import { readdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { Worker } from "node:worker_threads";
import * as api from "../dist/index.js";
import { WebSocketDialer } from "../dist/websocket.js";
import { CODEX, directory, fakeServer, info, proxy, server, SILENT, until } from "./support/servers.mjs";

const { Sandbox } = api;
const quick = { connectTimeout: 300 };

test("an address where nothing listens", async () => {
  await assert.rejects(Sandbox.connect("ws://127.0.0.1:1"), api.ConnectionRefusedError);
  await assert.rejects(Sandbox.connect("unix:/nowhere/codex.sock"), api.ConnectionRefusedError);
  await assert.rejects(Sandbox.local({ codex: "/nowhere/codex" }), api.CommandEndedError);
  for (const bad of ["", "http://h", "env:", "stdio:", "h:1"]) await assert.rejects(Sandbox.connect(bad), api.InvalidParamsError, bad);
});

test("a secret in a URL is in no error", async () => {
  for (const url of ["ws://user:hunter2@127.0.0.1:1/?key=hunter2", "http://user:hunter2@h/?hunter2"]) {
    await assert.rejects(Sandbox.connect(url, { token: "hunter2" }), (error) => !`${error} ${error.stack}`.includes("hunter2"));
  }
});

test("a server that is not one", async (t) => {
  const listen = async (what) => {
    what.listen(0, "127.0.0.1");
    await once(what, "listening");
    t.after(() => what.close());
    return `ws://127.0.0.1:${what.address().port}`;
  };
  const web = http.createServer((_, response) => response.end("hello"));
  await assert.rejects(Sandbox.connect(await listen(web), quick), api.ProtocolViolationError);
  const ssh = net.createServer((socket) => socket.on("error", () => {}).end("SSH-2.0-x\r\n"));
  await assert.rejects(Sandbox.connect(await listen(ssh), quick), api.ProtocolViolationError);
  const silent = net.createServer((socket) => void socket.on("error", () => {}));
  await assert.rejects(Sandbox.connect(await listen(silent), quick), api.TimedOutError);

  const says = async (text) => (await fakeServer(t, (_method, _params, send) => (send(text), SILENT))).url;
  for (const text of ["hello", "[1]", "1", '{"id":1,"result":[]}', '{"id":1,"result":"x"}', "{}"]) {
    await assert.rejects(Sandbox.connect(await says(text), quick), api.ProtocolViolationError, text);
  }
  const mute = await fakeServer(t, () => SILENT);
  await assert.rejects(Sandbox.connect(mute.url, quick), api.TimedOutError);
  await assert.rejects(Sandbox.connect("stdio:cat", quick), api.CodexError);
  await assert.rejects(Sandbox.connect("stdio:false"), api.CommandEndedError);
});

test("a server that breaks the protocol later ends the session, not the program", async (t) => {
  const fake = await fakeServer(t, (method, _params, send) => (method === "fs/readDirectory" ? (send("}{"), SILENT) : undefined));
  const sandbox = await Sandbox.connect(fake.url);
  await assert.rejects(sandbox.files.list("/"), api.ProtocolViolationError);
  await until(() => sandbox.closed, "the session has ended");
  await assert.rejects(sandbox.run(["true"]), api.ProtocolViolationError);
  await sandbox.close();
});

test("an old server without extensions gives clear errors, and what it has works", async (t) => {
  const fake = await fakeServer(t, (method, { processId }, send) => {
    if (method === "initialize") return {};
    if (method === "environment/info") return { ...info(), capabilities: undefined };
    if (method === "process/start") {
      queueMicrotask(() => {
        // Without numbers, as the first revision sent them.
        send({ method: "process/output", params: { processId, stream: "stdout", chunk: "aGk=" } });
        send({ method: "process/exited", params: { processId, exitCode: 0 } });
        send({ method: "process/closed", params: { processId } });
      });
      return { processId };
    }
    if (method === "process/read") return { chunks: [], nextSeq: 2, exited: true, exitCode: 0, closed: true, failure: null };
    throw Object.assign(new Error(`unknown method ${method}`), { code: -32601 });
  });
  const sandbox = await Sandbox.connect(fake.url);
  const result = await sandbox.run(["x"]);
  assert.deepEqual([result.exitCode, result.stdout], [0, "hi"]);
  await assert.rejects(sandbox.files.search("x").next(), api.UnsupportedError);
  await assert.rejects(sandbox.files.watch("/x").next(), api.UnsupportedError);
  await assert.rejects(sandbox.files.rename("/a", "/b"), api.UnsupportedError);
  await assert.rejects(sandbox.processes(), api.UnsupportedError);
  await assert.rejects(sandbox.start(["x"], { limits: { pids: 1 } }), api.UnsupportedError);
  await assert.rejects(sandbox.start(["x"], { pty: { rows: 1, cols: 1 } }), api.UnsupportedError);
  await assert.rejects(sandbox.run(["x"], { input: "y" }), api.CodexError);
  await sandbox.close();
});

test("a token that is missing, wrong or right", async (t) => {
  const file = join(directory(t), "token");
  writeFileSync(file, "correct-horse-battery", { mode: 0o600 });
  const { url } = await server(t, { args: ["--ws-auth", "capability-token", "--ws-token-file", file] });
  await assert.rejects(Sandbox.connect(url), api.TokenRefusedError);
  await assert.rejects(Sandbox.connect(url, { token: "wrong-horse-battery-x" }), api.TokenRefusedError);
  const sandbox = await Sandbox.connect(url, { token: "correct-horse-battery" });
  assert.equal((await sandbox.run(["echo", "in"])).stdout, "in\n");
  await sandbox.close();
});

test("a drop in the middle of an upload loses nothing", async (t) => {
  const cwd = directory(t);
  const { url } = await server(t, { cwd });
  const middle = await proxy(t, url);
  const sandbox = await Sandbox.connect(middle.url);
  const block = Buffer.alloc(100_000, "abcdefg");
  const content = async function* () {
    for (let n = 0; n < 60; n++) {
      if (n % 15 === 7) middle.cut();
      yield block;
    }
  };
  await sandbox.files.write("big", content());
  assert.deepEqual(Buffer.from(await sandbox.files.read("big")), Buffer.concat(Array(60).fill(block)));
  assert.ok(middle.stats.cuts >= 4);
  await sandbox.close();
});

test("a drop in the middle of an upload to a server that keeps no handles is an error", async (t) => {
  const fake = await fakeServer(t, (method, _params, _send, socket) => {
    if (method === "initialize") return { sessionId: "s1", environmentInfo: info({ fileWriteStreaming: true }) };
    if (method === "fs/open") return {};
    if (method === "fs/writeBlock") return socket.terminate(), SILENT;
    return {};
  });
  const sandbox = await Sandbox.connect(fake.url);
  await assert.rejects(sandbox.files.write("/x", new Uint8Array(1 << 20)), api.ConnectionLostError);
  await sandbox.close();
});

test("a session that the server has forgotten is lost, and everything that waits says so", async (t) => {
  const cwd = directory(t);
  const { url } = await server(t, { cwd, args: ["--detach-ttl", "0"] });
  const middle = await proxy(t, url);
  const sandbox = await Sandbox.connect(middle.url);
  const process = await sandbox.start(["sleep", "100"]);
  const waiting = assert.rejects(process.wait(), api.ConnectionLostError);
  const running = assert.rejects(sandbox.run(["sleep", "100"]), api.ConnectionLostError);
  await sandbox.files.list();
  middle.cut();
  await Promise.all([waiting, running]);
  await assert.rejects(sandbox.run(["true"]), api.ConnectionLostError);
  await sandbox.close();
});

test("giving up reconnecting ends what waits", async (t) => {
  const fake = await fakeServer(t, (method) => (method === "process/start" ? {} : undefined));
  const sandbox = await Sandbox.connect(fake.url, { reconnect: { giveUpAfter: 200 } });
  const process = await sandbox.start(["x"]);
  fake.wss.close();
  fake.sockets[0].terminate();
  await assert.rejects(process.wait(), api.ConnectionLostError);
  await sandbox.close();
});

test("a timeout returns partial output, also while the connection is down", async (t) => {
  const { url } = await server(t);
  const sandbox = await Sandbox.connect(url);
  const result = await sandbox.run("echo part; (trap '' TERM INT; sleep 100) & sleep 100", { timeout: 300 });
  assert.deepEqual([result.timedOut, result.stdout], [true, "part\n"]);
  await assert.rejects(sandbox.run("echo part; sleep 100", { timeout: 200, check: true }), (error) =>
    error instanceof api.CommandFailedError && error.kind === "timedOut" && error.result.stdout === "part\n");
  await sandbox.close();

  // This one answers nothing after the start.
  const fake = await fakeServer(t, (method, { processId }, send) => {
    if (method === "process/start") {
      queueMicrotask(() => send({ method: "process/output", params: { processId, seq: 1, stream: "stdout", chunk: "aGk=" } }));
      return { processId };
    }
    return method === "initialize" ? undefined : SILENT;
  });
  const stuck = await Sandbox.connect(fake.url);
  const partial = await stuck.run(["x"], { timeout: 100 });
  assert.deepEqual([partial.timedOut, partial.stdout, partial.exitCode], [true, "hi", -1]);
  await stuck.close();
});

test("cancellation at every await rejects with the reason and leaves nothing running", async (t) => {
  const cwd = directory(t);
  writeFileSync(join(cwd, "file"), Buffer.alloc(3 << 20));
  const { url } = await server(t, { cwd });
  const works = {
    connect: (signal) => Sandbox.connect(url, { signal }).then((sandbox) => sandbox.close()),
    // Long, so that a command that is left running is noticed.
    run: (signal, sandbox) => sandbox.run(["sleep", "1000"], { signal }),
    input: (signal, sandbox) => sandbox.run(["sleep", "0.05"], { input: new Uint8Array(3 << 20), signal }),
    read: (signal, sandbox) => sandbox.files.read("file", { signal }),
    write: (signal, sandbox) => sandbox.files.write("out", new Uint8Array(2 << 20), { signal }),
    search: async (signal, sandbox) => { for await (const _ of sandbox.files.search("x", { signal })); },
    upload: (signal, sandbox) => sandbox.upload(join(cwd, "file"), "up", { signal }),
    download: (signal, sandbox) => sandbox.download("file", join(cwd, "down"), { signal }),
    patch: (signal, sandbox) => sandbox.applyPatch("*** Begin Patch\n*** Add File: p\n+x\n*** End Patch", { signal }),
    wait: async (signal, sandbox) => (await sandbox.start(["sleep", "0.05"])).wait({ signal }),
  };
  for (const [name, work] of Object.entries(works)) {
    const sandbox = await Sandbox.connect(url);
    // Each turn of the event loop is a place to cancel at.
    for (let turns = 0, done = false; !done && turns < 40; turns++) {
      const abort = new AbortController();
      const reason = new Error(`${name} after ${turns} turns`);
      const outcome = work(abort.signal, sandbox).then(() => (done = true), (error) => error);
      for (let n = 0; n < turns; n++) await new Promise(setImmediate);
      abort.abort(reason);
      const result = await outcome;
      assert.ok(result === true || result === reason || result?.cause === reason, `${name}: ${result?.stack}`);
    }
    assert.equal((await sandbox.run(["echo", "usable"])).stdout, "usable\n", name);
    await until(async () => (await sandbox.processes()).every(({ exited }) => exited), `nothing of ${name} runs`);
    await sandbox.close();
  }
});

test("aborting can leave the command running", async (t) => {
  const { url } = await server(t);
  const sandbox = await Sandbox.connect(url);
  const abort = new AbortController();
  const running = sandbox.run("echo started; read x; echo $x", { signal: abort.signal, onAbort: "detach", processId: "left", onStdout: () => abort.abort(), pty: true });
  await assert.rejects(running, { name: "AbortError" });
  const [left] = await sandbox.processes();
  assert.deepEqual([left.processId, left.exited], ["left", false]);
  const process = sandbox.process("left");
  await process.write("on\n");
  assert.equal((await process.wait()).exitCode, 0);
  await sandbox.close();
});

test("a blocked event loop does not lose the connection", async (t) => {
  const { url } = await server(t);
  const dialer = new WebSocketDialer(url, {});
  const { dial } = dialer;
  let blocks = 0;
  // Blocked between a ping and the turn that would read the pong: afterwards, timers come before sockets.
  dialer.dial = async (...args) => {
    const transport = await dial.apply(dialer, args);
    const { ping } = transport;
    return { ...transport, ping: () => (ping(), setImmediate(() => (blocks++, Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 700)))) };
  };
  const sandbox = await Sandbox.connect(dialer, { keepAliveIdle: 100, keepAliveTimeout: 100, reconnect: { enabled: false } });
  const process = await sandbox.start("sleep 3; echo late");
  let text = "";
  for await (const event of process) if (event.type === "output") text += Buffer.from(event.data);
  assert.equal(text, "late\n");
  assert.ok(blocks > 1);
  await sandbox.close();
});

test("a connection that has gone silent is replaced", async (t) => {
  const { url } = await server(t);
  const net = await proxy(t, url);
  // Reads nothing and closes nothing: a network that is gone.
  const sandbox = await Sandbox.connect(net.url, { keepAliveIdle: 200, keepAliveTimeout: 200 });
  const process = await sandbox.start("cat", { pty: true });
  net.freeze();
  await process.write("after\n");
  let text = "";
  for await (const event of process) {
    if (event.type === "output") text += Buffer.from(event.data);
    if (text.includes("after")) break;
  }
  assert.equal(net.stats.connections, 2);
  await process.terminate();
  await sandbox.close();
});

test("a server's names lead nowhere outside of a download", async (t) => {
  const names = ["file:///srv/tree/..%2Fevil", "file:///srv/tree/%2E%2E", "file:///srv/tree/a%2Fb", "file:///srv/tree/"];
  for (const fileNameUri of names) {
    const fake = await fakeServer(t, (method, { path }) => {
      if (method === "fs/readDirectory") return { entries: [{ fileName: "x", fileNameUri, isDirectory: false, isFile: true }] };
      if (method === "fs/getMetadata") return { isDirectory: path.endsWith("/tree"), isFile: !path.endsWith("/tree"), isSymlink: false, size: 1, createdAtMs: 0, modifiedAtMs: 0 };
      if (method === "fs/readBlock") return { chunk: "eA==", eof: true };
      return method === "initialize" ? undefined : {};
    });
    const sandbox = await Sandbox.connect(fake.url);
    const to = directory(t);
    await assert.rejects(sandbox.download("tree", join(to, "tree")), api.InvalidPathError, fileNameUri);
    assert.deepEqual(readdirSync(to, { recursive: true }), ["tree"], fileNameUri);
    await sandbox.close();
  }
});

test("two event loops work at once", async (t) => {
  const { url } = await server(t);
  const source = `
    import { parentPort, workerData } from "node:worker_threads";
    import { Sandbox } from ${JSON.stringify(new URL("../dist/index.js", import.meta.url).href)};
    const sandbox = await Sandbox.connect(workerData);
    for (let n = 0; n < 20; n++) parentPort.postMessage((await sandbox.run(["echo", "w" + n])).stdout);
    await sandbox.close();`;
  const worker = new Worker(new URL(`data:text/javascript,${encodeURIComponent(source)}`), { workerData: url });
  const said = [];
  worker.on("message", (text) => said.push(text));
  const ended = once(worker, "exit");
  const sandbox = await Sandbox.connect(url);
  for (let n = 0; n < 20; n++) assert.equal((await sandbox.run(["echo", `m${n}`])).stdout, `m${n}\n`);
  await ended;
  assert.deepEqual(said, Array.from({ length: 20 }, (_, n) => `w${n}\n`));
  await sandbox.close();
});

for (const signal of ["SIGINT", "SIGKILL"]) {
  test(`${signal} to the program ends what Sandbox.local started`, async (t) => {
    const pidFile = join(directory(t), "pid");
    const source = `
      import { Sandbox } from ${JSON.stringify(new URL("../dist/index.js", import.meta.url).href)};
      const sandbox = await Sandbox.local({ codex: ${JSON.stringify(CODEX)} });
      await sandbox.run(["sh", "-c", "echo $$ > $0.tmp; mv $0.tmp $0; exec sleep 1000", ${JSON.stringify(pidFile)}]);`;
    const child = spawn(process.execPath, ["--input-type=module", "-e", source], { stdio: ["ignore", "ignore", "inherit"] });
    const exited = once(child, "exit");
    const { readFileSync, existsSync } = await import("node:fs");
    await until(() => existsSync(pidFile), "the command runs");
    child.kill(signal);
    await exited;
    const pid = Number(readFileSync(pidFile, "utf8"));
    await until(() => { try { process.kill(pid, 0); return false; } catch { return true; } }, "the command is gone");
  });
}
