export interface Usage { cpuUs: number; peakMemoryBytes?: number; readBytes: number; writtenBytes: number }
export interface ReadResponse { chunks: { seq: number; stream: string; chunk: string }[]; nextSeq: number; exited: boolean; exitCode?: number | null; closed: boolean; failure?: string | null; sandboxDenied?: boolean; droppedBytes?: number; endedBy?: string | null; usage?: Usage | null }
export type Capabilities = Record<string, boolean>;
export interface EnvironmentInfo { shell: { name: string; path: string }; executorVersion: string; cwd?: string | null; userHomeDir?: string; platformOs: string; tempDir?: string; sandboxAssurance?: string; capabilities: Capabilities }
export interface InitializeParams { clientName: string; resumeSessionId?: string | null; detachTtlMs?: number; attach?: { role: "holder" | "control" | "view"; events?: string[]; take?: boolean }; sessionName?: string }
export interface InitializeResponse { sessionId?: string | null; environmentInfo?: EnvironmentInfo | null; role?: string }
export interface TerminalSize { rows: number; cols: number }
export interface SandboxContext { permissions: unknown; cwd?: string; workspaceRoots?: string[] }
export interface EnvPolicy { inherit: string; ignoreDefaultExcludes: boolean; exclude: string[]; set: Record<string, string>; includeOnly: string[] }
export interface ExecResponse { processId: string; sandboxType?: string; sandboxAssurance?: string }
export interface ProcessInfo { processId: string; argv: string[]; cwd: string; tty: boolean; pid?: number; startedAtMs: number; exited: boolean; exitCode?: number | null; closed: boolean; nextSeq: number }
export interface ResourceLimits { wallMs?: number; idleMs?: number; cpuMs?: number; cpusMilli?: number; memoryBytes?: number; pids?: number; openFiles?: number; outputBytes?: number; diskBytes?: number }
export interface SessionInfo { sessionId: string; sessionName?: string; connections: number; processes: ProcessInfo[] }
export interface FsChange { path: string; kind: "created" | "modified" | "removed" }
export interface FsGetMetadataResponse { isDirectory: boolean; isFile: boolean; isSymlink: boolean; size: number; createdAtMs: number; modifiedAtMs: number; mode?: number; uid?: number; gid?: number; inode?: number; nlink?: number; device?: number }
export interface FsWalkEntry { path: string; kind: "directory" | "file" }
export interface FsPathError { path: string; message: string }
export interface FsGlobResponse { entries: FsWalkEntry[]; truncated: boolean; errors: FsPathError[] }
export interface FsWalkResponse { entries: FsWalkEntry[]; truncated: boolean; errors: FsPathError[] }
export interface FsReadDirectoryResponse { entries: { fileName: string; isDirectory: boolean; isFile: boolean; fileNameUri?: string }[]; truncated?: boolean }
export interface FsSearchLine { lineNumber: number; kind: "match" | "context"; text: string; textTruncated?: boolean; ranges?: { start: number; end: number }[] }
export interface FsSearchFile { path: string; lines: FsSearchLine[] }
export interface FsSearchParams { path: string; pattern: string; literal?: boolean; caseInsensitive?: boolean; word?: boolean; multiline?: boolean; include?: string[]; exclude?: string[]; respectGitignore?: boolean; hidden?: boolean; beforeContext?: number; afterContext?: number; maxMatches?: number; maxMatchesPerFile?: number; maxFileBytes?: number; searchId?: string; sandbox?: SandboxContext }
export interface FsSearchResponse { files?: FsSearchFile[]; matches: number; filesMatched: number; filesSearched: number; truncated: boolean; cancelled?: boolean; errors: FsPathError[] }
