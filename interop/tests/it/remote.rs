//! Remote mode through our own rendezvous: both implementations as the server, both as the harness.

use std::io::Read;
use std::process::Stdio;

use crate::cloud::Cloud;
use crate::model::exec;
use crate::programs::{Implementation, Program, Server, output, output_of};
use crate::real_client::{patching, session, typing};

/// A variable value that only the server's environment has.
const MARK: &str = "in-the-environment";

fn marked(cloud: &Cloud, implementation: Implementation) -> Program {
    cloud.serving(implementation, |command| {
        command.env("MARK", MARK).env("RUST_LOG", "warn");
    })
}

/// Tests our command line in the environment.
fn our_harness(cloud: &Cloud) {
    let run = |script: &str| output(cloud.ours("run").args(["--", "sh", "-c", script]));
    let result = run("echo $MARK; echo err >&2; exit 3");
    assert_eq!(
        (result.code, &*result.out, &*result.err),
        (Some(3), &*format!("{MARK}\n"), "err\n")
    );
    let many = run("seq 200000").success();
    assert_eq!(many.lines().count(), 200_000);
    let info = output(&mut cloud.ours("info")).success();
    assert!(info.contains("env:interop"), "{info}");

    let work = crate::programs::home();
    let path = |name: &str| work.path().join(name).to_str().unwrap().to_owned();
    let content: Vec<u8> = (0..400_000u32).flat_map(u32::to_le_bytes).collect();
    std::fs::write(path("here"), &content).unwrap();
    output(cloud.ours("cp").args([path("here"), format!(":{}", path("there"))])).success();
    output(cloud.ours("cp").args([format!(":{}", path("there")), path("back")])).success();
    assert!(std::fs::read(path("back")).unwrap() == content, "a file comes back as it went");

    let denied =
        output(cloud.ours("run").args(["--sandbox", "read-only", "--cwd", &path("")]).args([
            "--",
            "sh",
            "-c",
            "echo x > denied",
        ]));
    assert_ne!(denied.code, Some(0), "{denied:?}");
    assert!(!work.path().join("denied").exists());
}

/// Tests their client in the environment.
fn their_harness(cloud: &Cloud) {
    let mut steps = vec![exec("echo $MARK; exit 7"), exec("echo old > there.txt")];
    steps.extend(typing());
    steps.push(patching());
    steps.push(exec("seq 100000 | tail -n 1; cat there.txt"));
    let session = session("danger-full-access", steps, |command| cloud.theirs(command));
    let tool_outputs = &session.tool_outputs;
    assert!(
        tool_outputs[0].contains(MARK) && tool_outputs[0].contains("code 7"),
        "{}",
        tool_outputs[0]
    );
    assert!(tool_outputs[3].contains("typed-abc"), "{tool_outputs:?}");
    assert!(tool_outputs[5].contains("100000\nchanged\n"), "{}", tool_outputs[5]);
}

#[test]
#[ignore = "interop/run runs it"]
fn our_harness_our_server() {
    let cloud = Cloud::start();
    let _server = marked(&cloud, Implementation::Ours);
    our_harness(&cloud);
}

#[test]
#[ignore = "interop/run runs it"]
fn our_harness_their_server() {
    let cloud = Cloud::start();
    let _server = marked(&cloud, Implementation::Theirs);
    our_harness(&cloud);
}

#[test]
#[ignore = "interop/run runs it"]
fn their_harness_our_server() {
    let cloud = Cloud::start();
    let _server = marked(&cloud, Implementation::Ours);
    their_harness(&cloud);
}

#[test]
#[ignore = "interop/run runs it"]
fn their_harness_their_server() {
    let cloud = Cloud::start();
    let _server = marked(&cloud, Implementation::Theirs);
    their_harness(&cloud);
}

#[test]
#[ignore = "interop/run runs it"]
fn their_server_behind_our_forwarder() {
    let cloud = Cloud::start();
    let listening = Server::with(Implementation::Theirs, |command| {
        command.env("MARK", MARK);
    });
    let _forwarder = cloud.forwarding(&listening);
    our_harness(&cloud);
    their_harness(&cloud);
}

/// Their server never resumes a stream, so the client resumes the session over a new one.
#[test]
#[ignore = "interop/run runs it"]
fn rendezvous_restart_loses_nothing_with_either_server() {
    for implementation in [Implementation::Ours, Implementation::Theirs] {
        let mut cloud = Cloud::start();
        let _server = marked(&cloud, implementation);
        let gate = crate::programs::home();
        let open = gate.path().join("open");
        let script = format!(
            "echo one; until [ -e {} ]; do sleep 0.05; done; seq 50000; exit 4",
            open.display()
        );
        let mut command = cloud.ours("run");
        command.args(["--", "sh", "-c", &script]).stdout(Stdio::piped());
        let mut running = Program::start(&mut command);
        let mut stdout = running.child.stdout.take().unwrap();
        let mut first = [0; 4];
        stdout.read_exact(&mut first).unwrap();
        cloud.restart();
        std::fs::write(&open, "").unwrap();
        let mut result = String::new();
        stdout.read_to_string(&mut result).unwrap();
        let all: String = (1..=50_000).map(|n| format!("{n}\n")).collect();
        assert!(result == all, "{implementation:?}: {} {}", result.len(), running.log());
        assert_eq!(running.wait().code(), Some(4), "{implementation:?}");
    }
}

#[test]
#[ignore = "interop/run runs it"]
fn input_reaches_either_server() {
    for implementation in [Implementation::Ours, Implementation::Theirs] {
        let cloud = Cloud::start();
        let _server = marked(&cloud, implementation);
        let result = output_of(cloud.ours("run").args(["--", "head", "-n", "2"]), b"a\nb\nc\n");
        assert_eq!(
            (result.code, &*result.out),
            (Some(0), "a\nb\n"),
            "{implementation:?}: {result:?}"
        );
    }
}
