//! What both ends of remote mode share: the registry, sign-in, and the sockets that carry relay
//! streams.
//!
//! A server behind NAT registers with a [`Registry`], connects out to a rendezvous, and serves many
//! harnesses over that one socket. The rendezvous routes frames and sees only ciphertext. The
//! protocol of the frames is a machine without sockets (`codex-exec-relay-core`); here are the
//! sockets, the clock and the randomness that drive it.
//!
//! This crate knows no JSON-RPC method, no process and no file of the machine but `auth.json`.

mod base_url;
mod credential;
mod entropy;
mod http_client;
mod login;
mod noise_key;
mod registry;
mod relay;
mod secret;
mod sign_in;
mod trace_context;

pub use base_url::{BaseUrl, BaseUrlError};
pub use credential::{Credential, CredentialError, CredentialFuture};
pub use entropy::entropy;
pub use http_client::{Answer, HttpClient, HttpConfig, HttpError, Payload};
pub use login::{
    BrowserLogin, CallbackError, DeviceLogin, LoginError, login_issuer, login_with_api_key,
    login_with_tokens, logout,
};
pub use noise_key::{NoiseKeyJson, key_to_json};
pub use registry::{
    Admission, ENVIRONMENT_NOT_FOUND, ENVIRONMENT_OFFLINE, Registration, Registry, RegistryError,
    SECURITY_PROFILE,
};
pub use relay::{
    Enrolment, EnvironmentError, EnvironmentLink, RelayConfig, RemoteError, RendezvousError,
    serve_streams,
};
pub use secret::Secret;
pub use sign_in::{
    AgentIdentity, AuthFile, AuthFileError, AuthJson, ChatGptTokens, Claims, IssuedTokens, Issuer,
    OauthError, SignIn, SignInError, SignInKind, SignInSources, TokenSet, claims, finish_renewals,
    rfc3339,
};
pub use trace_context::TraceContext;
