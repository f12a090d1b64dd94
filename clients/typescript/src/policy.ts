/** Policies: what a command or a file request may do. The server's kernel enforces them. */
import type { FileSystemEntry, SandboxContext } from "./models.js";

/**
 * - `read-only`: read everything, change nothing, no network.
 * - `workspace-write`: also write below the sandbox's directory and to temporary directories.
 * - `full-access`: no sandbox.
 * - an object: a sandbox context of the protocol (`docs/PROTOCOL.md`), for everything else.
 */
export type Policy = "read-only" | "workspace-write" | "full-access" | SandboxContext;

const special = (kind: "root" | "project_roots" | "slash_tmp" | "tmpdir", access: "read" | "write"): FileSystemEntry => ({
  path: { type: "special", value: { kind } },
  access,
});

/** The `sandbox` member of requests; `undefined` without a sandbox. */
export function sandboxContext(policy: Policy | undefined, cwd: string | undefined): SandboxContext | undefined {
  if (policy === undefined || policy === "full-access") return undefined;
  if (typeof policy === "object") return policy;
  if (policy !== "read-only" && policy !== "workspace-write") {
    throw new TypeError(`unknown policy ${JSON.stringify(policy)}: expected read-only, workspace-write, full-access or an object`);
  }
  const entries = [special("root", "read")];
  if (policy === "workspace-write") {
    entries.push(special("project_roots", "write"), special("slash_tmp", "write"), special("tmpdir", "write"));
  }
  return {
    permissions: { type: "managed", file_system: { type: "restricted", entries }, network: "restricted" },
    ...(cwd === undefined ? {} : { cwd, workspaceRoots: [cwd] }),
    windowsSandboxLevel: "disabled",
    windowsSandboxPrivateDesktop: false,
    windowsSandboxProxySettingsMode: "preserve",
    useLegacyLandlock: false,
  };
}
