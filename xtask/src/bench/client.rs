//! A minimal client, so that benchmarks measure the server.

use anyhow::{Context, bail};
use futures_util::{SinkExt, StreamExt};
use tokio::net::TcpStream;
use tokio_websockets::{ClientBuilder, Limits, MaybeTlsStream, Message, Payload, WebSocketStream};

#[derive(Debug)]
pub(crate) struct Client {
    socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
}

impl Client {
    /// A bare websocket.
    pub(crate) async fn connect(url: &str) -> anyhow::Result<Self> {
        let builder = ClientBuilder::new().uri(url)?.limits(Limits::unlimited());
        let (socket, _) = builder.connect().await?;
        // Another crate of the workspace may have the library built with TLS.
        #[allow(irrefutable_let_patterns)]
        if let MaybeTlsStream::Plain(tcp) = socket.get_ref() {
            tcp.set_nodelay(true)?;
        }
        Ok(Self { socket })
    }

    /// A connection after the `initialize` handshake.
    pub(crate) async fn initialize(url: &str) -> anyhow::Result<Self> {
        let mut client = Self::connect(url).await?;
        client.send(r#"{"id":0,"method":"initialize","params":{"clientName":"bench"}}"#).await?;
        client.next().await?;
        client.send(r#"{"method":"initialized"}"#).await?;
        Ok(client)
    }

    pub(crate) async fn send(&mut self, text: impl Into<String>) -> anyhow::Result<()> {
        Ok(self.socket.send(Message::text(text.into())).await?)
    }

    pub(crate) async fn next(&mut self) -> anyhow::Result<Payload> {
        loop {
            let message = self.socket.next().await.context("closed")??;
            if message.is_text() {
                return Ok(message.into_payload());
            }
        }
    }

    /// Skips messages up to one that contains `text` near its beginning.
    pub(crate) async fn until(&mut self, text: &str) -> anyhow::Result<Payload> {
        loop {
            let message = self.next().await?;
            let head = &message[..message.len().min(120)];
            if head.windows(text.len()).any(|window| window == text.as_bytes()) {
                return Ok(message);
            }
            if head.starts_with(b"{\"error\"") {
                bail!("{}", String::from_utf8_lossy(&message));
            }
        }
    }
}

/// The params of `process/start`.
pub(crate) fn start(id: &str, argv: &[&str], more: &str) -> String {
    let argv = serde_json::json!(argv);
    format!(
        r#"{{"id":1,"method":"process/start","params":{{"processId":"{id}","argv":{argv},"cwd":"file:///","env":{{"PATH":"/usr/bin:/bin"}},"tty":false{more}}}}}"#
    )
}
