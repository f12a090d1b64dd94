//! Relay streams over real sockets: the relay core, driven.
//!
//! [`serve_streams`] is an executor's side: one physical socket, a [`Connection`] for each harness.
//! [`EnvironmentLink`] is a harness's: each dial gives one [`Connection`].
//!
//! [`Connection`]: codex_exec_rpc::Connection

mod config;
mod endpoint;
mod executor;
mod harness;
mod inbox;
mod pump;
mod socket;

pub(crate) use config::Backoff;
pub use config::RelayConfig;
pub use executor::{Enrolment, RemoteError, serve_streams};
pub use harness::{EnvironmentError, EnvironmentLink};
pub use socket::RendezvousError;
