// Throughput and latency of this client beside the Rust client (codex run) and beside bare messages.
//
//   node tools/bench.mjs PATH-OF-CODEX [MIB]
//
// Ratios of the same run; absolute figures depend on the machine. Rounds alternate, and the best of each counts.
import { spawn } from "node:child_process";
import { once } from "node:events";
import { WebSocket } from "ws";
import { Sandbox } from "../dist/index.js";

const [codex, mib = "512"] = process.argv.slice(2);
if (!codex) throw new Error("usage: node tools/bench.mjs PATH-OF-CODEX [MIB]");
const bytes = Number(mib) << 20;
const command = ["head", "-c", String(bytes), "/dev/zero"];

const server = spawn(codex, ["exec-server"], { stdio: ["ignore", "pipe", "inherit"] });
const url = String((await once(server.stdout, "data"))[0]).trim();
const sandbox = await Sandbox.connect(url);

const seconds = async (work) => {
  const began = performance.now();
  await work();
  return (performance.now() - began) / 1000;
};
const viaThis = async () => {
  let got = 0;
  for await (const event of await sandbox.start(command)) if (event.type === "output") got += event.data.length;
  if (got !== bytes) throw new Error(`got ${got} of ${bytes} bytes`);
};
// To a file without content, so that a pipe is not what is measured.
const viaRust = async () => {
  const child = spawn(codex, ["run", "--on", url, "--", ...command], { stdio: ["ignore", "ignore", "inherit"] });
  const [code] = await once(child, "exit");
  if (code !== 0) throw new Error(`codex run exited with ${code}`);
};

/** The same messages, without a client. */
async function bare() {
  const socket = new WebSocket(url, { perMessageDeflate: false });
  await once(socket, "open");
  let wake;
  socket.on("message", (data) => {
    const message = JSON.parse(data);
    if (message.id === 1 || message.method === "process/closed") wake();
  });
  const exchange = (message) => new Promise((resolve) => {
    wake = resolve;
    socket.send(JSON.stringify(message));
  });
  await exchange({ id: 1, method: "initialize", params: { clientName: "bench" } });
  socket.send(JSON.stringify({ method: "initialized" }));
  let n = 1;
  const run = () => exchange({ id: ++n, method: "process/start", params: { processId: `b${n}`, argv: ["true"], cwd: "file:///", env: { PATH: "/usr/bin:/bin" }, tty: false } });
  return { run, close: () => socket.close() };
}

const floor = await bare();
const best = { this: Infinity, rust: Infinity, run: Infinity, floor: Infinity };
for (let round = 0; round < 5; round++) {
  best.this = Math.min(best.this, await seconds(viaThis));
  best.rust = Math.min(best.rust, await seconds(viaRust));
  const many = (work) => seconds(async () => { for (let n = 0; n < 100; n++) await work(); });
  best.floor = Math.min(best.floor, (await many(floor.run)) / 100);
  best.run = Math.min(best.run, (await many(() => sandbox.run(["true"]))) / 100);
}
const rate = (time) => `${(bytes / 1e6 / time).toFixed(0)} MB/s`;
const ms = (time) => `${(time * 1000).toFixed(2)} ms`;
console.log(`throughput: this client ${rate(best.this)}, codex run ${rate(best.rust)}: ratio ${(best.rust / best.this).toFixed(2)}`);
console.log(`run(["true"]): this client ${ms(best.run)}, bare messages ${ms(best.floor)}: ratio ${(best.run / best.floor).toFixed(2)}`);
floor.close();
await sandbox.close();
server.kill("SIGTERM");
