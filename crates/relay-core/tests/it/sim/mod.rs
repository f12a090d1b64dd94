//! A deterministic simulator: one executor, some harnesses, and a relay between them that loses,
//! repeats, disorders, delays, drops sockets and, in one kind of schedule, lies.
//!
//! Everything follows from a seed: run one again with `SIM_SEED=n`, more or fewer with
//! `SIM_COUNT=n`, others than the usual with `SIM_FIRST=n`. The cryptography is real, in every schedule that is not of the clear mode; only
//! static identities are shared between schedules.
//!
//! What must hold in every schedule:
//! - a receiver's messages are a prefix of the sender's, each once and in order;
//! - if no side ended the stream, the prefix is the whole;
//! - where the faults are survivable (see [`Kind`]), no side ends the stream;
//! - a segment number never carries two different payloads, so no nonce is used twice;
//! - what a stream holds stays within its configured limits, at every step;
//! - in the end nothing moves but heartbeats.

mod relay;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

use world::World;

/// What kind of trouble a schedule has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A perfect wire with delays. Survivable.
    Calm,
    /// Sockets of either side drop and come back; otherwise in order. Survivable.
    Reconnect,
    /// Loss, repetition, disorder and reconnects, once both sides know that the other
    /// acknowledges. Survivable.
    Lossy,
    /// All of that from the first frame on. A stream may end, but not lie.
    Wild,
    /// The relay tampers with one harness's stream and injects rubbish. The others survive.
    Hostile,
    /// Acknowledgements never arrive, as with deployed peers, in one direction or both.
    /// Survivable until the socket drops, which it does in the end.
    NeverAck,
}

const KINDS: [Kind; 6] =
    [Kind::Calm, Kind::Reconnect, Kind::Lossy, Kind::Wild, Kind::Hostile, Kind::NeverAck];

/// Runs one schedule; gives a digest of everything that went over the wire.
pub(crate) fn run(seed: u64) -> u64 {
    let kind = KINDS[(seed % KINDS.len() as u64) as usize];
    let clear = seed / KINDS.len() as u64 % 5 < 2;
    World::new(seed, kind, clear).run()
}

fn from_env(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap())
}

#[test]
fn random_schedules_lose_nothing() {
    if let Some(seed) = from_env("SIM_SEED") {
        run(seed);
        return;
    }
    let count = from_env("SIM_COUNT").unwrap_or(100_000);
    let first = from_env("SIM_FIRST").unwrap_or(0);
    let next = AtomicU64::new(first);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let failed: Vec<u64> = std::thread::scope(|scope| {
        let work = || {
            let mut failed = Vec::new();
            loop {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed - first >= count || failed.len() >= 3 {
                    return failed;
                }
                if catch_unwind(AssertUnwindSafe(|| run(seed))).is_err() {
                    eprintln!("schedule failed: SIM_SEED={seed}");
                    failed.push(seed);
                }
            }
        };
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    assert!(failed.is_empty(), "run one of these again with SIM_SEED: {failed:?}");
}

#[test]
fn same_seed_gives_the_same_schedule() {
    for seed in 0..60 {
        assert_eq!(run(seed), run(seed), "seed {seed}");
    }
}
