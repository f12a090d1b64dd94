//! The seam between the registry and sign-in: what the registry's client needs of a credential.
//!
//! Invariant: no header is asked of a credential before [`Credential::may_go_to`] has let its target
//! pass; [`Registry::new`](crate::Registry::new) sees to it.

use std::error::Error;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use codex_exec_rpc::Secret;
use http::{HeaderMap, header};

use crate::base_url::BaseUrl;
use crate::http_client::HttpClient;

/// A request as it will be sent, for credentials that sign it.
#[derive(Debug, Clone, Copy)]
pub struct OutgoingRequest<'a> {
    /// `GET` or `POST`.
    pub method: &'a str,
    /// `http`, `https`, `ws` or `wss`, with the query.
    pub url: &'a str,
    /// The `Content-Type` header, if there is one.
    pub content_type: Option<&'a str>,
    /// The body; empty for an upgrade.
    pub body: &'a [u8],
}

/// Proves to a registry who is asking. `Debug` must not show the secret.
pub trait Credential: fmt::Debug + Send + Sync {
    /// Whether the credential may be sent to this service.
    fn may_go_to(&self, base: &BaseUrl) -> Result<(), CredentialError>;

    /// The headers of one request. May ask other services by `http`, for a new token say.
    fn headers<'a>(&'a self, http: &'a HttpClient) -> CredentialFuture<'a, HeaderMap>;

    /// The headers of this very request. By default those of any.
    fn headers_for<'a>(
        &'a self,
        _request: OutgoingRequest<'a>,
        http: &'a HttpClient,
    ) -> CredentialFuture<'a, HeaderMap> {
        self.headers(http)
    }

    /// After a 401: whether there is now another credential to try with.
    fn renew<'a>(&'a self, http: &'a HttpClient) -> CredentialFuture<'a, bool>;
}

impl Credential for Arc<dyn Credential> {
    fn may_go_to(&self, base: &BaseUrl) -> Result<(), CredentialError> {
        (**self).may_go_to(base)
    }

    fn headers<'a>(&'a self, http: &'a HttpClient) -> CredentialFuture<'a, HeaderMap> {
        (**self).headers(http)
    }

    fn headers_for<'a>(
        &'a self,
        request: OutgoingRequest<'a>,
        http: &'a HttpClient,
    ) -> CredentialFuture<'a, HeaderMap> {
        (**self).headers_for(request, http)
    }

    fn renew<'a>(&'a self, http: &'a HttpClient) -> CredentialFuture<'a, bool> {
        (**self).renew(http)
    }
}

/// What the methods of a [`Credential`] return.
pub type CredentialFuture<'a, T> =
    Pin<Box<dyn Future<Output = Result<T, CredentialError>> + Send + 'a>>;

/// A token that was named together with the registry it is for: it goes there, whatever the way.
#[derive(Debug, Clone)]
pub struct BearerToken(pub Secret);

impl Credential for BearerToken {
    fn may_go_to(&self, _base: &BaseUrl) -> Result<(), CredentialError> {
        Ok(())
    }

    fn headers<'a>(&'a self, _http: &'a HttpClient) -> CredentialFuture<'a, HeaderMap> {
        Box::pin(async {
            let value = self.0.header("Bearer ").ok_or_else(|| {
                CredentialError::permanent(
                    "the token contains characters that an HTTP header cannot carry; check its \
                     source",
                )
            })?;
            Ok(HeaderMap::from_iter([(header::AUTHORIZATION, value)]))
        })
    }

    fn renew<'a>(&'a self, _http: &'a HttpClient) -> CredentialFuture<'a, bool> {
        Box::pin(async { Ok(false) })
    }
}

/// Why a credential cannot be used.
pub struct CredentialError {
    cause: Box<dyn Error + Send + Sync>,
    transient: bool,
}

impl CredentialError {
    /// It will not work later either.
    pub fn permanent(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { cause: cause.into(), transient: false }
    }

    /// Trying later may do.
    pub fn transient(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { cause: cause.into(), transient: true }
    }

    /// Whether trying later may do.
    pub fn is_transient(&self) -> bool {
        self.transient
    }
}

// Shown as its cause is.
impl fmt::Debug for CredentialError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.cause, f)
    }
}

impl fmt::Display for CredentialError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.cause, f)
    }
}

impl Error for CredentialError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.cause.source()
    }
}
