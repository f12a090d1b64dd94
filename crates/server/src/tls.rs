//! TLS of a listener: its certificate, and the certificates of its clients.
//!
//! Invariant: a listener always has a usable configuration. One that cannot be read again leaves the old one.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::RwLock;
use ring::digest;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use tokio_rustls::rustls::{self, RootCertStore, ServerConfig};

use crate::auth::{AuthConfigError, check_private};

/// The files of a listener with TLS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate and its chain, in PEM.
    pub certificate: PathBuf,
    /// The key, in PEM. Only its owner may be able to write it.
    pub key: PathBuf,
    /// Authorities in PEM: clients need a certificate of one of them. `None` asks for no certificate.
    pub client_authorities: Option<PathBuf>,
}

/// Why TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read as PEM.
    #[error("cannot read {path} as PEM: {source}")]
    Pem {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: pem::Error,
    },
    /// A file holds no certificate.
    #[error("{0} contains no certificate")]
    NoCertificate(PathBuf),
    /// Others can change the key.
    #[error(transparent)]
    Key(#[from] AuthConfigError),
    /// The TLS library refuses the certificate or the key.
    #[error("cannot use the certificate {path}: {reason}")]
    Unusable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
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
    pub(crate) fn new(files: TlsFiles) -> Result<Self, TlsError> {
        let current = RwLock::new(load(&files)?);
        Ok(Self { files, current })
    }

    /// Reads the files again, for new connections.
    pub(crate) fn reload(&self) -> Result<(), TlsError> {
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

fn load(files: &TlsFiles) -> Result<Arc<ServerConfig>, TlsError> {
    let chain = certificates(&files.certificate)?;
    check_private(&files.key)?;
    let pem = |source| TlsError::Pem { path: files.key.clone(), source };
    let key = PrivateKeyDer::from_pem_file(&files.key).map_err(pem)?;
    let unusable = |path: &Path, reason: &dyn fmt::Display| TlsError::Unusable {
        path: path.to_owned(),
        reason: reason.to_string(),
    };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| unusable(&files.certificate, &error))?;
    let builder = match &files.client_authorities {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for authority in certificates(path)? {
                roots.add(authority).map_err(|error| unusable(path, &error))?;
            }
            let verifier =
                WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
            builder.with_client_cert_verifier(verifier.map_err(|error| unusable(path, &error))?)
        }
    };
    let mut config = builder
        .with_single_cert(chain, key)
        .map_err(|error| unusable(&files.certificate, &error))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let pem = |source| TlsError::Pem { path: path.to_owned(), source };
    let certificates = CertificateDer::pem_file_iter(path).map_err(pem)?;
    let certificates = certificates.collect::<Result<Vec<_>, _>>().map_err(pem)?;
    if certificates.is_empty() {
        return Err(TlsError::NoCertificate(path.to_owned()));
    }
    Ok(certificates)
}
