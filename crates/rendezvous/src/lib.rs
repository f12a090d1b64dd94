//! The self-hosted registry and rendezvous.
//!
//! An environment (a machine with an exec-server) registers over HTTP, gets a URL, and keeps a websocket
//! to it. A harness requests the environment, gets another URL and the environment's public key, and opens
//! streams over its websocket. The service routes frames between the two by their stream ids; the content
//! of the frames is encrypted end to end.
//!
//! ```text
//!  http ──▶ http.rs ──▶ registry.rs ──▶ store.rs            tokens, registrations, used tickets
//!                          │   ticket.rs                    signed urls and authorizations
//!  websocket ──▶ socket.rs ──▶ hub.rs ──▶ environment.rs ──▶ table.rs      who owns which stream
//!                                │
//!                                └─▶ cluster.rs ──▶ wire.rs ──▶ NATS       the other nodes
//! ```
//!
//! A single service keeps its state in a directory (`file_store.rs`); with NATS, any number of nodes share
//! their state (`nats_store.rs`) and pass frames to each other. Nothing else differs. Keep the logs of the
//! `async_nats` crate at warning level: at trace level it logs whole messages, keys included.
//!
//! # What is absent
//!
//! No key that could decrypt anything: this crate only calls `peek` on frames, which reads the stream id
//! and the kind. No process, and no file outside the data directory. Without `--nats`, no outgoing
//! connection.

#![forbid(unsafe_code)]

mod admission;
mod api_error;
mod blame;
mod bridge;
mod cluster;
mod config;
mod environment;
mod file_store;
mod fingerprint;
#[doc(hidden)]
pub mod fuzzing;
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
mod token;
mod token_cache;
mod wire;

pub use codex_exec_rpc::TlsError;
pub use config::{Clock, Config, PublicUrl, PublicUrlError};
pub use file_store::TokenFile;
pub use nats::{NatsOptions, NatsServers, NatsServersError};
pub use secret::{Secret, SigningKey};
pub use service::{ServeError, ServeOptions, Service, StoreOptions, serve};
pub use store::{FileStore, NatsStore, NatsTokens, Registration, Store, StoreError, TokenStore};
pub use token::{Right, Scope, TokenRecord, UnknownRight};
