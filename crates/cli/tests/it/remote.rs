//! Environments as whole programs: a rendezvous, a registered server, and every command through it.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::commands::{CommandOutput, Server, codex, output, output_of, read, read_until};
use crate::support::{numbers, send, wait};
use crate::terminal::Terminal;

/// The environment's id.
const BOX: &str = "box";
/// The log message of a server that harnesses can reach.
const READY: &str = "connected to the rendezvous";

/// A child that is killed when dropped.
pub(crate) struct Program(Child);

impl Program {
    fn start(command: &mut Command) -> Self {
        Self(command.spawn().unwrap())
    }

    fn ended(mut self) -> ExitStatus {
        wait(&mut self.0)
    }

    fn terminate(self) -> ExitStatus {
        send(self.0.id(), Signal::TERM);
        self.ended()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A rendezvous, a token for one environment, and a home.
pub(crate) struct Cloud {
    service: Program,
    pub url: String,
    token: String,
    home: TempDir,
}

impl Cloud {
    pub(crate) fn start() -> Self {
        let home = tempfile::tempdir().unwrap();
        let (service, url) = serve(home.path(), "127.0.0.1:0");
        let token = create_token(home.path(), "register,connect");
        Self { service, url, token, home }
    }

    /// Kills the rendezvous, and starts it again on the same address.
    fn restart(self) -> Self {
        let Self { service, url, token, home } = self;
        drop(service);
        let address = url.strip_prefix("http://").unwrap();
        let (service, url) = serve(home.path(), address);
        Self { service, url, token, home }
    }

    /// A server of the environment, not yet started.
    fn executor(&self, subcommand: &[&str]) -> Command {
        self.executor_by(&self.url, subcommand)
    }

    /// The same, with another URL of the rendezvous.
    fn executor_by(&self, url: &str, subcommand: &[&str]) -> Command {
        let mut command = codex();
        command.arg("exec-server").args(subcommand);
        command.args(["--remote", url, "--environment-id", BOX]);
        command.env("CODEX_API_KEY", &self.token).env("RUST_LOG", "info");
        command.env("CODEX_HOME", self.home.path());
        command
    }

    /// A server that can be reached.
    fn serving(&self) -> Program {
        ready(&mut self.executor(&[]))
    }

    /// The same, with another URL of the rendezvous.
    pub(crate) fn serving_by(&self, url: &str) -> Program {
        ready(&mut self.executor_by(url, &[]))
    }

    /// A command on the environment, with another URL of the rendezvous.
    pub(crate) fn codex_by(&self, url: &str, subcommand: &str) -> Command {
        let mut command = self.plain_by(url, subcommand);
        command.env("CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN", &self.token);
        command
    }

    /// A command on the environment, without credentials.
    fn plain(&self, subcommand: &str) -> Command {
        self.plain_by(&self.url, subcommand)
    }

    fn plain_by(&self, url: &str, subcommand: &str) -> Command {
        let mut command = codex();
        command.args([subcommand, "--on", &format!("env:{BOX}"), "--registry", url]);
        command.env("CODEX_HOME", self.home.path()).env("XDG_STATE_HOME", self.home.path());
        command
    }

    /// A command on the environment.
    fn codex(&self, subcommand: &str) -> Command {
        self.codex_by(&self.url, subcommand)
    }

    fn sh(&self, script: &str) -> CommandOutput {
        output(self.codex("run").args(["--", "sh", "-c", script]))
    }
}

fn create_token(home: &Path, rights: &str) -> String {
    let mut create = codex();
    create.args(["rendezvous", "token", "create", "--environment", BOX, "--can", rights]);
    output(create.arg("--data").arg(home.join("data"))).success().trim().to_owned()
}

fn serve(home: &Path, listen: &str) -> (Program, String) {
    let mut command = codex();
    command.args(["rendezvous", "serve", "--listen", listen, "--data"]).arg(home.join("data"));
    let mut service = Program::start(command.stdout(Stdio::piped()));
    let mut url = String::new();
    let stdout = service.0.stdout.take().unwrap();
    BufReader::new(stdout).read_line(&mut url).unwrap();
    (service, url.trim().to_owned())
}

/// Starts a server, and waits until harnesses can reach it.
fn ready(command: &mut Command) -> Program {
    let mut server = Program::start(command.stderr(Stdio::piped()));
    let mut stderr = server.0.stderr.take().unwrap();
    read_until(&mut stderr, READY);
    // Reads the rest, so that the server never waits for this pipe.
    std::thread::spawn(move || std::io::copy(&mut stderr, &mut std::io::sink()));
    server
}

/// A script that prints the ancestors of its process.
const LINEAGE: &str = "\
    p=$$; while [ $p -gt 1 ]; do p=$(sed 's/.*) //' /proc/$p/stat | cut -d' ' -f2); echo $p; done";

fn is_below(ancestor: u32, lineage: CommandOutput) -> bool {
    numbers(&lineage.success()).contains(&ancestor)
}

#[test]
fn commands_run_in_an_environment() {
    let cloud = Cloud::start();
    let server = cloud.serving();
    let said = cloud.sh("echo out; echo err >&2; exit 3");
    assert_eq!((said.code, &*said.out, &*said.err), (Some(3), "out\n", "err\n"));
    let said = output_of(cloud.codex("run").args(["--", "tr", "a-z", "A-Z"]), b"typed\n");
    assert_eq!(said.success(), "TYPED\n");
    assert_eq!(cloud.sh("echo [$CODEX_API_KEY]").success(), "[]\n", "without its secrets");
    assert!(is_below(server.0.id(), cloud.sh(LINEAGE)));

    let info = output(&mut cloud.codex("info")).success();
    assert!(info.contains("env:box"), "{info}");
    let mut named = codex();
    named.arg("info").env("CODEX_EXEC_SERVER_URL", "env:box").env("CODEX_HOME", cloud.home.path());
    named.env("CODEX_REGISTRY_URL", &cloud.url).env("CODEX_API_KEY", &cloud.token);
    assert!(output(&mut named).success().contains("env:box"));

    let mut terminal = Terminal::start(cloud.codex("run").args(["-t", "--", "cat"]));
    terminal.type_in("hello\r");
    terminal.shows("hello\r\nhello");
    terminal.type_in("\x04");
    assert!(terminal.ends().success());
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
fn files_of_an_environment_are_copied_listed_and_searched() {
    let cloud = Cloud::start();
    let _server = cloud.serving();
    let work = tempfile::tempdir().unwrap();
    let path = |name: &str| work.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("here"), vec![b'x'; 3 << 20]).unwrap();
    output(cloud.codex("cp").args([path("here"), format!(":{}", path("there"))])).success();
    output(cloud.codex("cp").args([format!(":{}", path("there")), path("back")])).success();
    assert_eq!(read(path("back")).len(), 3 << 20);
    std::fs::write(path("note"), "needle\n").unwrap();
    assert_eq!(output(cloud.codex("cat").arg(path("note"))).success(), "needle\n");
    let listed = output(cloud.codex("ls").arg(work.path())).success();
    assert!(listed.contains("there") && listed.contains("note"), "{listed}");
    let found = output(cloud.codex("search").arg("needle").arg(work.path())).success();
    assert!(found.contains("note"), "{found}");
    let patch = "*** Begin Patch\n*** Update File: note\n@@\n-needle\n+thread\n*** End Patch\n";
    let said =
        output_of(cloud.codex("apply-patch").arg("--cwd").arg(work.path()), patch.as_bytes());
    assert_eq!(said.code, Some(0), "{said:?}");
    assert_eq!(read(path("note")), "thread\n");
    output(cloud.codex("rm").arg(path("note"))).success();
    assert!(!Path::new(&path("note")).exists());
}

#[test]
fn a_sandbox_is_enforced_in_an_environment() {
    let cloud = Cloud::start();
    let _server = cloud.serving();
    let work = tempfile::tempdir_in("/var/tmp").unwrap();
    let run = |policy: &str| {
        let mut command = cloud.codex("run");
        command.args(["--sandbox", policy, "--cwd"]).arg(work.path());
        output(command.args(["--", "sh", "-c", "echo hi > file"]))
    };
    let denied = run("read-only");
    assert_ne!(denied.code, Some(0), "{denied:?}");
    assert!(!work.path().join("file").exists());
    assert_eq!(run("workspace-write").code, Some(0));
    assert_eq!(read(work.path().join("file")), "hi\n");
}

#[test]
fn a_detached_command_in_an_environment_is_reattached() {
    let cloud = Cloud::start();
    let _server = cloud.serving();
    let gate = cloud.home.path().join("gate");
    let script =
        format!("echo one; until [ -e {} ]; do sleep 0.05; done; echo two; exit 5", gate.display());
    let said = output(cloud.codex("run").args(["--detach", "build", "--", "sh", "-c", &script]));
    assert_eq!((said.code, &*said.out), (Some(0), "build\n"), "{said:?}");
    // The saved name is enough from now on.
    let back = |arguments: &[&str]| {
        let mut command = codex();
        command.args(arguments).env("CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN", &cloud.token);
        output(command.env("XDG_STATE_HOME", cloud.home.path()))
    };
    let table = back(&["ps"]).success();
    assert!(table.contains("build  running") && table.contains("env:box"), "{table}");
    assert!(back(&["logs", "build"]).out.contains("one"));
    std::fs::write(&gate, "").unwrap();
    let attached = back(&["attach", "build"]);
    assert_eq!(attached.code, Some(5), "{attached:?}");
    assert!(attached.out.ends_with("two\n"), "{attached:?}");

    let said = output(cloud.codex("run").args(["--detach", "long", "--", "sleep", "1000"]));
    assert_eq!(said.code, Some(0), "{said:?}");
    assert_eq!(back(&["kill", "long"]).code, Some(0));
}

/// What one token's harness started, another harness finds from any machine if it has that token, and else not.
#[test]
fn a_session_belongs_to_the_token_of_its_harness() {
    let cloud = Cloud::start();
    let _server = cloud.serving();
    let other = create_token(cloud.home.path(), "connect");
    let mut start = cloud.codex("run");
    start.args(["--detach", "job", "--", "sh", "-c", "echo mine; exec sleep 1000"]);
    assert_eq!(output(&mut start).code, Some(0));
    let saved = cloud.home.path().join("codex/sessions/job.json");
    let elsewhere = tempfile::tempdir().unwrap();
    let by = |token: &str, state: &Path, arguments: &[&str]| {
        let mut command = cloud.plain(arguments[0]);
        command.args(&arguments[1..]).env("CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN", token);
        output(command.env("XDG_STATE_HOME", state))
    };
    assert!(by(&cloud.token, elsewhere.path(), &["ps"]).success().contains("job"));
    assert_eq!(by(&cloud.token, elsewhere.path(), &["logs", "job"]).success(), "mine\n");
    assert_eq!(by(&other, elsewhere.path(), &["ps"]).out, "");
    // Not even if it has the id of the session.
    let stolen = elsewhere.path().join("codex/sessions/job.json");
    std::fs::create_dir_all(stolen.parent().unwrap()).unwrap();
    std::fs::copy(saved, stolen).unwrap();
    for command in ["logs", "kill", "attach"] {
        let said = by(&other, elsewhere.path(), &[command, "job"]);
        assert!(said.code != Some(0) && !said.out.contains("mine"), "{said:?}");
    }
    assert_eq!(by(&cloud.token, cloud.home.path(), &["logs", "job"]).success(), "mine\n");
    by(&cloud.token, elsewhere.path(), &["kill", "-s", "kill", "job"]).success();
}

#[test]
fn a_command_survives_a_restart_of_the_rendezvous() {
    let cloud = Cloud::start();
    let _server = cloud.serving();
    let gate = cloud.home.path().join("gate");
    let script = format!(
        "echo one; until [ -e {} ]; do sleep 0.05; done; seq 100000; exit 4",
        gate.display()
    );
    let mut command = cloud.codex("run");
    command.args(["--", "sh", "-c", &script]).stdout(Stdio::piped());
    let mut running = Program::start(&mut command);
    let mut stdout = running.0.stdout.take().unwrap();
    let mut said = read_until(&mut stdout, "one\n");
    let _cloud = cloud.restart();
    std::fs::write(&gate, "").unwrap();
    std::io::Read::read_to_string(&mut stdout, &mut said).unwrap();
    let all: String = (1..=100_000).map(|n| format!("{n}\n")).collect();
    assert!(said == format!("one\n{all}"), "complete and in order");
    assert_eq!(running.ended().code(), Some(4));
}

#[test]
fn credentials_come_from_files_variables_and_login() {
    let cloud = Cloud::start();
    let _server = cloud.serving();
    let info = || cloud.plain("info");
    output(&mut info()).failed(1, "run codex login or set CODEX_API_KEY");
    let file = cloud.home.path().join("token");
    std::fs::write(&file, "\n").unwrap();
    output(info().arg("--token-file").arg(&file)).failed(1, "is empty");
    std::fs::write(&file, format!("{}\n", cloud.token)).unwrap();
    output(info().arg("--token-file").arg(&file)).success();
    output(info().env("CODEX_API_KEY", &cloud.token)).success();
    output(info().env("CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN", &cloud.token)).success();
    let refused = output(
        info()
            .env("CODEX_API_KEY", &cloud.token)
            .env("CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN", "wrong"),
    );
    refused.failed(1, "$CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN");
    assert!(!refused.err.contains("wrong"), "{refused:?}");
    // As stored by `codex login --api-key`.
    output_of(
        codex().args(["login", "--api-key"]).env("CODEX_HOME", cloud.home.path()),
        cloud.token.as_bytes(),
    );
    output(&mut info()).success();
    // A key is sent only to the hosts that its rule names.
    let mut elsewhere = codex();
    elsewhere.args(["info", "--on", "env:box", "--registry", "https://registry.example"]);
    output(elsewhere.env("CODEX_API_KEY", "k")).failed(1, "--allow-registry-host registry.example");
}

#[test]
fn unreachable_environments_are_reported() {
    let cloud = Cloud::start();
    output(&mut cloud.codex("info")).failed(1, "check the id");
    let server = cloud.serving();
    assert_eq!(server.terminate().code(), Some(0));
    output(&mut cloud.codex("info")).failed(1, ": codex exec-server --remote http://127.0.0.1:");
    output(codex().args(["info", "--on", "env:box"])).failed(1, "--registry URL");
    output(codex().args(["info", "--on", "env:"])).failed(2, "env:laptop");
    let registry = |url: &str| {
        let mut command = codex();
        command.args(["run", "--on", "env:box", "--registry", url, "--", "ls"]);
        output(command.env("CODEX_API_KEY", "k"))
    };
    registry("nowhere").failed(125, "expected https://HOST");
    registry("http://127.0.0.1:1").failed(125, "cannot reach the registry");
}

#[test]
fn forward_connects_streams_to_a_listening_server() {
    let cloud = Cloud::start();
    let listening = Server::start();
    let connect = ["forward", "--connect", &listening.url];
    let forward = ready(&mut cloud.executor(&connect));
    assert!(is_below(listening.pid(), cloud.sh(LINEAGE)), "it ran on the server that listens");
    let said = output_of(cloud.codex("run").args(["--", "wc", "-c"]), &vec![b'x'; 1 << 20]);
    assert_eq!(said.success().trim(), (1 << 20).to_string());
    // The server goes away during a stream: the harness gets an error, and the forwarder continues.
    let mut command = cloud.codex("run");
    command.args(["--", "sh", "-c", "echo up; sleep 1000"]).stdout(Stdio::piped());
    let mut running = Program::start(command.stderr(Stdio::piped()));
    read_until(running.0.stdout.as_mut().unwrap(), "up\n");
    drop(listening);
    let mut stderr = running.0.stderr.take().unwrap();
    send(running.0.id(), Signal::TERM);
    std::io::copy(&mut stderr, &mut std::io::sink()).unwrap();
    assert!(!running.ended().success());
    assert_eq!(forward.terminate().code(), Some(0));

    let wrong = ["forward", "--connect", "http://127.0.0.1:1"];
    output(&mut cloud.executor(&wrong)).failed(1, "invalid --connect URL");
}

#[test]
fn exit_on_stdin_close_stops_the_server() {
    let cloud = Cloud::start();
    let mut command = cloud.executor(&["--exit-on-stdin-close"]);
    let mut remote = ready(command.stdin(Stdio::piped()));
    cloud.sh("true").success();
    drop(remote.0.stdin.take());
    assert_eq!(remote.ended().code(), Some(0));

    let listening = |command: &mut Command| {
        let mut server = Program::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()));
        read_until(server.0.stdout.as_mut().unwrap(), "\n");
        drop(server.0.stdin.take());
        assert_eq!(server.ended().code(), Some(0));
    };
    listening(codex().args(["exec-server", "--exit-on-stdin-close"]));
    listening(codex().arg("exec-server").env("CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE", "1"));
}

#[test]
fn a_refusal_by_the_registry_stops_the_server() {
    let cloud = Cloud::start();
    let refused = |change: &dyn Fn(&mut Command)| {
        let mut command = cloud.executor(&[]);
        change(&mut command);
        output(&mut command)
    };
    refused(&|command| {
        command.env("CODEX_API_KEY", "crt_wrong");
    })
    .failed(1, "refused the sign-in (HTTP 401");
    refused(&|command| {
        command.env_remove("CODEX_API_KEY");
    })
    .failed(1, "run codex login or set CODEX_API_KEY");
    refused(&|command| {
        command.arg("--use-agent-identity-auth");
    })
    .failed(1, "CODEX_ACCESS_TOKEN");
    let mut nameless = codex();
    nameless.args(["exec-server", "--remote", &cloud.url]).env("CODEX_API_KEY", &cloud.token);
    output(&mut nameless).failed(1, "--environment-id");
}

/// The first line for people has a command that works as it stands.
#[test]
fn a_remote_server_prints_how_to_connect() {
    let cloud = Cloud::start();
    let mut command = cloud.executor(&[]);
    let mut server = Program::start(command.env_remove("RUST_LOG").stderr(Stdio::piped()));
    let mut lines = BufReader::new(server.0.stderr.take().unwrap()).lines();
    let line = lines.next().unwrap().unwrap();
    let shown = line.split("connect with: ").nth(1).unwrap_or_else(|| panic!("{line}"));
    let words = shlex::split(shown).unwrap();
    assert_eq!((&*words[0], &*words[1]), ("codex", "shell"), "{line}");
    let mut run = codex();
    run.arg("run").args(&words[2..]).args(["--", "echo", "there"]);
    run.env("CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN", &cloud.token);
    run.env("CODEX_HOME", cloud.home.path());
    assert_eq!(output(&mut run).success(), "there\n");
}
