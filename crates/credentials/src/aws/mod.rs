//! AWS Signature Version 4: signs each request of a registry in place of a token.
//!
//! Credentials are read again for every request, so a rotated file takes effect at once. Of the AWS SDK's
//! sources it supports the environment and the profiles of the shared files; it supports no source that
//! sends requests (SSO, roles, instance metadata) and no `credential_process`.

mod sigv4;
mod sources;

use std::time::SystemTime;

use codex_exec_remote::{
    BaseUrl, Credential, CredentialError, CredentialFuture, CredentialKind, HttpClient,
    OutgoingRequest, Verdict, may_send,
};
use http::HeaderMap;

pub use sigv4::{AwsKeys, sign};
pub use sources::{AwsError, AwsSources};

/// Signs requests with AWS credentials.
#[derive(Debug, Clone)]
pub struct AwsCredential {
    sources: AwsSources,
    region: String,
    service: String,
    now: fn() -> SystemTime,
}

impl AwsCredential {
    /// Signs for this service with the credentials of `sources`. Fails if they name no region.
    pub fn new(sources: AwsSources, service: impl Into<String>) -> Result<Self, AwsError> {
        let region = sources.region()?;
        Ok(Self { sources, region, service: service.into(), now: SystemTime::now })
    }

    /// Replaces the system's clock.
    #[must_use]
    pub fn with_clock(mut self, now: fn() -> SystemTime) -> Self {
        self.now = now;
        self
    }

    fn signed(&self, request: &OutgoingRequest<'_>) -> Result<HeaderMap, AwsError> {
        let keys = self.sources.keys()?;
        sign(request, &keys, &self.region, &self.service, (self.now)()).ok_or(AwsError::Unsignable)
    }
}

impl Credential for AwsCredential {
    fn check_target(&self, base: &BaseUrl) -> Result<(), CredentialError> {
        match may_send(CredentialKind::Signature, base.origin(), &[]) {
            Verdict::Send => Ok(()),
            _ => Err(CredentialError::permanent(AwsError::InClear(base.to_string()))),
        }
    }

    fn headers<'a>(&'a self, _http: &'a HttpClient) -> CredentialFuture<'a, HeaderMap> {
        Box::pin(async { Err(CredentialError::permanent(AwsError::Unsignable)) })
    }

    fn headers_for<'a>(
        &'a self,
        request: OutgoingRequest<'a>,
        _http: &'a HttpClient,
    ) -> CredentialFuture<'a, HeaderMap> {
        Box::pin(async move { self.signed(&request).map_err(CredentialError::permanent) })
    }

    fn renew<'a>(&'a self, _http: &'a HttpClient) -> CredentialFuture<'a, bool> {
        Box::pin(async { Ok(false) })
    }
}
