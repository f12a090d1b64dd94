//! A cache of plans: an agent sends the same policy with every request.
//!
//! Invariant: a cached plan equals a newly made one: its policy and surroundings are equal, and every
//! fact about the file system that it depends on still holds (see [`observations`]). The files that a
//! sandbox is built on are verified again when it is built.

mod observations;
mod watches;

use std::collections::VecDeque;
use std::ffi::OsString;
use std::hash::{BuildHasher, RandomState};
use std::path::PathBuf;
use std::sync::Arc;

use codex_exec_server_protocol::SandboxContext;

use crate::decide::facts::Facts;
use crate::decide::policy::Surroundings;
use crate::host::HostFacts;
use crate::launch::Planned;
use observations::{Observations, RecordingFacts};
use parking_lot::Mutex;
use watches::Watches;

/// Maximum cached plans.
const MAX_PLANS: usize = 16;

/// Maximum inotify instances that are kept for reuse.
const MAX_IDLE_WATCHES: usize = 4;

/// Maximum observations of all cached plans together.
const MAX_OBSERVATIONS: usize = 128 * 1024;

/// Maximum policies remembered as seen once. Only a repeated policy is cached: setting watches costs
/// more than looking files up.
const MAX_SEEN: usize = 256;

/// The plan cache of a server.
#[derive(Debug, Default)]
pub(crate) struct PlanCache {
    hasher: RandomState,
    plans: Mutex<Plans>,
}

#[derive(Debug, Default)]
struct Plans {
    /// Least recently used first.
    cached: Vec<Arc<CachedPlan>>,
    seen: VecDeque<u64>,
    /// Inotify instances without watches, for reuse.
    idle: Vec<Watches>,
}

#[derive(Debug)]
struct CachedPlan {
    context: SandboxContext,
    around: RelevantSurroundings,
    planned: Planned,
    size: usize,
    /// `None` once a check has failed.
    observations: Mutex<Option<Observations>>,
}

/// The parts of [`Surroundings`] that matter.
#[derive(Debug, PartialEq, Eq, Hash)]
struct RelevantSurroundings {
    cwd: Option<PathBuf>,
    tmpdir: Option<OsString>,
}

impl RelevantSurroundings {
    fn new(context: &SandboxContext, around: Surroundings<'_>) -> Self {
        // A policy with its own `cwd` does not depend on the process's.
        let cwd = around.cwd.filter(|_| context.cwd.is_none());
        Self { cwd: cwd.map(Into::into), tmpdir: around.tmpdir.map(Into::into) }
    }
}

impl PlanCache {
    /// Returns a current cached plan, or calls `plan` and caches its result.
    pub(crate) fn plan<E>(
        &self,
        context: &SandboxContext,
        around: Surroundings<'_>,
        plan: impl FnOnce(&dyn Facts) -> Result<Option<Planned>, E>,
    ) -> Result<Option<Planned>, E> {
        let around = RelevantSurroundings::new(context, around);
        if let Some(cached) = self.find(context, &around) {
            if cached.is_current() {
                return Ok(Some(cached.planned.clone()));
            }
            let plans = &mut *self.plans.lock();
            plans.cached.retain(|other| !Arc::ptr_eq(other, &cached));
            plans.recycle_watches(&cached);
        }
        let hash = self.hasher.hash_one((context, &around));
        let Some(watches) = self.watches_if_seen_before(hash) else {
            return plan(&HostFacts::default());
        };
        let facts = RecordingFacts::new(watches);
        let planned = plan(&facts);
        match (facts.finish(), &planned) {
            (Ok(observations), Ok(Some(planned))) => self.insert(CachedPlan {
                context: context.clone(),
                around,
                planned: planned.clone(),
                size: observations.size(),
                observations: Mutex::new(Some(observations)),
            }),
            (Ok(observations), _) => self.plans.lock().recycle(observations.into_watches()),
            (Err(watches), _) => self.plans.lock().recycle(watches),
        }
        planned
    }

    /// Removes all plans.
    pub(crate) fn clear(&self) {
        let plans = &mut *self.plans.lock();
        for cached in std::mem::take(&mut plans.cached) {
            plans.recycle_watches(&cached);
        }
    }

    fn find(
        &self,
        context: &SandboxContext,
        around: &RelevantSurroundings,
    ) -> Option<Arc<CachedPlan>> {
        let cached = &mut self.plans.lock().cached;
        let found = cached.iter().rposition(|cached| cached.matches(context, around));
        found.map(|index| {
            cached[index..].rotate_left(1);
            cached[cached.len() - 1].clone()
        })
    }

    /// Watches for recording, if this policy was seen before.
    fn watches_if_seen_before(&self, hash: u64) -> Option<Watches> {
        let plans = &mut *self.plans.lock();
        if let Some(index) = plans.seen.iter().position(|seen| *seen == hash) {
            plans.seen.remove(index);
            return plans.idle.pop().or_else(|| Watches::new().ok());
        }
        if plans.seen.len() == MAX_SEEN {
            plans.seen.pop_front();
        }
        plans.seen.push_back(hash);
        None
    }

    fn insert(&self, new: CachedPlan) {
        let plans = &mut *self.plans.lock();
        // Another request may have cached the same plan meanwhile; keep the new one.
        let mut evicted: Vec<Arc<CachedPlan>> = plans
            .cached
            .extract_if(.., |cached| cached.matches(&new.context, &new.around))
            .collect();
        let mut size = new.size + plans.cached.iter().map(|cached| cached.size).sum::<usize>();
        while !plans.cached.is_empty()
            && (plans.cached.len() >= MAX_PLANS || size > MAX_OBSERVATIONS)
        {
            let oldest = plans.cached.remove(0);
            size -= oldest.size;
            evicted.push(oldest);
        }
        plans.cached.push(Arc::new(new));
        for cached in evicted {
            plans.recycle_watches(&cached);
        }
    }
}

impl Plans {
    /// Recycles the watches of a plan that was removed from the cache.
    fn recycle_watches(&mut self, cached: &CachedPlan) {
        // If it is locked, another thread is checking it, and drops it afterwards.
        if let Some(mut observations) = cached.observations.try_lock()
            && let Some(observations) = observations.take()
        {
            self.recycle(observations.into_watches());
        }
    }

    /// Keeps a few for reuse; the kernel limits how many a user may have.
    fn recycle(&mut self, watches: Watches) {
        if self.idle.len() < MAX_IDLE_WATCHES {
            self.idle.push(watches);
        }
    }
}

impl CachedPlan {
    fn matches(&self, context: &SandboxContext, around: &RelevantSurroundings) -> bool {
        self.around == *around && self.context == *context
    }

    fn is_current(&self) -> bool {
        self.observations.lock().as_mut().is_some_and(Observations::is_current)
    }
}
