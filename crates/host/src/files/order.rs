//! Who goes first among the filesystem requests of one connection, or of a session's.
//!
//! Invariant: a turn that was taken earlier and has not ended is waited for, if either of the two is
//! a change; scans and free requests are never waited for. A turn ends when it is dropped, also if
//! its request never ran, and ending early lets nobody past those that were before it.

use codex_exec_server_protocol::Order;
use parking_lot::Mutex;
use tokio_util::sync::{CancellationToken, DropGuard};

/// The line the requests of a connection, or of all connections of a session, stand in.
#[derive(Debug, Default)]
pub struct Turns(Mutex<Line>);

/// Ends of turns that may not have ended yet.
#[derive(Debug, Default)]
struct Line {
    changes: Vec<CancellationToken>,
    reads: Vec<CancellationToken>,
}

impl Turns {
    /// Takes a place in the line. Call it in the order the requests arrived.
    pub fn take(&self, order: Order) -> Turn {
        let mut line = self.0.lock();
        line.changes.retain(|end| !end.is_cancelled());
        line.reads.retain(|end| !end.is_cancelled());
        let end = CancellationToken::new();
        let before = match order {
            Order::Free => Vec::new(),
            Order::Scan => line.changes.clone(),
            Order::Read => {
                line.reads.push(end.clone());
                line.changes.clone()
            }
            Order::Change => {
                let before = line.changes.iter().chain(&line.reads).cloned().collect();
                line.changes.push(end.clone());
                before
            }
        };
        Turn { before, _end: end.drop_guard() }
    }
}

/// A place in the line. Dropping it lets the next go.
#[derive(Debug)]
pub struct Turn {
    before: Vec<CancellationToken>,
    _end: DropGuard,
}

impl Turn {
    /// Whether nobody has to be waited for.
    pub fn has_come(&self) -> bool {
        self.before.iter().all(CancellationToken::is_cancelled)
    }

    /// Waits for everyone before.
    pub async fn come(&mut self) {
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
    fn reads_share_and_changes_do_not() {
        let turns = Turns::default();
        let (first, second) = (turns.take(Order::Read), turns.take(Order::Read));
        assert!(first.has_come() && second.has_come());
        let change = turns.take(Order::Change);
        let (scan, read) = (turns.take(Order::Scan), turns.take(Order::Read));
        let free = turns.take(Order::Free);
        assert!(!change.has_come() && !scan.has_come() && !read.has_come() && free.has_come());
        drop(first);
        assert!(!change.has_come());
        drop(second);
        assert!(change.has_come() && !read.has_come());
        drop(change);
        assert!(scan.has_come() && read.has_come());
        let after_scan = turns.take(Order::Change);
        drop(read);
        assert!(after_scan.has_come(), "a scan holds nobody up");
        drop(scan);
    }

    #[test]
    fn a_turn_given_up_lets_nobody_past_those_before_it() {
        let turns = Turns::default();
        let first = turns.take(Order::Change);
        let given_up = turns.take(Order::Change);
        let last = turns.take(Order::Read);
        drop(given_up);
        assert!(!last.has_come());
        drop(first);
        assert!(last.has_come());
    }

    proptest! {
        /// Whatever ends in whatever order, no two that exclude each other are on at once.
        #[test]
        fn changes_are_alone(
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
                    (0..waiting.len()).filter(|&i| waiting[i].2.has_come()).collect();
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
