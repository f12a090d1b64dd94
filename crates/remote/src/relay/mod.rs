//! Relay streams over real sockets: the driver of the relay core.
//!
//! [`serve_streams`] is the executor's side: one physical socket, a [`Connection`] for each harness.
//! [`EnvironmentConnector`] is the harness's side: each dial opens one [`Connection`].
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
pub use executor::{RegistrationTarget, RemoteError, serve_streams};
pub use harness::{EnvironmentConnector, EnvironmentError};
pub use socket::RendezvousError;
