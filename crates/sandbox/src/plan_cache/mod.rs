//! Plans that are used again: an agent sends the same policy with every request.
//!
//! Invariant: a plan that is handed out again is the one that planning anew would give, for its policy
//! and surroundings are equal and every answer of the file system it was made from still holds (see
//! [`observations`]). What it would be built on is checked once more when it is built.

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

/// As many plans as are kept.
const MAX_PLANS: usize = 16;

/// As many watches of nothing as wait to be used again.
const MAX_IDLE_WATCHES: usize = 4;

/// As many answers as are remembered for all of them.
const MAX_OBSERVATIONS: usize = 128 * 1024;

/// As many policies as are known to have been asked for once. Only what is asked for again is kept: to
/// watch costs more than to look.
const MAX_SEEN: usize = 256;

/// The plans that are kept.
#[derive(Debug, Default)]
pub(crate) struct PlanCache {
    hasher: RandomState,
    plans: Mutex<Plans>,
}

#[derive(Debug, Default)]
struct Plans {
    /// The one that was used last at the end.
    cached: Vec<Arc<CachedPlan>>,
    seen: VecDeque<u64>,
    /// Watches of nothing, to be used again.
    idle: Vec<Watches>,
}

#[derive(Debug)]
struct CachedPlan {
    context: SandboxContext,
    around: RelevantSurroundings,
    planned: Planned,
    size: usize,
    /// Gone once it did not hold.
    observations: Mutex<Option<Observations>>,
}

/// [`Surroundings`], as far as they matter.
#[derive(Debug, PartialEq, Eq, Hash)]
struct RelevantSurroundings {
    cwd: Option<PathBuf>,
    tmpdir: Option<OsString>,
}

impl RelevantSurroundings {
    fn new(context: &SandboxContext, around: Surroundings<'_>) -> Self {
        // A policy with a directory of its own is not relative to the process's.
        let cwd = around.cwd.filter(|_| context.cwd.is_none());
        Self { cwd: cwd.map(Into::into), tmpdir: around.tmpdir.map(Into::into) }
    }
}

impl PlanCache {
    /// The plan for a policy: a kept one that holds, or else what `plan` makes of the facts.
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

    /// Keeps nothing any more.
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

    /// Something to watch with, for a policy that was asked for before.
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
        // Another request may have kept the same meanwhile; either will do.
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
    /// Takes back what a plan that is no longer kept was watched with.
    fn recycle_watches(&mut self, cached: &CachedPlan) {
        // Whoever has locked it is asking whether it holds, and lets go of it after that.
        if let Some(mut observations) = cached.observations.try_lock()
            && let Some(observations) = observations.take()
        {
            self.recycle(observations.into_watches());
        }
    }

    /// The kernel lets a user have few of them, so no more than are soon used again.
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
