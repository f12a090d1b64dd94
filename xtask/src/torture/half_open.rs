//! Connections that begin and do not go on: nothing sent, half of an upgrade, no `initialize`, half a message.

use anyhow::Context;
use fastrand::Rng;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Opens some, each at another step, and leaves them there.
pub(crate) async fn connections(url: &str, rng: &mut Rng) -> anyhow::Result<Vec<TcpStream>> {
    let address = url.strip_prefix("ws://").context("no websocket")?;
    let mut open = Vec::new();
    for _ in 0..rng.usize(5..40) {
        let mut stream = TcpStream::connect(address).await?;
        let upgrade = format!(
            "GET / HTTP/1.1\r\nHost: {address}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
             Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        );
        match rng.u8(..4) {
            0 => {}
            1 => stream.write_all(&upgrade.as_bytes()[..rng.usize(1..upgrade.len())]).await?,
            step => {
                stream.write_all(upgrade.as_bytes()).await?;
                let answered = stream.read(&mut [0; 1024]).await?;
                anyhow::ensure!(answered > 0, "an upgrade was not answered");
                if step == 3 {
                    // A masked text frame that says it has 100 bytes, and has 10.
                    stream.write_all(&[0x81, 0x80 | 100, 0, 0, 0, 0]).await?;
                    stream.write_all(&[b' '; 10]).await?;
                }
            }
        }
        open.push(stream);
    }
    Ok(open)
}
