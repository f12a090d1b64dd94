//! Errors of the registry's HTTP API: status, code and message. The successful responses are in
//! `codex_exec_remote`, for both sides.

use std::io;

use codex_exec_remote::{ENVIRONMENT_NOT_FOUND, ENVIRONMENT_OFFLINE, ErrorDetail, ErrorResponse};
use hyper::StatusCode;

use crate::store::StoreError;

/// Why a call failed, as the response says. Never holds data of the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ApiError {
    #[error("token is missing, unknown, expired or revoked")]
    Unauthorized,
    #[error("token does not permit this, or not for this environment")]
    Forbidden,
    #[error("requests with an Origin header are refused")]
    Origin,
    #[error("the environment has never registered here, or was removed")]
    UnknownEnvironment,
    #[error("the environment is offline; start its exec-server and try again")]
    Offline,
    #[error("the environment uses the older revision, without encryption")]
    NotEncrypted,
    #[error("the environment requires encryption, which the older revision lacks")]
    Encrypted,
    #[error("this URL has expired or was used; request a new one from the registry")]
    PassExpired,
    #[error("this URL belongs to a registration that was replaced; register or connect again")]
    Replaced,
    #[error("harness limit of this environment reached; close another connection first")]
    TooManyHarnesses,
    #[error(
        "invalid environment id: expected 1 to 128 of the characters A-Z a-z 0-9 . _ ~ : @ + -"
    )]
    EnvironmentId,
    #[error("invalid request body: {0}")]
    Body(&'static str),
    #[error("the request body is too long")]
    BodyTooLong,
    #[error("the request body took too long")]
    BodyTooSlow,
    #[error("this path expects a websocket")]
    UpgradeRequired,
    #[error("not found")]
    NotFound,
    #[error("this path does not support this method")]
    Method,
    #[error("too many requests; wait a minute")]
    Limited,
    #[error("the service is stopping; try again in a moment")]
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
            Self::Forbidden | Self::Origin | Self::PassExpired => StatusCode::FORBIDDEN,
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
            Self::UnknownEnvironment => ENVIRONMENT_NOT_FOUND,
            Self::Offline => ENVIRONMENT_OFFLINE,
            Self::NotEncrypted | Self::Encrypted => "security_profile_mismatch",
            Self::PassExpired => "url_expired",
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

    pub(crate) fn body(self) -> ErrorResponse {
        let (code, message) = (Some(self.code().to_owned()), Some(self.to_string()));
        ErrorResponse { error: ErrorDetail { code, message } }
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        tracing::error!(%error, "the store failed");
        let full = |error: &io::Error| error.kind() == io::ErrorKind::StorageFull;
        if matches!(&error, StoreError::File(error) if full(error)) {
            Self::Full
        } else {
            Self::Store
        }
    }
}
