//! Everything the tests run: the re-entered executable, a server in miniature, and the attempts.
//!
//! - re-entered: the sandbox
//! - `run CONTEXT CWD -- ARGV`: prepares, spawns and waits as a server would, as the user who runs it; with
//!   `TEST_MANAGED` also serves these ports of a managed network
//! - `attempt NAME [ARGUMENT…]`: tries something forbidden; exits 0 if it succeeded

mod attempts;
mod serve;
mod spawn;

use std::ffi::OsString;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Stdio, exit};

use codex_exec_server_protocol::SandboxContext;
use codex_linux_sandbox::reentry::{self, Helper};
use codex_linux_sandbox::{
    Assurance, Capabilities, Command, Config, ManagedNetwork, Prepared, Request, Sandbox,
};

/// What `run` exits with if the sandbox was refused.
const REFUSED: i32 = 201;
/// What `run` exits with if the sandbox failed to be built.
const FAILED: i32 = 202;

fn main() {
    reentry::main_if_reentered(&[Helper { name: "copy", run: copy_helper }]);
    let mut args = std::env::args_os().skip(1);
    match args.next().unwrap_or_default().to_str() {
        Some("run") => run(&args.collect::<Vec<_>>()),
        Some("attempt") => {
            let args: Vec<String> =
                args.map(|argument| argument.into_string().expect("text")).collect();
            exit(attempts::attempt(&args[0], &args[1..]));
        }
        other => panic!("unknown word {other:?}"),
    }
}

/// A helper: says what it sees, then copies its input.
fn copy_helper() -> i32 {
    let mut names: Vec<String> =
        std::env::vars().map(|(name, _)| name).filter(|name| name != "PWD").collect();
    names.sort();
    let mut input = Vec::new();
    let mut out = std::io::stdout();
    let copied = std::io::stdin()
        .read_to_end(&mut input)
        .and_then(|_| writeln!(out, "env {}", names.join(" ")))
        .and_then(|()| writeln!(out, "write {}", std::fs::write("/etc/x", "x").is_ok()))
        .and_then(|()| writeln!(out, "mounts stand {}", reentry::mounts_intact()))
        .and_then(|()| writeln!(out, "mounts stand {}", reentry::mounts_intact()))
        .and_then(|()| out.write_all(&input))
        .and_then(|()| out.flush());
    i32::from(copied.is_err())
}

fn run(args: &[OsString]) {
    let context: SandboxContext =
        serde_json::from_str(args[0].to_str().expect("text")).expect("a context");
    let cwd = PathBuf::from(&args[1]);
    let argv = &args[3..];
    let mut config = Config::new(std::env::current_exe().expect("an executable"));
    if std::env::var_os("TEST_LANDLOCK_ONLY").is_some() {
        config.capabilities = Some(Capabilities { user_namespace: false, ..Capabilities::probe() });
        config.assurance = Assurance::Landlock;
    }
    if std::env::var_os("TEST_CLAIMS_LANDLOCK").is_some() {
        config.capabilities = Some(Capabilities { landlock_abi: 7, ..Capabilities::probe() });
    }
    config.shares_pids = std::env::var_os("TEST_SHARES_PIDS").is_some();
    if let Some(file) = std::env::var_os("TEST_OWN_FILE") {
        config.own_files.denied.push(file.into());
    }
    if let Some(limit) = std::env::var("TEST_PROCESSES").ok().and_then(|n| n.parse().ok()) {
        config.limits.processes = limit;
    }
    let sandbox = Sandbox::new(config).expect("a pipe");
    let env: Vec<(OsString, OsString)> = std::env::vars_os()
        .filter(|(name, _)| !name.to_string_lossy().starts_with("TEST_"))
        .collect();
    let command = if args[2] == "--helper" {
        Command::Helper { name: argv[0].to_str().expect("text"), env: &env }
    } else {
        Command::Program { argv, arg0: None, env: &env, cwd: &cwd }
    };
    let network = std::env::var("TEST_MANAGED").ok().map(|ports| ManagedNetwork {
        loopback_ports: ports.split_terminator(',').map(|n| n.parse().expect("a port")).collect(),
        transparent: std::env::var_os("TEST_TRANSPARENT").is_some(),
    });
    let request = Request::new(command).with_network(network.as_ref());
    let mut launch = match sandbox.prepare(&context, &request) {
        Ok(Prepared::Enforced(launch)) => launch,
        Ok(Prepared::Unrestricted) => {
            eprintln!("unrestricted");
            exit(0);
        }
        Err(error) => {
            eprintln!("refused: {error}");
            exit(REFUSED);
        }
    };
    let mut command = spawn::command(&launch);
    command.stdin(Stdio::inherit());
    let network = launch.network.take();
    let (mut child, failure, cleanup) = spawn::spawn(command, launch).expect("a child");
    if let Some(failure) = failure {
        eprintln!("failed: {failure}");
        let _ = child.wait();
        exit(FAILED);
    }
    if let Some(network) = network {
        serve::serve(network.receive().expect("the network"));
    }
    if std::env::var_os("TEST_ANNOUNCE").is_some() {
        eprintln!("pid {}", child.id());
    }
    let status = child.wait().expect("a child");
    use std::os::unix::process::ExitStatusExt;
    if let Some(signal) = status.signal() {
        cleanup.run();
        exit(128 + signal);
    }
    exit(status.code().unwrap_or(FAILED));
}
