//! Torture: random programs, random clients and random kills, checked against a model and the machine.
//!
//! Each round starts a server and several concurrent sessions. A model knows every byte and exit code of
//! every program; nothing that a round started may be alive after its end. [`Allowed`] says what a fault may
//! change; nothing else may change. In some rounds the server is short of something (`scarcity`). Sandboxed
//! file requests and patches of files with several names run at the same time, checked against the disk.

mod client;
mod confined;
mod files;
mod half_open;
pub(crate) mod machine;
#[path = "../../../crates/client/tests/it/patch_model.rs"]
#[allow(clippy::unwrap_used, reason = "it is a test's model, which panics where it cannot go on")]
mod patch_model;
mod patches;
mod programs;
mod scarcity;
mod script;
mod session;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use fastrand::Rng;
use tokio::task::JoinSet;

use confined::Scarcity;
use files::Workspace;
use rustix::process::Signal;
use session::{Allowed, Treatment};

/// The most keepers, or wardens one after the other, that a round kills.
const MAX_KILLS: usize = 3;

/// How long to run, and from which seed.
#[derive(Debug, Args)]
pub(crate) struct TortureArgs {
    /// Begin with this seed, as printed by a round that failed
    #[arg(long)]
    seed: Option<u64>,
    /// Stop after this many rounds
    #[arg(long)]
    rounds: Option<u64>,
    /// Stop after this many seconds
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// The most concurrent sessions
    #[arg(long, default_value_t = 8)]
    sessions: usize,
    /// How many rounds run concurrently, each with its own server
    #[arg(long, default_value_t = 3)]
    at_once: usize,
    /// Only rounds with this fault
    #[arg(long, value_enum)]
    fault: Option<Fault>,
    /// The program under test; built beside this one if not given
    #[arg(long)]
    codex: Option<PathBuf>,
}

/// What a round kills.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Fault {
    /// Nothing
    None,
    Server,
    Warden,
    Keeper,
    /// The warden, and a moment later the server
    WardenThenServer,
    /// The server, and a moment later the warden
    ServerThenWarden,
    /// A keeper, and at once the server
    KeeperAndServer,
    /// The sessions end before their programs do
    Client,
    /// The processes of sandboxes that serve file requests
    Helper,
    /// Nothing, but connections go silent without closing
    Silence,
    /// Processes stop for a while (SIGSTOP): the server, its warden, keepers and sandboxes, and a client. To
    /// a stopped process, every clock jumps forward
    Stop,
    /// Connections that begin and do not go on, at every step of the way in
    HalfOpen,
    /// The server is short of open files
    Descriptors,
    /// The server's user is short of processes
    Processes,
    /// The server is short of address space
    Memory,
    /// The server's disk is full
    Room,
    /// The server's disk is read-only for a while
    Writability,
    /// The wall clock jumps
    Clock,
}

impl Fault {
    /// Whether the server survives the fault.
    fn leaves_server_running(self) -> bool {
        !matches!(
            self,
            Self::Server | Self::WardenThenServer | Self::ServerThenWarden | Self::KeeperAndServer
        )
    }

    /// What the server is short of. These rounds need root, for namespaces and other users.
    fn scarcity(self) -> Option<Scarcity> {
        Some(match self {
            Self::Descriptors => Scarcity::Descriptors,
            Self::Processes => Scarcity::Processes,
            Self::Memory => Scarcity::Memory,
            Self::Room => Scarcity::Room,
            Self::Writability => Scarcity::Writability,
            Self::Clock => Scarcity::Clock,
            _ => return None,
        })
    }

    fn treatment(self) -> Treatment {
        let allowed = match self {
            Self::Warden => Allowed { refused: true, killed: false },
            Self::Keeper => Allowed { refused: true, killed: true },
            _ => Allowed::default(),
        };
        // Where helpers are killed, only helpers use sandboxes.
        Treatment { allowed, silence: self == Self::Silence, confine: self != Self::Helper }
    }
}

const FAULTS: [Fault; 18] = [
    Fault::None,
    Fault::Server,
    Fault::Warden,
    Fault::Keeper,
    Fault::WardenThenServer,
    Fault::ServerThenWarden,
    Fault::KeeperAndServer,
    Fault::Client,
    Fault::Helper,
    Fault::Silence,
    Fault::Stop,
    Fault::HalfOpen,
    Fault::Descriptors,
    Fault::Processes,
    Fault::Memory,
    Fault::Room,
    Fault::Writability,
    Fault::Clock,
];

pub(crate) fn run(args: &TortureArgs) -> anyhow::Result<()> {
    let codex = match &args.codex {
        Some(codex) => codex.clone(),
        None => crate::codex::build()?,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let first = args.seed.unwrap_or_else(|| fastrand::u64(..1 << 40));
    let (began, mut rounds) = (Instant::now(), 0);
    runtime.block_on(async {
        let mut running = JoinSet::new();
        loop {
            while running.len() < args.at_once.max(1)
                && began.elapsed() < Duration::from_secs(args.seconds)
                && args.rounds.is_none_or(|most| rounds < most)
            {
                let (codex, seed, sessions) = (codex.clone(), first + rounds, args.sessions);
                let mut rng = Rng::with_seed(seed);
                let fault = rng.choice(FAULTS).unwrap_or(Fault::None);
                let fault = args.fault.unwrap_or(fault);
                running.spawn(async move {
                    if let Some(scarcity) = fault.scarcity() {
                        let round = scarcity::round(&codex, scarcity, seed, &mut rng).await;
                        return round.with_context(|| format!("seed {seed}, fault {fault:?}"));
                    }
                    let round = round(&codex, fault, seed, sessions, &mut rng).await;
                    round.with_context(|| format!("seed {seed}, fault {fault:?}"))
                });
                rounds += 1;
            }
            match running.join_next().await {
                Some(done) => done??,
                None => return anyhow::Ok(()),
            }
        }
    })?;
    eprintln!("{rounds} rounds from seed {first}: nothing lost, nothing left behind");
    Ok(())
}

/// A server that is killed when this is dropped.
struct Server {
    child: Child,
    url: String,
}

impl Server {
    fn start(codex: &Path) -> anyhow::Result<Self> {
        let mut child = Command::new(codex)
            .args(["exec-server", "--detach-ttl", "2s"])
            .env("RUST_LOG", "off")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let stdout = child.stdout.take().context("no stdout")?;
        let mut url = String::new();
        BufReader::new(stdout).read_line(&mut url)?;
        Ok(Self { child, url: url.trim().to_owned() })
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn kill(&mut self) -> anyhow::Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

async fn round(
    codex: &Path,
    fault: Fault,
    seed: u64,
    most: usize,
    rng: &mut Rng,
) -> anyhow::Result<()> {
    let token = format!("{:015}", seed % 1_000_000_000_000_000);
    let mut server = Server::start(codex)?;
    let treatment = fault.treatment();
    let count = rng.usize(1..=most.max(1));
    let sessions: Vec<_> = (0..count)
        .map(|_| {
            let (url, token, rng) = (server.url.clone(), token.clone(), rng.fork());
            tokio::spawn(async move { session::run(&url, &token, rng, treatment).await })
        })
        .collect();
    let half_open = match fault {
        Fault::HalfOpen => half_open::connections(&server.url, rng).await?,
        _ => Vec::new(),
    };
    let with_program = fault == Fault::Stop || fault == Fault::None && rng.u8(..3) == 0;
    let program = with_program.then(|| {
        let (codex, url, token, rng) =
            (codex.to_owned(), server.url.clone(), token.clone(), rng.fork());
        let stop = fault == Fault::Stop;
        tokio::spawn(async move { programs::run(&codex, &url, &token, rng, stop).await })
    });
    let patches = (matches!(fault, Fault::None | Fault::Silence)).then(|| {
        let (codex, url, rng) = (codex.to_owned(), server.url.clone(), rng.fork());
        tokio::spawn(async move { patches::run(&codex, &url, rng).await })
    });
    let calm = Arc::new(AtomicBool::new(false));
    let workspaces: Vec<_> = (0..rng.usize(1..3))
        .map(|_| {
            let (url, rng, calm) = (server.url.clone(), rng.fork(), calm.clone());
            let faulty = matches!(fault, Fault::Helper | Fault::Warden | Fault::Keeper);
            let mut workspace = Workspace::new()?;
            anyhow::Ok(tokio::spawn(async move {
                let result = workspace.torture(&url, rng, faulty, calm).await;
                (workspace, result)
            }))
        })
        .collect::<anyhow::Result<_>>()?;
    let moment = Duration::from_micros(rng.u64(
        ..match fault {
            Fault::Warden | Fault::Keeper => 100_000,
            _ => 400_000,
        },
    ));
    tokio::time::sleep(moment).await;
    inject_fault(fault, &mut server, &sessions, rng).await?;
    calm.store(true, Ordering::SeqCst);
    let lives = fault.leaves_server_running();
    for session in sessions {
        match session.await {
            // The result of a session whose server or client was killed is ignored.
            Ok(result) if lives && fault != Fault::Client => result?,
            Err(error) if error.is_panic() => return Err(error.into()),
            _ => {}
        }
    }
    if let Some(program) = program {
        program.await??;
    }
    if let Some(patches) = patches {
        patches.await??;
    }
    let mut checked = Vec::new();
    for workspace in workspaces {
        let (workspace, result) = workspace.await?;
        if lives {
            result?;
        }
        checked.push(workspace);
    }
    drop(half_open);
    machine::wait_until_none(|| {
        let left = machine::with_token(&token);
        (!left.is_empty()).then(|| format!("left behind: {left:?}"))
    })
    .await?;
    if lives {
        let pid = server.pid();
        // A helper stays for the next request of its policy.
        machine::wait_until_none(|| machine::unsettled(pid, checked.len())).await?;
        // Connections and processes hold descriptors only while they exist.
        machine::wait_until_none(|| {
            let open = machine::descriptors(pid);
            (open > 64).then(|| format!("{open} descriptors stay open"))
        })
        .await?;
        server.kill()?;
    }
    for workspace in checked {
        workspace.check().await?;
    }
    Ok(())
}

async fn inject_fault<T>(
    fault: Fault,
    server: &mut Server,
    sessions: &[tokio::task::JoinHandle<T>],
    rng: &mut Rng,
) -> anyhow::Result<()> {
    let pid = server.pid();
    match fault {
        Fault::Stop => {
            for _ in 0..rng.usize(3..12) {
                let mut all = vec![pid];
                all.extend(machine::wardens(pid));
                all.extend(machine::keepers(pid));
                all.extend(machine::sandboxes(pid));
                let Some(stopped) = rng.choice(all) else { continue };
                machine::signal(stopped, Signal::STOP);
                tokio::time::sleep(Duration::from_millis(rng.u64(..150))).await;
                machine::signal(stopped, Signal::CONT);
            }
        }
        Fault::Helper => {
            for _ in 0..rng.usize(1..30) {
                if let Some(sandbox) = rng.choice(machine::sandboxes(pid)) {
                    machine::kill(sandbox);
                }
                tokio::time::sleep(Duration::from_millis(rng.u64(..40))).await;
            }
        }
        Fault::Server => server.kill()?,
        Fault::Client => sessions.iter().for_each(tokio::task::JoinHandle::abort),
        Fault::Warden => {
            for _ in 0..rng.usize(1..=MAX_KILLS) {
                machine::wardens(pid).into_iter().for_each(machine::kill);
                tokio::time::sleep(Duration::from_millis(rng.u64(..60))).await;
            }
        }
        Fault::Keeper => {
            for _ in 0..rng.usize(1..=MAX_KILLS) {
                if let Some(keeper) = rng.choice(machine::keepers(pid)) {
                    machine::kill(keeper);
                }
            }
        }
        Fault::WardenThenServer => {
            machine::wardens(pid).into_iter().for_each(machine::kill);
            tokio::time::sleep(Duration::from_millis(rng.u64(..30))).await;
            server.kill()?;
        }
        Fault::ServerThenWarden => {
            let wardens = machine::wardens(pid);
            machine::kill(pid);
            // The warden stops its keepers for this short time. No timer is as precise.
            let until = Instant::now() + Duration::from_micros(rng.u64(..3000));
            while Instant::now() < until {
                std::hint::spin_loop();
            }
            wardens.into_iter().for_each(machine::kill);
            server.kill()?;
        }
        Fault::KeeperAndServer => {
            if let Some(keeper) = rng.choice(machine::keepers(pid)) {
                machine::kill(keeper);
            }
            server.kill()?;
        }
        // The others change how a server or its clients begin.
        _ => {}
    }
    Ok(())
}
