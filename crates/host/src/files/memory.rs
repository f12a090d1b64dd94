//! Memory for what the answers of file requests carry.
//!
//! Invariant: an answer of more than [`SMALL_ANSWER`] bytes is made only once its memory is reserved,
//! and whoever sends the answer holds the reservation until the answer has left.

use std::any::Any;
use std::fmt;
use std::pin::Pin;

use super::{FilesConfig, Operation};

/// Bytes that an answer may carry without a reservation.
pub const SMALL_ANSWER: u64 = 256 << 10;

/// Gives out the memory for large answers.
pub trait AnswerMemory: Send + Sync + 'static {
    /// Waits until there is memory for an answer that carries so many bytes.
    fn reserve(&self, bytes: u64) -> Pin<Box<dyn Future<Output = Reservation> + Send + '_>>;
}

/// Memory for one answer. Dropping it gives the memory back.
pub struct Reservation {
    _held: Box<dyn Any + Send + Sync>,
}

impl Reservation {
    /// A reservation that lasts as long as `held`.
    pub fn new(held: impl Send + Sync + 'static) -> Self {
        Self { _held: Box::new(held) }
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reservation")
    }
}

impl Operation {
    /// The most bytes that its answer carries, as far as the request tells: the size of a file is
    /// known only once it is open.
    pub(super) fn answer_bytes(&self, config: &FilesConfig) -> u64 {
        match self {
            Self::ReadBlock(params) => params.len.min(config.max_block_bytes as u64),
            Self::ReadDirectory(_) | Self::Walk(_) | Self::Glob(_) => {
                config.max_scan_answer_bytes as u64
            }
            // With an id, the matches are notifications.
            Self::Search(params) if params.search_id.is_none() => {
                config.max_scan_answer_bytes as u64
            }
            _ => 0,
        }
    }
}
