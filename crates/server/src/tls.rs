//! TLS of a listener: its certificate, and the certificates of its clients.
//!
//! Invariant: a listener always has a usable configuration. One that cannot be read again leaves the old one.

use std::fmt;
use std::sync::Arc;

use codex_exec_rpc::{TlsError, TlsFiles};
use parking_lot::RwLock;
use ring::digest;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::server::ParsedCertificate;

use crate::auth::{AuthConfigError, check_private};

/// Why TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum ListenerTlsError {
    /// Others can change the key.
    #[error(transparent)]
    Key(#[from] AuthConfigError),
    /// The files cannot be used.
    #[error(transparent)]
    Files(#[from] TlsError),
}

/// The TLS configuration of a listener, which can be read again.
pub(crate) struct Tls {
    files: TlsFiles,
    current: RwLock<Arc<ServerConfig>>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Tls").field(&self.files).finish()
    }
}

impl Tls {
    pub(crate) fn new(files: TlsFiles) -> Result<Self, ListenerTlsError> {
        let current = RwLock::new(load(&files)?);
        Ok(Self { files, current })
    }

    /// Reads the files again, for new connections.
    pub(crate) fn reload(&self) -> Result<(), ListenerTlsError> {
        let config = load(&self.files)?;
        *self.current.write() = config;
        Ok(())
    }

    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(self.current.read().clone())
    }

    /// Whether clients need a certificate.
    pub(crate) fn authenticates_clients(&self) -> bool {
        self.files.client_authorities.is_some()
    }
}

/// The SHA-256 of the public key in a certificate: the same after a renewal with the same key.
pub(crate) fn key_digest(certificate: &CertificateDer<'_>) -> Option<[u8; 32]> {
    let parsed = ParsedCertificate::try_from(certificate).ok()?;
    let key = parsed.subject_public_key_info();
    digest::digest(&digest::SHA256, &key).as_ref().try_into().ok()
}

fn load(files: &TlsFiles) -> Result<Arc<ServerConfig>, ListenerTlsError> {
    check_private(&files.key)?;
    Ok(files.server_config()?)
}
