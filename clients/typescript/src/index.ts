/**
 * Run commands and work with files in a sandbox, here or on another machine.
 *
 * @packageDocumentation
 */
export { Sandbox } from "./sandbox.js";
export type { BridgeOptions, Command, LocalOptions, RunOptions, SandboxOptions, StartOptions } from "./sandbox.js";
export { Process } from "./process.js";
export type { DetachedProcess, DetachOptions, SignalName, WaitOptions } from "./process.js";
export type { ExitStatus, OutputStream, ProcessEvent } from "./sequencer.js";
export { CommandFailedError, RunResult } from "./run.js";
export { Files } from "./files.js";
export type {
  Abortable, Content, Entry, RemotePath, SearchMatch, SearchOptions, Stat, Tree, WalkOptions, WatchEvent, WatchOptions, WriteOptions,
} from "./files.js";
export type { TransferOptions, TransferReport } from "./transfer.js";
export { formatChange, PatchError } from "./patch.js";
export type { PatchChange } from "./patch.js";
export type { Policy } from "./policy.js";
export type { ReconnectOptions, SessionOptions } from "./session.js";
export type { WebSocketOptions } from "./websocket.js";
export type { Dialer, Transport, TransportEvents } from "./transport.js";
export * from "./errors.js";
export * as models from "./models.js";
