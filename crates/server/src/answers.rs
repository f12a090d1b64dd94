//! Memory for large answers.
//!
//! Invariant: an answer of more than [`SMALL_ANSWER`] bytes is made, or kept while its client does not
//! read, only with a share of its connection's memory and of the server's; the share goes back when the
//! answer is written to the socket. So clients that do not read make each other wait, for large answers
//! alone, and do not make the server grow.

use std::pin::Pin;
use std::sync::Arc;

use codex_exec_host::files::{self, Reservation, SMALL_ANSWER};
use codex_exec_rpc::Budget;

use crate::config::ServerConfig;

/// A connection's memory for large answers. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct AnswerMemory(Arc<Budgets>);

#[derive(Debug)]
struct Budgets {
    connection: Budget,
    server: Budget,
}

impl AnswerMemory {
    /// A part of what the whole server has.
    pub(crate) fn new(config: &ServerConfig, server: &Budget) -> Self {
        let connection = Budget::new(config.answer_memory_per_connection);
        Self(Arc::new(Budgets { connection, server: server.clone() }))
    }

    /// Waits until an answer that carries so many bytes can be held.
    pub(crate) async fn reserve(&self, bytes: u64) -> Reservation {
        let cost = cost(bytes);
        let connection = self.0.connection.take(cost).await;
        Reservation::new((self.0.server.take(cost).await, connection))
    }

    /// The same, if nothing has to be waited for.
    pub(crate) fn try_reserve(&self, bytes: u64) -> Option<Reservation> {
        let cost = cost(bytes);
        let connection = self.0.connection.try_take(cost)?;
        Some(Reservation::new((self.0.server.try_take(cost)?, connection)))
    }
}

impl files::AnswerMemory for AnswerMemory {
    fn reserve(&self, bytes: u64) -> Pin<Box<dyn Future<Output = Reservation> + Send + '_>> {
        Box::pin(self.reserve(bytes))
    }
}

/// Whether an answer of so many bytes needs no memory of its own.
pub(crate) fn is_small(bytes: usize) -> bool {
    bytes as u64 <= SMALL_ANSWER
}

/// The bytes, and the message that has them in base64.
fn cost(bytes: u64) -> u64 {
    bytes.saturating_add(bytes.saturating_mul(4) / 3)
}
