/** Servers for tests: the programs under test, a scripted one, and a proxy that cuts connections. */
import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, rmSync } from "node:fs";
import net from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { WebSocketServer } from "ws";

export const CODEX = process.env.CODEX_BIN ?? "codex";

/** A directory that is removed after the test. */
export function directory(t) {
  const path = mkdtempSync(join(tmpdir(), "codex-ts-"));
  t.after(() => rmSync(path, { recursive: true, force: true }));
  return path;
}

/** Starts `codex exec-server` and returns its address; it ends with the test. */
export async function server(t, { bin = CODEX, args = [], listen = "ws://127.0.0.1:0", cwd, env = {} } = {}) {
  const home = directory(t);
  const child = spawn(bin, ["exec-server", "--listen", listen, ...args], {
    stdio: ["ignore", "pipe", "pipe"],
    cwd: cwd ?? home,
    env: { ...process.env, CODEX_HOME: home, ...env },
  });
  let errors = "";
  child.stderr.on("data", (data) => (errors += data));
  const exited = once(child, "exit");
  t.after(async () => {
    child.kill("SIGTERM");
    await exited;
  });
  let line = "";
  while (!line.includes("\n")) {
    const ended = exited.then(() => { throw new Error(`${bin} ended: ${errors}`); });
    ended.catch(() => {});
    const [data] = await Promise.race([once(child.stdout, "data"), ended]);
    line += data;
  }
  return { url: line.trim(), child, cwd: cwd ?? home };
}

/** A scripted server. `answer(method, params, send, socket)` returns a result, throws an error, or returns undefined to stay silent. */
export async function fakeServer(t, answer) {
  const wss = new WebSocketServer({ host: "127.0.0.1", port: 0 });
  await once(wss, "listening");
  t.after(() => {
    for (const client of wss.clients) client.terminate();
    wss.close();
  });
  const sockets = [];
  wss.on("connection", (socket) => {
    sockets.push(socket);
    const send = (message) => socket.send(typeof message === "string" ? message : JSON.stringify(message));
    socket.on("message", async (data) => {
      const { id, method, params } = JSON.parse(data);
      if (id === undefined) return;
      try {
        const result = (await answer(method, params ?? {}, send, socket)) ?? defaults[method]?.(params);
        if (result !== undefined && result !== SILENT) send({ id, result });
      } catch (error) {
        send({ id, error: { code: error.code ?? -32603, message: error.message, ...(error.data ? { data: error.data } : {}) } });
      }
    });
  });
  return { url: `ws://127.0.0.1:${wss.address().port}`, sockets, wss };
}

export const SILENT = Symbol("no answer");
export const info = (capabilities = {}) => ({
  shell: { name: "sh", path: "/bin/sh" }, executorVersion: "0.0.0", cwd: "file:///srv", platformOs: "linux", prependPathDirs: [], capabilities,
});
const defaults = {
  initialize: (params) => ({ sessionId: params.resumeSessionId ?? "s1", environmentInfo: info() }),
  "process/terminate": () => ({ running: false }),
  "environment/status": () => ({ status: "ready" }),
};

/** A proxy of bytes. `cut()` destroys all connections; `budget()` says after how many bytes from the server each is cut. */
export async function proxy(t, url, budget = () => Infinity) {
  const { hostname, port } = new URL(url);
  const open = new Set();
  const stats = { connections: 0, cuts: 0 };
  const listener = net.createServer((inner) => {
    stats.connections++;
    const outer = net.connect(Number(port), hostname);
    const pair = { inner, outer };
    open.add(pair);
    const end = () => {
      open.delete(pair);
      inner.destroy();
      outer.destroy();
    };
    let left = budget();
    for (const socket of [inner, outer]) socket.on("error", end).on("close", end);
    inner.pipe(outer);
    outer.on("data", (data) => {
      if (data.length >= left) {
        // In the middle of a message, as networks do.
        inner.write(data.subarray(0, left));
        stats.cuts++;
        return end();
      }
      left -= data.length;
      if (!inner.write(data)) {
        outer.pause();
        inner.once("drain", () => outer.resume());
      }
    });
  });
  listener.listen(0, "127.0.0.1");
  await once(listener, "listening");
  const cut = () => {
    for (const { inner, outer } of open) {
      stats.cuts++;
      inner.destroy();
      outer.destroy();
    }
  };
  /** Cuts at the next bytes from the server, which are lost: a request has its effect, and its response does not arrive. */
  const loseAnswer = () => {
    for (const { inner, outer } of open) {
      outer.removeAllListeners("data");
      outer.once("data", () => {
        stats.cuts++;
        inner.destroy();
        outer.destroy();
      });
    }
  };
  /** Passes nothing on, and closes nothing. Later connections work. */
  const freeze = () => {
    for (const { inner, outer } of open) {
      inner.unpipe(outer);
      inner.pause();
      outer.removeAllListeners("data");
      outer.pause();
    }
  };
  t.after(() => {
    listener.close();
    cut();
  });
  return { url: `ws://127.0.0.1:${listener.address().port}`, cut, loseAnswer, freeze, stats };
}

/** Resolves once the condition holds; fails after 20 s. */
export async function until(condition, what) {
  const deadline = Date.now() + 20_000;
  while (!(await condition())) {
    if (Date.now() > deadline) throw new Error(`gave up waiting until ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
}
