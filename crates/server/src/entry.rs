//! The gate of the listeners: how many connections there are, and how many of them have not initialized yet.
//!
//! ```text
//!            enter                 initialized
//!  accepted ───────▶ waiting ─────────────────────▶ admitted: stays until it closes
//!     │ refused         │ overdue, or evicted for a newcomer
//!     ▼                 ▼
//!   closed            closed
//! ```
//!
//! A peer that has not initialized costs a descriptor and some memory. If too many wait, the gate first waits
//! with the next one; then the oldest of the address that has the most gives way. So a client that initializes
//! within [`EntryConfig::waiting_grace`] gets in, however many silent peers there are.
//!
//! Invariant: an initialized connection is never evicted.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

/// Limits on connections of a server's listeners, all of them together.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct EntryConfig {
    /// Maximum connections. Default 16,384; more are closed at once.
    pub connections: usize,
    /// Maximum connections from one address: an IPv4 address, an IPv6 network of 64 bits, or a virtual machine.
    /// Default 1,024; more are closed at once. Loopback and Unix sockets have no limit of their own.
    pub connections_per_address: usize,
    /// Maximum connections that have not initialized yet. Default 512; then further ones wait, and after
    /// `waiting_grace` the oldest one is closed for them.
    pub waiting: usize,
    /// The same for one address. Default 64; more are closed at once, unless one of them is older than
    /// `waiting_grace`, which is closed instead.
    pub waiting_per_address: usize,
    /// How long a connection may wait before it may have to give way to another. Default 1 s.
    pub waiting_grace: Duration,
    /// How long a connection may take from its accept to the response to `initialize`. Default 30 s.
    pub initialize_timeout: Duration,
    /// Descriptors that are left for the work of admitted connections. Default 256, and at most a quarter of
    /// the limit on open files. If fewer are free, the server closes new connections at once.
    pub reserved_descriptors: usize,
}

impl Default for EntryConfig {
    fn default() -> Self {
        Self {
            connections: 16_384,
            connections_per_address: 1_024,
            waiting: 512,
            waiting_per_address: 64,
            waiting_grace: Duration::from_secs(1),
            initialize_timeout: Duration::from_secs(30),
            reserved_descriptors: 256,
        }
    }
}

/// Where a connection comes from, as far as limits distinguish.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Origin {
    /// This machine.
    Local,
    /// An IPv4 address, or the first 64 bits of an IPv6 address.
    Address(u128),
    /// A virtual machine, or its host.
    Machine(u32),
}

impl Origin {
    pub(crate) fn of(ip: IpAddr) -> Self {
        match ip.to_canonical() {
            ip if ip.is_loopback() => Self::Local,
            IpAddr::V4(ip) => Self::Address(u128::from(ip.to_bits())),
            IpAddr::V6(ip) => Self::Address(ip.to_bits() >> 64 << 64),
        }
    }
}

/// Why a connection is closed at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Full {
    #[error("the server has its maximum of connections")]
    Connections,
    #[error("this address has its maximum of connections")]
    Address,
    #[error("this address has its maximum of connections without initialize")]
    Waiting,
    #[error("the server has too few descriptors left")]
    Descriptors,
}

/// The gate of a server. Clones are handles to the same one.
#[derive(Debug, Clone)]
pub(crate) struct Gate(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    config: EntryConfig,
    book: Mutex<Book>,
    /// A connection has left, or no longer waits.
    changed: Notify,
}

/// The connections that are in.
#[derive(Debug, Default)]
struct Book {
    last: u64,
    open: BTreeMap<u64, Open>,
    /// Those that have not initialized, the oldest first.
    waiting: BTreeSet<u64>,
    by_origin: HashMap<Origin, Counts>,
    refused: u64,
    last_warning: Option<Instant>,
}

#[derive(Debug)]
struct Open {
    origin: Origin,
    since: Instant,
    evicted: CancellationToken,
}

#[derive(Debug, Default, Clone, Copy)]
struct Counts {
    open: usize,
    waiting: usize,
}

/// What becomes of an arriving connection.
enum Arrival {
    Enters(u64, CancellationToken),
    Refused(Full),
    /// Nothing changes before that time unless a connection leaves.
    Waits(Instant),
}

/// How often refusals are logged at most.
const WARNING_INTERVAL: Duration = Duration::from_secs(10);

impl Gate {
    pub(crate) fn new(config: EntryConfig) -> Self {
        Self(Arc::new(Shared { config, book: Mutex::default(), changed: Notify::new() }))
    }

    pub(crate) fn config(&self) -> &EntryConfig {
        &self.0.config
    }

    /// Lets a connection in, perhaps after a wait for another to leave.
    pub(crate) async fn enter(&self, origin: Origin) -> Result<Pass, Full> {
        loop {
            let changed = self.0.changed.notified();
            let now = Instant::now();
            let arrival = self.0.book.lock().arrive(origin, &self.0.config, now);
            match arrival {
                Arrival::Enters(id, evicted) => {
                    let deadline = now + self.0.config.initialize_timeout;
                    let initialized = CancellationToken::new();
                    return Ok(Pass { gate: self.clone(), id, evicted, initialized, deadline });
                }
                Arrival::Refused(full) => return Err(full),
                Arrival::Waits(until) => tokio::select! {
                    () = changed => {}
                    () = sleep_until(until) => {}
                },
            }
        }
    }

    /// Notes that a connection was closed at once; logs that now and then.
    pub(crate) fn refused(&self, reason: Full) {
        let mut book = self.0.book.lock();
        book.refused += 1;
        let now = Instant::now();
        if book.last_warning.is_none_or(|last| now - last >= WARNING_INTERVAL) {
            book.last_warning = Some(now);
            let count = std::mem::take(&mut book.refused);
            tracing::warn!(count, "refused connections: {reason}");
        }
    }

    fn change(&self, change: impl FnOnce(&mut Book)) {
        change(&mut self.0.book.lock());
        self.0.changed.notify_waiters();
    }
}

impl Book {
    fn arrive(&mut self, origin: Origin, config: &EntryConfig, now: Instant) -> Arrival {
        let counts = self.by_origin.get(&origin).copied().unwrap_or_default();
        let has_limit = origin != Origin::Local;
        let old = |since: Instant| now - since >= config.waiting_grace;
        // One that gives way makes room in every count.
        let mut victim = None;
        if has_limit && counts.waiting >= config.waiting_per_address {
            match self.oldest_of(origin) {
                Some((id, since)) if old(since) => victim = Some(id),
                _ => return Arrival::Refused(Full::Waiting),
            }
        }
        let leaving = usize::from(victim.is_some());
        if has_limit && counts.open - leaving >= config.connections_per_address {
            return Arrival::Refused(Full::Address);
        }
        if self.open.len() - leaving >= config.connections {
            return Arrival::Refused(Full::Connections);
        }
        if self.waiting.len() - leaving >= config.waiting {
            match self.most_waiting().and_then(|origin| self.oldest_of(origin)) {
                Some((id, since)) if old(since) => victim = Some(id),
                Some((_, since)) => return Arrival::Waits(since + config.waiting_grace),
                None => return Arrival::Refused(Full::Waiting),
            }
        }
        if let Some(id) = victim
            && let Some(evicted) = self.leave(id)
        {
            evicted.cancel();
        }
        self.last += 1;
        let evicted = CancellationToken::new();
        let open = Open { origin, since: now, evicted: evicted.clone() };
        self.open.insert(self.last, open);
        self.waiting.insert(self.last);
        let counts = self.by_origin.entry(origin).or_default();
        counts.open += 1;
        counts.waiting += 1;
        Arrival::Enters(self.last, evicted)
    }

    /// The connection of this origin that has waited longest.
    fn oldest_of(&self, origin: Origin) -> Option<(u64, Instant)> {
        let open = self.waiting.iter().filter_map(|id| Some((*id, self.open.get(id)?)));
        open.filter(|(_, open)| open.origin == origin).map(|(id, open)| (id, open.since)).next()
    }

    /// The origin with the most connections that wait.
    fn most_waiting(&self) -> Option<Origin> {
        let origins = self.by_origin.iter().filter(|(_, counts)| counts.waiting > 0);
        origins.max_by_key(|(origin, counts)| (counts.waiting, **origin)).map(|(origin, _)| *origin)
    }

    fn no_longer_waits(&mut self, id: u64) {
        if self.waiting.remove(&id)
            && let Some(open) = self.open.get(&id)
            && let Some(counts) = self.by_origin.get_mut(&open.origin)
        {
            counts.waiting -= 1;
        }
    }

    /// Removes a connection; `None` if it is not in.
    fn leave(&mut self, id: u64) -> Option<CancellationToken> {
        self.no_longer_waits(id);
        let open = self.open.remove(&id)?;
        if let Some(counts) = self.by_origin.get_mut(&open.origin) {
            counts.open -= 1;
            if counts.open == 0 {
                self.by_origin.remove(&open.origin);
            }
        }
        Some(open.evicted)
    }
}

/// The place of one connection. Dropping it frees the place.
#[derive(Debug)]
pub(crate) struct Pass {
    gate: Gate,
    id: u64,
    evicted: CancellationToken,
    initialized: CancellationToken,
    deadline: Instant,
}

impl Pass {
    /// Notes that the connection has initialized.
    pub(crate) fn initialized(&self) {
        if !self.initialized.is_cancelled() {
            self.initialized.cancel();
            self.gate.change(|book| book.no_longer_waits(self.id));
        }
    }

    /// Resolves if the connection has to close: it took too long to initialize, or gives way to another.
    pub(crate) async fn must_leave(&self) {
        tokio::select! {
            biased;
            () = self.evicted.cancelled() => {}
            () = self.initialized.cancelled() => std::future::pending().await,
            () = sleep_until(self.deadline) => {}
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.gate.change(|book| drop(book.leave(self.id)));
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn small() -> EntryConfig {
        EntryConfig {
            connections: 12,
            connections_per_address: 5,
            waiting: 6,
            waiting_per_address: 3,
            ..EntryConfig::default()
        }
    }

    /// Random arrivals, initializations, departures and times, with the promises checked after each.
    #[tokio::test(start_paused = true)]
    async fn random_crowds_are_held_to_the_limits() {
        for seed in 0..300 {
            let mut random = fastrand::Rng::with_seed(seed);
            let config = small();
            let gate = Gate::new(config);
            let origins =
                [Origin::Local, Origin::Address(1), Origin::Address(2), Origin::Machine(3)];
            // Each with its origin, when it came, and whether it has initialized.
            let mut inside: Vec<(Pass, Origin, Instant, bool)> = Vec::new();
            for step in 0..120 {
                match random.u32(..5) {
                    0 | 1 => {
                        let origin = origins[random.usize(..origins.len())];
                        let arrived = Instant::now();
                        if let Ok(pass) = gate.enter(origin).await {
                            inside.push((pass, origin, Instant::now(), false));
                        } else {
                            assert!(arrived.elapsed().is_zero(), "a refusal is immediate");
                        }
                    }
                    2 if !inside.is_empty() => {
                        let chosen = random.usize(..inside.len());
                        let (pass, _, _, initialized) = &mut inside[chosen];
                        // As a connection does: one that has to leave does not initialize.
                        if pass.must_leave().now_or_never().is_none() {
                            pass.initialized();
                            *initialized = true;
                        }
                    }
                    3 if !inside.is_empty() => {
                        drop(inside.swap_remove(random.usize(..inside.len())));
                    }
                    _ => tokio::time::advance(Duration::from_millis(random.u64(..700))).await,
                }
                inside.retain(|(pass, _, since, initialized)| {
                    let leaves = pass.must_leave().now_or_never().is_some();
                    assert!(!(leaves && *initialized), "seed {seed}, step {step}: evicted");
                    let early = since.elapsed() < config.waiting_grace;
                    assert!(!(leaves && early), "seed {seed}, step {step}: no time to initialize");
                    !leaves
                });
                let waiting = |origin: Option<Origin>| {
                    let of = |other: &Origin| origin.is_none_or(|origin| origin == *other);
                    inside
                        .iter()
                        .filter(|(_, other, _, initialized)| of(other) && !initialized)
                        .count()
                };
                assert!(inside.len() <= config.connections);
                assert!(waiting(None) <= config.waiting, "seed {seed}, step {step}");
                for origin in origins.into_iter().filter(|origin| *origin != Origin::Local) {
                    let open = inside.iter().filter(|(_, other, ..)| *other == origin).count();
                    assert!(open <= config.connections_per_address, "seed {seed}, step {step}");
                    assert!(waiting(Some(origin)) <= config.waiting_per_address);
                }
                let book = gate.0.book.lock();
                assert_eq!(book.open.len(), inside.len(), "seed {seed}, step {step}");
                assert_eq!(book.waiting.len(), waiting(None));
            }
            inside.clear();
            let book = gate.0.book.lock();
            assert!(book.open.is_empty() && book.waiting.is_empty() && book.by_origin.is_empty());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_that_floods_makes_room_before_others_do() {
        let gate = Gate::new(EntryConfig { waiting_per_address: 100, ..small() });
        let honest = gate.enter(Origin::Address(1)).await.unwrap();
        let mut flood = Vec::new();
        for _ in 0..5 {
            flood.push(gate.enter(Origin::Address(2)).await.unwrap());
        }
        let newcomer = gate.enter(Origin::Machine(1)).await.unwrap();
        assert!(flood[0].must_leave().now_or_never().is_some());
        for pass in flood[1..].iter().chain([&honest, &newcomer]) {
            assert!(pass.must_leave().now_or_never().is_none());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_does_not_initialize_in_time_leaves() {
        let gate = Gate::new(EntryConfig::default());
        let (silent, quick) = (gate.enter(Origin::Local).await, gate.enter(Origin::Local).await);
        let (silent, quick) = (silent.unwrap(), quick.unwrap());
        quick.initialized();
        let entered = Instant::now();
        silent.must_leave().await;
        assert_eq!(entered.elapsed(), EntryConfig::default().initialize_timeout);
        assert!(quick.must_leave().now_or_never().is_none());
    }

    #[test]
    fn addresses_are_distinguished_as_far_as_a_peer_cannot_choose() {
        let of = |ip: &str| Origin::of(ip.parse().unwrap());
        assert_eq!(of("127.0.0.9"), Origin::Local);
        assert_eq!(of("::1"), Origin::Local);
        assert_eq!(of("::ffff:127.0.0.1"), Origin::Local);
        assert_eq!(of("1.2.3.4"), of("::ffff:1.2.3.4"));
        assert_ne!(of("1.2.3.4"), of("1.2.3.5"));
        assert_eq!(of("2001:db8::1"), of("2001:db8::2:3:4:5"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
    }
}
