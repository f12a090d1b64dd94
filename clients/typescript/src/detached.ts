/**
 * Detached processes by name: the files of `codex run --detach`, so that `codex ps`, `attach`, `logs` and
 * `kill` work with what this package detached, and the other way round. In Node, Deno and Bun.
 */
import { AlreadyExistsError, InvalidParamsError, PathNotFoundError } from "./errors.js";
import type { DetachedProcess } from "./process.js";

function check(name: string): void {
  if (!/^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$/.test(name)) {
    throw new InvalidParamsError(`invalid name ${JSON.stringify(name)}: expected up to 64 letters, digits, -, _ and ., not starting with - or .`);
  }
}

async function file(name: string): Promise<string> {
  check(name);
  const { homedir } = await import("node:os");
  const state = process.env["XDG_STATE_HOME"];
  return `${state?.startsWith("/") ? state : `${homedir()}/.local/state`}/codex/sessions/${name}.json`;
}

/** Saves a process under a name; readable by its owner only, since the id of a session opens it. */
export async function saveDetached(name: string, detached: DetachedProcess): Promise<void> {
  const path = await file(name);
  const { promises: fs } = await import("node:fs");
  const { url, sessionId, processId, tty, afterSeq } = detached;
  await fs.mkdir(path.slice(0, path.lastIndexOf("/")), { recursive: true, mode: 0o700 });
  try {
    await fs.writeFile(path, `${JSON.stringify({ url, sessionId, processId, tty, afterSeq }, null, 2)}\n`, { mode: 0o600, flag: "wx" });
  } catch (cause) {
    if ((cause as { code?: string }).code !== "EEXIST") throw cause;
    throw new AlreadyExistsError(`the name ${name} is in use; see codex ps, or remove ${path} if its server is gone`, { cause });
  }
}

export async function loadDetached(name: string): Promise<DetachedProcess> {
  const path = await file(name);
  const { promises: fs } = await import("node:fs");
  let text: string;
  try {
    text = await fs.readFile(path, "utf8");
  } catch (cause) {
    throw new PathNotFoundError(`no detached process has the name ${name}; see codex ps`, { cause });
  }
  const { url, sessionId, processId, tty, afterSeq = 0 } = JSON.parse(text) as DetachedProcess;
  return { url, sessionId, processId, tty: tty === true, afterSeq, name };
}

export async function removeDetached(name: string): Promise<void> {
  const path = await file(name);
  const { promises: fs } = await import("node:fs");
  await fs.rm(path, { force: true });
}
