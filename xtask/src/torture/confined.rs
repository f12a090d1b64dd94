//! A server that is short of something: descriptors, processes, memory, room on its disk, a disk that it may
//! write to, or a clock that goes forward.

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};
use tempfile::TempDir;

use super::Server;
use super::machine;

/// What a server is short of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scarcity {
    /// Open files: EMFILE.
    Descriptors,
    /// Processes: EAGAIN from fork.
    Processes,
    /// Address space: ENOMEM.
    Memory,
    /// Room on the disk: ENOSPC.
    Room,
    /// A disk that can be written: EROFS.
    Writability,
    /// The wall clock jumps, days back and forth.
    Clock,
}

/// Open files of a server that is short of them.
const DESCRIPTORS: usize = 96;
/// Processes and threads of a server that is short of them, its own dozen included.
const PROCESSES: usize = 48;
/// Address space of every process: several times what an idle server maps.
const MEMORY: u64 = 3 << 30;
/// The disk of a server, in bytes.
const DISK: usize = 4 << 20;

/// A server in such a place.
pub(crate) struct Confined {
    pub server: Server,
    /// A directory of the server's own disk, by a path that is valid outside of its namespace, too.
    pub disk: PathBuf,
    /// The same, as the server sees it.
    pub inside: PathBuf,
    place: TempDir,
    scarcity: Scarcity,
    seed: u64,
}

impl Confined {
    /// Starts a server, or says why this machine cannot have one.
    pub(crate) fn start(codex: &Path, scarcity: Scarcity, seed: u64) -> anyhow::Result<Self> {
        let place = tempfile::tempdir_in("/var/tmp")?;
        let inside = place.path().join("disk");
        std::fs::create_dir(&inside)?;
        // Another user may not reach the directory of the build.
        let program = place.path().join("codex");
        if std::fs::hard_link(codex, &program).is_err() {
            std::fs::copy(codex, &program)?;
        }
        machine::open_to_all(place.path())?;
        machine::open_to_all(&inside)?;
        let mut words = around(scarcity, &inside, seed)?;
        let rest = ["exec-server", "--detach-ttl", "2s"].map(OsString::from);
        words.push(program.into());
        words.extend(rest);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).env("RUST_LOG", "off").env("TMPDIR", &inside);
        command.env("HOME", &inside);
        if scarcity == Scarcity::Clock {
            let library = build_clock(place.path())?;
            command.env("LD_PRELOAD", library).env("FAKE_CLOCK", inside.join("clock"));
        }
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = child.spawn().with_context(|| format!("{:?}", words[0]))?;
        let mut url = String::new();
        BufReader::new(child.stdout.take().context("no stdout")?).read_line(&mut url)?;
        let server = Server { child, url: url.trim().to_owned() };
        ensure!(!server.url.is_empty(), "a server that is short of {scarcity:?} does not start");
        let root = format!("/proc/{}/root", server.pid());
        let below = inside.strip_prefix("/").context("not absolute")?;
        Ok(Self { disk: Path::new(&root).join(below), inside, server, place, scarcity, seed })
    }

    /// Takes away what can be taken away from a server that runs.
    pub(crate) fn press(&self) -> anyhow::Result<()> {
        match self.scarcity {
            Scarcity::Room => {
                // Leaves a page or two, so that some writes begin and do not end.
                let bytes = vec![0; DISK - (8 << 10)];
                Ok(std::fs::write(self.disk.join("filling"), bytes)?)
            }
            Scarcity::Writability => self.remount("ro"),
            Scarcity::Processes => self.limit_processes(Some(PROCESSES)),
            _ => Ok(()),
        }
    }

    /// Gives it back.
    pub(crate) fn relieve(&self) -> anyhow::Result<()> {
        match self.scarcity {
            Scarcity::Room => Ok(std::fs::remove_file(self.disk.join("filling"))?),
            Scarcity::Writability => self.remount("rw"),
            Scarcity::Clock => self.set_clock(0),
            Scarcity::Processes => self.limit_processes(None),
            _ => Ok(()),
        }
    }

    /// Moves the wall clock by so many seconds from the true time.
    pub(crate) fn set_clock(&self, seconds: i64) -> anyhow::Result<()> {
        // Replaced at once: a reader sees the one or the other.
        let (new, file) = (self.place.path().join("clock.new"), self.inside.join("clock"));
        std::fs::write(&new, seconds.to_le_bytes())?;
        Ok(std::fs::rename(new, file)?)
    }

    /// Limits the processes that start others for the server; `None` lifts the limit again.
    fn limit_processes(&self, most: Option<usize>) -> anyhow::Result<()> {
        let server = self.server.pid();
        let (wardens, keepers) = (machine::wardens(server), machine::keepers(server));
        for pid in [server].into_iter().chain(wardens).chain(keepers) {
            // A keeper may be gone meanwhile.
            let Ok(limits) = std::fs::read_to_string(format!("/proc/{pid}/limits")) else {
                continue;
            };
            let line = limits.lines().find_map(|line| line.strip_prefix("Max processes"));
            let hard = line.and_then(|line| line.split_whitespace().nth(1)).context("no limit")?;
            let soft = most.map_or(hard.to_owned(), |most| most.to_string());
            let limit = format!("--nproc={soft}:");
            // As their own user: another one needs a capability that containers lack.
            let mut command = Command::new("setpriv");
            command.args(run_as(user(self.seed))).args(["prlimit", "--pid", &pid.to_string()]);
            let done = command.arg(limit).status()?;
            ensure!(done.success() || pid != server, "cannot limit the server");
        }
        Ok(())
    }

    fn remount(&self, mode: &str) -> anyhow::Result<()> {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.server.pid().to_string(), "--mount", "mount", "-o"]);
        let done = command.arg(format!("remount,{mode}")).arg(&self.inside).status()?;
        ensure!(done.success(), "cannot remount the disk of the server {mode}");
        Ok(())
    }

    /// Everything on its disk that is not ours.
    pub(crate) fn left_on_disk(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.disk).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.filter(|name| name != "clock" && name != "filling").collect()
    }
}

/// The user of a round. Limits of processes are counted by user, and rounds run at the same time.
fn user(seed: u64) -> u32 {
    200_000 + (seed % 50_000) as u32
}

/// The arguments of `setpriv` for this user.
fn run_as(user: u32) -> Vec<OsString> {
    let (user, group) = (format!("--reuid={user}"), format!("--regid={user}"));
    vec![user.into(), group.into(), "--clear-groups".into()]
}

/// The command that a server is started behind.
fn around(scarcity: Scarcity, disk: &Path, seed: u64) -> anyhow::Result<Vec<OsString>> {
    let words = |text: &str| text.split(' ').map(OsString::from).collect::<Vec<_>>();
    let mounted = |options: &str| {
        let disk = disk.display();
        let script = format!("mount -t tmpfs -o {options} tmpfs {disk} && exec \"$0\" \"$@\"");
        let mut command = words("unshare --mount --propagation private sh -c");
        command.push(script.into());
        command
    };
    Ok(match scarcity {
        Scarcity::Descriptors => words(&format!("prlimit --nofile={DESCRIPTORS} --")),
        Scarcity::Memory => words(&format!("prlimit --as={MEMORY} --")),
        Scarcity::Processes => {
            let user = user(seed);
            words("setpriv").into_iter().chain(run_as(user)).collect()
        }
        Scarcity::Room => mounted(&format!("size={DISK},mode=1777")),
        Scarcity::Writability => mounted("size=64m,mode=1777"),
        Scarcity::Clock => words("env"),
    })
}

/// Compiles the clock that a server of [`Scarcity::Clock`] is given: the true one, moved by what a file says.
///
/// A time namespace has an offset too, but one that is fixed before its first process, and none for the wall
/// clock, which only a privileged process can set, for the whole machine.
fn build_clock(place: &Path) -> anyhow::Result<PathBuf> {
    let (source, library) = (place.join("clock.c"), place.join("clock.so"));
    std::fs::write(&source, include_str!("clock.c"))?;
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source);
    ensure!(compiler.status()?.success(), "cannot compile the clock");
    Ok(library)
}
