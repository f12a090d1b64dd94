//! Certificate authorities of one's own, from a file.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use codex_exec_rpc::tls_from_roots;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::{self, ClientConfig};

/// Why a file gives no authorities.
#[derive(Debug, thiserror::Error)]
pub enum AuthoritiesError {
    /// It cannot be read as PEM.
    #[error("cannot read {path} as PEM")]
    Pem {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: pem::Error,
    },
    /// It holds none.
    #[error("{0} contains no certificate")]
    Empty(PathBuf),
    /// What it holds does not do.
    #[error("cannot use the certificates in {path}")]
    Unusable {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: rustls::Error,
    },
}

/// TLS that trusts the authorities in this PEM file, and no others.
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
