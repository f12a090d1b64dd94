//! TLS in front of the tests' own servers: an authority that `CODEX_CA_CERTIFICATE` can name, and listeners
//! with its certificates.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::pki_types::PrivateKeyDer;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

/// An authority of this test alone.
pub(crate) struct Authority {
    directory: tempfile::TempDir,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // Another name than those of its certificates, which would look signed by themselves.
        params.distinguished_name.push(DnType::CommonName, "authority of a test");
        let key = KeyPair::generate().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        std::fs::write(directory.path().join("authority.pem"), pem).unwrap();
        Self { directory, issuer: Issuer::new(params, key) }
    }

    /// Its certificate, in PEM.
    pub(crate) fn file(&self) -> PathBuf {
        self.directory.path().join("authority.pem")
    }

    /// Listens on 127.0.0.1 with a certificate for `name`, and carries connections to `address`. Returns
    /// the port.
    pub(crate) async fn front(&self, name: &str, address: SocketAddr) -> u16 {
        let key = KeyPair::generate().unwrap();
        let leaf = CertificateParams::new([name.to_owned()]).unwrap();
        let leaf = leaf.signed_by(&key, &self.issuer).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(
                vec![leaf.der().clone()],
                PrivateKeyDer::try_from(key.serialize_der()).unwrap(),
            )
            .unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            while let Ok((outer, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    let Ok(mut outer) = acceptor.accept(outer).await else { return };
                    let mut inner = TcpStream::connect(address).await.unwrap();
                    let _ = copy_bidirectional(&mut outer, &mut inner).await;
                });
            }
        });
        port
    }
}

/// `--ca-file` decides whom a client trusts: its own authority, and then no other.
#[tokio::test(flavor = "multi_thread")]
async fn ca_file_names_the_only_authorities_to_trust() {
    use crate::commands::{Server, codex, output};
    let (authority, other) = (Authority::new(), Authority::new());
    let server = Server::start();
    let address = server.url.strip_prefix("ws://").unwrap().parse().unwrap();
    let port = authority.front("localhost", address).await;
    let run = |files: &[&Authority], variable: Option<&Authority>| {
        let mut command = codex();
        command.args(["run", "--on", &format!("wss://localhost:{port}")]);
        for authority in files {
            command.arg("--ca-file").arg(authority.file());
        }
        if let Some(authority) = variable {
            command.env("CODEX_CA_CERTIFICATE", authority.file());
        }
        output(command.args(["--", "echo", "in"]))
    };
    tokio::task::block_in_place(|| {
        run(&[], None).failed(125, "--ca-file");
        assert_eq!(run(&[&authority], None).success(), "in\n");
        assert_eq!(run(&[], Some(&authority)).success(), "in\n");
        run(&[&other], Some(&authority)).failed(125, "TLS to `localhost` failed");
    });
    let mut missing = codex();
    missing.args(["info", "--on", "ws://127.0.0.1:1", "--ca-file", "/no/such"]);
    output(&mut missing).failed(1, "cannot read /no/such as PEM");
}
