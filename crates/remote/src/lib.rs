//! Remote mode, for both ends: the registry client, and the sockets that carry relay streams.
//!
//! A server behind NAT registers with a [`Registry`], connects out to a rendezvous, and serves many
//! harnesses over that one socket. The rendezvous routes frames and sees only ciphertext. The frame
//! protocol is a state machine without sockets (`codex-exec-relay-core`); this crate adds the sockets, the
//! clock and the random source that drive it.
//!
//! This crate knows no JSON-RPC method, no process, no file of the machine, and no way to sign in: its
//! requests carry a [`Credential`], which another crate makes (`codex-exec-credentials`).

mod authorities;
mod base_url;
mod credential;
mod destination;
mod direct;
mod entropy;
mod http_client;
mod registry;
mod relay;
mod trace_context;

pub use authorities::{AuthoritiesError, tls_from_file};
pub use base_url::{BaseUrl, BaseUrlError};
pub use codex_exec_rpc::{Proxies, Secret};
pub use credential::{
    BearerToken, Credential, CredentialError, CredentialFuture, OutgoingRequest, check_destination,
};
pub use destination::{CredentialKind, Origin, OriginError, Verdict, may_send};
pub use direct::{DirectError, serve_direct};
pub use entropy::entropy;
pub use http_client::{HttpClient, HttpConfig, HttpError, HttpResponse, Payload, encode_form};
pub use registry::{
    Admission, ConnectRequest, ConnectResponse, DIRECT_TRANSPORT, DirectRegistrationError,
    ENVIRONMENT_NOT_FOUND, ENVIRONMENT_OFFLINE, EnvironmentStatus, ErrorDetail, ErrorResponse,
    ExecutorResponse, ListResponse, NoiseKeyJson, RegisterRequest, RegisterResponse, Registration,
    Registry, RegistryError, SECURITY_PROFILE, ValidateRequest, ValidateResponse, key_to_json,
};
pub use relay::{
    EnvironmentConnector, EnvironmentError, RegistrationTarget, RelayConfig, RemoteError,
    RendezvousError, serve_streams,
};
pub use trace_context::TraceContext;
