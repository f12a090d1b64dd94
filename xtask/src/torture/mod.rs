//! Torture: random programs, random clients, random kills, judged by what is on the machine after it.
//!
//! Each round starts a server and some sessions beside each other. A model knows every byte and exit
//! code of every program; nothing that a round started may be alive after its end. What a fault may
//! change is said by [`Allowed`], and nothing else may.

mod client;
mod machine;
mod programs;
mod script;
mod session;

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use fastrand::Rng;

use session::Allowed;

/// How long to torture, and from where.
#[derive(Debug, Args)]
pub struct TortureArgs {
    /// Begin with this seed, as printed by a round that failed
    #[arg(long)]
    seed: Option<u64>,
    /// Stop after so many rounds
    #[arg(long)]
    rounds: Option<u64>,
    /// Stop after so many seconds
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// At most so many sessions at once
    #[arg(long, default_value_t = 8)]
    sessions: usize,
    /// Only rounds with this fault
    #[arg(long, value_enum)]
    fault: Option<Fault>,
    /// The program under torture; built beside this one if not given
    #[arg(long)]
    codex: Option<PathBuf>,
}

/// Who is killed in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Fault {
    /// Nobody
    None,
    Server,
    Warden,
    Keeper,
    /// The warden, and a moment later the server
    WardenThenServer,
    /// A keeper, and at once the server
    KeeperAndServer,
    /// The sessions end before their programs do
    Client,
}

const FAULTS: [Fault; 7] = [
    Fault::None,
    Fault::Server,
    Fault::Warden,
    Fault::Keeper,
    Fault::WardenThenServer,
    Fault::KeeperAndServer,
    Fault::Client,
];

pub fn run(args: &TortureArgs) -> anyhow::Result<()> {
    let codex = match &args.codex {
        Some(codex) => codex.clone(),
        None => build()?,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let first = args.seed.unwrap_or_else(|| fastrand::u64(..1 << 40));
    let (began, mut rounds) = (Instant::now(), 0);
    while began.elapsed() < Duration::from_secs(args.seconds)
        && args.rounds.is_none_or(|most| rounds < most)
    {
        let seed = first + rounds;
        let mut rng = Rng::with_seed(seed);
        let fault = rng.choice(FAULTS).unwrap_or(Fault::None);
        let fault = args.fault.unwrap_or(fault);
        let round = runtime.block_on(round(&codex, fault, seed, args.sessions, &mut rng));
        round.with_context(|| format!("seed {seed}, fault {fault:?}"))?;
        rounds += 1;
    }
    eprintln!("{rounds} rounds from seed {first}: nothing lost, nothing left behind");
    Ok(())
}

fn build() -> anyhow::Result<PathBuf> {
    let release = !cfg!(debug_assertions);
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["build", "--quiet", "--locked", "--package", "codex"]);
    let built = command.args(release.then_some("--release")).status()?;
    ensure!(built.success(), "the build failed");
    Ok(std::env::current_exe()?.with_file_name("codex"))
}

/// A server that is killed when this is dropped.
struct Server {
    child: Child,
    url: String,
}

impl Server {
    fn start(codex: &PathBuf) -> anyhow::Result<Self> {
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
    codex: &PathBuf,
    fault: Fault,
    seed: u64,
    most: usize,
    rng: &mut Rng,
) -> anyhow::Result<()> {
    let token = format!("{:015}", seed % 1_000_000_000_000_000);
    let mut server = Server::start(codex)?;
    let allowed = match fault {
        Fault::Warden => Allowed { refused: true, killed: false },
        Fault::Keeper => Allowed { refused: true, killed: true },
        _ => Allowed::default(),
    };
    let count = rng.usize(1..=most.max(1));
    let sessions: Vec<_> = (0..count)
        .map(|_| {
            let (url, token, rng) = (server.url.clone(), token.clone(), rng.fork());
            tokio::spawn(async move { session::run(&url, &token, rng, allowed).await })
        })
        .collect();
    let program = (fault == Fault::None && rng.u8(..3) == 0).then(|| {
        let (codex, url, token, rng) =
            (codex.clone(), server.url.clone(), token.clone(), rng.fork());
        tokio::spawn(async move { programs::run(&codex, &url, &token, rng).await })
    });
    let moment = Duration::from_micros(rng.u64(
        ..match fault {
            Fault::Warden | Fault::Keeper => 100_000,
            _ => 400_000,
        },
    ));
    tokio::time::sleep(moment).await;
    inflict(fault, &mut server, &sessions, rng).await?;
    let lives = !matches!(fault, Fault::Server | Fault::WardenThenServer | Fault::KeeperAndServer);
    for session in sessions {
        match session.await {
            // A session that lost its server, or was ended, has nothing to say.
            Ok(said) if lives && fault != Fault::Client => said?,
            Err(error) if error.is_panic() => return Err(error.into()),
            _ => {}
        }
    }
    if let Some(program) = program {
        program.await??;
    }
    machine::settles(|| {
        let left = machine::with_token(&token);
        (!left.is_empty()).then(|| format!("left behind: {left:?}"))
    })
    .await?;
    if lives {
        let pid = server.pid();
        machine::settles(|| {
            let (wardens, mut keepers) = (machine::wardens(pid), machine::keepers(pid));
            keepers.retain(|&keeper| !machine::keeps_spare(keeper));
            let settled = wardens.len() == 1 && keepers.is_empty();
            (!settled).then(|| format!("wardens {wardens:?}, keepers {keepers:?}"))
        })
        .await?;
        // A connection and a process each need some while they live, and none after.
        machine::settles(|| {
            let open = machine::descriptors(pid);
            (open > 64).then(|| format!("{open} descriptors stay open"))
        })
        .await?;
    }
    Ok(())
}

async fn inflict<T>(
    fault: Fault,
    server: &mut Server,
    sessions: &[tokio::task::JoinHandle<T>],
    rng: &mut Rng,
) -> anyhow::Result<()> {
    let pid = server.pid();
    match fault {
        Fault::None => {}
        Fault::Server => server.kill()?,
        Fault::Client => sessions.iter().for_each(tokio::task::JoinHandle::abort),
        Fault::Warden => {
            for _ in 0..rng.usize(1..4) {
                machine::wardens(pid).into_iter().for_each(machine::kill);
                tokio::time::sleep(Duration::from_millis(rng.u64(..60))).await;
            }
        }
        Fault::Keeper => {
            for _ in 0..rng.usize(1..4) {
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
        Fault::KeeperAndServer => {
            if let Some(keeper) = rng.choice(machine::keepers(pid)) {
                machine::kill(keeper);
            }
            server.kill()?;
        }
    }
    Ok(())
}
