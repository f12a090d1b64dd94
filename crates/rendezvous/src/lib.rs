//! The self-hosted registry and rendezvous.
//!
//! An environment (a machine with an exec-server) registers here over http, is handed a url, and
//! keeps a websocket to it. A harness asks for the environment, is handed a url of its own and
//! the environment's public key, and opens streams over its websocket. Frames pass between the
//! two by the stream ids in them; what is in the frames is encrypted end to end and stays so.
//!
//! ```text
//!  http ──▶ http.rs ──▶ registry.rs ──▶ store.rs            tokens, registrations, used tickets
//!                          │   ticket.rs                    signed urls and authorizations
//!  websocket ──▶ socket.rs ──▶ hub.rs ──▶ environment.rs ──▶ table.rs      who owns which stream
//!                                │
//!                                └─▶ cluster.rs ──▶ wire.rs ──▶ NATS       the other nodes
//! ```
//!
//! On its own it keeps its state in a directory (`file_store.rs`); with NATS any number of nodes
//! share theirs (`nats_store.rs`) and pass frames to each other. Nothing else differs. Keep logs of
//! the `async_nats` crate at warnings: at trace level it tells whole messages, keys included.
//!
//! # What is absent
//!
//! No key that could decrypt anything: of the frames this crate calls `peek` only, which reads an
//! address and a kind. No process, no file but those of the data directory. Without `--nats`, no
//! connection that nobody opened to it.

#![forbid(unsafe_code)]

mod api_error;
mod bridge;
mod cluster;
mod config;
mod environment;
mod file_store;
mod fingerprint;
mod http;
mod hub;
mod journal;
mod metrics;
mod nats;
mod nats_store;
mod rate;
mod registry;
mod secret;
mod service;
mod socket;
mod store;
mod table;
mod ticket;
mod tls;
mod token;
mod wire;

pub use config::{Clock, Config, PublicUrl, PublicUrlError};
pub use file_store::TokenFile;
pub use nats::{NatsOptions, NatsServers, NatsServersError};
pub use secret::{Secret, SigningKey};
pub use service::{ServeError, ServeOptions, Service, StoreOptions, serve};
pub use store::{FileStore, NatsStore, NatsTokens, Registration, Store, StoreError, TokenStore};
pub use tls::TlsError;
pub use token::{Right, Scope, TokenRecord, UnknownRight};
