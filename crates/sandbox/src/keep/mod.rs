//! Plans that are used again: an agent sends the same policy with every request.
//!
//! Invariant: a plan that is handed out again is the one that planning anew would give, for its policy
//! and surroundings are equal and every answer of the file system it was made from still holds (see
//! [`witness`]). What it would be built on is checked once more when it is built.

mod watch;
mod witness;

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
use parking_lot::Mutex;
use watch::Watches;
use witness::{Recording, Witness};

/// As many plans as are kept.
const PLANS: usize = 16;

/// As many watches of nothing as wait to be used again.
const IDLE: usize = 4;

/// As many answers as are remembered for all of them.
const ANSWERS: usize = 128 * 1024;

/// As many policies as are known to have been asked for once. Only what is asked for again is kept: to
/// watch costs more than to look.
const SEEN: usize = 256;

/// The plans that are kept.
#[derive(Debug, Default)]
pub(crate) struct Keep {
    hasher: RandomState,
    plans: Mutex<Plans>,
}

#[derive(Debug, Default)]
struct Plans {
    /// The one that was used last at the end.
    kept: Vec<Arc<Kept>>,
    seen: VecDeque<u64>,
    /// Watches of nothing, to be used again.
    idle: Vec<Watches>,
}

#[derive(Debug)]
struct Kept {
    context: SandboxContext,
    around: Around,
    planned: Planned,
    size: usize,
    /// Gone once it did not hold.
    witness: Mutex<Option<Witness>>,
}

/// [`Surroundings`], as far as they matter.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Around {
    cwd: Option<PathBuf>,
    tmpdir: Option<OsString>,
}

impl Around {
    fn new(context: &SandboxContext, around: Surroundings<'_>) -> Self {
        // A policy with a directory of its own is not relative to the process's.
        let cwd = around.cwd.filter(|_| context.cwd.is_none());
        Self { cwd: cwd.map(Into::into), tmpdir: around.tmpdir.map(Into::into) }
    }
}

impl Keep {
    /// The plan for a policy: a kept one that holds, or else what `plan` makes of the facts.
    pub(crate) fn plan<E>(
        &self,
        context: &SandboxContext,
        around: Surroundings<'_>,
        plan: impl FnOnce(&dyn Facts) -> Result<Option<Planned>, E>,
    ) -> Result<Option<Planned>, E> {
        let around = Around::new(context, around);
        if let Some(kept) = self.find(context, &around) {
            if kept.holds() {
                return Ok(Some(kept.planned.clone()));
            }
            let plans = &mut *self.plans.lock();
            plans.kept.retain(|other| !Arc::ptr_eq(other, &kept));
            plans.reuse(&kept);
        }
        let hash = self.hasher.hash_one((context, &around));
        let Some(watches) = self.watches_if_seen(hash) else { return plan(&HostFacts::default()) };
        let recording = Recording::new(watches);
        let planned = plan(&recording);
        match (recording.finish(), &planned) {
            (Ok(witness), Ok(Some(planned))) => self.insert(Kept {
                context: context.clone(),
                around,
                planned: planned.clone(),
                size: witness.size(),
                witness: Mutex::new(Some(witness)),
            }),
            (Ok(witness), _) => self.plans.lock().put_by(witness.into_watches()),
            (Err(watches), _) => self.plans.lock().put_by(watches),
        }
        planned
    }

    /// Keeps nothing any more.
    pub(crate) fn forget(&self) {
        let plans = &mut *self.plans.lock();
        for kept in std::mem::take(&mut plans.kept) {
            plans.reuse(&kept);
        }
    }

    fn find(&self, context: &SandboxContext, around: &Around) -> Option<Arc<Kept>> {
        let kept = &mut self.plans.lock().kept;
        let found = kept.iter().rposition(|kept| kept.is_for(context, around));
        found.map(|index| {
            kept[index..].rotate_left(1);
            kept[kept.len() - 1].clone()
        })
    }

    /// Something to watch with, for a policy that was asked for before.
    fn watches_if_seen(&self, hash: u64) -> Option<Watches> {
        let plans = &mut *self.plans.lock();
        if let Some(index) = plans.seen.iter().position(|seen| *seen == hash) {
            plans.seen.remove(index);
            return plans.idle.pop().or_else(|| Watches::new().ok());
        }
        if plans.seen.len() == SEEN {
            plans.seen.pop_front();
        }
        plans.seen.push_back(hash);
        None
    }

    fn insert(&self, new: Kept) {
        let plans = &mut *self.plans.lock();
        // Another request may have kept the same meanwhile; either will do.
        let mut gone: Vec<Arc<Kept>> =
            plans.kept.extract_if(.., |kept| kept.is_for(&new.context, &new.around)).collect();
        let mut size = new.size + plans.kept.iter().map(|kept| kept.size).sum::<usize>();
        while !plans.kept.is_empty() && (plans.kept.len() >= PLANS || size > ANSWERS) {
            let oldest = plans.kept.remove(0);
            size -= oldest.size;
            gone.push(oldest);
        }
        plans.kept.push(Arc::new(new));
        for kept in gone {
            plans.reuse(&kept);
        }
    }
}

impl Plans {
    /// Takes back what a plan that is no longer kept was watched with.
    fn reuse(&mut self, kept: &Kept) {
        // Whoever has locked it is asking whether it holds, and lets go of it after that.
        if let Some(mut witness) = kept.witness.try_lock()
            && let Some(witness) = witness.take()
        {
            self.put_by(witness.into_watches());
        }
    }

    /// The kernel lets a user have few of them, so no more than are soon used again.
    fn put_by(&mut self, watches: Watches) {
        if self.idle.len() < IDLE {
            self.idle.push(watches);
        }
    }
}

impl Kept {
    fn is_for(&self, context: &SandboxContext, around: &Around) -> bool {
        self.around == *around && self.context == *context
    }

    fn holds(&self) -> bool {
        self.witness.lock().as_mut().is_some_and(Witness::holds)
    }
}
