//! The program's results are exact through connections that are cut repeatedly.
//!
//! `CUTS` sets how many connections each test cuts, `CUTS_SEED` where.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::commands::{Server, codex, output, output_of};
use crate::proxy::{Plan, Proxy};
use crate::remote::Cloud;
use crate::support::wait;
use crate::terminal::Terminal;

/// Number of concurrent runs, each with a part of the cuts.
const AT_ONCE: usize = 10;

fn number(variable: &str, default: usize) -> usize {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Runs a test several times at once, each through its own proxy, until all cuts are made.
fn through_cuts(most: i64, test: impl Fn(&Server, &Proxy, Plan) + Sync) {
    let (cuts, seed) = (number("CUTS", 500), number("CUTS_SEED", 1));
    let server = Server::start();
    std::thread::scope(|scope| {
        for at in 0..AT_ONCE {
            let seed = (seed * 1000 + at) as u64;
            let plan = Plan { seed, cuts: cuts.div_ceil(AT_ONCE), most };
            let (server, test) = (&server, &test);
            scope.spawn(move || {
                let proxy = Proxy::start(&server.url, plan);
                test(server, &proxy, plan);
                assert_eq!(proxy.cut(), plan.cuts, "it outlived the cuts, {plan:?}");
            });
        }
    });
}

fn on(proxy: &Proxy, subcommand: &str) -> Command {
    proxy.expect_new_client();
    let mut command = codex();
    command.args([subcommand, "--on", &proxy.url]);
    command
}

/// Different lines of this many bytes in total.
fn text(bytes: usize) -> String {
    (0..bytes / 16).map(|n| format!("{n:015}\n")).collect()
}

/// Enough bytes for that many connections.
fn enough(plan: Plan) -> usize {
    plan.cuts * plan.most as usize * 2 / 3
}

#[test]
fn run_forwards_all_input_and_output_through_cuts() {
    through_cuts(30_000, |_, proxy, plan| {
        let input = text(enough(plan));
        let script = "echo begun >&2; cat; echo over >&2; exit 7";
        let mut run = on(proxy, "run");
        let said = output_of(run.args(["--", "/bin/sh", "-c", script]), input.as_bytes());
        assert_eq!((said.code, said.err.as_str()), (Some(7), "begun\nover\n"), "{plan:?}");
        assert!(said.out == input, "{} of {} bytes, {plan:?}", said.out.len(), input.len());
    });
}

fn copy(proxy: &Proxy, from: &str, to: &str, plan: Plan) {
    let said = output(on(proxy, "cp").args([from, to]));
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""), "{plan:?}");
}

fn shown(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn cp_uploads_and_downloads_through_cuts() {
    through_cuts(40_000, |_, proxy, plan| {
        let directory = tempfile::tempdir().unwrap();
        let (from, to) = (directory.path().join("from"), directory.path().join("to"));
        let mut left = plan.cuts;
        let mut round = 0;
        // Copies repeatedly until all cuts are made.
        while left > 0 {
            round += 1;
            assert!(round < 1000, "the cuts are never made, {plan:?}");
            let content = text(round * 100_000 + 300_000);
            std::fs::write(&from, &content).unwrap();
            std::fs::write(&to, "old").unwrap();
            match plan.seed % 2 {
                0 => copy(proxy, shown(&from), &format!(":{}", shown(&to)), plan),
                _ => copy(proxy, &format!(":{}", shown(&from)), shown(&to), plan),
            }
            assert!(std::fs::read_to_string(&to).unwrap() == content, "round {round}, {plan:?}");
            let names = std::fs::read_dir(directory.path()).unwrap().count();
            assert_eq!(names, 2, "nothing is left, round {round}, {plan:?}");
            left = plan.cuts - proxy.cut();
        }
    });
}

/// Types into a shell until all cuts are made.
fn shell(mut command: Command, cuts_are_made: impl Fn() -> bool, plan: Plan) {
    let home = tempfile::tempdir().unwrap();
    let typed = home.path().join("typed");
    command.env("HOME", "/").env("XDG_STATE_HOME", home.path());
    command.stdin(Stdio::null());
    let mut terminal = Terminal::start(&command);
    terminal.type_in(&format!("f={}; echo rea''dy\n", shown(&typed)));
    terminal.shows("ready");
    let mut round = 0;
    while !cuts_are_made() {
        assert!(round < 100_000, "the cuts are never made, {plan:?}");
        // Each command runs once, and its output is shown.
        terminal.type_in(&format!("echo {round} >> $f; echo rou''nd {round}.\n"));
        terminal.shows(&format!("round {round}."));
        round += 1;
    }
    terminal.type_in("exit 5\n");
    assert_eq!(terminal.ends().code(), Some(5), "{plan:?}");
    let want: String = (0..round).map(|n| format!("{n}\n")).collect();
    assert_eq!(std::fs::read_to_string(&typed).unwrap(), want, "{plan:?}");
}

#[test]
fn shell_loses_no_key_and_no_output_through_cuts() {
    through_cuts(7_000, |_, proxy, plan| {
        shell(on(proxy, "shell"), || proxy.cut() == plan.cuts, plan);
    });
}

/// An environment whose server and client both reach the rendezvous through cutting proxies.
struct Relay {
    cloud: Cloud,
    server: Proxy,
    user: Proxy,
    plan: Plan,
}

impl Relay {
    fn cuts_are_made(&self) -> bool {
        self.server.cut() >= self.plan.cuts && self.user.cut() >= self.plan.cuts
    }

    fn codex(&self, subcommand: &str) -> Command {
        self.cloud.codex_by(&self.user.url, subcommand)
    }

    /// Feeds an echoing command until all cuts are made.
    fn run(&self) {
        let plan = self.plan;
        let mut command = self.codex("run");
        command.args(["--", "/bin/sh", "-c", "cat; exit 7"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let (mut stdout, mut stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let errors = std::thread::spawn(move || {
            let mut said = String::new();
            stderr.read_to_string(&mut said).unwrap();
            said
        });
        let mut line = 0_u64;
        while !self.cuts_are_made() {
            // Waits for the echo before it sends more, so that the data does not outrun the cuts.
            let piece: Vec<u8> = (0..100).flat_map(|n| text_line(line + n)).collect();
            let mut back = vec![0; piece.len()];
            let passed = stdin.write_all(&piece).and_then(|()| stdout.read_exact(&mut back));
            if let Err(error) = passed {
                drop(stdin);
                panic!("line {line}: {error}, {}, {plan:?}", errors.join().unwrap());
            }
            assert!(back == piece, "from line {line}, {plan:?}");
            line += 100;
        }
        drop(stdin);
        let mut rest = String::new();
        stdout.read_to_string(&mut rest).unwrap();
        let code = wait(&mut child).code();
        let said = (code, errors.join().unwrap(), rest);
        assert_eq!(said, (Some(7), String::new(), String::new()), "{plan:?}");
    }

    /// Copies a file that is large enough for all cuts.
    fn copy(&self) {
        let plan = self.plan;
        let directory = tempfile::tempdir().unwrap();
        let (from, to) = (directory.path().join("from"), directory.path().join("to"));
        let content = text(plan.cuts * plan.most as usize);
        std::fs::write(&from, &content).unwrap();
        let (from_there, to_there) = (format!(":{}", shown(&from)), format!(":{}", shown(&to)));
        let mut command = self.codex("cp");
        match plan.seed % 2 {
            0 => command.args([shown(&from), &to_there]),
            _ => command.args([&from_there, shown(&to)]),
        };
        let said = output(&mut command);
        assert_eq!((said.code, said.err.as_str()), (Some(0), ""), "{plan:?}");
        assert!(std::fs::read_to_string(&to).unwrap() == content, "{plan:?}");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2, "{plan:?}");
    }
}

fn text_line(n: u64) -> Vec<u8> {
    format!("{n:015}\n").into_bytes()
}

/// Half of the cuts hit the server's connection to the rendezvous, half the client's.
#[test]
fn a_relay_loses_nothing_through_cuts() {
    let (cuts, seed) = (number("CUTS", 500), number("CUTS_SEED", 1));
    std::thread::scope(|scope| {
        for at in 0..AT_ONCE {
            let seed = (seed * 1000 + at) as u64;
            let plan = Plan { seed, cuts: cuts.div_ceil(2 * AT_ONCE), most: 30_000 };
            scope.spawn(move || {
                let cloud = Cloud::start();
                let server = Proxy::start_relay(&cloud.url, plan);
                let user = Proxy::start_relay(&cloud.url, Plan { seed: seed + 500, ..plan });
                let _serving = cloud.serving_by(&server.url);
                let relay = Relay { cloud, server, user, plan };
                match at % 3 {
                    0 => relay.run(),
                    1 => relay.copy(),
                    _ => shell(relay.codex("shell"), || relay.cuts_are_made(), plan),
                }
                assert!(relay.cuts_are_made(), "it outlived the cuts, {plan:?}");
            });
        }
    });
}
