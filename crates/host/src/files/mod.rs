//! File operations on this machine: every filesystem request as data.
//!
//! ```text
//! FileConnection (async, one a connection: order, handles, watches, searches)
//!    ├─ Executor on the blocking pool          no sandbox
//!    └─ HelperClient ═pipe═ serve_helper → Executor   a sandboxed process
//! ```
//!
//! Not here: JSON-RPC, policy (a request's sandbox only selects a [`Backend`]), and checks on a path
//! instead of the descriptor that is used.

mod cached_paths;
mod cancel;
mod change_memory;
mod config;
mod connection;
mod content;
mod copy;
mod directory;
mod error;
mod executor;
mod glob;
mod handles;
mod helper;
mod helpers;
mod ignored;
mod memory;
mod metadata;
mod missing;
mod names;
mod operation;
mod persistent;
mod preserve;
mod remove;
mod replace;
mod resolve;
mod scan;
mod search;
mod turns;
mod walk;
mod watch;
mod watches;

pub use cancel::Cancel;
pub use change_memory::{ChangeMemory, ChangeShare};
pub use config::FilesConfig;
pub use connection::{Answer, Backend, EventSink, FileConnection, RequestsEnd};
pub use error::FileError;
pub use executor::Executor;
pub use helper::{HelperClient, serve_helper};
pub use helpers::Helpers;
pub(crate) use helpers::{HELPER, run_helper};
pub use memory::{AnswerMemory, Reservation, SMALL_ANSWER};
pub use operation::{Event, FileNotification, FileRequest, Operation, Outcome};
pub use persistent::PersistentHandles;
pub use preserve::Preserved;
pub(crate) use turns::{Turn, Turns};
