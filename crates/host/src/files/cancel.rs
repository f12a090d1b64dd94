//! A token that cancels a request.
//!
//! Invariant: a cancelled token stays cancelled; a hook runs exactly once, at the latest when it is
//! added to a cancelled token.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::FileError;

type Hook = Box<dyn FnOnce() + Send>;

/// Cancels a blocking operation. Clones share the same token.
#[derive(Clone, Default)]
pub struct Cancel(Arc<State>);

#[derive(Default)]
struct State {
    cancelled: AtomicBool,
    hooks: Mutex<Vec<Hook>>,
}

impl Cancel {
    /// A token that is not cancelled.
    pub fn new() -> Self {
        Self::default()
    }

    /// Asks the operation to stop.
    pub fn cancel(&self) {
        let hooks = {
            let mut hooks = self.0.hooks.lock();
            self.0.cancelled.store(true, Ordering::Release);
            std::mem::take(&mut *hooks)
        };
        hooks.into_iter().for_each(|hook| hook());
    }

    /// Whether the token is cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.0.cancelled.load(Ordering::Acquire)
    }

    /// Returns an error once the token is cancelled; for loops.
    pub fn check(&self) -> Result<(), FileError> {
        if self.is_cancelled() { Err(FileError::Cancelled) } else { Ok(()) }
    }

    /// Runs `hook` when the token is cancelled; for operations that wait.
    pub fn on_cancel(&self, hook: impl FnOnce() + Send + 'static) {
        {
            let mut hooks = self.0.hooks.lock();
            if !self.is_cancelled() {
                hooks.push(Box::new(hook));
                return;
            }
        }
        hook();
    }

    /// A guard that cancels the token when dropped.
    pub fn drop_guard(&self) -> CancelOnDrop {
        CancelOnDrop(self.clone())
    }
}

impl fmt::Debug for Cancel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cancel").field(&self.is_cancelled()).finish()
    }
}

/// Cancels a token when dropped; see [`Cancel::drop_guard`].
#[derive(Debug)]
pub struct CancelOnDrop(Cancel);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn hook_runs_once_before_or_after_cancellation() {
        let (token, ran) = (Cancel::new(), Arc::new(AtomicU32::new(0)));
        let hook = |ran: &Arc<AtomicU32>| {
            let ran = ran.clone();
            move || {
                ran.fetch_add(1, Ordering::Relaxed);
            }
        };
        token.on_cancel(hook(&ran));
        assert!(token.check().is_ok());
        drop(token.drop_guard());
        token.cancel();
        assert_eq!(ran.load(Ordering::Relaxed), 1);
        token.on_cancel(hook(&ran));
        assert_eq!(ran.load(Ordering::Relaxed), 2);
        assert_eq!(token.check(), Err(FileError::Cancelled));
    }
}
