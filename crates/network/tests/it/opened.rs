//! Tunnels that the proxy opens: TLS on both sides, over HTTP/1.1 and HTTP/2.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use bytes::Bytes;
use codex_exec_network::decide::Mode;
use codex_exec_network::{CertificateAuthority, Config, Masker, Mitm, Roots};
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::{PrivateKeyDer, ServerName};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::socks::{ask, named};
use crate::world::{World, allow, read_head};

pub(crate) const TOKEN: &str = "ghp_0123456789abcdefghijABCDEFGHIJ012345";
const H2: &[u8] = b"h2";
pub(crate) const H1: &[u8] = b"http/1.1";

/// An authority for origins, and a server with a certificate for `name` that answers with the version,
/// the request line and the headers it was sent.
async fn tls_origin(name: &str, alpn: &'static [u8]) -> (SocketAddr, Roots) {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let pem = params.self_signed(&key).unwrap().pem();
    let issuer = Issuer::new(params, key);
    let leaf_key = KeyPair::generate().unwrap();
    let leaf =
        CertificateParams::new([name.to_owned()]).unwrap().signed_by(&leaf_key, &issuer).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(
            vec![leaf.der().clone()],
            PrivateKeyDer::try_from(leaf_key.serialize_der()).unwrap(),
        )
        .unwrap();
    config.alpn_protocols = vec![alpn.to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(stream) = acceptor.accept(stream).await else { return };
                let service = hyper::service::service_fn(
                    |request: Request<hyper::body::Incoming>| async move {
                        Ok::<_, Infallible>(echo(&request))
                    },
                );
                let stream = TokioIo::new(stream);
                if alpn == H2 {
                    let builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                    let _ = builder.serve_connection(stream, service).await;
                } else {
                    let builder = hyper::server::conn::http1::Builder::new();
                    let _ = builder.serve_connection(stream, service).await;
                }
            });
        }
    });
    (address, Roots::from_pem(&pem))
}

fn echo(request: &Request<hyper::body::Incoming>) -> Response<Full<Bytes>> {
    let mut text = format!("{:?} {} {}", request.version(), request.method(), request.uri());
    for (name, value) in request.headers() {
        text.push_str(&format!("|{name}: {}", value.to_str().unwrap()));
    }
    Response::new(Full::from(text))
}

pub(crate) struct Opening {
    pub world: World,
    pub authority: Arc<CertificateAuthority>,
    pub config: Config,
    pub standin: String,
}

/// A proxy that has a token of GitHub bound, in front of an origin.
pub(crate) async fn opening(alpn: &'static [u8], certificate_for: &str) -> Opening {
    let world = World::new().await;
    let (origin, roots) = tls_origin(certificate_for, alpn).await;
    *world.internet.origin.lock().unwrap() = Some(origin);
    for name in ["api.github.com", "other.github.com"] {
        world.internet.name(name, &["140.82.112.5"]);
    }
    let mut env = BTreeMap::from([("GH_TOKEN".to_owned(), TOKEN.to_owned())]);
    let masking = Masker::new().unwrap().mask(&mut env, &BTreeMap::new());
    let authority = Arc::new(CertificateAuthority::new().unwrap());
    let mut config = world.config(allow(&["*.github.com", "good.com"]));
    config.mitm = Some(Mitm {
        authority: authority.clone(),
        upstream_tls: roots.client_config().unwrap(),
        bindings: masking.bindings,
    });
    Opening { world, authority, config, standin: env["GH_TOKEN"].clone() }
}

/// TLS inside a tunnel, trusting these certificates only.
async fn tls(
    stream: TcpStream,
    trusted: &Roots,
    alpn: &[u8],
    name: &str,
) -> std::io::Result<tokio_rustls::client::TlsStream<TcpStream>> {
    let mut config = (*trusted.client_config().unwrap()).clone();
    config.alpn_protocols = vec![alpn.to_vec()];
    let name = ServerName::try_from(name.to_owned()).unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, stream).await
}

async fn tunnel(port: u16, authority: &str) -> TcpStream {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
    let head = format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    assert!(read_head(&mut stream).await.unwrap().starts_with("HTTP/1.1 200 "));
    stream
}

/// One request over a TLS stream; status and body of the answer.
async fn send(
    stream: tokio_rustls::client::TlsStream<TcpStream>,
    request: Request<Full<Bytes>>,
) -> (u16, String) {
    let stream_h2 = stream.get_ref().1.alpn_protocol() == Some(H2);
    let stream = TokioIo::new(stream);
    let response = if stream_h2 {
        let builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
        let (mut sender, connection) = builder.handshake(stream).await.unwrap();
        tokio::spawn(connection);
        sender.send_request(request).await.unwrap()
    } else {
        let (mut sender, connection) =
            hyper::client::conn::http1::Builder::new().handshake(stream).await.unwrap();
        tokio::spawn(connection);
        sender.send_request(request).await.unwrap()
    };
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

fn request(alpn: &[u8], method: &str, host: &str, token: &str) -> Request<Full<Bytes>> {
    let builder =
        Request::builder().method(method).header("authorization", format!("Bearer {token}"));
    let builder = match alpn == H2 {
        true => builder.uri(format!("https://{host}/user?q")),
        false => builder.uri("/user?q").header("host", host),
    };
    builder.body(Full::default()).unwrap()
}

#[tokio::test]
async fn secrets_are_put_back_over_every_protocol() {
    for far in [H1, H2] {
        let opening = opening(far, "api.github.com").await;
        let proxy = opening.world.start(opening.config.clone()).await;
        let trusted = Roots::from_pem(opening.authority.pem());
        for near in [H1, H2] {
            for socks in [false, true] {
                let stream = match socks {
                    true => ask(&proxy, &named(1, "api.github.com", 443)).await.2,
                    false => tunnel(proxy.http_port(), "api.github.com:443").await,
                };
                let stream = tls(stream, &trusted, near, "api.github.com").await.unwrap();
                assert_eq!(stream.get_ref().1.alpn_protocol(), Some(near));
                let (status, body) =
                    send(stream, request(near, "GET", "api.github.com", &opening.standin)).await;
                assert_eq!(status, 200, "{body}");
                assert!(body.contains(&format!("|authorization: Bearer {TOKEN}")), "{body}");
                assert!(body.contains("/user?q"), "{body}");
                assert!(
                    body.starts_with(if far == H2 { "HTTP/2.0 GET" } else { "HTTP/1.1 GET" }),
                    "{body}"
                );
                let stream = tunnel(proxy.http_port(), "api.github.com:443").await;
                let stream = tls(stream, &trusted, near, "api.github.com").await.unwrap();
                let (_, body) =
                    send(stream, request(near, "GET", "api.github.com", "another")).await;
                assert!(body.contains("|authorization: Bearer another"), "{body}");
            }
        }
        let connected = opening.world.internet.connected();
        assert!(connected.iter().all(|address| address == "140.82.112.5:443"), "{connected:?}");
    }
}

#[tokio::test]
async fn tunnels_without_a_secret_stay_closed() {
    let opening = opening(H1, "other.github.com").await;
    let proxy = opening.world.start(opening.config.clone()).await;
    let ours = Roots::from_pem(opening.authority.pem());
    // The program sees the target's own certificate, which our authority has not signed.
    let stream = tunnel(proxy.http_port(), "other.github.com:443").await;
    assert!(tls(stream, &ours, H1, "other.github.com").await.is_err());
    // So it is at another port of a host that has one.
    let stream = tunnel(proxy.http_port(), "api.github.com:8443").await;
    assert!(tls(stream, &ours, H1, "other.github.com").await.is_err());
}

#[tokio::test]
async fn a_request_for_another_host_is_refused() {
    let opening = opening(H1, "api.github.com").await;
    let proxy = opening.world.start(opening.config.clone()).await;
    let trusted = Roots::from_pem(opening.authority.pem());
    for near in [H1, H2] {
        for host in ["other.github.com", "api.github.com:444", "github.com", "x@api.github.com"] {
            if near == H2 && host.contains('@') {
                continue; // No client could send it.
            }
            let stream = tunnel(proxy.http_port(), "api.github.com:443").await;
            let stream = tls(stream, &trusted, near, "api.github.com").await.unwrap();
            let answer = send(stream, request(near, "GET", host, &opening.standin)).await;
            assert_eq!(answer, (400, "host mismatch".into()), "{host}");
        }
    }
    assert_eq!(opening.world.internet.connected(), Vec::<String>::new());
}

#[tokio::test]
async fn a_target_with_a_wrong_certificate_gets_no_secret() {
    let opening = opening(H1, "evil.com").await;
    let proxy = opening.world.start(opening.config.clone()).await;
    let trusted = Roots::from_pem(opening.authority.pem());
    let stream = tunnel(proxy.http_port(), "api.github.com:443").await;
    let stream = tls(stream, &trusted, H1, "api.github.com").await.unwrap();
    let answer = send(stream, request(H1, "GET", "api.github.com", &opening.standin)).await;
    assert_eq!(answer, (502, "mitm upstream error".into()));
}

#[tokio::test]
async fn limited_mode_judges_methods_inside_every_tunnel() {
    let mut opening = opening(H1, "good.com").await;
    opening.config.mode = Mode::Limited;
    let proxy = opening.world.start(opening.config.clone()).await;
    let trusted = Roots::from_pem(opening.authority.pem());
    for near in [H1, H2] {
        for (method, socks) in
            [("GET", false), ("POST", false), ("HEAD", false), ("GET", true), ("DELETE", true)]
        {
            let stream = match socks {
                true => ask(&proxy, &named(1, "good.com", 443)).await.2,
                false => tunnel(proxy.http_port(), "good.com:443").await,
            };
            let stream = tls(stream, &trusted, near, "good.com").await.unwrap();
            opening.world.notebook.take();
            let (status, body) = send(stream, request(near, method, "good.com", "x")).await;
            let records = opening.world.notebook.take();
            if ["GET", "HEAD"].contains(&method) {
                assert_eq!((status, records.len()), (200, 0), "{body}");
                continue;
            }
            let protocol = if socks { "socks5_tcp" } else { "https_connect" };
            let expected = format!(
                r#"{{"status":"blocked","host":"good.com","reason":"method_not_allowed","decision":"deny","source":"mode_guard","protocol":"{protocol}","port":443,"message":"Method not allowed in limited mode."}}"#
            );
            assert_eq!((status, body), (403, expected));
            assert_eq!(records[0].reason, "method_not_allowed");
            assert_eq!(records[0].method.as_deref(), Some(method));
            assert_eq!(records[0].scope.as_str(), "non_domain");
        }
    }
    // What is not TLS cannot be judged, and ends.
    let mut stream = tunnel(proxy.http_port(), "good.com:80").await;
    stream.write_all(b"POST / HTTP/1.1\r\nHost: good.com\r\n\r\n").await.unwrap();
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest).await;
    assert!(!rest.starts_with(b"HTTP/"), "{rest:?}");
}
