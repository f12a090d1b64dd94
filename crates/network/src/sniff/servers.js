// Prints, for each line of hex, the host that Node's servers take from it: the strict one, else the lenient one.
const http = require("http");
const { Duplex } = require("stream");
const servers = [false, true].map((insecureHTTPParser) => http.createServer({ insecureHTTPParser }));
const seen = (server, data) =>
  new Promise((resolve) => {
    const stream = new Duplex({ read() {}, write(_chunk, _encoding, done) { done(); } });
    stream.answer = (host) => { stream.destroy(); resolve(host); };
    stream.on("close", () => resolve(""));
    server.emit("connection", stream);
    stream.push(data);
    stream.push(null);
  });
for (const server of servers) {
  server.on("request", (request) => request.socket.answer(request.headers.host || ""));
  server.on("upgrade", (request) => request.socket.answer(request.headers.host || ""));
  server.on("connect", (request) => request.socket.answer(request.headers.host || ""));
  server.on("clientError", (_error, stream) => stream.answer(""));
}
(async () => {
  const lines = require("fs").readFileSync(0, "utf8").split("\n").filter(Boolean);
  for (const line of lines) {
    const data = Buffer.from(line, "hex");
    let host = "";
    for (const server of servers) host = host || (await seen(server, data));
    console.log(JSON.stringify(host.trim()).slice(1, -1));
  }
  process.exit(0);
})();
