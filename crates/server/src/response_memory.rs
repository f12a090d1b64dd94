//! Memory for large responses.
//!
//! Invariant: a response of more than [`SMALL_ANSWER`] bytes exists only with a share of its
//! connection's memory and of the server's, and returns it once it is written to the socket. So clients
//! that do not read do not make the server grow, nor do they make others wait for long: see [`Budget`](codex_exec_rpc::Budget).

use std::pin::Pin;
use std::sync::Arc;

use codex_exec_host::files::{self, ChangeMemory, Reservation, SMALL_ANSWER};
use codex_exec_rpc::{Account, Transfer};
use tokio::sync::Semaphore;

use crate::server::Server;

/// A connection's memory for large responses. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct ResponseMemory {
    /// This connection's part.
    own: Arc<Semaphore>,
    limit: u32,
    /// The memory of all connections.
    server: Account,
    /// The memory of all connections for changes of watched files.
    changes: Arc<ChangeMemory>,
}

impl ResponseMemory {
    /// A part of the server's budget, for the connection whose progress `transfer` tracks.
    pub(crate) fn new(server: &Server, transfer: &Transfer) -> Self {
        let config = server.config();
        let limit = u32::try_from(config.response_memory_per_connection).unwrap_or(u32::MAX).max(1);
        let own = Arc::new(Semaphore::new(limit as usize));
        let changes = server.change_memory().clone();
        Self { own, limit, server: server.response_budget().account(transfer), changes }
    }

    /// Waits until there is memory for a response with this many bytes of content.
    pub(crate) async fn reserve(&self, bytes: u64) -> Reservation {
        let cost = cost(bytes);
        let own = self.own.clone().acquire_many_owned(self.permits(cost)).await;
        let own = own.expect("the semaphore is never closed");
        Reservation::new((self.server.take(cost).await, own))
    }

    /// Like [`reserve`](Self::reserve), but does not wait.
    pub(crate) fn try_reserve(&self, bytes: u64) -> Option<Reservation> {
        let cost = cost(bytes);
        let own = self.own.clone().try_acquire_many_owned(self.permits(cost)).ok()?;
        Some(Reservation::new((self.server.try_take(cost)?, own)))
    }

    /// A response that needs more than all of the connection's memory takes all of it.
    fn permits(&self, cost: u64) -> u32 {
        u32::try_from(cost).unwrap_or(u32::MAX).min(self.limit)
    }
}

impl files::AnswerMemory for ResponseMemory {
    fn reserve(&self, bytes: u64) -> Pin<Box<dyn Future<Output = Reservation> + Send + '_>> {
        Box::pin(self.reserve(bytes))
    }

    fn changes(&self) -> Option<Arc<ChangeMemory>> {
        Some(self.changes.clone())
    }
}

/// Whether a response with this many bytes of content needs no reservation.
pub(crate) fn is_small(bytes: usize) -> bool {
    bytes as u64 <= SMALL_ANSWER
}

/// Bytes of the content, plus those of the message that carries it in base64.
fn cost(bytes: u64) -> u64 {
    bytes.saturating_add(bytes.saturating_mul(4) / 3)
}
