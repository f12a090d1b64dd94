//! Dialling through proxies that tunnel, forward, refuse, or send invalid responses.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use codex_exec_rpc::{
    Connection, ConnectionConfig, DialError, ExchangeError, HttpTarget, Proxies, WebsocketDial,
    tls_from_roots,
};
use futures_util::{SinkExt, StreamExt};
use http::Request;
use http_body_util::{BodyExt, Empty};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ClientConfig, ServerConfig};
use tokio_websockets::{Message, ServerBuilder};

async fn head(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"\r\n\r\n") {
        bytes.push(stream.read_u8().await.unwrap());
    }
    String::from_utf8(bytes).unwrap()
}

async fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// Serves one connection as a proxy: every tunnel leads to `target`, whatever host it is for.
async fn tunnel(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    target: SocketAddr,
    heads: mpsc::UnboundedSender<String>,
) {
    heads.send(head(&mut stream).await).unwrap();
    stream.write_all(b"HTTP/1.1 200 Connection established\r\nvia: p\r\n\r\n").await.unwrap();
    let mut there = TcpStream::connect(target).await.unwrap();
    let _ = copy_bidirectional(&mut stream, &mut there).await;
}

/// Echoes one message.
async fn echo(stream: impl AsyncRead + AsyncWrite + Unpin) {
    let (_, mut socket) = ServerBuilder::new().accept(stream).await.unwrap();
    let message = socket.next().await.unwrap().unwrap();
    socket.send(message).await.unwrap();
}

fn proxies(variables: &[(&str, String)]) -> Arc<Proxies> {
    let get = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| v.clone());
    Arc::new(Proxies::from_lookup(get))
}

/// A certificate for both names, and a client configuration that trusts it.
fn certificate() -> (TlsAcceptor, Arc<ClientConfig>) {
    let names = ["server.invalid".to_owned(), "localhost".to_owned()];
    let made = rcgen::generate_simple_self_signed(names).unwrap();
    let certificate: CertificateDer<'static> = made.cert.der().clone();
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.clone()], key)
        .unwrap();
    (TlsAcceptor::from(Arc::new(config)), tls_from_roots([certificate]).unwrap())
}

#[tokio::test]
async fn websockets_use_a_tunnel_with_and_without_tls_on_either_leg() {
    let (acceptor, tls) = certificate();
    for (server_tls, proxy_tls) in [(false, false), (true, false), (false, true), (true, true)] {
        let (server, target) = listen().await;
        let (proxy, address) = listen().await;
        let (heads, mut asked) = mpsc::unbounded_channel();
        let (to_server, to_proxy) = (acceptor.clone(), acceptor.clone());
        tokio::spawn(async move {
            let (socket, _) = server.accept().await.unwrap();
            match server_tls {
                true => echo(to_server.accept(socket).await.unwrap()).await,
                false => echo(socket).await,
            }
        });
        tokio::spawn(async move {
            let (socket, _) = proxy.accept().await.unwrap();
            match proxy_tls {
                true => tunnel(to_proxy.accept(socket).await.unwrap(), target, heads).await,
                false => tunnel(socket, target, heads).await,
            }
        });
        let scheme = if proxy_tls { "https" } else { "http" };
        let url = format!("{scheme}://user:hunter2@localhost:{}", address.port());
        // The name does not resolve; only the proxy knows it.
        let mut dial = WebsocketDial::new(match server_tls {
            true => "wss://server.invalid/x",
            false => "ws://server.invalid/x",
        });
        dial.tls = Some(tls.clone());
        dial.proxies = proxies(&[("ALL_PROXY", url)]);
        let mut connection = Connection::dial(&dial, &ConnectionConfig::default()).await.unwrap();
        connection.outbound().send("hello").await.unwrap();
        assert_eq!(connection.next().await.unwrap().unwrap(), "hello");
        let port = if server_tls { 443 } else { 80 };
        let host = format!("server.invalid:{port}");
        let expected = format!("CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n");
        let asked = asked.recv().await.unwrap();
        assert_eq!(asked, expected + "Proxy-Authorization: Basic dXNlcjpodW50ZXIy\r\n\r\n");
    }
}

#[tokio::test]
async fn request_without_tls_is_forwarded_by_the_proxy() {
    let (proxy, address) = listen().await;
    let answering = tokio::spawn(async move {
        let (mut socket, _) = proxy.accept().await.unwrap();
        let asked = head(&mut socket).await;
        socket.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi").await.unwrap();
        asked
    });
    let target = HttpTarget {
        secure: false,
        authority: "server.invalid:81",
        connect_timeout: Duration::from_secs(30),
        tls: None,
        proxies: proxies(&[("HTTP_PROXY", format!("http://u:p@{address}"))]),
    };
    let request = Request::get("/a?b").header("host", "server.invalid:81");
    // The proxy's own credentials replace those of the request.
    let request = request.header("proxy-authorization", "Basic other");
    let answer = target.send(request.body(Empty::<Bytes>::new()).unwrap()).await.unwrap();
    assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "hi");
    let asked = answering.await.unwrap();
    assert!(asked.starts_with("GET http://server.invalid:81/a?b HTTP/1.1\r\n"), "{asked}");
    assert!(asked.contains("host: server.invalid:81\r\n"), "{asked}");
    assert!(asked.contains("proxy-authorization: Basic dTpw\r\n"), "{asked}");
    assert!(!asked.contains("other"), "{asked}");
}

#[tokio::test]
async fn proxy_that_opens_no_tunnel_is_a_proxy_error() {
    let long = format!("HTTP/1.1 200 OK\r\nx: {}", "y".repeat(20 << 10));
    for (answer, why) in [
        ("HTTP/1.1 407 No\r\n\r\n", "user name and password"),
        ("HTTP/1.1 403 Forbidden\r\n\r\n", "HTTP 403"),
        ("SSH-2.0-x\r\n\r\n", "does not speak HTTP"),
        ("HTTP/1.1\r\n\r\n", "does not speak HTTP"),
        ("HTTP/1.1 200 OK\r\n\r\nspoke first", "before the tunnel was used"),
        ("", "closed the connection"),
        (&long, "too long"),
    ] {
        let (proxy, address) = listen().await;
        let answer = answer.to_owned();
        tokio::spawn(async move {
            let (mut socket, _) = proxy.accept().await.unwrap();
            head(&mut socket).await;
            let _ = socket.write_all(answer.as_bytes()).await;
            let _ = socket.shutdown().await;
            let _ = socket.read_to_end(&mut Vec::new()).await;
        });
        let mut dial = WebsocketDial::new("wss://server.invalid/x?secret");
        dial.proxies = proxies(&[("HTTPS_PROXY", format!("http://user:hunter2@{address}"))]);
        let error = dial.connect(Default::default()).await.unwrap_err();
        assert!(matches!(error, DialError::Proxy { .. }), "{error}");
        assert_eq!((error.status(), error.is_permanent()), (None, false), "{error}");
        let text = error.to_string();
        assert!(text.contains(why) && text.contains(&address.to_string()), "{text}");
        assert!(!text.contains("hunter2") && !text.contains("secret"), "{text}");
    }
}

#[tokio::test]
async fn no_proxy_connects_directly_and_unusable_proxy_fails() {
    let (server, target) = listen().await;
    tokio::spawn(async move { echo(server.accept().await.unwrap().0).await });
    let unusable = ("ALL_PROXY", "socks5://127.0.0.1:1".to_owned());
    let mut dial = WebsocketDial::new(format!("ws://{target}"));
    dial.proxies = proxies(&[unusable.clone(), ("NO_PROXY", "127.0.0.0/8".to_owned())]);
    let mut socket = dial.connect(Default::default()).await.unwrap();
    socket.send(Message::text("direct")).await.unwrap();
    assert_eq!(socket.next().await.unwrap().unwrap().as_text(), Some("direct"));

    dial.proxies = proxies(&[unusable]);
    let error = dial.connect(Default::default()).await.unwrap_err();
    assert!(error.to_string().contains("ALL_PROXY"), "{error}");
    let target = HttpTarget {
        secure: false,
        authority: &target.to_string(),
        connect_timeout: Duration::from_secs(30),
        tls: None,
        proxies: dial.proxies,
    };
    let error = target.send(Request::new(Empty::<Bytes>::new())).await.unwrap_err();
    assert!(matches!(error, ExchangeError::Dial(DialError::Proxy { .. })), "{error}");
}
