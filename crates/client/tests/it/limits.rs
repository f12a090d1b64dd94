//! Limits of processes: random programs under random limits, judged by a model of what must end them.

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::time::Duration;

use codex_exec_client::protocol::process::ProcessSignal;
use codex_exec_client::protocol::resources::{EndedBy, LimitMechanism, Resource, ResourceLimits};
use codex_exec_client::{
    ErrorKind, ExecCommand, ExecServerClient, ExitStatus, OutputStream, ProcessEvent,
};
use codex_exec_serving::{LimitConfig, Quota, Server, ServerConfig};

use crate::embedded::embedded;
use crate::support::options;

/// More than any program here needs, however busy the machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// Writes to stdout, and notes in the file that is its first argument how many bytes were accepted.
const PROGRAM: &str = r#"
import mmap, os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_DFL)
kind, amount, code = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
note = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 8)
written = 0
def say(n):
    global written
    while n > 0:
        done = os.write(1, bytes((written + i) % 251 for i in range(min(n, 4096))))
        written += done
        n -= done
        note[:] = written.to_bytes(8, 'little')
def forever():
    while True: signal.pause()
say(100 + amount % 77)
if kind == 'allocate':
    blocks = []
    for _ in range(amount):
        blocks.append(b'x' * (1 << 20))
        if len(blocks) % 8 == 0: say(10)
    say(3)
    if code < 0: forever()
elif kind == 'fork':
    children = []
    for n in range(amount):
        child = os.fork()
        if child == 0:
            if n % 2: os.setsid()
            forever()
        children.append(child)
    say(3)
    if code < 0: forever()
    for child in children: os.kill(child, signal.SIGKILL)
elif kind == 'write':
    say(amount)
    if code < 0: forever()
elif kind == 'sleep':
    if code < 0: forever()
elif kind == 'chat':
    # Busy for longer than it may be idle, and then silent.
    for _ in range(amount):
        time.sleep(0.05)
        say(5)
    if code < 0: forever()
elif kind == 'burn':
    for _ in range(amount):
        if os.fork() == 0:
            if code < 0:
                while True: pass
            os._exit(0)
    if code < 0: forever()
    for _ in range(amount): os.wait()
elif kind == 'disk':
    f = os.open(sys.argv[1] + '.disk', os.O_RDWR | os.O_CREAT)
    for _ in range(amount): os.write(f, b'y' * (1 << 20))
    say(3)
    if code < 0: forever()
elif kind == 'daemon':
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            null = os.open('/dev/null', os.O_RDWR)
            for n in range(3): os.dup2(null, n)
            forever()
        os._exit(0)
    os.wait()
elif kind == 'files':
    opened = 0
    try:
        while opened < 100000: os.dup(0); opened += 1
    except OSError: pass
    say(opened)
sys.exit(max(code, 0))
"#;

/// One random program with its limits, and what the model says about it.
#[derive(Debug)]
struct Case {
    kind: &'static str,
    amount: u64,
    /// Exit code; negative if it never exits by itself.
    code: i32,
    limits: ResourceLimits,
    expected: Option<EndedBy>,
    tty: bool,
    /// What the client does to it.
    action: Action,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    None,
    Terminate,
    Kill,
    Interrupt,
}

/// A small generator, so that a seed names a case on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }

    fn chance(&mut self) -> bool {
        self.below(2) == 0
    }
}

const MIB: u64 = 1 << 20;

impl Case {
    fn random(random: &mut Random) -> Self {
        // Limits that nothing here reaches.
        let mut limits = ResourceLimits::default();
        for (resource, value) in [
            (Resource::Wall, 600_000),
            (Resource::Idle, 500_000),
            (Resource::Cpu, 400_000),
            (Resource::Memory, 4096 * MIB),
            (Resource::Pids, 1000),
            (Resource::Output, 64 * MIB),
            (Resource::Disk, 10_000 * MIB),
            (Resource::OpenFiles, 300),
        ] {
            if random.below(3) == 0 {
                limits.set(resource, Some(value));
            }
        }
        let exceeds = random.chance();
        let code = if exceeds { -1 } else { random.below(100) as i32 };
        let mut case = Self {
            kind: "sleep",
            amount: 0,
            code,
            limits,
            expected: None,
            tty: random.below(4) == 0,
            action: Action::None,
        };
        let mut decide = |kind, amount, resource, limit, by| {
            case.kind = kind;
            case.amount = amount;
            case.limits.set(resource, Some(limit));
            case.expected = exceeds.then_some(by);
        };
        match (random.below(9), exceeds) {
            (0, true) => decide("allocate", 96, Resource::Memory, 48 * MIB, EndedBy::Oom),
            (0, false) => decide("allocate", 20, Resource::Memory, 120 * MIB, EndedBy::Oom),
            (1, true) => {
                let extra = random.below(20);
                decide("fork", 12 + extra, Resource::Pids, 4 + random.below(8), EndedBy::Pids);
            }
            (1, false) => decide("fork", random.below(6), Resource::Pids, 12, EndedBy::Pids),
            (2, true) => {
                let limit = 200 + random.below(200_000);
                let amount = limit + random.below(400_000);
                decide("write", amount, Resource::Output, limit, EndedBy::Output);
            }
            (2, false) => {
                let amount = random.below(200_000);
                decide("write", amount, Resource::Output, amount + 177, EndedBy::Output);
            }
            (3, _) => decide("sleep", 0, Resource::Wall, wall(random, exceeds), EndedBy::Wall),
            (4, _) => decide("sleep", 0, Resource::Idle, wall(random, exceeds), EndedBy::Idle),
            (5, _) => {
                let burners = 1 + random.below(3);
                decide("burn", burners, Resource::Cpu, wall(random, exceeds), EndedBy::Cpu);
            }
            (6, true) => decide("disk", 24, Resource::Disk, 8 * MIB, EndedBy::Disk),
            (6, false) => decide("disk", 2, Resource::Disk, 16 * MIB, EndedBy::Disk),
            (7, _) => {
                decide("daemon", 0, Resource::Wall, 1500 + random.below(500), EndedBy::Wall);
                (case.code, case.expected) = (case.code.max(0), None);
            }
            _ => {
                // Not a limit but the client, if anything.
                case.kind = "sleep";
                if exceeds {
                    (case.action, case.expected) = match random.below(3) {
                        0 => (Action::Terminate, Some(EndedBy::Terminate)),
                        1 => (Action::Kill, Some(EndedBy::Signal)),
                        _ => (Action::Interrupt, Some(EndedBy::Signal)),
                    };
                }
            }
        }
        case
    }

    fn command(&self, note: &Path, mark: &str) -> ExecCommand {
        let (amount, code) = (self.amount.to_string(), self.code.to_string());
        let note = note.to_str().unwrap();
        let argv = ["python3", "-c", PROGRAM, note, self.kind, &amount, &code];
        let mut command = ExecCommand::new(argv).env("LIMITS_TEST", mark).limits(self.limits);
        if self.tty {
            command = command.tty();
        }
        command
    }
}

/// Milliseconds: soon if it is to be exceeded, else never.
fn wall(random: &mut Random, soon: bool) -> u64 {
    if soon { 200 + random.below(600) } else { 300_000 }
}

/// Processes with this mark in their environment.
fn marked(mark: &str) -> Vec<u32> {
    let mark = format!("LIMITS_TEST={mark}");
    let pids = fs::read_dir("/proc").unwrap().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let has_mark = |pid: &u32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|&byte| byte == 0).any(|variable| variable == mark.as_bytes())
    };
    pids.filter(has_mark).collect()
}

async fn check(client: &ExecServerClient, directory: &Path, name: &str, case: &Case) {
    let note = directory.join(name);
    fs::write(&note, [0; 8]).unwrap();
    let mark = format!("{}-{name}", std::process::id());
    let mut process = client.spawn(case.command(&note, &mark)).await.unwrap();
    let applied = *process.limits().unwrap_or(&Default::default());
    let asked: Vec<_> = case.limits.iter().collect();
    let told: Vec<_> = applied.iter().map(|(resource, limit)| (resource, limit.value)).collect();
    assert_eq!(told, asked, "{case:?}");
    for (resource, limit) in applied.iter() {
        let by = match resource {
            Resource::Wall | Resource::Idle | Resource::Output => LimitMechanism::Server,
            Resource::OpenFiles => LimitMechanism::Rlimit,
            _ => LimitMechanism::Watchdog,
        };
        assert_eq!(limit.by, by, "{resource:?}");
    }
    let (mut got, mut exit, mut closed) = (Vec::new(), None, false);
    let mut acted = false;
    while let Some(event) = process.next_event().await {
        assert!(!closed, "an event after the last");
        match event {
            ProcessEvent::Output { bytes, stream } => {
                assert_ne!(stream, OutputStream::Stderr, "{case:?}: {bytes:?}");
                got.extend_from_slice(&bytes);
                if !std::mem::replace(&mut acted, true) {
                    match case.action {
                        Action::None => {}
                        Action::Terminate => assert!(process.terminate().await.unwrap()),
                        Action::Kill => process.signal(ProcessSignal::Kill).await.unwrap(),
                        Action::Interrupt => {
                            process.signal(ProcessSignal::Interrupt).await.unwrap();
                        }
                    }
                }
            }
            ProcessEvent::Exited(status) => exit = Some(status),
            ProcessEvent::Closed => closed = true,
            other => panic!("{case:?}: {other:?}"),
        }
    }
    let ExitStatus { code, ended_by, usage, .. } = exit.expect("it exited");
    assert_eq!(ended_by, case.expected, "{case:?}: code {code}, {usage:?}");
    match case.expected {
        Some(_) => assert!(code > 128, "{case:?}: {code}"),
        None => assert_eq!(code, case.code, "{case:?}"),
    }
    let usage = usage.expect("its keeper reported");
    if case.expected == Some(EndedBy::Cpu) {
        assert!(usage.cpu_us / 1000 >= case.limits.cpu_ms.unwrap(), "{case:?}: {usage:?}");
    }
    if case.expected == Some(EndedBy::Oom) {
        let peak = usage.peak_memory_bytes.unwrap();
        assert!(peak >= case.limits.memory_bytes.unwrap(), "{case:?}: {usage:?}");
    }
    // Everything that the program was told was written is there, in order. (A terminal changes bytes.)
    let accepted = u64::from_le_bytes(fs::read(&note).unwrap().try_into().unwrap());
    if !case.tty {
        assert!(got.len() as u64 >= accepted, "{case:?}: {} of {accepted}", got.len());
        assert!(got.iter().enumerate().all(|(n, &byte)| byte as usize == n % 251), "{case:?}");
    }
    // The daemon has the rest of its wall time.
    let gone = async {
        while !marked(&mark).is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let left = tokio::time::timeout(PATIENCE, gone).await;
    assert!(left.is_ok(), "{case:?}: left behind {:?}", marked(&mark));
}

/// Runs cases at the same time; `LIMITS_SEED` and `LIMITS_CASES` choose others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_programs_end_by_the_limit_that_they_exceed() {
    let number = |name: &str, default| {
        std::env::var(name).map_or(default, |text| text.parse::<u64>().unwrap())
    };
    let (seed, cases) = (number("LIMITS_SEED", 15), number("LIMITS_CASES", 48));
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (server, client) = embedded().await;
    let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    for _ in 0..20 {
        random.below(2);
    }
    let cases: Vec<_> = (0..cases).map(|_| Case::random(&mut random)).collect();
    let kinds: HashSet<_> = cases.iter().map(|case| (case.kind, case.expected)).collect();
    assert!(cases.len() < 40 || kinds.len() > 12, "{kinds:?}");
    for (batch, cases) in cases.chunks(6).enumerate() {
        let check = |(n, case)| {
            let (client, directory) = (&client, directory.path());
            async move {
                let name = format!("{seed}-{batch}-{n}");
                let checked = check(client, directory, &name, case);
                let checked = tokio::time::timeout(PATIENCE, checked).await;
                assert!(checked.is_ok(), "seed {seed}: {case:?} never ended");
            }
        };
        futures_util::future::join_all(cases.iter().enumerate().map(check)).await;
    }
    server.shut_down().await;
}

#[tokio::test]
async fn output_before_a_kill_is_published_before_the_close() {
    let (server, client) = embedded().await;
    // More than a pipe holds.
    let limits = ResourceLimits { pids: Some(8), ..ResourceLimits::default() };
    let script = "head -c 400000 /dev/zero | tr '\\0' a; echo end; \
                  for n in 1 2 3 4 5 6 7 8 9; do sleep 1000 & done; sleep 1000";
    let process = client.spawn(ExecCommand::shell(script).limits(limits)).await.unwrap();
    let output = process.wait_with_output().await.unwrap();
    assert_eq!(output.status.ended_by, Some(EndedBy::Pids));
    assert_eq!(output.stdout.len(), 400_004);
    server.shut_down().await;
}

#[tokio::test]
async fn input_keeps_a_process_from_being_idle() {
    use tokio::io::AsyncWriteExt;
    let (server, client) = embedded().await;
    let limits = ResourceLimits { idle_ms: Some(2000), ..ResourceLimits::default() };
    let command = ExecCommand::shell("cat > /dev/null; sleep 1000").pipe_stdin().limits(limits);
    let mut process = client.spawn(command).await.unwrap();
    let mut stdin = process.take_stdin().unwrap();
    let began = std::time::Instant::now();
    while began.elapsed() < Duration::from_millis(4500) {
        // It is not dead yet, so its input is taken.
        stdin.write_all(b"x").await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(process.wait().await.unwrap().ended_by, Some(EndedBy::Idle));
    server.shut_down().await;
}

#[tokio::test]
async fn open_files_are_limited_by_the_kernel() {
    let (server, client) = embedded().await;
    let directory = tempfile::tempdir().unwrap();
    let note = directory.path().join("note");
    fs::write(&note, [0; 8]).unwrap();
    let limits = ResourceLimits { open_files: Some(40), ..ResourceLimits::default() };
    let argv = ["python3", "-c", PROGRAM, note.to_str().unwrap(), "files", "0", "0"];
    let output = client.run(ExecCommand::new(argv).limits(limits)).await.unwrap();
    let opened = output.stdout.len() - 100;
    assert!((20..=37).contains(&opened), "{opened}");
    let usage = output.status.usage.unwrap();
    assert!(usage.cpu_us > 0, "{usage:?}");
    assert_eq!(output.status.ended_by, None);
    let small = ResourceLimits { open_files: Some(3), ..ResourceLimits::default() };
    let refused = client.run(ExecCommand::shell("true").limits(small)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidParams);
    let cpus = ResourceLimits { cpus_milli: Some(500), ..ResourceLimits::default() };
    let refused = client.run(ExecCommand::shell("true").limits(cpus)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported, "nothing here enforces it");
    server.shut_down().await;
}

#[tokio::test]
async fn budgets_refuse_starts_until_descendants_have_ended() {
    let mut config = ServerConfig::default();
    let mut limits = LimitConfig::default();
    limits.max.wall_ms = Some(100_000);
    limits.session = Quota::default();
    limits.session.processes = Some(2);
    config.limits = limits;
    let server = Server::new(config).unwrap();
    let connect =
        async || ExecServerClient::connect_connection(server.connect(), options()).await.unwrap();
    let (client, other) = (connect().await, connect().await);
    let first = client.spawn(ExecCommand::shell("sleep 1000")).await.unwrap();
    assert_eq!(first.limits().unwrap().wall_ms.unwrap().value, 100_000, "the server's own");
    // It exits at once, and what it leaves behind is in use.
    let script = "sleep 1000 > /dev/null 2>&1 & echo $!";
    let second = client.run(ExecCommand::shell(script)).await.unwrap();
    let sleeper = String::from_utf8(second.stdout).unwrap();
    let refused = client.spawn(ExecCommand::shell("true")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::LimitReached);
    other.run(ExecCommand::shell("true")).await.unwrap();
    let asks = ResourceLimits { wall_ms: Some(100_001), ..ResourceLimits::default() };
    let refused = other.spawn(ExecCommand::shell("true").limits(asks)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::LimitReached);
    let kill = format!("kill {sleeper}");
    other.run(ExecCommand::shell(kill)).await.unwrap();
    let started = async {
        while let Err(error) = client.run(ExecCommand::shell("true")).await {
            assert_eq!(error.kind(), ErrorKind::LimitReached);
        }
    };
    tokio::time::timeout(PATIENCE, started).await.expect("there is room again");
    server.shut_down().await;
}
