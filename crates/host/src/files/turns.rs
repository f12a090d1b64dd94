//! The order of the file requests of a connection or a session.
//!
//! Invariant: a request waits for every earlier one that has not ended, if one of the two is a change;
//! no request waits for scans and free requests. A turn ends when it is dropped, even if its request
//! never ran; a turn that ends early does not let later ones pass those before it.

use codex_exec_server_protocol::Order;
use parking_lot::Mutex;
use tokio_util::sync::{CancellationToken, DropGuard};

/// The queue of file requests of a connection, or of all connections of a session.
#[derive(Debug, Default)]
pub(crate) struct Turns(Mutex<Queue>);

/// The ends of turns that may still be pending.
#[derive(Debug, Default)]
struct Queue {
    changes: Vec<CancellationToken>,
    reads: Vec<CancellationToken>,
}

impl Turns {
    /// Enters the queue. Call it in the order the requests arrived.
    pub(crate) fn take(&self, order: Order) -> Turn {
        let mut queue = self.0.lock();
        queue.changes.retain(|end| !end.is_cancelled());
        queue.reads.retain(|end| !end.is_cancelled());
        let end = CancellationToken::new();
        let before = match order {
            Order::Free => Vec::new(),
            Order::Scan => queue.changes.clone(),
            Order::Read => {
                queue.reads.push(end.clone());
                queue.changes.clone()
            }
            Order::Change => {
                let before = queue.changes.iter().chain(&queue.reads).cloned().collect();
                queue.changes.push(end.clone());
                before
            }
        };
        Turn { before, _end: end.drop_guard() }
    }
}

/// A place in the queue. Dropping it releases the next.
#[derive(Debug)]
pub(crate) struct Turn {
    before: Vec<CancellationToken>,
    _end: DropGuard,
}

impl Turn {
    /// Whether all turns before it have ended.
    pub(crate) fn ready(&self) -> bool {
        self.before.iter().all(CancellationToken::is_cancelled)
    }

    /// Waits for all turns before it.
    pub(crate) async fn wait(&mut self) {
        for end in self.before.drain(..) {
            end.cancelled().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reads_run_together_and_changes_alone() {
        let turns = Turns::default();
        let (first, second) = (turns.take(Order::Read), turns.take(Order::Read));
        assert!(first.ready() && second.ready());
        let change = turns.take(Order::Change);
        let (scan, read) = (turns.take(Order::Scan), turns.take(Order::Read));
        let free = turns.take(Order::Free);
        assert!(!change.ready() && !scan.ready() && !read.ready() && free.ready());
        drop(first);
        assert!(!change.ready());
        drop(second);
        assert!(change.ready() && !read.ready());
        drop(change);
        assert!(scan.ready() && read.ready());
        let after_scan = turns.take(Order::Change);
        drop(read);
        assert!(after_scan.ready(), "a scan holds nobody up");
        drop(scan);
    }

    #[test]
    fn dropped_turn_does_not_let_later_ones_overtake() {
        let turns = Turns::default();
        let first = turns.take(Order::Change);
        let given_up = turns.take(Order::Change);
        let last = turns.take(Order::Read);
        drop(given_up);
        assert!(!last.ready());
        drop(first);
        assert!(last.ready());
    }

    proptest! {
        /// In whatever order turns end, no two that exclude each other run at once.
        #[test]
        fn random_turns_exclude_each_other_as_specified(
            orders in proptest::collection::vec(0..4u8, 1..24),
            ends in proptest::collection::vec(any::<proptest::sample::Index>(), 24),
        ) {
            let turns = Turns::default();
            let mut waiting: Vec<(usize, Order, Turn)> = orders
                .iter()
                .map(|order| [Order::Read, Order::Change, Order::Scan, Order::Free][*order as usize])
                .enumerate()
                .map(|(at, order)| (at, order, turns.take(order)))
                .collect();
            for pick in ends {
                let on: Vec<usize> =
                    (0..waiting.len()).filter(|&i| waiting[i].2.ready()).collect();
                prop_assert!(waiting.is_empty() || !on.is_empty(), "someone can always go");
                for &i in &on {
                    for earlier in &waiting[..i] {
                        let excluded = match (earlier.1, waiting[i].1) {
                            (Order::Change, order) => order != Order::Free,
                            (Order::Read, order) => order == Order::Change,
                            _ => false,
                        };
                        prop_assert!(!excluded, "{:?} overtook {:?}", waiting[i], earlier);
                    }
                }
                if !on.is_empty() {
                    waiting.remove(on[pick.index(on.len())]);
                }
            }
        }
    }
}
