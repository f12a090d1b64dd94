//! A memory budget that connections share, for large messages in one direction.
//!
//! Invariants:
//! - All shares together never exceed the [`Budget`]. Requests for more than is left wait in arrival
//!   order, one request of each [`Account`] at a time.
//! - Part of the budget is a reserve for first shares: small shares of accounts that hold none. An account
//!   with a share gets no more from the reserve, so small requests do not wait for large holders.
//! - While other accounts wait, a holder must make progress: a connection that waits for its peer pays for
//!   that time with bytes that the peer moves, 1/[`TURNOVER_SECONDS`] of the connection's shares for each
//!   second. What it moves in advance counts for up to [`MAX_GRACE`]. Once it owes more than the grace, the
//!   connection is [revoked](Transfer::revoked). So is one that holds a share for [`MAX_HOLD`] of such
//!   time, whatever it waits for.
//! - The grace is [`MAX_GRACE`]. While revocations follow one another it halves each time, down to
//!   [`MIN_GRACE`], and all holders are judged at the same time. So `n` connections that move nothing, `s` of
//!   which can hold shares at once, delay another request by at most 2 × [`MAX_GRACE`] + `n` / `s` ×
//!   ([`MIN_GRACE`] + 2 × [`CHECK_INTERVAL`]), besides the time that they have paid for by filling the buffers
//!   of their sockets, and what the server itself needs for their messages. The grace doubles with every [`MAX_GRACE`] in which none is revoked, and is whole again when no
//!   request waits.
//! - A peer that moves its part in every [`MIN_GRACE`] is never revoked, whatever others do, before
//!   [`MAX_HOLD`], which is twice the time that it needs.
//!
//! Progress is counted in bytes that the kernel has taken from or given to the socket. The waiting requests
//! check the holders, every [`CHECK_INTERVAL`], so nothing runs while no request waits.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

/// The reserve for first shares is this fraction of the budget: 64 of 256 MiB.
const RESERVE_DIVISOR: usize = 4;

/// A first share takes at most this fraction of the budget: 10.6 of 256 MiB, enough for a response that
/// carries 4.5 MiB or a message of 5.3 MiB.
const FIRST_SHARE_DIVISOR: usize = 24;

/// Seconds in which a peer has to move everything that its connection holds.
const TURNOVER_SECONDS: u64 = 60;

/// How much of that a peer may owe, and how much it may have moved in advance.
const MAX_GRACE: Duration = Duration::from_secs(10);

/// The least grace, while revocations follow one another.
const MIN_GRACE: Duration = Duration::from_secs(1);

/// How long a share may be held while others wait.
const MAX_HOLD: Duration = Duration::from_secs(120);

/// How often holders are checked. A longer gap is this process's own delay and does not count against
/// them.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// Bytes of share per byte moved: the message itself, and the data it is made from or decoded to.
pub(crate) const COST: u64 = 2;

/// A memory budget that connections share. Clones are the same budget.
#[derive(Debug, Clone)]
pub struct Budget(Arc<Pool>);

#[derive(Debug)]
struct Pool {
    /// The largest share, in bytes.
    max_share: u64,
    /// The largest share that may come from the reserve, in bytes.
    max_first_share: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Bytes available to every account.
    left: u64,
    /// Bytes available for first shares.
    reserve: u64,
    /// Waiting requests in arrival order, at most one per account.
    waiting: VecDeque<Waiter>,
    /// Accounts that hold shares.
    holders: HashMap<u64, Holder>,
    last_account: u64,
    last_share: u64,
    checked_at: Option<Instant>,
    /// How much a holder may owe.
    grace: Duration,
    /// Time in which requests have waited since the last revocation.
    calm: Duration,
}

#[derive(Debug)]
struct Waiter {
    client: Arc<Client>,
    bytes: u64,
    granted: oneshot::Sender<Share>,
}

/// An account that holds shares.
#[derive(Debug)]
struct Holder {
    client: Arc<Client>,
    /// Sum of its shares, in bytes.
    held: u64,
    /// Its shares, and for how long other accounts have waited since each was taken.
    shares: HashMap<u64, Duration>,
    /// Time that the peer has not paid for.
    owed: Duration,
    /// Time that the peer has paid for in advance.
    paid: Duration,
    checked_at: Instant,
    /// Bytes received and sent at the last check.
    received: u64,
    sent: u64,
}

#[derive(Debug, Clone, Copy)]
enum Source {
    Common,
    Reserve,
}

/// A part of a budget that one connection holds; dropping it returns it.
#[derive(Debug)]
pub struct Share {
    budget: Budget,
    account: u64,
    id: u64,
    bytes: u64,
    source: Source,
}

/// One connection's account with a budget. Clones are the same account.
#[derive(Debug, Clone)]
pub struct Account {
    budget: Budget,
    client: Arc<Client>,
    /// Held by the one request that waits or takes.
    turn: Arc<tokio::sync::Mutex<()>>,
}

#[derive(Debug)]
struct Client {
    id: u64,
    transfer: Transfer,
    /// The share of the message that is being received, in bytes; 0 if there is none.
    receiving: AtomicU64,
}

/// Counts what a connection's socket moves, and tells when its shares are revoked. Clones are the same.
#[derive(Debug, Clone, Default)]
pub struct Transfer(Arc<TransferState>);

#[derive(Debug, Default)]
struct TransferState {
    received: AtomicU64,
    sent: AtomicU64,
    /// Whether a write waits for the peer.
    send_blocked: AtomicBool,
    revoked: CancellationToken,
}

impl Transfer {
    /// Resolves when the connection has lost its shares; it then has to close.
    pub async fn revoked(&self) {
        self.0.revoked.cancelled().await;
    }

    pub(crate) fn token(&self) -> &CancellationToken {
        &self.0.revoked
    }

    pub(crate) fn received(&self, bytes: usize) {
        self.0.received.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn sent(&self, bytes: usize) {
        self.0.sent.fetch_add(bytes as u64, Ordering::Relaxed);
        self.send_blocked(false);
    }

    pub(crate) fn send_blocked(&self, blocked: bool) {
        self.0.send_blocked.store(blocked, Ordering::Relaxed);
    }
}

impl Budget {
    /// Makes a budget of `bytes`, a quarter of it reserved for first shares. A request for more than the
    /// other three quarters gets all of those.
    pub fn new(bytes: usize) -> Self {
        let bytes = bytes.max(1);
        let reserve = (bytes / RESERVE_DIVISOR) as u64;
        let left = bytes as u64 - reserve;
        let state = State {
            left,
            reserve,
            waiting: VecDeque::new(),
            holders: HashMap::new(),
            last_account: 0,
            last_share: 0,
            checked_at: None,
            grace: MAX_GRACE,
            calm: Duration::ZERO,
        };
        let max_first_share = (bytes / FIRST_SHARE_DIVISOR) as u64;
        Self(Arc::new(Pool { max_share: left, max_first_share, state: Mutex::new(state) }))
    }

    /// Bytes that no share holds.
    pub fn left(&self) -> usize {
        let state = self.lock();
        (state.left + state.reserve) as usize
    }

    /// Opens an account for the connection that `transfer` counts.
    pub fn account(&self, transfer: &Transfer) -> Account {
        let mut state = self.lock();
        state.last_account += 1;
        let client = Client {
            id: state.last_account,
            transfer: transfer.clone(),
            receiving: AtomicU64::new(0),
        };
        Account { budget: self.clone(), client: Arc::new(client), turn: Arc::default() }
    }

    /// Grants waiting requests as far as the budget allows. The caller drops the returned shares, whose
    /// requests have gone, after it has released `state`.
    #[must_use]
    fn grant(&self, state: &mut State) -> Vec<Share> {
        let mut unwanted = Vec::new();
        while let Some((at, source)) = state.next(self.0.max_first_share) {
            let Some(waiter) = state.waiting.remove(at) else { break };
            let share = self.share(state, &waiter.client, waiter.bytes, source);
            unwanted.extend(waiter.granted.send(share).err());
        }
        if state.waiting.is_empty() {
            state.grace = MAX_GRACE;
            state.calm = Duration::ZERO;
        }
        unwanted
    }

    fn share(&self, state: &mut State, client: &Arc<Client>, bytes: u64, source: Source) -> Share {
        *state.available(source) -= bytes;
        state.last_share += 1;
        let (account, id) = (client.id, state.last_share);
        let holder = state.holders.entry(account).or_insert_with(|| Holder::new(client));
        // What was paid for a small share is not worth as much time of a large one.
        let parts = u128::from(holder.held) * holder.paid.as_millis()
            / u128::from((holder.held + bytes).max(1));
        holder.paid = Duration::from_millis(u64::try_from(parts).unwrap_or(u64::MAX));
        holder.held += bytes;
        holder.shares.insert(id, Duration::ZERO);
        Share { budget: self.clone(), account, id, bytes, source }
    }

    /// Revokes connections that hold shares without progress while other accounts wait.
    fn revoke_stalled(&self) {
        let now = Instant::now();
        let mut state = self.lock();
        if state.checked_at.is_some_and(|at| now - at < CHECK_INTERVAL) {
            return;
        }
        let passed = state.checked_at.map_or(Duration::ZERO, |at| since_check(now, at));
        state.calm += passed;
        state.checked_at = Some(now);
        let State { waiting, holders, grace, calm, .. } = &mut *state;
        let mut any_revoked = false;
        for (id, holder) in holders {
            let others_wait = waiting.iter().any(|waiter| waiter.client.id != *id);
            if holder.is_stalled(now, others_wait, *grace) && !holder.is_revoked() {
                tracing::debug!(
                    account = id,
                    held = holder.held,
                    "revoked a connection's shares because other connections wait"
                );
                holder.client.transfer.0.revoked.cancel();
                any_revoked = true;
            }
        }
        if any_revoked {
            (*grace, *calm) = ((*grace / 2).max(MIN_GRACE), Duration::ZERO);
        } else if *calm >= MAX_GRACE {
            (*grace, *calm) = ((*grace * 2).min(MAX_GRACE), Duration::ZERO);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock()
    }
}

impl State {
    /// The next request that can be granted, and from where.
    fn next(&self, max_first_share: u64) -> Option<(usize, Source)> {
        let next_in_line = self.waiting.front().filter(|waiter| waiter.bytes <= self.left);
        if next_in_line.is_some() {
            return Some((0, Source::Common));
        }
        let at =
            self.waiting.iter().position(|waiter| self.is_first_share(waiter, max_first_share))?;
        (self.waiting[at].bytes <= self.reserve).then_some((at, Source::Reserve))
    }

    /// Whether the request may be granted from the reserve.
    fn is_first_share(&self, waiter: &Waiter, max_first_share: u64) -> bool {
        waiter.bytes <= max_first_share && !self.holders.contains_key(&waiter.client.id)
    }

    fn available(&mut self, source: Source) -> &mut u64 {
        match source {
            Source::Common => &mut self.left,
            Source::Reserve => &mut self.reserve,
        }
    }
}

impl Holder {
    fn new(client: &Arc<Client>) -> Self {
        let moved = &client.transfer.0;
        Self {
            held: 0,
            shares: HashMap::new(),
            owed: Duration::ZERO,
            paid: Duration::ZERO,
            checked_at: Instant::now(),
            received: moved.received.load(Ordering::Relaxed),
            sent: moved.sent.load(Ordering::Relaxed),
            client: client.clone(),
        }
    }

    fn is_revoked(&self) -> bool {
        self.client.transfer.0.revoked.is_cancelled()
    }

    /// Updates the counts since the last check. Returns whether the connection has to be revoked.
    fn is_stalled(&mut self, now: Instant, others_wait: bool, grace: Duration) -> bool {
        let passed = since_check(now, self.checked_at);
        self.checked_at = now;
        let moved = &self.client.transfer.0;
        let received = moved.received.load(Ordering::Relaxed);
        let sent = moved.sent.load(Ordering::Relaxed);
        let (moved, held, waits_for_peer) = match self.client.receiving.load(Ordering::Relaxed) {
            0 => (sent - self.sent, self.held, moved.send_blocked.load(Ordering::Relaxed)),
            message => (received - self.received, message, true),
        };
        (self.received, self.sent) = (received, sent);
        let covered = u128::from(moved) * u128::from(COST * TURNOVER_SECONDS * 1000)
            / u128::from(held.max(1));
        let covered = Duration::from_millis(u64::try_from(covered).unwrap_or(u64::MAX));
        self.paid = self.paid.saturating_add(covered);
        if others_wait {
            self.shares.values_mut().for_each(|waited| *waited += passed);
            self.owed += if waits_for_peer { passed } else { Duration::ZERO };
        }
        let settled = self.paid.min(self.owed);
        self.owed -= settled;
        self.paid = (self.paid - settled).min(MAX_GRACE);
        self.owed > grace || self.shares.values().any(|waited| *waited > MAX_HOLD)
    }
}

/// Time since the last check, as far as it counts.
fn since_check(now: Instant, checked_at: Instant) -> Duration {
    now.saturating_duration_since(checked_at).min(2 * CHECK_INTERVAL)
}

impl Account {
    /// Waits for a share of `bytes`, after this account's earlier requests. Cancel safe.
    pub async fn take(&self, bytes: u64) -> Share {
        let _turn = self.turn.lock().await;
        let mut wait = match self.request(bytes) {
            Ok(share) => return share,
            Err(wait) => wait,
        };
        loop {
            tokio::select! {
                biased;
                share = &mut wait.granted => return share.expect("waiters are removed here alone"),
                () = sleep(CHECK_INTERVAL) => self.budget.revoke_stalled(),
            }
        }
    }

    /// Takes a share of `bytes` if that needs no wait.
    pub fn try_take(&self, bytes: u64) -> Option<Share> {
        let _turn = self.turn.try_lock().ok()?;
        self.request(bytes).ok()
    }

    /// Counts of what its connection moves.
    pub fn transfer(&self) -> &Transfer {
        &self.client.transfer
    }

    /// Sets the share of the message that is being received; 0 if there is none.
    pub(crate) fn receiving(&self, bytes: u64) {
        self.client.receiving.store(bytes, Ordering::Relaxed);
    }

    fn request(&self, bytes: u64) -> Result<Share, WaitGuard<'_>> {
        let bytes = bytes.min(self.budget.0.max_share);
        let (sender, mut granted) = oneshot::channel();
        let client = self.client.clone();
        let unwanted = {
            let mut state = self.budget.lock();
            state.waiting.push_back(Waiter { client, bytes, granted: sender });
            self.budget.grant(&mut state)
        };
        drop(unwanted);
        match granted.try_recv() {
            Ok(share) => Ok(share),
            Err(_) => Err(WaitGuard { account: self, granted }),
        }
    }
}

/// Removes the account's waiting request on drop.
struct WaitGuard<'a> {
    account: &'a Account,
    granted: oneshot::Receiver<Share>,
}

impl Drop for WaitGuard<'_> {
    fn drop(&mut self) {
        let Account { budget, client, .. } = self.account;
        let unwanted = {
            let mut state = budget.lock();
            state.waiting.retain(|waiter| waiter.client.id != client.id);
            budget.grant(&mut state)
        };
        drop(unwanted);
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let unwanted = {
            let mut state = self.budget.lock();
            *state.available(self.source) += self.bytes;
            if let Some(holder) = state.holders.get_mut(&self.account) {
                holder.held -= self.bytes;
                holder.shares.remove(&self.id);
                if holder.shares.is_empty() {
                    state.holders.remove(&self.account);
                }
            }
            self.budget.grant(&mut state)
        };
        drop(unwanted);
    }
}
