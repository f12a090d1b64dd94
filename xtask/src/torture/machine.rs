//! Processes on this machine: the server's own, and those with a token.

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

/// How long any step may take.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// Every process with this token in its command line or environment, with its command line.
pub(crate) fn with_token(token: &str) -> Vec<(u32, String)> {
    let has = |bytes: &[u8]| bytes.windows(token.len()).any(|window| window == token.as_bytes());
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|&pid| pid != std::process::id() && state(pid).is_some_and(|state| state != b'Z'))
        .filter_map(|pid| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            let found = has(&line) || has(&environment);
            found.then(|| (pid, String::from_utf8_lossy(&line).replace('\0', " ")))
        })
        .collect()
}

fn state(pid: u32) -> Option<u8> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.as_bytes().first().copied()
}

pub(crate) fn children(pid: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = tasks.map(|task| task.path().join("children"));
    let lists = lists.filter_map(|list| std::fs::read_to_string(list).ok());
    lists
        .flat_map(|list| list.split(' ').filter_map(|n| n.parse().ok()).collect::<Vec<_>>())
        .collect()
}

fn is_called(pid: u32, name: &str) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == name)
}

pub(crate) fn wardens(server: u32) -> Vec<u32> {
    children(server).into_iter().filter(|&pid| is_called(pid, "exec-warden")).collect()
}

/// The keepers below a server, also those reparented to it.
pub(crate) fn keepers(server: u32) -> Vec<u32> {
    let below = wardens(server).into_iter().flat_map(children).chain(children(server));
    below.filter(|&pid| is_called(pid, "exec-keeper")).collect()
}

/// The processes that make up sandboxes below a server, without the programs in them.
pub(crate) fn sandboxes(server: u32) -> Vec<u32> {
    let mut found = Vec::new();
    let mut look = keepers(server);
    while let Some(pid) = look.pop() {
        let below = children(pid).into_iter().filter(|&child| is_sandbox(child));
        let before = found.len();
        found.extend(below);
        look.extend_from_slice(&found[before..]);
    }
    found
}

/// The most keepers that wait for a program.
const MAX_WAITING: usize = 2;

/// What an idle server has besides one warden, its spares, and keepers that wait for a program. Sandboxed
/// helpers may be left, at most this many.
pub(crate) fn unsettled(server: u32, helpers: usize) -> Option<String> {
    let (wardens, mut keepers) = (wardens(server), keepers(server));
    let waiting = keepers.iter().filter(|&&keeper| children(keeper).is_empty()).count();
    keepers.retain(|&keeper| has_program(keeper));
    let sandboxed = keepers.iter().all(|&keeper| children(keeper).into_iter().all(is_sandbox));
    let settled =
        wardens.len() == 1 && waiting <= MAX_WAITING && sandboxed && keepers.len() <= helpers;
    (!settled).then(|| format!("wardens {wardens:?}, keepers {keepers:?}, {waiting} that wait"))
}

fn is_sandbox(pid: u32) -> bool {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&line).contains("\0__linux-sandbox\0")
}

/// Whether a keeper has something below it that belongs to a client: it does not wait for a program, and has no
/// spare.
pub(crate) fn has_program(keeper: u32) -> bool {
    let children = children(keeper);
    !children.is_empty() && !children.into_iter().any(is_spare)
}

fn is_spare(pid: u32) -> bool {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&line).ends_with("__linux-sandbox\0wait\0")
}

pub(crate) fn kill(pid: u32) {
    signal(pid, Signal::KILL);
}

pub(crate) fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid.cast_signed()) {
        let _ = rustix::process::kill_process(pid, signal);
    }
}

/// What is mounted where, as a process sees it.
pub(crate) fn mounts(pid: u32) -> anyhow::Result<Vec<String>> {
    let table = std::fs::read_to_string(format!("/proc/{pid}/mountinfo"))?;
    // The root and the place of each, without options, which a remount changes and changes back.
    let places = table.lines().map(|line| line.split(' ').skip(3).take(2).collect::<Vec<_>>());
    Ok(places.map(|place| place.join(" ")).collect())
}

/// Lets every user read and write a directory.
pub(crate) fn open_to_all(directory: &std::path::Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(directory, std::fs::Permissions::from_mode(0o1777))
}

pub(crate) fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

/// Waits until `what` returns `None`; fails with its last text after the timeout.
pub(crate) async fn wait_until_none(what: impl Fn() -> Option<String>) -> anyhow::Result<()> {
    let until = Instant::now() + TIMEOUT;
    while let Some(complaint) = what() {
        if Instant::now() > until {
            anyhow::bail!(complaint);
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}
