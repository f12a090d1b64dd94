// The same script against this project's server and, if $CODEX_INTEROP_BIN names it, the other
// implementation's. What a server lacks has to be a clear error.
//
// CODEX_STREAM_MIB=1024 streams a gibibyte.
import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { mkdirSync, readdirSync, readFileSync, statSync, symlinkSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import * as api from "../dist/index.js";
import { random, SEED } from "./support/random.mjs";
import { CODEX, directory, proxy, server, until } from "./support/servers.mjs";

const { Sandbox } = api;
const MIB = Number(process.env.CODEX_STREAM_MIB ?? 48);
const servers = [{ name: "ours", bin: CODEX, ours: true }];
if (process.env.CODEX_INTEROP_BIN) servers.push({ name: "theirs", bin: process.env.CODEX_INTEROP_BIN, ours: false });

/** Numbers as text, so that a byte that is lost, repeated or moved changes the digest. */
const COUNT = (bytes) => ["sh", "-c", `seq 1 1000000000 | head -c ${bytes}`];
function expected(bytes) {
  const hash = createHash("sha256");
  for (let n = 1, left = bytes; left > 0; ) {
    let text = "";
    while (text.length < 1 << 16) text += `${n++}\n`;
    hash.update(text.slice(0, left));
    left -= Math.min(left, text.length);
  }
  return hash.digest("hex");
}
async function digest(process, pause = async () => {}) {
  const hash = createHash("sha256");
  let bytes = 0;
  let lost = false;
  for await (const event of process) {
    if (event.type === "lost") lost = true;
    if (event.type !== "output") continue;
    hash.update(event.data);
    bytes += event.data.length;
    await pause(bytes);
  }
  return { digest: hash.digest("hex"), bytes, lost };
}

for (const { name, bin, ours } of servers) {
  const has = (sandbox, capability) => sandbox.info.capabilities?.[capability] === true;
  const connect = async (t, options = {}) => {
    const cwd = directory(t);
    const { url } = await server(t, { bin, cwd });
    const sandbox = await Sandbox.connect(url, { cwd, ...options });
    t.after(() => sandbox.close());
    return { sandbox, cwd, url };
  };

  test(`${name}: commands`, async (t) => {
    const { sandbox, cwd } = await connect(t);
    const result = await sandbox.run(["sh", "-c", "echo out; echo err >&2; exit 3"]);
    assert.deepEqual([result.exitCode, result.stdout, result.stderr, result.timedOut], [3, "out\n", "err\n", false]);
    assert.equal((await sandbox.run("pwd; echo $GREETING ü", { env: { GREETING: "hi" } })).stdout, `${cwd}\nhi ü\n`);
    assert.equal((await sandbox.run("kill -9 $$")).exitCode, 137);
    assert.deepEqual([...(await sandbox.run(["printf", "\\377\\000"])).stdoutBytes], [255, 0]);
    await assert.rejects(sandbox.run(["no-such-program-here"]), api.ProgramNotFoundError);
    await assert.rejects(sandbox.run("exit 4", { check: true }), (error) => error instanceof api.CommandFailedError && error.result.exitCode === 4);
    const pieces = [];
    await sandbox.run("printf '\\303'; sleep 0.1; printf '\\274'", { onStdout: (text) => pieces.push(text) });
    assert.equal(pieces.join(""), "ü");
    const late = await sandbox.run("echo part; sleep 100", { timeout: 500 });
    assert.deepEqual([late.timedOut, late.stdout], [true, "part\n"]);
  });

  test(`${name}: stdin, terminals, signals`, async (t) => {
    const { sandbox } = await connect(t);
    if (has(sandbox, "processCloseStdin")) {
      const data = Buffer.alloc(3_000_000, "0123456789abcdef\n");
      assert.deepEqual(Buffer.from((await sandbox.run(["cat"], { input: data })).stdoutBytes), data);
    } else {
      await assert.rejects(sandbox.run(["cat"], { input: "x" }), api.UnsupportedError);
    }
    const shell = await sandbox.start(["sh"], { pty: true });
    await shell.write("stty -echo; echo re''ady; read line; echo got:$line; exit 5\n");
    let text = "";
    for await (const event of shell) {
      if (event.type !== "output") continue;
      const before = text;
      text += Buffer.from(event.data);
      if (text.includes("ready") && !before.includes("ready")) await shell.write("word\n");
    }
    assert.match(text, /got:word/);
    assert.equal(shell.exit.exitCode, 5);
    if (has(sandbox, "processResize")) {
      const sized = await sandbox.start("stty size; read x; stty size", { pty: { rows: 31, cols: 99 } });
      await sized.resize(40, 120);
      await sized.write("\n");
      let sizes = "";
      for await (const event of sized) if (event.type === "output") sizes += Buffer.from(event.data);
      assert.match(sizes, /40 120\s*$/);
    } else {
      await assert.rejects(sandbox.start(["sh"], { pty: { rows: 1, cols: 1 } }), api.UnsupportedError);
    }
    const trap = await sandbox.start("trap 'echo caught; exit 9' INT; sleep 600 >/dev/null 2>&1 & echo set; while :; do wait; done");
    for await (const event of trap) if (event.type === "output" && String(Buffer.from(event.data)).includes("set")) await trap.signal("interrupt");
    assert.equal(trap.exit.exitCode, 9);
    const sleeper = await sandbox.start(["sleep", "100"]);
    assert.equal(await sleeper.terminate(), true);
    assert.ok((await sleeper.wait()).exitCode !== 0);
    await assert.rejects(sleeper.write("x"), api.StdinClosedError);
  });

  test(`${name}: streams have back-pressure`, async (t) => {
    const { sandbox } = await connect(t, { window: 1 << 20, spillLimit: 1 << 20 });
    const size = 8 << 20;
    const process = await sandbox.start(["sh", "-c", `seq 1 1000000000 | head -c ${size}; echo done >&2`]);
    const read = async (stream) => {
      const hash = createHash("sha256");
      let bytes = 0;
      for await (const chunk of stream) {
        hash.update(chunk);
        bytes += chunk.length;
        if (bytes % 7 === 0) await new Promise(setImmediate);
      }
      return { bytes, digest: hash.digest("hex") };
    };
    const [out, err] = await Promise.all([read(process.stdout), read(process.stderr)]);
    assert.deepEqual([out.digest, err.bytes], [expected(size), 5]);
  });

  test(`${name}: a checksummed stream of ${MIB} MiB`, async (t) => {
    const { sandbox } = await connect(t);
    const bytes = MIB << 20;
    const result = await digest(await sandbox.start(COUNT(bytes)));
    assert.deepEqual(result, { digest: expected(bytes), bytes, lost: false });
  });

  test(`${name}: 1,000 processes`, async (t) => {
    const { sandbox } = await connect(t);
    const results = [];
    const queue = Array.from({ length: 1000 }, (_, n) => n);
    await Promise.all(Array.from({ length: 40 }, async () => {
      for (let n = queue.shift(); n !== undefined; n = queue.shift()) results[n] = (await sandbox.run(["echo", `n${n}`])).stdout;
    }));
    assert.deepEqual(results, Array.from({ length: 1000 }, (_, n) => `n${n}\n`));
  });

  test(`${name}: cuts in the middle of messages lose no output and no input`, async (t) => {
    const cwd = directory(t);
    const { url } = await server(t, { bin, cwd });
    const rng = random();
    const middle = await proxy(t, url, () => 20_000 + rng.below(ours ? 900_000 : 400_000));
    const sandbox = await Sandbox.connect(middle.url, { cwd, reconnect: { firstDelay: 5 } });
    t.after(() => sandbox.close());
    // The other implementation drops output once it is sent: what a cut destroys in a socket is reported.
    const bytes = ours ? 12 << 20 : 2 << 20;
    const result = await digest(await sandbox.start(COUNT(bytes)));
    if (ours || !result.lost) assert.deepEqual(result, { digest: expected(bytes), bytes, lost: false }, `SEED=${SEED}`);
    assert.ok(middle.stats.cuts > 1, "the proxy has cut nothing");
    const before = middle.stats.cuts;
    // It outlives its input: the response to a write that is repeated would be lost in its end.
    const echo = await sandbox.start("stty raw -echo; echo ok; head -c 300000 | sha256sum; sleep 600", { pty: true });
    const data = Buffer.from(Array.from({ length: 300_000 }, () => rng.below(256)));
    let text = "";
    const reading = (async () => { for await (const event of echo) if (event.type === "output") text += Buffer.from(event.data); })();
    await until(() => text.includes("ok"), "the terminal is raw");
    for (let at = 0; at < data.length; at += 50_000) {
      // Either the write or the response to it is lost.
      const accepted = (at / 50_000) % 2 === 0;
      if (accepted) middle.loseAnswer();
      const writing = echo.write(data.subarray(at, at + 50_000));
      if (!accepted) middle.cut();
      await writing;
    }
    await until(() => text.includes(" -"), "all input has arrived");
    await echo.terminate();
    await reading;
    assert.ok(middle.stats.cuts > before);
    assert.match(text, new RegExp(createHash("sha256").update(data).digest("hex")), `SEED=${SEED}`);
  });

  test(`${name}: files`, async (t) => {
    const { sandbox, cwd } = await connect(t);
    const { files } = sandbox;
    await files.write("a.txt", "hello ü\n");
    assert.equal(await files.readText("a.txt"), "hello ü\n");
    assert.equal(readFileSync(join(cwd, "a.txt"), "utf8"), "hello ü\n");
    const big = Buffer.alloc(5_000_001, "0123456789");
    await files.write("big", big);
    assert.deepEqual(Buffer.from(await files.read("big")), big);
    await files.write("streamed", new Blob([big, "tail"]).stream());
    let size = 0;
    for await (const chunk of files.stream("streamed")) size += chunk.length;
    assert.equal(size, big.length + 4);
    await files.write("empty", "");
    assert.equal((await files.read("empty")).length, 0);
    assert.equal((await files.stat("big")).size, big.length);
    assert.equal(await files.exists("none"), false);
    await assert.rejects(files.read("none"), api.PathNotFoundError);
    await assert.rejects(files.read("."), api.FileError);
    await files.write("d/e/f.txt", "x", { parents: true });
    const tree = await files.walk("d");
    assert.deepEqual(tree.entries.map(({ path }) => path), [join(cwd, "d/e"), join(cwd, "d/e/f.txt")]);
    await files.copy("d", "copy", { recursive: true });
    assert.equal(await files.readText("copy/e/f.txt"), "x");
    await files.remove("d");
    assert.equal(await files.exists("d"), false);
    if (has(sandbox, "fsSearch")) {
      const found = [];
      for await (const { path, lineNumber } of files.search("hel+o", { include: ["*.txt"] })) found.push([path, lineNumber]);
      assert.deepEqual(found, [[join(cwd, "a.txt"), 1]]);
      assert.deepEqual((await files.glob("**/*.txt")).entries.map((entry) => entry.name).sort(), ["a.txt", "f.txt"]);
      await files.rename("a.txt", "b.txt");
      await files.symlink("link", "b.txt");
      await files.setMode("b.txt", 0o600);
      assert.equal(await files.canonicalize("link"), join(await files.canonicalize("."), "b.txt"));
      const abort = new AbortController();
      const watch = files.watch(".", { debounceMs: 10, signal: abort.signal });
      const first = watch.next();
      // The watch begins with a request; the next request comes after it.
      await files.list();
      await files.write("watched", "1");
      let event = (await first).value;
      while (event.type !== "changed" || !event.path.endsWith("/watched")) event = (await watch.next()).value;
      const pending = assert.rejects(watch.next().then(() => watch.next()).then(() => watch.next()), { name: "AbortError" });
      abort.abort();
      await pending;
    } else {
      await assert.rejects(files.search("x").next(), api.UnsupportedError);
      await assert.rejects(files.glob("*"), api.UnsupportedError);
      await assert.rejects(files.rename("a.txt", "b.txt"), api.UnsupportedError);
    }
  });

  test(`${name}: names that are Unicode, odd, or not UTF-8`, async (t) => {
    const { sandbox, cwd } = await connect(t);
    const names = ["ü 漢字 🦀", "e\u0301", "a%20b", "q?#&", "new\nline", " ", "-rf", "\\back", "\u202e"];
    for (const name of names) {
      await sandbox.files.write(`${cwd}/${name}`, name);
      assert.equal(readFileSync(join(cwd, name), "utf8"), name);
    }
    const odd = Buffer.from([0x78, 0xff, 0xfe, 0x25, 0x32]);
    await sandbox.files.write(Buffer.concat([Buffer.from(`${cwd}/`), odd]), "odd");
    assert.equal(readFileSync(Buffer.concat([Buffer.from(`${cwd}/`), odd]), "utf8"), "odd");
    const listed = await sandbox.files.list(cwd);
    assert.deepEqual(listed.map(({ name }) => name).filter((name) => !name.includes("\ufffd")).sort(), [...names].sort());
    for (const entry of listed) {
      if (entry.name.includes("\ufffd") && !ours) continue;
      assert.equal(await sandbox.files.readText(entry.path), entry.name.includes("\ufffd") ? "odd" : entry.name);
    }
  });

  test(`${name}: trees go up and come back the same`, async (t) => {
    const { sandbox, cwd } = await connect(t);
    const from = join(directory(t), "from");
    mkdirSync(join(from, "sub/deep"), { recursive: true });
    const rng = random();
    for (let n = 0; n < 40; n++) writeFileSync(join(from, rng.pick(["", "sub", "sub/deep"]), `f${n}`), Buffer.alloc(rng.below(700_000), n));
    writeFileSync(join(from, "run.sh"), "#!/bin/sh\n", { mode: 0o755 });
    if (ours) writeFileSync(Buffer.concat([Buffer.from(`${from}/`), Buffer.from([0xff])]), "odd");
    symlinkSync("run.sh", join(from, "link"));
    const up = await sandbox.upload(from, "tree");
    assert.deepEqual(up.skipped, has(sandbox, "fsRenameLinkMode") ? [] : [join(from, "link")]);
    const to = join(cwd, "back");
    await sandbox.download("tree", to);
    const all = readdirSync(from, { recursive: true }).sort();
    const back = readdirSync(to, { recursive: true }).sort();
    assert.deepEqual(back, all.filter((path) => path !== "link" || has(sandbox, "fsRenameLinkMode")), `SEED=${SEED}`);
    for (const path of all) {
      if (path.includes("\ufffd") || path === "link" || statSync(join(from, path)).isDirectory()) continue;
      assert.deepEqual(readFileSync(join(to, path)), readFileSync(join(from, path)), path);
    }
    if (ours) assert.equal(statSync(join(to, "run.sh")).mode & 0o777, 0o755);
  });

  test(`${name}: patches`, async (t) => {
    const { sandbox, cwd } = await connect(t);
    writeFileSync(join(cwd, "app.py"), 'def greet():\nprint("Hi")\n');
    writeFileSync(join(cwd, "old.txt"), "old\n");
    const changes = await sandbox.applyPatch(
      '*** Begin Patch\n*** Add File: notes/new.txt\n+first\n*** Delete File: old.txt\n*** Update File: app.py\n*** Move to: main.py\n@@ def greet():\n-print("Hi")\n+print("Hello")\n*** End Patch\n',
    );
    assert.deepEqual(changes.map(api.formatChange), ["A notes/new.txt", "D old.txt", "A main.py", "D app.py"]);
    assert.equal(readFileSync(join(cwd, "main.py"), "utf8"), 'def greet():\nprint("Hello")\n');
    const before = readdirSync(cwd).sort();
    await assert.rejects(sandbox.applyPatch("*** Begin Patch\n*** Add File: x\n+x\n*** Update File: main.py\n@@\n-nope\n+y\n*** End Patch"), (error) =>
      error instanceof api.PatchError && /hunk 1 of main.py/.test(error.message) && error.done.length === 0);
    assert.deepEqual(readdirSync(cwd).sort(), before, "a patch that does not fit changes nothing");
  });

  test(`${name}: policies`, async (t) => {
    const { sandbox, cwd } = await connect(t, { policy: "read-only" });
    const probe = await sandbox.run("echo fine").catch((error) => error);
    if (probe instanceof api.SandboxUnavailableError || (!ours && probe.stdout !== "fine\n")) {
      return t.skip(`this server cannot enforce a sandbox on this machine: ${probe.message ?? probe.stderr}`);
    }
    assert.equal(probe.stdout, "fine\n");
    assert.notEqual((await sandbox.run("echo x > file")).exitCode, 0);
    assert.deepEqual(readdirSync(cwd), []);
    await assert.rejects(sandbox.files.write("file", "x"), api.CodexError);
    assert.equal((await sandbox.run("echo x > file", { policy: "workspace-write" })).exitCode, 0);
    assert.equal(await sandbox.files.readText("file"), "x\n");
  });

  test(`${name}: processes outlive the client that detaches`, async (t) => {
    const cwd = directory(t);
    const { url } = await server(t, { bin, cwd });
    const state = directory(t);
    process.env.XDG_STATE_HOME = state;
    const sandbox = await Sandbox.connect(url, { cwd });
    const started = await sandbox.start("echo one; while [ ! -e go ]; do sleep 0.02; done; echo two; exit 6");
    for await (const event of started) if (event.type === "output") break;
    const other = await sandbox.start(["sleep", "100"], { processId: "other" });
    await started.detach("job");
    await assert.rejects(started.detach("../evil"), api.InvalidParamsError);
    await assert.rejects(started.detach("job"), api.AlreadyExistsError);
    await sandbox.close();
    await assert.rejects(other.wait(), api.ConnectionLostError);
    const attached = await Sandbox.attach("job", { cwd });
    await attached.sandbox.files.write("go", "");
    let text = "";
    for await (const event of attached.process) {
      assert.notEqual(event.type, "lost");
      if (event.type === "output") text += Buffer.from(event.data);
    }
    assert.deepEqual([text, attached.process.exit.exitCode], ["two\n", 6]);
    await attached.sandbox.close();
    await until(() => readdirSync(join(state, "codex/sessions")).length === 0, "the name is free");
    await assert.rejects(Sandbox.attach("job"), api.PathNotFoundError);
  });
}
