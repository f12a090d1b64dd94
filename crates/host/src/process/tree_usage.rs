//! What everything below a keeper uses, added up from `/proc`.
//!
//! The CPU time and the I/O of a process go to its parent when that reaps it, so the sum over the keeper
//! and all that is below it includes the dead. (Except of processes whose parent ignores SIGCHLD: the
//! kernel forgets the CPU time of those. A control group counts them.)

use std::fs;

use rustix::process::Pid;

use super::descendants;

/// Which amounts to add up; each costs a file per process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Wanted {
    pub cpu: bool,
    /// Memory up to here need not be exact.
    pub memory: Option<u64>,
    pub pids: bool,
    pub disk: bool,
}

impl Wanted {
    pub(super) fn is_nothing(self) -> bool {
        self == Self::default()
    }
}

/// The sums. Those that were not wanted are 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct TreeUsage {
    pub cpu_us: u64,
    pub memory_bytes: u64,
    pub pids: u64,
    pub read_bytes: u64,
    pub written_bytes: u64,
}

/// Adds up what is below a keeper now. Blocks. The caller checks afterwards that the keeper has not ended.
pub(super) fn of(keeper: Pid, wanted: Wanted) -> TreeUsage {
    let below = descendants::descendants(keeper);
    let mut total = TreeUsage { pids: below.len() as u64, ..TreeUsage::default() };
    if wanted.cpu {
        // Of the keeper itself only what it has reaped.
        total.cpu_us += cpu(keeper).map_or(0, |[_, reaped]| reaped);
        total.cpu_us +=
            below.iter().filter_map(|&pid| cpu(pid)).map(|[own, reaped]| own + reaped).sum::<u64>();
    }
    if wanted.disk {
        for &pid in [keeper].iter().chain(&below) {
            let [read, written] = disk(pid).unwrap_or_default();
            total.read_bytes += read;
            total.written_bytes += written;
        }
    }
    if let Some(enough) = wanted.memory {
        total.memory_bytes = below.iter().filter_map(|&pid| resident(pid)).sum();
        // Forked processes share pages, which this counts for each of them. What they have in shares takes
        // the kernel longer to say.
        if total.memory_bytes > enough {
            total.memory_bytes =
                below.iter().filter_map(|&pid| proportional(pid).or_else(|| resident(pid))).sum();
        }
    }
    total
}

/// Whether this process may know what another process of its user writes to disks.
pub(super) fn knows_disk() -> bool {
    disk(rustix::process::getpid()).is_some()
}

fn read(pid: Pid, file: &str) -> Option<String> {
    let bytes = fs::read(format!("/proc/{}/{file}", pid.as_raw_nonzero())).ok()?;
    // Only names of programs may be anything but ASCII.
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// CPU time in microseconds: its own, and of the children that it has reaped.
fn cpu(pid: Pid) -> Option<[u64; 2]> {
    let ticks = parse_cpu(&read(pid, "stat")?)?;
    let second = rustix::param::clock_ticks_per_second().max(1);
    Some(ticks.map(|ticks| ticks.saturating_mul(1_000_000) / second))
}

fn parse_cpu(stat: &str) -> Option<[u64; 2]> {
    // The name, in parentheses, may contain anything.
    let (_, rest) = stat.rsplit_once(')')?;
    // After the name: state, parent, group, session, terminal, its group, flags, four kinds of faults.
    let mut fields = rest.split_ascii_whitespace().skip(11);
    let mut next = || fields.next()?.parse::<i64>().ok().map(|n| n.max(0).cast_unsigned());
    let (user, system, reaped_user, reaped_system) = (next()?, next()?, next()?, next()?);
    Some([user + system, reaped_user + reaped_system])
}

/// Memory that cannot be read back from a file, in bytes.
fn resident(pid: Pid) -> Option<u64> {
    let status = read(pid, "status")?;
    // Absent for a zombie.
    Some(kib(&status, "RssAnon:").unwrap_or(0) + kib(&status, "RssShmem:").unwrap_or(0))
}

/// The same, with shared pages divided by the number of processes that share them.
fn proportional(pid: Pid) -> Option<u64> {
    let rollup = read(pid, "smaps_rollup")?;
    Some(kib(&rollup, "Pss_Anon:")? + kib(&rollup, "Pss_Shmem:")?)
}

fn kib(text: &str, name: &str) -> Option<u64> {
    Some(number(text, name)?.saturating_mul(1024))
}

fn number(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name))?;
    value.split_ascii_whitespace().next()?.parse().ok()
}

/// Bytes read from and written to disks, by itself and the children that it has reaped.
fn disk(pid: Pid) -> Option<[u64; 2]> {
    let io = read(pid, "io")?;
    Some([number(&io, "read_bytes:")?, number(&io, "write_bytes:")?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_proc_are_parsed() {
        let stat = "7 (a) b (c)) T 5 6 9 34816 7 4194304 1 2 3 4 50 6 -7 8 20 0 1 0 4242 9 9";
        assert_eq!(parse_cpu(stat), Some([56, 8]));
        assert_eq!(parse_cpu("7 (x) S 1"), None);
        let status = "Name:\tx\nRssAnon:\t     12 kB\nRssShmem:\t 1 kB\n";
        assert_eq!(kib(status, "RssAnon:"), Some(12 << 10));
        assert_eq!(kib(status, "RssFile:"), None);
    }

    #[test]
    fn forked_processes_do_not_multiply_their_memory() {
        let script = "import os,signal\nm=bytearray(64<<20)\nfor _ in range(4):\n if os.fork()==0:\n  \
                      signal.pause()\nprint('x',flush=True)\nsignal.pause()";
        let mut python = std::process::Command::new("setsid")
            .args(["python3", "-c", script])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = [0];
        std::io::Read::read_exact(python.stdout.as_mut().unwrap(), &mut line).unwrap();
        let root = Pid::from_raw(python.id().cast_signed()).unwrap();
        let memory = |enough| of(root, Wanted { memory: Some(enough), ..Wanted::default() });
        let (rough, exact) = (memory(u64::MAX), memory(0));
        // They share the pages with their parent, which is not below itself.
        let with_parent = exact.memory_bytes + proportional(root).unwrap();
        let _ = rustix::process::kill_process_group(root, rustix::process::Signal::KILL);
        let _ = python.wait();
        assert_eq!(rough.pids, 4);
        assert!(rough.memory_bytes > 4 * (64 << 20), "{rough:?}");
        assert!((60 << 20..110 << 20).contains(&with_parent), "{with_parent}");
    }
}
