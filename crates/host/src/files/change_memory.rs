//! Memory for changes that watches have seen and not yet reported.
//!
//! Invariant: the shares of a [`ChangeMemory`] never exceed its limit, nor the limit of the one it is part
//! of. Nothing waits for a share: a watch that gets none drops the change and reports an overflow.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Memory that the watches of a connection, or of a server, share.
#[derive(Debug)]
pub struct ChangeMemory {
    left: AtomicUsize,
    part_of: Option<Arc<ChangeMemory>>,
}

/// A part of a [`ChangeMemory`]. Dropping it returns the part.
#[derive(Debug)]
pub struct ChangeShare {
    memory: Arc<ChangeMemory>,
    bytes: usize,
}

impl ChangeMemory {
    /// Memory of `bytes`, each share of which is also one of `part_of`.
    pub fn new(bytes: usize, part_of: Option<Arc<Self>>) -> Arc<Self> {
        Arc::new(Self { left: AtomicUsize::new(bytes), part_of })
    }

    /// Takes a share, if there is one.
    pub fn take(self: &Arc<Self>, bytes: usize) -> Option<ChangeShare> {
        self.subtract(bytes).then(|| ChangeShare { memory: self.clone(), bytes })
    }

    fn subtract(&self, bytes: usize) -> bool {
        let less = |left: usize| left.checked_sub(bytes);
        if self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_err() {
            return false;
        }
        if self.part_of.as_ref().is_none_or(|all| all.subtract(bytes)) {
            return true;
        }
        self.left.fetch_add(bytes, Ordering::Relaxed);
        false
    }

    fn add(&self, bytes: usize) {
        self.left.fetch_add(bytes, Ordering::Relaxed);
        if let Some(all) = &self.part_of {
            all.add(bytes);
        }
    }
}

impl ChangeShare {
    /// An empty share.
    pub(super) fn none(memory: &Arc<ChangeMemory>) -> Self {
        Self { memory: memory.clone(), bytes: 0 }
    }

    /// Takes more, if there is enough.
    pub(super) fn grow(&mut self, bytes: usize) -> bool {
        let grown = self.memory.subtract(bytes);
        self.bytes += if grown { bytes } else { 0 };
        grown
    }
}

impl Drop for ChangeShare {
    fn drop(&mut self) {
        self.memory.add(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever is taken and returned: neither limit is passed, and everything comes back.
        #[test]
        fn shares_stay_within_both_limits(
            steps in prop::collection::vec((0usize..3, 0usize..60, any::<bool>()), 1..80),
        ) {
            let all = ChangeMemory::new(150, None);
            let parts: Vec<_> = (0..3).map(|_| ChangeMemory::new(100, Some(all.clone()))).collect();
            let mut held: Vec<(usize, ChangeShare)> = Vec::new();
            for (at, bytes, take) in steps {
                let of_part: usize = held.iter().filter(|(part, _)| *part == at).map(|(_, s)| s.bytes).sum();
                let of_all: usize = held.iter().map(|(_, share)| share.bytes).sum();
                if take {
                    let share = parts[at].take(bytes);
                    let fits = of_part + bytes <= 100 && of_all + bytes <= 150;
                    prop_assert_eq!(share.is_some(), fits);
                    held.extend(share.map(|share| (at, share)));
                } else if let Some(last) = held.iter().rposition(|(part, _)| *part == at) {
                    held.remove(last);
                }
            }
            drop(held);
            prop_assert_eq!(all.left.load(Ordering::Relaxed), 150);
            prop_assert!(parts.iter().all(|part| part.left.load(Ordering::Relaxed) == 100));
        }
    }
}
