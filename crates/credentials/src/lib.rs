//! Sign-in: where credentials come from, how they are renewed, and how a person signs in and out.
//!
//! [`SignInSources`] reads the environment and `auth.json`; of these it makes a [`SignIn`], which a
//! registry takes as a [`Credential`](codex_exec_remote::Credential). [`BrowserLogin`] and
//! [`DeviceLogin`] are the ways of a person to an `auth.json`, [`logout`] is the way back.
//!
//! [`ExecutorCredential`] is one that a parent process hands over, [`AwsCredential`] signs requests.
//!
//! This crate knows no relay and no JSON-RPC method, and of the machine no file but `auth.json` and the
//! shared files of AWS.

#![forbid(unsafe_code)]

mod agent;
mod auth_file;
mod aws;
mod executor;
mod issuer;
mod jwt;
mod login;
mod sign_in;
mod sources;
mod timestamp;
mod tokens;

pub use agent::AgentIdentity;
pub use auth_file::{AuthFile, AuthFileError, AuthJson, TokenSet};
pub use aws::{AwsCredential, AwsError, AwsKeys, AwsSources, sign as sign_aws_request};
pub use executor::{
    CredentialPipe, CredentialPipeConfig, ExecutorCredential, ExecutorCredentialError,
};
pub use issuer::{IssuedTokens, Issuer, OauthError};
pub use jwt::{Claims, claims};
pub use login::{
    BrowserLogin, CallbackError, DeviceLogin, LoginError, login_issuer, login_with_api_key,
    login_with_tokens, logout,
};
pub use sign_in::{SignIn, SignInError};
pub use sources::{SignInKind, SignInSources};
pub use timestamp::rfc3339;
pub use tokens::{ChatGptTokens, finish_renewals};
