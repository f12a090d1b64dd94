/**
 * Errors, a class for each kind of the protocol (`docs/protocol/errors.md`).
 *
 * Decide by class or by `kind`, never by the message. Classes of one area share a parent, so that
 * `catch` can be as coarse as needed: {@link FileError}, {@link StartError}, {@link ConnectionError}.
 */
import { inferKind } from "./infer-kind.js";

/** What an error can carry besides its message. */
export interface ErrorDetails {
  /** The kind, as in `error.data.kind` on the wire; of the client's own failures, too. */
  kind?: string;
  /** The JSON-RPC code, if the server sent the error. */
  code?: number;
  /** The method that failed, if there is one. */
  method?: string;
  /** What caused it. */
  cause?: unknown;
}

/** The parent of every error of this package. */
export class CodexError extends Error {
  /** The kind of the error; `unknown` if the server sent none and its code implies none. */
  readonly kind: string;
  /** The JSON-RPC code, if the server sent the error. */
  readonly code: number | undefined;
  /** The method that failed. */
  readonly method: string | undefined;

  constructor(message: string, details: ErrorDetails = {}) {
    super(message, details.cause === undefined ? undefined : { cause: details.cause });
    this.name = new.target.name;
    this.kind = details.kind ?? defaultKind(new.target) ?? "unknown";
    this.code = details.code;
    this.method = details.method;
  }
}

/** No connection, or no longer one. */
export class ConnectionError extends CodexError {}
export class ConnectionRefusedError extends ConnectionError {}
export class UnreachableError extends ConnectionError {}
export class TokenRefusedError extends ConnectionError {}
export class EnvironmentOfflineError extends ConnectionError {}
export class EnvironmentNotFoundError extends ConnectionError {}
/** The command behind a stdio connection (`Sandbox.local`, `stdio:`, `env:`) ended. */
export class CommandEndedError extends ConnectionError {}
/** The connection ended before the response came, or the sandbox was closed. The request may have had its effect. */
export class ConnectionLostError extends ConnectionError {}

/** No response came in time. */
export class TimedOutError extends CodexError {}
/** Output was dropped before it could be read. */
export class OutputLostError extends CodexError {}
/** The process takes no input. */
export class StdinClosedError extends CodexError {}

/** The peer does not speak the protocol, or this client broke it. */
export class ProtocolError extends CodexError {}
export class ProtocolViolationError extends ProtocolError {}
export class MalformedMessageError extends ProtocolError {}
export class NotInitializedError extends ProtocolError {}
export class AlreadyInitializedError extends ProtocolError {}

/** The server does not offer it. */
export class UnsupportedError extends CodexError {}
export class MethodNotFoundError extends UnsupportedError {}
export class InvalidParamsError extends CodexError {}

/** The session is not there, or not this client's. */
export class SessionError extends CodexError {}
export class UnknownSessionError extends SessionError {}
export class SessionAttachedError extends SessionError {}
export class SessionEndedError extends SessionError {}
export class ViewOnlyError extends SessionError {}

/** A request to a process failed. */
export class ProcessError extends CodexError {}
export class ProcessExistsError extends ProcessError {}
export class UnknownProcessError extends ProcessError {}
export class NoTerminalError extends ProcessError {}

/** A command could not be started. */
export class StartError extends CodexError {}
export class ProgramNotFoundError extends StartError {}
export class ProgramNotExecutableError extends StartError {}
export class WorkingDirectoryMissingError extends StartError {}
export class WorkingDirectoryDeniedError extends StartError {}

/** A policy does not permit it, or cannot be enforced. */
export class PolicyError extends CodexError {}
export class SandboxUnavailableError extends PolicyError {}
export class OperatorPolicyError extends PolicyError {}
export class DeniedBySandboxError extends PolicyError {}

/** A file request failed. */
export class FileError extends CodexError {}
export class PathNotFoundError extends FileError {}
export class UnknownFileHandleError extends FileError {}
export class IdInUseError extends FileError {}
export class PermissionDeniedError extends FileError {}
export class AlreadyExistsError extends FileError {}
export class NotADirectoryError extends FileError {}
export class IsADirectoryError extends FileError {}
export class NotARegularFileError extends FileError {}
export class DirectoryNotEmptyError extends FileError {}
export class SymlinkRefusedError extends FileError {}
export class InvalidPathError extends FileError {}
export class ReadOnlyFileSystemError extends FileError {}
export class CrossDeviceError extends FileError {}
export class BusyError extends FileError {}
export class TooLargeError extends FileError {}
export class DiskFullError extends FileError {}
export class QuotaExceededError extends FileError {}
export class RefusedError extends FileError {}
export class PreservedError extends FileError {}

/** The server takes no new sessions, because it is being stopped. */
export class DrainingError extends CodexError {}
export class LimitReachedError extends CodexError {}
export class CancelledError extends CodexError {}
export class HttpFailedError extends CodexError {}
export class InvalidConfigError extends CodexError {}
export class IoError extends CodexError {}
export class InternalError extends CodexError {}

/** The class of each kind. */
export const ERROR_CLASSES = {
  connectionRefused: ConnectionRefusedError,
  unreachable: UnreachableError,
  tokenRefused: TokenRefusedError,
  environmentOffline: EnvironmentOfflineError,
  environmentNotFound: EnvironmentNotFoundError,
  commandEnded: CommandEndedError,
  connectionLost: ConnectionLostError,
  timedOut: TimedOutError,
  outputLost: OutputLostError,
  stdinClosed: StdinClosedError,
  protocolViolation: ProtocolViolationError,
  malformedMessage: MalformedMessageError,
  notInitialized: NotInitializedError,
  alreadyInitialized: AlreadyInitializedError,
  methodNotFound: MethodNotFoundError,
  invalidParams: InvalidParamsError,
  unsupported: UnsupportedError,
  unknownSession: UnknownSessionError,
  sessionAttached: SessionAttachedError,
  viewOnly: ViewOnlyError,
  sessionEnded: SessionEndedError,
  processExists: ProcessExistsError,
  unknownProcess: UnknownProcessError,
  noTerminal: NoTerminalError,
  programNotFound: ProgramNotFoundError,
  programNotExecutable: ProgramNotExecutableError,
  workingDirectoryMissing: WorkingDirectoryMissingError,
  workingDirectoryDenied: WorkingDirectoryDeniedError,
  sandboxUnavailable: SandboxUnavailableError,
  operatorPolicy: OperatorPolicyError,
  deniedBySandbox: DeniedBySandboxError,
  pathNotFound: PathNotFoundError,
  unknownFileHandle: UnknownFileHandleError,
  idInUse: IdInUseError,
  permissionDenied: PermissionDeniedError,
  alreadyExists: AlreadyExistsError,
  notADirectory: NotADirectoryError,
  isADirectory: IsADirectoryError,
  notARegularFile: NotARegularFileError,
  directoryNotEmpty: DirectoryNotEmptyError,
  symlinkRefused: SymlinkRefusedError,
  invalidPath: InvalidPathError,
  readOnlyFileSystem: ReadOnlyFileSystemError,
  crossDevice: CrossDeviceError,
  busy: BusyError,
  tooLarge: TooLargeError,
  diskFull: DiskFullError,
  quotaExceeded: QuotaExceededError,
  draining: DrainingError,
  limitReached: LimitReachedError,
  refused: RefusedError,
  preserved: PreservedError,
  cancelled: CancelledError,
  httpFailed: HttpFailedError,
  invalidConfig: InvalidConfigError,
  ioError: IoError,
  internal: InternalError,
} as const satisfies Record<string, typeof CodexError>;

function defaultKind(type: unknown): string | undefined {
  return Object.entries(ERROR_CLASSES).find(([, known]) => known === type)?.[0];
}

/** The error that a server sent in response to `method`. */
export function serverError(method: string, error: { code: number; message: string; data?: unknown }): CodexError {
  const data = error.data as { kind?: unknown } | null | undefined;
  const sent = typeof data?.kind === "string" ? data.kind : undefined;
  const kind = sent ?? inferKind(method, error.code, error.message);
  // A kind of a later version is treated as its code would be.
  const type = kindClass(kind) ?? kindClass(inferKind(method, error.code, "")) ?? CodexError;
  return new type(`${method}: ${error.message}`, { kind: kind ?? "unknown", code: error.code, method });
}

function kindClass(kind: string | undefined): typeof CodexError | undefined {
  return kind !== undefined && Object.hasOwn(ERROR_CLASSES, kind)
    ? ERROR_CLASSES[kind as keyof typeof ERROR_CLASSES]
    : undefined;
}
