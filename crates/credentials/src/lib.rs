//! Sign-in: sources of credentials, their renewal, and login and logout.
//!
//! [`SignInSources`] reads the environment and `auth.json` and makes a [`SignIn`] from them, which is a
//! [`Credential`](codex_exec_remote::Credential) for a registry. [`BrowserLogin`] and [`DeviceLogin`] write
//! an `auth.json`; [`logout`] removes it.
//!
//! [`ExecutorCredential`] and [`ChatGptAccessToken`] come from a parent process, [`AwsCredential`] signs requests.
//!
//! This crate knows no relay and no JSON-RPC method, and no file of the machine except `auth.json`, the
//! shared files of AWS, and the password file, for the home directory.

#![forbid(unsafe_code)]

mod agent;
mod auth_file;
mod aws;
mod executor;
mod home;
mod issuer;
mod jwt;
mod login;
mod private_files;
mod sign_in;
mod sources;
mod stdin_token;
mod timestamp;
mod tokens;

pub use agent::AgentIdentity;
pub use auth_file::{AuthFile, AuthFileError, AuthJson, TokenSet};
pub use aws::{AwsCredential, AwsError, AwsKeys, AwsSources, sign as sign_aws_request};
pub use executor::{
    CredentialPipe, CredentialPipeConfig, ExecutorCredential, ExecutorCredentialError,
};
pub use home::home_dir;
pub use issuer::{IssuedTokens, Issuer, OauthError};
pub use jwt::{Claims, claims};
pub use login::{
    BrowserLogin, CallbackError, DeviceLogin, LoginError, login_issuer, login_with_api_key,
    login_with_tokens, logout,
};
pub use private_files::{ExposedError, check_directory, check_file, create_new};
pub use sign_in::{SignIn, SignInError, fingerprint};
pub use sources::{SignInKind, SignInSources};
pub use stdin_token::{ChatGptAccessToken, StdinTokenError, read_token_line};
pub use timestamp::rfc3339;
pub use tokens::{ChatGptTokens, finish_renewals};
