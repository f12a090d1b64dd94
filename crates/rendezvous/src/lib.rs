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
//! ```
//!
//! # What is absent
//!
//! No key that could decrypt anything: of the frames this crate calls `peek` only, which reads an
//! address and a kind. No process, no file but those of the data directory.

#![forbid(unsafe_code)]

mod api;
mod client;
mod config;
mod environment;
mod file_store;
mod http;
mod hub;
mod journal;
mod key;
mod metrics;
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

pub use api::{EnvironmentStatus, SECURITY_PROFILE};
pub use client::{ClientError, RegistryClient};
pub use config::{Clock, Config, PublicUrl, PublicUrlError};
pub use file_store::TokenFile;
pub use key::{WireKey, WireKeyError};
pub use secret::{Secret, SigningKey};
pub use service::{ServeError, ServeOptions, Service, serve};
pub use store::{FileStore, Registration, Store, StoreError};
pub use tls::TlsError;
pub use token::{Right, Scope, TokenRecord, UnknownRight};
