//! The sandbox: its cost for starting a process and for file requests, and how preparing scales.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::ensure;
use codex_exec_server_protocol::SandboxContext;
use codex_linux_sandbox::{Command, Config, Prepared, Request, Sandbox};
use serde_json::{Value, json};

use super::client::{Client, start};
use super::report::{Goal, Report, microseconds, p50};
use super::target::Target;

/// A directory of this run, away from `/tmp`, which some policies make writable.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> anyhow::Result<Self> {
        let path = PathBuf::from(format!("/var/tmp/codex-bench-{}", std::process::id()));
        std::fs::create_dir_all(&path)?;
        Ok(Self(path))
    }

    fn directory(&self, name: impl AsRef<Path>) -> anyhow::Result<PathBuf> {
        let path = self.0.join(name);
        std::fs::create_dir_all(&path)?;
        Ok(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// start → closed of `/bin/true` in a sandbox, against the same without.
pub(crate) async fn start_to_closed(report: &mut Report<'_>, effort: usize) -> anyhow::Result<()> {
    let scratch = Scratch::new()?;
    for kind in ["read-only", "workspace-write"] {
        let name = format!("start→closed, {kind}, p50");
        if !report.wants(&name) {
            continue;
        }
        let server = Target::exec_server()?;
        let mut client = Client::initialize(&server.url).await?;
        let sandbox = json!({"permissions": {"type": kind}, "cwd": scratch.0});
        let sandbox = format!(r#","sandbox":{sandbox}"#);
        let (mut measured, mut floor) = (Vec::new(), Vec::new());
        for n in 0..200 * effort {
            for (more, times) in [(sandbox.as_str(), &mut measured), ("", &mut floor)] {
                let began = Instant::now();
                client.send(start(&format!("{n}{}", more.len()), &["/bin/true"], more)).await?;
                client.until("process/closed").await?;
                times.push(began.elapsed());
            }
        }
        report_ratio(report, &name, measured, floor, Goal::AtMost(3.5));
    }
    Ok(())
}

/// `fs/readFile` and `fs/writeFile` of three bytes: in a helper that is there, against no helper;
/// and in one that has to be made, against the start of a process.
pub(crate) async fn files(report: &mut Report<'_>, effort: usize) -> anyhow::Result<()> {
    let names = ["sandboxed readFile, warm, p50", "sandboxed writeFile, warm, p50"];
    let cold = "sandboxed writeFile, cold, p50";
    let scratch = Scratch::new()?;
    let server = Target::exec_server()?;
    let mut client = Client::initialize(&server.url).await?;
    let work = scratch.directory("work")?;
    std::fs::write(work.join("file"), "abc")?;
    let path = work.join("file");
    for (name, method, params) in [
        (names[0], "fs/readFile", json!({"path": path})),
        (names[1], "fs/writeFile", json!({"path": path, "dataBase64": "YWJj"})),
    ] {
        if !report.wants(name) {
            continue;
        }
        let (mut measured, mut floor) = (Vec::new(), Vec::new());
        for _ in 0..2000 * effort {
            for (sandbox, times) in [(policy(&work), &mut measured), (Value::Null, &mut floor)] {
                let call = call(method, &params, sandbox);
                let began = Instant::now();
                client.send(call).await?;
                client.until("\"result\"").await?;
                times.push(began.elapsed());
            }
        }
        report_ratio(report, name, measured, floor, Goal::AtMost(3.0));
    }
    if !report.wants(cold) {
        return Ok(());
    }
    let (mut measured, mut floor) = (Vec::new(), Vec::new());
    for n in 0..100 * effort {
        let work = scratch.directory(format!("cold-{n}"))?;
        let params = json!({"path": work.join("file"), "dataBase64": "YWJj"});
        let call = call("fs/writeFile", &params, policy(&work));
        let began = Instant::now();
        client.send(call).await?;
        client.until("\"result\"").await?;
        measured.push(began.elapsed());
        let sandbox = format!(r#","sandbox":{}"#, policy(&work));
        let began = Instant::now();
        client.send(start(&n.to_string(), &["/bin/true"], &sandbox)).await?;
        client.until("process/closed").await?;
        floor.push(began.elapsed());
    }
    report_ratio(report, cold, measured, floor, Goal::AtMost(1.0));
    Ok(())
}

/// The whole disk readable but for one directory, which keeps reads from being done without a
/// helper; the workspace writable.
fn policy(work: &Path) -> Value {
    json!({
        "permissions": {
            "type": "managed",
            "network": "restricted",
            "file_system": {"type": "restricted", "entries": [
                {"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"},
                {"path": {"type": "special", "value": {"kind": "project_roots"}}, "access": "write"},
                {"path": {"type": "path", "path": "/root"}, "access": "deny"},
            ]},
        },
        "cwd": work,
        "workspaceRoots": [work],
    })
}

fn call(method: &str, params: &Value, sandbox: Value) -> String {
    let mut params = params.clone();
    params["sandbox"] = sandbox;
    json!({"id": 3, "method": method, "params": params}).to_string()
}

/// Preparing a policy of 1,000 entries, against one of 10: at most twenty times the time for a hundred times
/// the entries. Measured as a server sees it, which gets the same policy with each request and decodes it
/// each time; and for a new policy, when every path has to be examined: then it may grow no faster than the
/// number of entries.
pub(crate) fn prepare(report: &mut Report<'_>, effort: usize) -> anyhow::Result<()> {
    for access in ["read", "write"] {
        let name = format!("preparing 1,000 {access} entries, p50");
        let first = format!("preparing 1,000 {access} entries, first, p50");
        if !report.wants(&name) && !report.wants(&first) {
            continue;
        }
        let scratch = Scratch::new()?;
        let paths: Vec<PathBuf> = (0..1000)
            .map(|n| scratch.directory(format!("{access}-{n}")))
            .collect::<anyhow::Result<_>>()?;
        let sandbox = Sandbox::new(Config::new(std::env::current_exe()?))?;
        let (mut again, mut anew) = (<[Vec<_>; 2]>::default(), <[Vec<_>; 2]>::default());
        for round in 0..100 * effort {
            // A new, unused working directory makes the policy a new one.
            let elsewhere = format!("/{round}");
            for (n, count) in [1000, 10].into_iter().enumerate() {
                for (cwd, times) in [("/", &mut again[n]), (elsewhere.as_str(), &mut anew[n])] {
                    let policy = context(&paths[..count], access, cwd).to_string();
                    times.push(prepared(&sandbox, &policy, &scratch.0)?);
                }
            }
        }
        for (name, [measured, floor], goal) in [(name, again, 20.0), (first, anew, 100.0)] {
            if report.wants(&name) {
                report_ratio(report, &name, measured, floor, Goal::AtMost(goal));
            }
        }
    }
    Ok(())
}

/// The time to prepare a policy after decoding it.
fn prepared(sandbox: &Sandbox, policy: &str, cwd: &Path) -> anyhow::Result<Duration> {
    let context: SandboxContext = serde_json::from_str(policy)?;
    let argv = [OsString::from("/bin/true")];
    let env = [(OsString::from("PATH"), OsString::from("/usr/bin:/bin"))];
    let command = Command::Program { argv: &argv, arg0: None, env: &env, cwd };
    let began = Instant::now();
    let prepared = sandbox.prepare(&context, &Request::new(command))?;
    let took = began.elapsed();
    ensure!(matches!(prepared, Prepared::Enforced(_)), "nothing to enforce");
    Ok(took)
}

fn context(paths: &[PathBuf], access: &str, cwd: &str) -> Value {
    let mut entries =
        vec![json!({"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"})];
    entries.extend(
        paths.iter().map(|path| json!({"path": {"type": "path", "path": path}, "access": access})),
    );
    json!({
        "permissions": {
            "type": "managed",
            "network": "restricted",
            "file_system": {"type": "restricted", "entries": entries},
        },
        "cwd": cwd,
    })
}

fn report_ratio(
    report: &mut Report<'_>,
    name: &str,
    mut measured: Vec<Duration>,
    mut floor: Vec<Duration>,
    goal: Goal,
) {
    let (measured, floor) = (p50(&mut measured), p50(&mut floor));
    let ratio = measured.as_secs_f64() / floor.as_secs_f64();
    report.figure(name, &microseconds(measured), &microseconds(floor), ratio, goal);
}
