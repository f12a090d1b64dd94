//! Dialling: plain, over TLS, to silent listeners and to missing hosts.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use codex_exec_rpc::{Connection, ConnectionConfig, DialError, WebsocketDial, tls_from_roots};
use futures_util::{SinkExt, StreamExt};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::{TlsAcceptor, rustls};
use tokio_websockets::{Message, ServerBuilder};

/// Echoes every message with the token of the upgrade.
async fn echo(stream: impl AsyncRead + AsyncWrite + Unpin) {
    let Ok((request, mut socket)) = ServerBuilder::new().accept(stream).await else { return };
    let token =
        request.headers().get("authorization").map(|value| value.to_str().unwrap().to_owned());
    while let Some(Ok(message)) = socket.next().await {
        if let Some(text) = message.as_text() {
            let answer = format!("{text} {}", token.as_deref().unwrap_or("anonymous"));
            socket.send(Message::text(answer)).await.unwrap();
        }
    }
}

async fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

async fn ask(dial: &WebsocketDial) -> Result<String, DialError> {
    let mut connection = Connection::dial(dial, &ConnectionConfig::default()).await?;
    connection.outbound().send("hello").await.unwrap();
    let answer = connection.next().await.unwrap().unwrap();
    Ok(String::from_utf8(answer.to_vec()).unwrap())
}

#[tokio::test]
async fn plain_websocket_carries_the_bearer_token() {
    let (listener, address) = listen().await;
    tokio::spawn(async move { echo(listener.accept().await.unwrap().0).await });
    let mut dial = WebsocketDial::new(format!("ws://{address}"));
    dial.bearer_token = Some("secret".into());
    assert_eq!(ask(&dial).await.unwrap(), "hello Bearer secret");
}

#[tokio::test]
async fn tls_connects_only_to_a_trusted_server() {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let certificate: CertificateDer<'static> = made.cert.der().clone();
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.clone()], key)
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let (listener, address) = listen().await;
    tokio::spawn(async move {
        loop {
            let (socket, _) = listener.accept().await.unwrap();
            if let Ok(stream) = acceptor.accept(socket).await {
                tokio::spawn(echo(stream));
            }
        }
    });

    let mut dial = WebsocketDial::new(format!("wss://localhost:{}", address.port()));
    dial.tls = Some(tls_from_roots([certificate]).unwrap());
    assert_eq!(ask(&dial).await.unwrap(), "hello anonymous");

    dial.tls = Some(tls_from_roots([]).unwrap());
    let error = ask(&dial).await.unwrap_err();
    assert!(matches!(error, DialError::Tls { .. }), "{error}");
}

#[tokio::test]
async fn dial_times_out_on_a_silent_listener() {
    let (listener, address) = listen().await;
    let mut dial = WebsocketDial::new(format!("ws://{address}"));
    dial.timeout = Duration::from_millis(50);
    let error = ask(&dial).await.unwrap_err();
    assert!(matches!(error, DialError::Timeout { .. }) && !error.is_permanent(), "{error}");
    drop(listener);
}

#[tokio::test]
async fn dial_to_a_missing_host_fails() {
    let error = ask(&WebsocketDial::new("ws://no-such-host.invalid:1")).await.unwrap_err();
    assert!(matches!(error, DialError::Resolve { .. }), "{error}");
    let (listener, address) = listen().await;
    drop(listener);
    let error = ask(&WebsocketDial::new(format!("ws://{address}"))).await.unwrap_err();
    assert!(matches!(error, DialError::Tcp { .. }), "{error}");
}
