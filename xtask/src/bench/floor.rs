//! Bare websocket peers on the same library, as floors for messages, and a minimal relay.

use std::io::Write;

use clap::{Args, ValueEnum};
use futures_util::{SinkExt, StreamExt};
use tokio::net::TcpListener;
use tokio_websockets::{Config, Message, ServerBuilder};

use super::forwarder;

#[derive(Debug, Args)]
pub(crate) struct FloorArgs {
    kind: FloorKind,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum FloorKind {
    /// Echoes every message; replies to `LEN …` with a message of that length
    Echo,
    /// Prepares COUNT messages of LEN bytes for `COUNT LEN`, replies `ready`, then sends them
    ReadyMade,
    /// A registry and a relay that only forwards frames
    Forwarder,
}

pub(crate) fn serve(args: &FloorArgs) -> anyhow::Result<()> {
    if let FloorKind::Forwarder = args.kind {
        return forwarder::serve();
    }
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        writeln!(std::io::stdout(), "ws://{}", listener.local_addr()?)?;
        let kind = args.kind;
        loop {
            let (socket, _) = listener.accept().await?;
            socket.set_nodelay(true)?;
            tokio::spawn(async move {
                let config = Config::default().flush_threshold(64 << 10);
                let builder = ServerBuilder::new().config(config);
                let (_, mut socket) = builder.accept(socket).await?;
                while let Some(message) = socket.next().await {
                    let message = message?;
                    match (kind, message.as_text()) {
                        (FloorKind::Echo, Some(text)) => {
                            let len = text.split(' ').next().and_then(|len| len.parse().ok());
                            let response = match len {
                                Some(len) => Message::text("x".repeat(len)),
                                None => Message::text(text.to_owned()),
                            };
                            socket.send(response).await?;
                        }
                        (FloorKind::ReadyMade, Some(text)) => {
                            let mut words = text.split(' ').filter_map(|word| word.parse().ok());
                            let (count, len): (usize, usize) =
                                (words.next().unwrap_or(0), words.next().unwrap_or(0));
                            // Separate buffers, like the messages of a server.
                            let ready: Vec<_> =
                                (0..count).map(|_| Message::text("x".repeat(len))).collect();
                            socket.send(Message::text("ready")).await?;
                            socket.next().await;
                            for message in ready {
                                socket.feed(message).await?;
                            }
                            socket.flush().await?;
                        }
                        _ => {}
                    }
                }
                anyhow::Ok(())
            });
        }
    })
}
