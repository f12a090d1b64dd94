//! The certificate authority of a server: signs a certificate for every host that the proxy opens.
//!
//! Invariant: its private key is in memory only, and leaves it in no form.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

use crate::host::Host;

/// The name by which programs know the authority.
const NAME: &str = "network_proxy MITM CA";

/// Certificates that are kept; beyond that, all are forgotten.
const MOST_KEPT: usize = 1024;

/// An ECDSA certificate authority, made anew for each server.
pub struct CertificateAuthority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
    /// Of all certificates: what distinguishes them is their host.
    leaf_key: KeyPair,
    kept: Mutex<HashMap<String, Arc<rustls::ServerConfig>>>,
}

/// Why there is no authority, or no certificate for a host.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// The certificate cannot be made.
    #[error("cannot make a certificate: {0}")]
    Certificate(#[from] rcgen::Error),
    /// The certificate cannot be used.
    #[error("cannot use a certificate: {0}")]
    Tls(#[from] rustls::Error),
}

impl CertificateAuthority {
    /// Makes a new key and its certificate.
    pub fn new() -> Result<Self, AuthorityError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, NAME);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate()?;
        let pem = params.self_signed(&key)?.pem();
        Ok(Self {
            issuer: Issuer::new(params, key),
            pem,
            leaf_key: KeyPair::generate()?,
            kept: Mutex::default(),
        })
    }

    /// The certificate that programs have to trust.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// What a TLS server for this host is made with: HTTP/2 and HTTP/1.1.
    pub(crate) fn server_config(
        &self,
        host: &Host,
    ) -> Result<Arc<rustls::ServerConfig>, AuthorityError> {
        if let Some(config) = self.kept.lock().get(host.as_str()) {
            return Ok(config.clone());
        }
        let mut params = CertificateParams::new([host.as_str().to_owned()])?;
        params.distinguished_name = DistinguishedName::new();
        // The common name of a certificate is at most 64 characters long.
        let name = if host.as_str().len() <= 64 { host.as_str() } else { "network_proxy" };
        params.distinguished_name.push(DnType::CommonName, name);
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let leaf = params.signed_by(&self.leaf_key, &self.issuer)?;
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.leaf_key.serialize_der()));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(vec![leaf.der().clone()], key)?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let config = Arc::new(config);
        let mut kept = self.kept.lock();
        if kept.len() >= MOST_KEPT {
            kept.clear();
        }
        kept.insert(host.as_str().to_owned(), config.clone());
        Ok(config)
    }
}

impl fmt::Debug for CertificateAuthority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CertificateAuthority").finish_non_exhaustive()
    }
}
