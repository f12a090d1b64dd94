//! What the registry's calls say, on the wire.

use std::io;

use hyper::StatusCode;
use serde::{Deserialize, Serialize};

use crate::key::WireKey;
use crate::store::StoreError;

/// The one profile there is.
pub const SECURITY_PROFILE: &str = "noise_hybrid_ik_v1";

#[derive(Debug, Deserialize)]
pub(crate) struct RegisterRequest {
    pub security_profile: String,
    pub executor_public_key: WireKey,
}

#[derive(Serialize)]
pub(crate) struct RegisterAnswer {
    pub environment_id: String,
    pub url: String,
    pub security_profile: &'static str,
    pub executor_registration_id: String,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ConnectRequest {
    pub harness_public_key: WireKey,
}

#[derive(Serialize)]
pub(crate) struct ConnectAnswer {
    pub environment_id: String,
    pub url: String,
    pub security_profile: &'static str,
    pub executor_registration_id: String,
    pub executor_public_key: WireKey,
    pub harness_key_authorization: String,
}

#[derive(Deserialize)]
pub(crate) struct ValidateRequest {
    pub executor_registration_id: String,
    pub harness_public_key: WireKey,
    pub harness_key_authorization: String,
}

#[derive(Serialize)]
pub(crate) struct ValidateAnswer {
    pub valid: bool,
}

/// The answer to an executor of the older revision, and to a harness that wants one.
#[derive(Serialize)]
pub(crate) struct ExecutorAnswer {
    pub executor_id: String,
    pub url: String,
}

/// One environment, as `codex environments` shows it. Times are seconds since 1970.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnvironmentStatus {
    /// Its id.
    pub environment_id: String,
    /// Whether its socket is there.
    pub online: bool,
    /// Since when it is.
    pub online_since: Option<u64>,
    /// When it was last there.
    pub last_seen: u64,
    /// When it registered.
    pub registered: u64,
    /// The id of its registration.
    pub executor_registration_id: String,
    /// How it is secured; `None` in the older revision, which is not.
    pub security_profile: Option<String>,
    /// The id of the token it registered with.
    pub token: String,
    /// Sockets of harnesses.
    pub harnesses: usize,
    /// Streams of theirs.
    pub streams: usize,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ListAnswer {
    pub environments: Vec<EnvironmentStatus>,
}

/// The body of every failure.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ErrorAnswer {
    pub error: ErrorDetail,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ErrorDetail {
    pub code: String,
    pub message: String,
}

/// Why a call failed, as it is told. Never holds anything that came with the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ApiError {
    #[error("a bearer token is required, and this one is not known, over or revoked")]
    Unauthorized,
    #[error("this token does not permit that, or not for this environment")]
    Forbidden,
    #[error("requests with an Origin header are refused")]
    Origin,
    #[error("the environment has never registered here, or was removed")]
    UnknownEnvironment,
    #[error("the environment is offline; start its exec-server and try again")]
    Offline,
    #[error("the environment is of the older revision, without encryption")]
    NotEncrypted,
    #[error("the environment is encrypted; the older revision cannot reach it")]
    Encrypted,
    #[error("this url is over; ask the registry for another")]
    PassOver,
    #[error("this url is of a registration that was replaced; register or connect again")]
    Replaced,
    #[error("as many harnesses are connected to this environment as there may be")]
    TooManyHarnesses,
    #[error("an environment id has 1 to 128 of the characters A-Z a-z 0-9 . _ ~ : @ + -")]
    EnvironmentId,
    #[error("the body is not what this call takes: {0}")]
    Body(&'static str),
    #[error("the body is too long")]
    BodyTooLong,
    #[error("the body took too long")]
    BodyTooSlow,
    #[error("connect to this with a websocket")]
    UpgradeRequired,
    #[error("not found")]
    NotFound,
    #[error("this path takes another method")]
    Method,
    #[error("too many; wait a minute")]
    Limited,
    #[error("the service is stopping; another will be there soon")]
    Draining,
    #[error("the service cannot reach its store; nothing was changed")]
    Store,
    #[error("the disk of the service is full; nothing was changed")]
    Full,
}

impl ApiError {
    pub(crate) fn status(self) -> StatusCode {
        match self {
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::Forbidden | Self::Origin | Self::PassOver => StatusCode::FORBIDDEN,
            Self::UnknownEnvironment | Self::NotFound => StatusCode::NOT_FOUND,
            Self::Offline
            | Self::NotEncrypted
            | Self::Encrypted
            | Self::Replaced
            | Self::TooManyHarnesses => StatusCode::CONFLICT,
            Self::EnvironmentId | Self::Body(_) => StatusCode::BAD_REQUEST,
            Self::BodyTooLong => StatusCode::PAYLOAD_TOO_LARGE,
            Self::BodyTooSlow => StatusCode::REQUEST_TIMEOUT,
            Self::UpgradeRequired => StatusCode::UPGRADE_REQUIRED,
            Self::Method => StatusCode::METHOD_NOT_ALLOWED,
            Self::Limited => StatusCode::TOO_MANY_REQUESTS,
            Self::Draining | Self::Store | Self::Full => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    fn code(self) -> &'static str {
        match self {
            Self::Unauthorized => "unauthorized",
            Self::Forbidden => "forbidden",
            Self::Origin => "origin_refused",
            Self::UnknownEnvironment => "environment_not_found",
            Self::Offline => "environment_offline",
            Self::NotEncrypted | Self::Encrypted => "security_profile_mismatch",
            Self::PassOver => "url_expired",
            Self::Replaced => "registration_replaced",
            Self::TooManyHarnesses => "too_many_harnesses",
            Self::EnvironmentId => "invalid_environment_id",
            Self::Body(_) => "invalid_request",
            Self::BodyTooLong => "body_too_long",
            Self::BodyTooSlow => "request_timeout",
            Self::UpgradeRequired => "upgrade_required",
            Self::NotFound => "not_found",
            Self::Method => "method_not_allowed",
            Self::Limited => "rate_limited",
            Self::Draining => "draining",
            Self::Store | Self::Full => "store_unavailable",
        }
    }

    pub(crate) fn answer(self) -> ErrorAnswer {
        ErrorAnswer {
            error: ErrorDetail { code: self.code().to_owned(), message: self.to_string() },
        }
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        tracing::error!(%error, "store");
        let full = |error: &io::Error| error.kind() == io::ErrorKind::StorageFull;
        if matches!(&error, StoreError::File(error) if full(error)) {
            Self::Full
        } else {
            Self::Store
        }
    }
}
