//! Remote mode through our own rendezvous: both implementations as the server, both as the harness.

use std::io::Read;
use std::process::Stdio;

use crate::cloud::Cloud;
use crate::model::exec;
use crate::programs::{Program, Server, Whose, output, output_of};
use crate::real_client::{patching, session, typing};

/// What only the server's own environment has.
const MARK: &str = "in-the-environment";

fn marked(cloud: &Cloud, whose: Whose) -> Program {
    cloud.serving(whose, |command| {
        command.env("MARK", MARK).env("RUST_LOG", "warn");
    })
}

/// Our command line does its work in the environment.
fn our_harness(cloud: &Cloud) {
    let run = |script: &str| output(cloud.ours("run").args(["--", "sh", "-c", script]));
    let said = run("echo $MARK; echo err >&2; exit 3");
    assert_eq!((said.code, &*said.out, &*said.err), (Some(3), &*format!("{MARK}\n"), "err\n"));
    let many = run("seq 200000").well();
    assert_eq!(many.lines().count(), 200_000);
    let info = output(&mut cloud.ours("info")).well();
    assert!(info.contains("env:interop"), "{info}");

    let work = crate::programs::home();
    let path = |name: &str| work.path().join(name).to_str().unwrap().to_owned();
    let content: Vec<u8> = (0..400_000u32).flat_map(u32::to_le_bytes).collect();
    std::fs::write(path("here"), &content).unwrap();
    output(cloud.ours("cp").args([path("here"), format!(":{}", path("there"))])).well();
    output(cloud.ours("cp").args([format!(":{}", path("there")), path("back")])).well();
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

/// Their client does its work in the environment.
fn their_harness(cloud: &Cloud) {
    let mut steps = vec![exec("echo $MARK; exit 7"), exec("echo old > there.txt")];
    steps.extend(typing());
    steps.push(patching());
    steps.push(exec("seq 100000 | tail -n 1; cat there.txt"));
    let session = session("danger-full-access", steps, |command| cloud.theirs(command));
    let answers = &session.answers;
    assert!(answers[0].contains(MARK) && answers[0].contains("code 7"), "{}", answers[0]);
    assert!(answers[3].contains("typed-abc"), "{answers:?}");
    assert!(answers[5].contains("100000\nchanged\n"), "{}", answers[5]);
}

#[test]
#[ignore = "interop/run runs it"]
fn our_harness_our_server() {
    let cloud = Cloud::start();
    let _server = marked(&cloud, Whose::Ours);
    our_harness(&cloud);
}

#[test]
#[ignore = "interop/run runs it"]
fn our_harness_their_server() {
    let cloud = Cloud::start();
    let _server = marked(&cloud, Whose::Theirs);
    our_harness(&cloud);
}

#[test]
#[ignore = "interop/run runs it"]
fn their_harness_our_server() {
    let cloud = Cloud::start();
    let _server = marked(&cloud, Whose::Ours);
    their_harness(&cloud);
}

#[test]
#[ignore = "interop/run runs it"]
fn their_harness_their_server() {
    let cloud = Cloud::start();
    let _server = marked(&cloud, Whose::Theirs);
    their_harness(&cloud);
}

#[test]
#[ignore = "interop/run runs it"]
fn their_server_behind_our_forwarder() {
    let cloud = Cloud::start();
    let listening = Server::with(Whose::Theirs, |command| {
        command.env("MARK", MARK);
    });
    let _forwarder = cloud.forwarding(&listening);
    our_harness(&cloud);
    their_harness(&cloud);
}

/// Their server never picks a stream up again, so the session is resumed over a new one.
#[test]
#[ignore = "interop/run runs it"]
fn a_rendezvous_that_falls_costs_nothing_with_either_server() {
    for whose in [Whose::Ours, Whose::Theirs] {
        let mut cloud = Cloud::start();
        let _server = marked(&cloud, whose);
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
        let mut said = String::new();
        stdout.read_to_string(&mut said).unwrap();
        let all: String = (1..=50_000).map(|n| format!("{n}\n")).collect();
        assert!(said == all, "{whose:?}: {} {}", said.len(), running.log());
        assert_eq!(running.ended().code(), Some(4), "{whose:?}");
    }
}

#[test]
#[ignore = "interop/run runs it"]
fn input_reaches_either_server() {
    for whose in [Whose::Ours, Whose::Theirs] {
        let cloud = Cloud::start();
        let _server = marked(&cloud, whose);
        let said = output_of(cloud.ours("run").args(["--", "head", "-n", "2"]), b"a\nb\nc\n");
        assert_eq!((said.code, &*said.out), (Some(0), "a\nb\n"), "{whose:?}: {said:?}");
    }
}
