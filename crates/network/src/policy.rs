//! The rules in force, and the connections that passed them.
//!
//! Invariant: a connection that is registered here is allowed by the rules in force. Rules are replaced
//! and connections registered under one lock, so none passes by rules that are gone.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::decide::Destination;
use crate::host::Host;
use crate::rules::{Listing, Rules};

/// The rules of one proxy, which may be replaced while it runs.
pub(crate) struct Policy {
    state: Mutex<State>,
}

struct State {
    rules: Arc<Rules>,
    passed: HashMap<u64, Passed>,
    next_id: u64,
}

/// What a connection was allowed for.
pub(crate) struct Passed {
    pub host: Host,
    pub port: u16,
    /// The controller allowed it, which the lists alone did not.
    pub overridden: bool,
    /// The addresses that it leads to were not judged.
    pub anywhere: bool,
    /// Ends the connection.
    pub cut: CancellationToken,
}

impl Passed {
    fn is_allowed_by(&self, rules: &Rules) -> bool {
        let listed = match rules.look_up(&self.host, self.port) {
            Listing::Denied | Listing::Local => false,
            // The controller's answer was about this connection, and holds as long as it lasts.
            Listing::Undecided => self.overridden,
            Listing::Allowed => true,
        };
        // Where such a connection leads is not known, so it may be local.
        listed && (rules.allow_local_binding || !self.anywhere)
    }
}

/// A connection's place in the register, which it leaves when this is dropped.
pub(crate) struct Pass {
    policy: Arc<Policy>,
    id: u64,
}

impl Policy {
    pub(crate) fn new(rules: Rules) -> Arc<Self> {
        let state = State { rules: Arc::new(rules), passed: HashMap::new(), next_id: 0 };
        Arc::new(Self { state: Mutex::new(state) })
    }

    pub(crate) fn rules(&self) -> Arc<Rules> {
        self.state.lock().rules.clone()
    }

    /// Registers a connection that passed. `None`: the rules in force do not allow it any more.
    pub(crate) fn admit(self: &Arc<Self>, passed: Passed) -> Option<Pass> {
        let mut state = self.state.lock();
        if !passed.is_allowed_by(&state.rules) {
            return None;
        }
        let id = state.next_id;
        state.next_id += 1;
        state.passed.insert(id, passed);
        Some(Pass { policy: self.clone(), id })
    }

    /// Replaces the rules, and ends the connections that the new ones do not allow.
    pub(crate) fn replace(&self, rules: Rules) {
        let mut state = self.state.lock();
        state.rules = Arc::new(rules);
        let rules = state.rules.clone();
        let cut: Vec<_> = state
            .passed
            .values()
            .filter(|passed| !passed.is_allowed_by(&rules))
            .map(|passed| passed.cut.clone())
            .collect();
        // A task that is woken may leave the register, which takes the lock.
        drop(state);
        for token in cut {
            token.cancel();
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        let passed = self.policy.state.lock().passed.remove(&self.id);
        // Dropped after the lock is released.
        drop(passed);
    }
}

/// Whether a destination was left to a later lookup.
pub(crate) fn is_anywhere(destination: &Destination) -> bool {
    *destination == Destination::Anywhere
}
