//! Private certificate authorities from a file.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use codex_exec_rpc::tls_from_roots;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::{self, ClientConfig};

/// Why a file of certificate authorities cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AuthoritiesError {
    /// The file cannot be read as PEM.
    #[error("cannot read {path} as PEM")]
    Pem {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: pem::Error,
    },
    /// The file contains no certificate.
    #[error("{0} contains no certificate")]
    Empty(PathBuf),
    /// The TLS library refuses the certificates.
    #[error("cannot use the certificates in {path}")]
    Unusable {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: rustls::Error,
    },
}

/// A TLS configuration that trusts only the authorities in this PEM file.
pub fn tls_from_file(path: &Path) -> Result<Arc<ClientConfig>, AuthoritiesError> {
    let unreadable = |source| AuthoritiesError::Pem { path: path.to_owned(), source };
    let found = CertificateDer::pem_file_iter(path).map_err(unreadable)?;
    let found = found.collect::<Result<Vec<_>, _>>().map_err(unreadable)?;
    if found.is_empty() {
        return Err(AuthoritiesError::Empty(path.to_owned()));
    }
    tls_from_roots(found)
        .map_err(|source| AuthoritiesError::Unusable { path: path.to_owned(), source })
}
