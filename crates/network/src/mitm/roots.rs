//! The roots that targets are verified by: those of the system and of files that the server's environment
//! names.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

/// Certificates of authorities that targets may have theirs from.
#[derive(Debug, Clone, Default)]
pub struct Roots {
    certificates: Vec<CertificateDer<'static>>,
}

impl Roots {
    /// The system's roots, and those in the files of `extra`: no file replaces the system's, since programs
    /// get all of them as the only ones to trust. What cannot be read is left out: without a root, every
    /// target is refused.
    pub fn load(extra: &[PathBuf]) -> Self {
        let system = openssl_probe::candidate_cert_dirs()
            .flat_map(|dir| rustls_native_certs::load_certs_from_paths(None, Some(dir)).certs);
        let extra = extra
            .iter()
            .flat_map(|file| rustls_native_certs::load_certs_from_paths(Some(file), None).certs);
        let mut seen = HashSet::new();
        let certificates = system.chain(extra).filter(|one| seen.insert(one.to_vec())).collect();
        Self { certificates }
    }

    /// Roots from PEM.
    pub fn from_pem(pem: &str) -> Self {
        let certificates = CertificateDer::pem_slice_iter(pem.as_bytes());
        Self { certificates: certificates.filter_map(Result::ok).collect() }
    }

    /// What a TLS client that verifies by these roots is made with: HTTP/2 and HTTP/1.1.
    pub fn client_config(&self) -> Result<Arc<rustls::ClientConfig>, rustls::Error> {
        let mut store = rustls::RootCertStore::empty();
        store.add_parsable_certificates(self.certificates.iter().cloned());
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(store)
            .with_no_client_auth();
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }

    /// All of them as PEM.
    pub fn pem(&self) -> String {
        let mut pem = String::new();
        for certificate in &self.certificates {
            pem.push_str("-----BEGIN CERTIFICATE-----\n");
            let encoded = base64_simd::STANDARD.encode_to_string(certificate);
            for line in encoded.as_bytes().chunks(64) {
                pem.push_str(&String::from_utf8_lossy(line));
                pem.push('\n');
            }
            pem.push_str("-----END CERTIFICATE-----\n");
        }
        pem
    }
}
