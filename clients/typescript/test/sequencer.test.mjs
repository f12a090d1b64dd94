// The sequencer against a model of the server: whatever is lost, repeated or reordered between them, the
// consumer gets every byte once and in order.
import assert from "node:assert/strict";
import { test } from "node:test";
import { Sequencer } from "../dist/sequencer.js";
import { random, SEED } from "./support/random.mjs";

const b64 = (text) => Buffer.from(text).toString("base64");

/** A process as the server keeps it. */
class ServerModel {
  constructor(untilRead) {
    this.untilRead = untilRead;
    this.events = [];
    this.released = 0;
  }
  publish(event) {
    this.events.push({ seq: this.events.length + 1, ...event });
    return this.events.at(-1);
  }
  read({ afterSeq, maxBytes }) {
    if (this.untilRead) this.released = Math.max(this.released, afterSeq);
    const chunks = [];
    let bytes = 0;
    for (const { seq, type, stream, text } of this.events) {
      if (type !== "output" || seq <= afterSeq) continue;
      assert.ok(seq > this.released || !this.untilRead, `chunk ${seq} was released by a read after ${this.released}`);
      bytes += text.length;
      if (chunks.length > 0 && bytes > maxBytes) break;
      chunks.push({ seq, stream, chunk: b64(text) });
    }
    const exit = this.events.find(({ type }) => type === "exited");
    const closed = this.events.some(({ type }) => type === "closed");
    const nextSeq = chunks.length > 0 ? chunks.at(-1).seq + 1 : this.events.length + 1;
    return { chunks, nextSeq, exited: !!exit, exitCode: exit ? 7 : null, closed, failure: null, sandboxDenied: false };
  }
}

function deliver(sequencer, { seq, type, stream, text }) {
  if (type === "output") sequencer.output(seq, stream, b64(text));
  else if (type === "exited") sequencer.exited(seq, { exitCode: 7, sandboxDenied: false });
  else sequencer.closedAt(seq);
}

function round(seed) {
  const rng = random(seed);
  const untilRead = rng.chance(0.7);
  const server = new ServerModel(untilRead);
  const sequencer = new Sequencer({ window: rng.pick([300, 1000, 100_000]), untilRead });
  const script = [];
  const outputs = rng.below(60);
  for (let n = 0; n < outputs; n++) {
    script.push({ type: "output", stream: rng.pick(["stdout", "stderr"]), text: `${n};`.padEnd(1 + rng.below(90), ".") });
  }
  script.splice(rng.below(script.length + 1), 0, { type: "exited" });
  script.push({ type: "closed" });
  const expected = script.filter(({ type }) => type === "output").map(({ stream, text }) => `${stream} ${text}`);

  let wire = [];
  const got = [];
  let exits = 0;
  let ended = false;
  const take = () => {
    const event = sequencer.shift();
    if (event?.type === "output") got.push(`${event.stream} ${Buffer.from(event.data)}`);
    if (event?.type === "exited") exits++;
    assert.notEqual(event?.type, "lost", "nothing was dropped, so nothing may be reported as lost");
    if (event?.type === "closed") ended = true;
    return event !== undefined;
  };
  for (let steps = 0; !ended; steps++) {
    assert.ok(steps < 20_000, "the consumer waits for ever");
    const what = rng.below(10);
    if (what < 3 && script.length > 0) wire.push(server.publish(script.shift()));
    else if (what < 5 && wire.length > 0) deliver(sequencer, wire.shift());
    else if (what === 5 && wire.length > 1 && rng.chance(0.3)) wire.push(wire.shift());
    else if (what === 6 && wire.length > 0 && rng.chance(0.3)) deliver(sequencer, wire[0]);
    else if (what === 7 && rng.chance(0.2)) {
      wire = [];
      sequencer.reconnected();
    } else if (what === 8) {
      const need = sequencer.need();
      if (need && (need !== "soon" || wire.length === 0)) {
        // All notifications that were sent before the response arrive before it.
        const request = sequencer.read(need);
        const response = server.read(request);
        if (rng.chance(0.1)) {
          wire = [];
          sequencer.reconnected();
        } else {
          for (const event of wire.splice(0)) deliver(sequencer, event);
          sequencer.response(request.afterSeq, response);
        }
      }
    } else if (rng.chance(0.6)) take();
    const released = server.events.filter(({ seq, type }) => type === "output" && seq <= server.released);
    assert.ok(released.length <= got.length, "a read released output that was not taken");
  }
  assert.deepEqual(got, expected);
  assert.equal(exits, 1);
}

test("every byte is delivered once and in order, whatever happens to notifications", () => {
  for (let n = 0; n < 3000; n++) {
    const seed = (SEED + n) >>> 0;
    try {
      round(seed);
    } catch (error) {
      error.message = `SEED=${seed}: ${error.message}`;
      throw error;
    }
  }
});

test("dropped output is reported as lost, once, where it is missing", () => {
  const sequencer = new Sequencer({ window: 1000, untilRead: false, resync: true });
  const chunk = (seq) => ({ seq, stream: "stdout", chunk: b64(`${seq}`) });
  const { afterSeq } = sequencer.read("now");
  sequencer.response(afterSeq, { chunks: [chunk(9), chunk(10)], nextSeq: 11, exited: false, closed: false, droppedBytes: 123 });
  assert.deepEqual(sequencer.shift(), { type: "lost", bytes: 123 });
  assert.equal(sequencer.shift().type, "output");
  assert.equal(sequencer.shift().type, "output");
  assert.equal(sequencer.shift(), undefined);
});

test("without a consumer the oldest output makes room", () => {
  const sequencer = new Sequencer({ window: 4000, untilRead: true });
  sequencer.dropOldest = true;
  for (let seq = 1; seq <= 100; seq++) sequencer.output(seq, "stdout", b64("x".repeat(500)));
  assert.ok(sequencer.waiting <= 4000);
  assert.equal(sequencer.need(), "acknowledge");
  assert.equal(sequencer.read("acknowledge").afterSeq, 100);
  assert.equal(sequencer.shift().type, "lost");
});
