//! Bare websocket peers on the same library: what a message costs without anything behind it.

use std::io::Write;

use clap::{Args, ValueEnum};
use futures_util::{SinkExt, StreamExt};
use tokio::net::TcpListener;
use tokio_websockets::{Config, Message, ServerBuilder};

#[derive(Debug, Args)]
pub struct FloorArgs {
    what: What,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum What {
    /// Sends every message back
    Echo,
    /// Answers `COUNT LEN` with so many ready-made messages of that length
    ReadyMade,
}

pub fn serve(args: &FloorArgs) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        writeln!(std::io::stdout(), "ws://{}", listener.local_addr()?)?;
        let what = args.what;
        loop {
            let (socket, _) = listener.accept().await?;
            socket.set_nodelay(true)?;
            tokio::spawn(async move {
                let config = Config::default().flush_threshold(64 << 10);
                let builder = ServerBuilder::new().config(config);
                let (_, mut socket) = builder.accept(socket).await?;
                while let Some(message) = socket.next().await {
                    let message = message?;
                    match (what, message.as_text()) {
                        (What::Echo, Some(text)) => {
                            let answer = Message::text(text.to_owned());
                            socket.send(answer).await?;
                        }
                        (What::ReadyMade, Some(text)) => {
                            let mut words = text.split(' ').filter_map(|word| word.parse().ok());
                            let (count, len): (usize, usize) =
                                (words.next().unwrap_or(0), words.next().unwrap_or(0));
                            let ready = Message::text("x".repeat(len));
                            for _ in 0..count {
                                socket.feed(ready.clone()).await?;
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
