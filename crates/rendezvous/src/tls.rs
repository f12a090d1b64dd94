//! TLS in the service itself: rustls with ring, TLS 1.2 and 1.3.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

/// Why TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read as PEM.
    #[error("cannot read {path} as PEM")]
    Pem {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: rustls::pki_types::pem::Error,
    },
    /// A file holds no certificate.
    #[error("{0} contains no certificate")]
    NoCertificate(PathBuf),
    /// The TLS library refuses the certificate or the key.
    #[error("cannot use this certificate with this key")]
    Rustls(#[from] rustls::Error),
}

/// Makes the acceptor for a listener.
pub(crate) fn acceptor(cert: &Path, key: &Path) -> Result<TlsAcceptor, TlsError> {
    let chain = certificates(cert)?;
    let pem = |source| TlsError::Pem { path: key.to_owned(), source };
    let key = PrivateKeyDer::from_pem_file(key).map_err(pem)?;
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(chain, key)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
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

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}
