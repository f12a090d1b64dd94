//! Limits of one program with everything that it starts, and what enforces each of them.
//!
//! | resource | with a delegated control group | without one |
//! | --- | --- | --- |
//! | wall, idle, output | the server | the server |
//! | CPU time | the group counts, the watchdog kills | the watchdog counts by `/proc` |
//! | memory, pids | the kernel | the watchdog |
//! | CPUs at once | the kernel | refused |
//! | open files | a resource limit | a resource limit |
//! | bytes on disks | the watchdog | the watchdog |
//!
//! The watchdog is a task that looks every [`limit_interval`](super::ProcessConfig::limit_interval). It and
//! the group live as long as the keeper: what a program leaves behind stays limited.
//!
//! Invariant: a limit that nothing here can enforce is an error, never ignored.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use codex_exec_server_protocol::resources::{
    AppliedLimit, AppliedLimits, EndedBy, LimitMechanism, Resource, ResourceLimits, Usage,
};
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, sleep_until};

use super::cgroup::{ProgramGroup, ProgramGroups};
use super::descendants;
use super::keeper::{KeeperHandle, OrderLimits, Used};
use super::launch::UntilGone;
use super::tree_usage::{self, TreeUsage, Wanted};
use crate::pool;

/// Longest time that a limit may name, so that no clock overflows.
const MAX_TIME: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Fewest open files of a program: its standard streams and what it takes to load it.
const MIN_OPEN_FILES: u64 = 16;

/// Fewest open files of a sandboxed program: its sandbox needs them while it is built.
const MIN_OPEN_FILES_CONFINED: u64 = 128;

/// A limit that cannot be enforced.
#[derive(Debug, thiserror::Error)]
pub enum LimitError {
    /// The value makes no sense.
    #[error("limits.{} is {value}; it must be at least {least}", resource.name())]
    TooSmall {
        /// The resource.
        resource: Resource,
        /// Requested amount.
        value: u64,
        /// Least amount.
        least: u64,
    },
    /// Nothing on this machine can enforce it.
    #[error("limits.{} cannot be enforced here: {needs}", resource.name())]
    Unsupported {
        /// The resource.
        resource: Resource,
        /// What it needs.
        needs: &'static str,
    },
}

/// Limits of a program that has not started.
#[derive(Debug)]
pub(super) struct Prepared {
    applied: AppliedLimits,
    group: Option<Arc<ProgramGroup>>,
    wanted: Wanted,
    interval: Duration,
    /// Dropped when no descendant is left.
    held: Option<UntilGone>,
}

/// What watches over a tree of processes; dropped with its keeper.
#[derive(Debug)]
pub(super) struct Guard {
    watchdog: Option<AbortHandle>,
    /// Removed when it is dropped.
    _group: Option<Arc<ProgramGroup>>,
    _held: Option<UntilGone>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(watchdog) = &self.watchdog {
            watchdog.abort();
        }
    }
}

/// The owner's part of the limits of a running program.
#[derive(Debug)]
pub(super) struct Limited {
    applied: AppliedLimits,
    group: Option<Arc<ProgramGroup>>,
    verdict: Option<oneshot::Receiver<EndedBy>>,
    peak: Arc<Mutex<TreeUsage>>,
    idle_until: Option<Instant>,
    /// How much it may still write.
    output_left: Option<u64>,
}

impl Prepared {
    /// Decides what enforces these limits. Blocks only if there is a control group to make.
    pub(super) fn new(
        limits: &ResourceLimits,
        groups: &ProgramGroups,
        interval: Duration,
        confined: bool,
        held: Option<UntilGone>,
    ) -> Result<Self, LimitError> {
        for (resource, value) in limits.iter() {
            let least = match resource {
                Resource::OpenFiles if confined => MIN_OPEN_FILES_CONFINED,
                Resource::OpenFiles => MIN_OPEN_FILES,
                // The processes of the sandbox itself count.
                Resource::Pids if confined => 4,
                Resource::Cpus => 10,
                _ => 1,
            };
            if value < least {
                return Err(LimitError::TooSmall { resource, value, least });
            }
        }
        let group = groups.create(limits).map(Arc::new);
        let has = |resource| group.as_ref().is_some_and(|group| group.enforces(resource));
        let mut wanted = Wanted::default();
        let mut applied = AppliedLimits::default();
        for (resource, value) in limits.iter() {
            let by = match resource {
                Resource::Wall | Resource::Idle | Resource::Output => LimitMechanism::Server,
                Resource::OpenFiles => LimitMechanism::Rlimit,
                Resource::Cpu | Resource::Memory | Resource::Pids | Resource::Cpus
                    if has(resource) =>
                {
                    LimitMechanism::Cgroup
                }
                Resource::Cpus => {
                    let needs = "it takes a delegated control group with the cpu controller";
                    return Err(LimitError::Unsupported { resource, needs });
                }
                Resource::Disk if !tree_usage::knows_disk() => {
                    let needs = "the kernel does not count what a process writes";
                    return Err(LimitError::Unsupported { resource, needs });
                }
                Resource::Cpu | Resource::Memory | Resource::Pids | Resource::Disk => {
                    match resource {
                        Resource::Cpu => wanted.cpu = true,
                        Resource::Memory => wanted.memory = Some(value),
                        Resource::Pids => wanted.pids = true,
                        _ => wanted.disk = true,
                    }
                    LimitMechanism::Watchdog
                }
            };
            applied.set(resource, Some(AppliedLimit { value, by }));
        }
        Ok(Self { applied, group, wanted, interval, held })
    }

    /// What the process has to do itself before it executes.
    pub(super) fn order(&self) -> OrderLimits {
        let open_files = self.applied.open_files.map_or(0, |limit| limit.value);
        OrderLimits {
            cgroup: self.group.as_ref().map(|group| group.entry()),
            open_files: u32::try_from(open_files).unwrap_or(u32::MAX),
        }
    }

    /// Starts to watch what is below this keeper. Call it inside a runtime.
    pub(super) fn start(self, keeper: Option<KeeperHandle>) -> (Guard, Limited) {
        let Self { applied, group, wanted, interval, held } = self;
        let value = |limit: Option<AppliedLimit>| limit.map(|limit| limit.value);
        let now = Instant::now();
        let wall_until = value(applied.wall_ms).map(|wall| now + milliseconds(wall));
        let idle_until = value(applied.idle_ms).map(|idle| now + milliseconds(idle));
        let polls = !wanted.is_nothing() || group.as_ref().is_some_and(|group| group.polled());
        let (decide, verdict) = oneshot::channel();
        let peak = Arc::<Mutex<TreeUsage>>::default();
        let watchdog = keeper.filter(|_| polls || wall_until.is_some()).map(|keeper| {
            let watchdog = Watchdog {
                keeper,
                applied,
                wanted,
                interval: polls.then_some(interval),
                wall_until,
                group: group.clone(),
                peak: peak.clone(),
            };
            tokio::spawn(watchdog.run(decide)).abort_handle()
        });
        let verdict = watchdog.is_some().then_some(verdict);
        let output_left = value(applied.output_bytes);
        let limited =
            Limited { applied, group: group.clone(), verdict, peak, idle_until, output_left };
        (Guard { watchdog, _group: group, _held: held }, limited)
    }
}

fn milliseconds(value: u64) -> Duration {
    Duration::from_millis(value).min(MAX_TIME)
}

/// Looks at a tree of processes until it exceeds a limit or has ended.
struct Watchdog {
    keeper: KeeperHandle,
    applied: AppliedLimits,
    wanted: Wanted,
    /// How often to look; `None` if there is nothing to see.
    interval: Option<Duration>,
    wall_until: Option<Instant>,
    group: Option<Arc<ProgramGroup>>,
    peak: Arc<Mutex<TreeUsage>>,
}

impl Watchdog {
    async fn run(self, decide: oneshot::Sender<EndedBy>) {
        let exceeded = tokio::select! {
            exceeded = self.watch() => exceeded,
            () = wait_until(self.wall_until) => Some(EndedBy::Wall),
        };
        let Some(exceeded) = exceeded else { return };
        // First the reason, then the kill: the owner must not see the exit without it.
        let _ = decide.send(exceeded);
        let (keeper, group) = (self.keeper, self.group);
        pool::spawn_detached(move || {
            descendants::kill_all(vec![keeper]);
            if let Some(group) = group {
                group.kill();
            }
        });
    }

    /// Returns the limit that is exceeded; `None` once nothing is left.
    async fn watch(&self) -> Option<EndedBy> {
        let Some(interval) = self.interval else { return pending().await };
        let mut pause = interval;
        loop {
            sleep(pause).await;
            let (keeper, wanted, group) = (self.keeper.clone(), self.wanted, self.group.clone());
            let began = Instant::now();
            let looked = pool::blocking(move || {
                let mut usage = match wanted.is_nothing() {
                    true => TreeUsage::default(),
                    false => tree_usage::of(keeper.pid, wanted),
                };
                usage.cpu_us =
                    usage.cpu_us.max(group.and_then(|group| group.cpu_us()).unwrap_or(0));
                // Until now its pid was its own.
                (!keeper.has_ended(0)).then_some(usage)
            })
            .await;
            let usage = match looked {
                Ok(Some(usage)) => usage,
                Ok(None) => return None,
                // No thread to look with: try again.
                Err(_) => continue,
            };
            self.record(usage);
            if let Some(exceeded) = self.exceeded(usage) {
                return Some(exceeded);
            }
            // A large tree takes long to look at; that must not become the machine's work.
            pause = interval.max(began.elapsed() * 10);
        }
    }

    fn record(&self, usage: TreeUsage) {
        let mut peak = self.peak.lock();
        peak.cpu_us = peak.cpu_us.max(usage.cpu_us);
        peak.memory_bytes = peak.memory_bytes.max(usage.memory_bytes);
        peak.pids = peak.pids.max(usage.pids);
        peak.read_bytes = peak.read_bytes.max(usage.read_bytes);
        peak.written_bytes = peak.written_bytes.max(usage.written_bytes);
    }

    fn exceeded(&self, usage: TreeUsage) -> Option<EndedBy> {
        let over =
            |limit: Option<AppliedLimit>, used| limit.is_some_and(|limit| used > limit.value);
        let limits = &self.applied;
        [
            (over(limits.memory_bytes, usage.memory_bytes), EndedBy::Oom),
            (over(limits.pids, usage.pids), EndedBy::Pids),
            (over(limits.cpu_ms, usage.cpu_us / 1000), EndedBy::Cpu),
            (over(limits.disk_bytes, usage.written_bytes), EndedBy::Disk),
        ]
        .into_iter()
        .find_map(|(over, by)| over.then_some(by))
    }
}

impl Limited {
    /// The limits in force; `None` if there are none.
    pub(super) fn applied(&self) -> Option<Box<AppliedLimits>> {
        (!self.applied.is_empty()).then(|| Box::new(self.applied))
    }

    /// Resolves once the watchdog has decided to kill the tree.
    pub(super) async fn verdict(&mut self) -> EndedBy {
        if let Some(verdict) = &mut self.verdict {
            let decided = verdict.await;
            self.verdict = None;
            if let Ok(by) = decided {
                return by;
            }
        }
        pending().await
    }

    /// The verdict, if there is one now.
    pub(super) fn verdict_now(&mut self) -> Option<EndedBy> {
        self.verdict.as_mut()?.try_recv().ok()
    }

    /// When it has been idle too long.
    pub(super) fn idle_until(&self) -> Option<Instant> {
        self.idle_until
    }

    /// It has written or received something.
    pub(super) fn is_active(&mut self) {
        if let Some(limit) = self.applied.idle_ms {
            self.idle_until = Some(Instant::now() + milliseconds(limit.value));
        }
    }

    /// Counts output; true if that is more than it may write.
    pub(super) fn exceeds_output(&mut self, bytes: usize) -> bool {
        let Some(left) = &mut self.output_left else { return false };
        match left.checked_sub(bytes as u64) {
            Some(rest) => *left = rest,
            None => self.output_left = None,
        }
        self.output_left.is_none()
    }

    /// The limit that the kernel enforced by killing it or by refusing it something.
    pub(super) fn ended_by_group(&self, signalled: bool, code: i32) -> Option<EndedBy> {
        let group = self.group.as_ref()?;
        if signalled && group.was_out_of_memory() {
            return Some(EndedBy::Oom);
        }
        (code != 0 && group.refused_a_fork()).then_some(EndedBy::Pids)
    }

    /// What the watchdog and the group have counted.
    fn add_to(&self, usage: &mut Usage) {
        let peak = *self.peak.lock();
        let group = self.group.as_ref();
        let cpu_us = group.and_then(|group| group.cpu_us()).unwrap_or(0).max(peak.cpu_us);
        let memory = group.and_then(|group| group.peak_memory()).unwrap_or(0);
        let memory = memory.max(peak.memory_bytes);
        usage.cpu_us = usage.cpu_us.max(cpu_us);
        if memory > 0 {
            usage.peak_memory_bytes = usage.peak_memory_bytes.max(Some(memory));
        }
        usage.read_bytes = usage.read_bytes.max(peak.read_bytes);
        usage.written_bytes = usage.written_bytes.max(peak.written_bytes);
    }
}

/// What a program used until its exit.
pub(super) fn usage(used: Option<Used>, limited: Option<&Limited>) -> Option<Usage> {
    let Used { cpu_us, memory_kib, blocks_in, blocks_out } = used?;
    let mut usage = Usage {
        cpu_us,
        peak_memory_bytes: (memory_kib > 0).then_some(memory_kib << 10),
        read_bytes: blocks_in << 9,
        written_bytes: blocks_out << 9,
    };
    if let Some(limited) = limited {
        limited.add_to(&mut usage);
    }
    Some(usage)
}

async fn wait_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => pending().await,
    }
}
