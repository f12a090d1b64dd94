//! `codex run` with its output in a pipe that is read slowly, on a server that does not offer to retain
//! output until it is read, like other implementations.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, ensure};
use fastrand::Rng;
use rustix::process::Signal;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;

use super::machine;

/// The name of a capability, and an unknown name of the same length.
const CAPABILITY: &[u8] = b"processRetainUntilRead";
const DISABLED_CAPABILITY: &[u8] = b"processRetainUntilXxxx";

/// Runs one program and compares the received output with what it wrote.
///
/// With `stop`, the client is stopped while its output is not read.
pub(crate) async fn run(
    codex: &Path,
    url: &str,
    token: &str,
    mut rng: Rng,
    stop: bool,
) -> anyhow::Result<()> {
    let url = disabling_proxy(url).await?;
    let lines = rng.u32(100_000..3_000_000);
    let code = rng.i32(0..100);
    let mut child = Command::new(codex)
        .args(["run", "--on", &url, "--", "sh", "-c"])
        .arg(format!(": {token}; seq 1 {lines}; exit {code}"))
        .env_remove("CODEX_EXEC_SERVER_URL")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut stdout = child.stdout.take().context("no stdout")?;
    let mut pauses = rng.u32(..30);
    let (mut line, mut seen, mut piece) = (Vec::new(), 0_u32, vec![0; 64 << 10]);
    loop {
        let len = stdout.read(&mut piece).await?;
        if len == 0 {
            break;
        }
        for &byte in &piece[..len] {
            if byte != b'\n' {
                line.push(byte);
                continue;
            }
            seen += 1;
            ensure!(line == seen.to_string().as_bytes(), "line {seen} is {line:?}");
            line.clear();
        }
        if pauses > 0 && rng.u8(..4) == 0 {
            pauses -= 1;
            let client = child.id().filter(|_| stop);
            client.iter().for_each(|pid| machine::signal(*pid, Signal::STOP));
            tokio::time::sleep(Duration::from_millis(rng.u64(..100))).await;
            client.iter().for_each(|pid| machine::signal(*pid, Signal::CONT));
        }
    }
    ensure!(seen == lines, "codex run wrote {seen} lines of {lines}");
    let status = child.wait().await?;
    ensure!(status.code() == Some(code), "codex run exited with {status}, not {code}");
    Ok(())
}

/// Starts a proxy that hides the capability, and returns its address.
async fn disabling_proxy(url: &str) -> anyhow::Result<String> {
    let server = url.strip_prefix("ws://").context("no websocket")?.to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let Ok(server) = TcpStream::connect(&server).await else { break };
            tokio::spawn(proxy(client, server));
        }
    });
    Ok(format!("ws://{address}"))
}

async fn proxy(client: TcpStream, server: TcpStream) -> anyhow::Result<()> {
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    tokio::spawn(async move { copy(&mut from_client, &mut to_server).await });
    let mut piece = vec![0; 64 << 10];
    let mut offers = true;
    loop {
        let len = from_server.read(&mut piece).await?;
        if len == 0 {
            return Ok(());
        }
        // It appears once, in the first response, which arrives in one piece.
        if offers && let Some(at) = find(&piece[..len]) {
            piece[at..at + CAPABILITY.len()].copy_from_slice(DISABLED_CAPABILITY);
            offers = false;
        }
        to_client.write_all(&piece[..len]).await?;
    }
}

fn find(piece: &[u8]) -> Option<usize> {
    piece.windows(CAPABILITY.len()).position(|window| window == CAPABILITY)
}
