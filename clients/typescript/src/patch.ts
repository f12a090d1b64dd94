/**
 * Patches in the format that agents write (`*** Begin Patch`), applied through file requests only.
 *
 * Invariant: every section is checked against the files before anything is written, so a patch that does
 * not fit changes nothing.
 */
import { CodexError, InvalidParamsError, PathNotFoundError } from "./errors.js";
import type { Abortable, Files } from "./files.js";

/** One changed file; the path is as written in the patch. */
export interface PatchChange {
  kind: "added" | "modified" | "deleted";
  path: string;
}

/** A patch that was not applied, or only in part. */
export class PatchError extends CodexError {
  /** The changes that were made. */
  readonly done: PatchChange[];
  /** The changes that were not made; the first of them may be incomplete. */
  readonly undone: PatchChange[];

  constructor(message: string, done: PatchChange[] = [], undone: PatchChange[] = [], cause?: unknown) {
    super(message, { kind: cause instanceof CodexError ? cause.kind : "refused", cause });
    this.done = done;
    this.undone = undone;
  }
}

type HunkLine = { is: " " | "-" | "+"; text: string };
interface Hunk {
  headers: string[];
  lines: HunkLine[];
  atEnd: boolean;
}
export type Section =
  | { is: "add"; path: string; lines: string[] }
  | { is: "delete"; path: string }
  | { is: "update"; path: string; moveTo: string | undefined; hunks: Hunk[] };

const BEGIN = "*** Begin Patch";
const END = "*** End Patch";
const ADD = "*** Add File: ";
const DELETE = "*** Delete File: ";
const UPDATE = "*** Update File: ";
const MOVE = "*** Move to: ";
const END_OF_FILE = "*** End of File";

/** Parses a patch. Ignores blank lines around it. */
export function parsePatch(text: string): Section[] {
  const lines = text.split("\n").map((line) => line.replace(/\r$/, ""));
  const isText = (line: string) => line.trim() !== "";
  const first = Math.max(lines.findIndex(isText), 0);
  const last = Math.max(lines.findLastIndex(isText), 0);
  const wrong = (at: number, problem: string) => new PatchError(`line ${at + 1} of the patch: ${problem}`);
  if (lines[first]!.trim() !== BEGIN) throw wrong(first, `a patch starts with \`${BEGIN}\``);
  if (last === first || lines[last]!.trim() !== END) throw wrong(last, `a patch ends with \`${END}\``);

  let at = first + 1;
  const peek = () => (at < last ? lines[at] : undefined);
  const path = (prefix: string): string | undefined => {
    // Generated text sometimes has spaces before the marker.
    const line = peek()?.trimStart();
    if (!line?.startsWith(prefix)) return undefined;
    const value = line.slice(prefix.length).trim();
    if (value === "") throw wrong(at, `\`${prefix.trimEnd()}\` needs a path`);
    at++;
    return value;
  };
  const isHunkLine = (line: string) => line === "" || " -+".includes(line[0]!);
  /** Whether nothing but blank lines comes before the next marker. */
  const restIsNoHunk = () => lines.slice(at, last).find(isText)?.startsWith("*** ") ?? true;
  const hunk = (): Hunk => {
    const found: Hunk = { headers: [], lines: [], atEnd: false };
    for (let line = peek(); line?.startsWith("@@"); line = peek()) {
      const header = line.slice(2).replace(/^ /, "");
      if (isText(header)) found.headers.push(header);
      at++;
    }
    const began = at;
    for (let line = peek(); line !== undefined; line = peek()) {
      if (line.trimEnd() === END_OF_FILE) {
        found.atEnd = true;
        at++;
        break;
      }
      if (!isHunkLine(line) || (line === "" && restIsNoHunk())) break;
      // An empty line is context whose leading space was lost.
      found.lines.push({ is: (line[0] ?? " ") as HunkLine["is"], text: line.slice(1) });
      at++;
    }
    if (found.lines.length === 0) {
      throw wrong(began, `expected a line that starts with a space, \`-\` or \`+\`, found: ${peek() ?? "the end of the patch"}`);
    }
    return found;
  };

  const sections: Section[] = [];
  while (at < last) {
    if (!isText(lines[at]!)) {
      at++;
      continue;
    }
    let name: string | undefined;
    if ((name = path(ADD)) !== undefined) {
      const content: string[] = [];
      for (let line = peek(); line?.startsWith("+"); line = peek()) {
        content.push(line.slice(1));
        at++;
      }
      sections.push({ is: "add", path: name, lines: content });
    } else if ((name = path(DELETE)) !== undefined) {
      sections.push({ is: "delete", path: name });
    } else if ((name = path(UPDATE)) !== undefined) {
      const began = at;
      const moveTo = peek()?.startsWith(MOVE) ? path(MOVE) : undefined;
      const hunks: Hunk[] = [];
      for (let line = peek(); line !== undefined; line = peek()) {
        if (!line.startsWith("@@") && !isHunkLine(line)) break;
        if (!isText(line) && restIsNoHunk()) break;
        hunks.push(hunk());
      }
      if (hunks.length === 0 && moveTo === undefined) throw wrong(began, `the update of ${name} has no hunk; start one with \`@@\``);
      sections.push({ is: "update", path: name, moveTo, hunks });
    } else {
      throw wrong(at, `expected \`${ADD}PATH\`, \`${DELETE}PATH\`, \`${UPDATE}PATH\` or \`${END}\``);
    }
  }
  if (sections.length === 0) throw new PatchError("the patch has no sections; add, update or delete a file");
  return sections;
}

/** The content with the hunks applied. Text is latin-1, a character a byte, so that other encodings survive. */
export function applyHunks(path: string, content: Uint8Array, hunks: readonly Hunk[]): Uint8Array {
  const text = fromBytes(content);
  const file = text.match(/[^\n]*\n|[^\n]+$/g)?.map(split) ?? [];
  const ended = file.length === 0 || file.at(-1)!.end !== "";
  const count = (end: string) => file.filter((line) => line.end === end).length;
  const usual = count("\r\n") > count("\n") ? "\r\n" : "\n";
  const texts = file.map((line) => line.text);

  const out: { text: string; end: string }[] = [];
  let at = 0;
  hunks.forEach((hunk, n) => {
    const start = locate(path, n + 1, hunk, texts, at);
    out.push(...file.slice(at, start));
    at = start;
    for (const line of hunk.lines) {
      if (line.is === "+") out.push({ text: bytesOf(line.text), end: usual });
      else {
        if (line.is === " ") out.push(file[at]!);
        at++;
      }
    }
  });
  out.push(...file.slice(at));
  const joined = out.map((line, n) => line.text + (n + 1 === out.length && !ended ? "" : line.end || usual)).join("");
  return toLatin1Bytes(joined);
}

function split(line: string): { text: string; end: string } {
  const end = line.endsWith("\r\n") ? "\r\n" : line.endsWith("\n") ? "\n" : "";
  return { text: line.slice(0, line.length - end.length), end };
}

/** Where the hunk's old lines start, at or after `from`. */
function locate(path: string, number: number, hunk: Hunk, lines: string[], from: number): number {
  const mismatch = (problem: string, wanted: string[]) =>
    new PatchError(
      `hunk ${number} of ${path} does not fit: ${problem}; read the file again and make the patch from it; nothing was changed. Looked for:\n${wanted.join("\n")}`,
    );
  let at = from;
  for (const header of hunk.headers) {
    const found = find(lines, [header], at, false);
    if (found === undefined) throw mismatch(`its \`@@\` line was not found after line ${at}`, [header]);
    at = found + 1;
  }
  const old = hunk.lines.filter((line) => line.is !== "+").map((line) => line.text);
  // Nothing to find: insert after the header, or at the end.
  if (old.length === 0) return hunk.headers.length === 0 || hunk.atEnd ? lines.length : at;
  let found = find(lines, old, at, hunk.atEnd);
  // The header itself may be the first line of context.
  if (found === undefined && hunk.headers.length > 0) found = find(lines, old, Math.max(at - 1, from), hunk.atEnd);
  if (found === undefined) throw mismatch(`its lines were not found ${hunk.atEnd ? "at the end of the file" : `after line ${at}`}`, old);
  return found;
}

/** Finds consecutive lines: first exactly, then with more and more leniency about white space and typography. */
function find(lines: string[], wanted: string[], from: number, atEnd: boolean): number | undefined {
  const last = lines.length - wanted.length;
  const first = atEnd ? Math.max(last, from) : from;
  for (const normalize of LENIENCY) {
    const goal = wanted.map(normalize);
    for (let start = first; start <= last; start++) {
      if (goal.every((line, n) => matches(lines[start + n]!, normalize, line))) return start;
    }
  }
  return undefined;
}

function matches(line: string, normalize: (line: string) => string, goal: string): boolean {
  const text = readable(line);
  return text !== undefined && normalize(text) === goal;
}

const LENIENCY: readonly ((line: string) => string)[] = [
  (line) => line,
  (line) => line.trimEnd(),
  (line) => line.trim(),
  (line) =>
    line.trim().replace(/[\u2010-\u2015\u2212]/g, "-").replace(/[\u2018-\u201b]/g, "'").replace(/[\u201c-\u201f]/g, '"')
      .replace(/[\u00a0\u2000-\u200a\u202f\u205f\u3000]/g, " "),
];

const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

/** A line for comparing, as UTF-8. One that is not UTF-8 equals nothing. */
function readable(latin1: string): string | undefined {
  if (!/[\x80-\xff]/.test(latin1)) return latin1;
  try {
    return strict.decode(toLatin1Bytes(latin1));
  } catch {
    return undefined;
  }
}

function fromBytes(bytes: Uint8Array): string {
  let text = "";
  for (let i = 0; i < bytes.length; i += 0x8000) text += String.fromCharCode(...bytes.subarray(i, i + 0x8000));
  return text;
}

function toLatin1Bytes(text: string): Uint8Array {
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

/** Text in the latin-1 form of a file's lines. */
function bytesOf(text: string): string {
  return fromBytes(new TextEncoder().encode(text));
}

interface Step {
  change: PatchChange;
  run(): Promise<void>;
}

/** A file as the steps so far leave it: its content, or `undefined` if there is none. */
interface Planned {
  content: Uint8Array | undefined;
  mode?: number | undefined;
  inPlace: boolean;
}

/** Applies a patch. */
export async function applyPatch(files: Files, text: string, canAtomic: boolean, options: Abortable = {}): Promise<PatchChange[]> {
  const sections = parsePatch(text);
  const planned = new Map<string, Planned>();
  const steps: Step[] = [];
  const { signal } = options;
  const refuse = (verb: string, path: string, problem: string) => new PatchError(`cannot ${verb} ${path}: ${problem}; nothing was changed`);

  const look = async (path: string, verb: string): Promise<Planned> => {
    const uri = files.uri(path);
    const known = planned.get(uri);
    if (known) return known;
    let found: Planned;
    try {
      const stat = await files.stat(uri, { signal });
      if (!stat.isFile) throw refuse(verb, path, "it is not a regular file");
      // A hard link is written through, and a link of unknown kind as well.
      const inPlace = !canAtomic || (stat.nlink ?? 2) > 1;
      found = { content: await files.read(uri, { signal }), mode: stat.mode ?? undefined, inPlace };
    } catch (error) {
      if (error instanceof PatchError) throw error;
      if (!(error instanceof PathNotFoundError)) throw unchanged(error);
      found = { content: undefined, inPlace: !canAtomic };
    }
    planned.set(uri, found);
    return found;
  };
  const write = (path: string, file: Planned, content: Uint8Array, kind: PatchChange["kind"]) => {
    const { inPlace } = file;
    const mode = kind === "added" && canAtomic ? file.mode : undefined;
    file.content = content;
    const whole = { signal, parents: kind === "added", ...(mode === undefined ? {} : { mode }) };
    steps.push({
      change: { kind, path },
      run: async () => {
        try {
          await files.write(path, content, { ...whole, atomic: !inPlace });
        } catch (error) {
          // A file may be writable although its directory is not.
          if (inPlace || !(error instanceof CodexError) || error.code !== -32600) throw error;
          await files.write(path, content, { ...whole, atomic: false });
        }
      },
    });
  };
  const remove = (path: string, file: Planned) => {
    file.content = undefined;
    steps.push({ change: { kind: "deleted", path }, run: () => files.remove(path, { signal, recursive: false, force: false }) });
  };

  for (const section of sections) {
    const verb = section.is;
    const file = await look(section.path, verb);
    if (section.is === "add") {
      const content = new TextEncoder().encode(section.lines.map((line) => `${line}\n`).join(""));
      write(section.path, file, content, file.content === undefined ? "added" : "modified");
      continue;
    }
    if (file.content === undefined) throw refuse(verb, section.path, "there is no such file");
    if (section.is === "delete") {
      remove(section.path, file);
      continue;
    }
    const content = applyHunks(section.path, file.content, section.hunks);
    const { moveTo } = section;
    if (moveTo === undefined || files.uri(moveTo) === files.uri(section.path)) {
      write(section.path, file, content, "modified");
      continue;
    }
    const target = await look(moveTo, "move");
    if (target.content !== undefined) throw refuse("move", moveTo, "there is a file already; delete it first, in the same patch if you like");
    target.mode = file.mode;
    write(moveTo, target, content, "added");
    remove(section.path, file);
  }

  for (const [at, step] of steps.entries()) {
    try {
      signal?.throwIfAborted();
      await step.run();
    } catch (error) {
      if (signal?.aborted && at === 0) throw error;
      const changes = (part: Step[]) => part.map(({ change }) => change);
      const [done, undone] = [changes(steps.slice(0, at)), changes(steps.slice(at))];
      const said = error instanceof Error ? error.message : String(error);
      const list = (part: PatchChange[]) => part.map(formatChange).join(", ") || "nothing";
      throw new PatchError(`${said}; the patch is applied in part: done: ${list(done)}; not done: ${list(undone)}`, done, undone, error);
    }
  }
  return steps.map(({ change }) => change);
}

/** As git prints it: `M src/main.ts`. */
export function formatChange({ kind, path }: PatchChange): string {
  return `${kind[0]!.toUpperCase()} ${path}`;
}

function unchanged(error: unknown): unknown {
  if (!(error instanceof CodexError) || error instanceof InvalidParamsError) return error;
  return new PatchError(`${error.message}; nothing was changed`, [], [], error);
}
