//! Memory for the responses of file requests.
//!
//! Invariant: a response of more than [`SMALL_ANSWER`] bytes is built only after its memory has been
//! reserved, and the sender holds the reservation until the response has been sent.

use std::any::Any;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use super::{ChangeMemory, FilesConfig, Operation};

/// Bytes that a response may carry without a reservation.
pub const SMALL_ANSWER: u64 = 256 << 10;

/// Grants memory for large responses.
pub trait AnswerMemory: Send + Sync + 'static {
    /// Waits until there is memory for a response that carries this many bytes.
    fn reserve(&self, bytes: u64) -> Pin<Box<dyn Future<Output = Reservation> + Send + '_>>;

    /// Memory of all connections for changes that watches have not yet reported. Without it, the limit of
    /// the connection is the only one.
    fn changes(&self) -> Option<Arc<ChangeMemory>> {
        None
    }
}

/// Memory for one response. Dropping it frees the memory.
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
    /// Maximum bytes of its response, as far as the request determines it: the size of a file or of a
    /// directory is known only once it is read. Every operation is listed, so that a new one has to be.
    pub(super) fn answer_bytes(&self, config: &FilesConfig) -> u64 {
        match self {
            Self::ReadBlock(params) => params.len.min(config.max_block_bytes as u64),
            Self::Walk(_) | Self::Glob(_) => config.max_scan_answer_bytes as u64,
            // With an id, the matches are notifications.
            Self::Search(params) if params.search_id.is_none() => {
                config.max_scan_answer_bytes as u64
            }
            // Of these two `Executor::execute_within` finds out.
            Self::ReadFile(_) | Self::ReadDirectory(_) => 0,
            // A path, an id or nothing: less than a message with the longest path.
            Self::Search(_)
            | Self::Open(_)
            | Self::WriteBlock(_)
            | Self::Close(_)
            | Self::WriteFile(_)
            | Self::CreateDirectory(_)
            | Self::GetMetadata(_)
            | Self::Canonicalize(_)
            | Self::Remove(_)
            | Self::Copy(_)
            | Self::WatchMissing(_)
            | Self::Rename(_)
            | Self::Symlink(_)
            | Self::SetMode(_)
            | Self::CancelSearch(_)
            | Self::Watch(_)
            | Self::Unwatch(_) => 0,
        }
    }
}
