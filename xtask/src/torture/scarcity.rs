//! Rounds in which the server is short of something. While it is, requests may be refused and connections may
//! end; wrong output is never allowed. Afterwards nothing is left, and the server serves as if nothing had been.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, ensure};
use fastrand::Rng;
use serde_json::json;
use tokio::net::TcpStream;

use super::client::Client;
use super::confined::{Confined, Scarcity};
use super::machine::{self, TIMEOUT};
use super::session::{self, Allowed, Treatment, WrongOutput};

/// Connections that take what descriptors there are.
const CROWD: usize = 160;

pub(crate) async fn round(
    codex: &Path,
    scarcity: Scarcity,
    seed: u64,
    rng: &mut Rng,
) -> anyhow::Result<()> {
    let token = format!("{:015}", seed % 1_000_000_000_000_000);
    let mut confined = Confined::start(codex, scarcity, seed)?;
    let (url, pid) = (confined.server.url.clone(), confined.server.pid());
    // The warden, the spare and what else a server has at rest.
    serves(&url, &token, rng).await.context("before anything was scarce")?;
    let before = machine::mounts(pid)?;
    confined.press()?;
    let crowd = match scarcity {
        Scarcity::Descriptors => crowd(&url).await,
        _ => Vec::new(),
    };
    load(&confined, scarcity, &token, rng).await?;
    confined.relieve()?;
    drop(crowd);
    serves(&url, &token, rng).await.context("after nothing was scarce any more")?;
    writes_whole_files(&confined).await?;
    settles(&confined, &token).await?;
    let after = machine::mounts(pid)?;
    ensure!(before == after, "mounts: {before:?}, then {after:?}");
    confined.server.kill()
}

/// Sessions and file requests while something is scarce.
async fn load(
    confined: &Confined,
    scarcity: Scarcity,
    token: &str,
    rng: &mut Rng,
) -> anyhow::Result<()> {
    // Programs that cannot fork or allocate go wrong by themselves.
    let exact = !matches!(scarcity, Scarcity::Processes | Scarcity::Memory);
    let allowed = Allowed { refused: true, killed: true };
    let treatment = Treatment { allowed, silence: false, confine: exact };
    let sessions: Vec<_> = (0..rng.usize(4..10))
        .map(|_| {
            let (url, token, rng) = (confined.server.url.clone(), token.to_owned(), rng.fork());
            tokio::spawn(async move { session::run(&url, &token, rng, treatment).await })
        })
        .collect();
    if scarcity == Scarcity::Clock {
        for _ in 0..rng.usize(5..30) {
            confined.set_clock(rng.i64(-400 * 86_400..400 * 86_400))?;
            tokio::time::sleep(Duration::from_millis(rng.u64(..30))).await;
        }
    } else {
        tokio::time::timeout(TIMEOUT, write_files(confined, rng))
            .await
            .context("a write hangs")??;
    }
    for session in sessions {
        match session.await? {
            Err(error) if exact && error.is::<WrongOutput>() => return Err(error),
            Err(error) if scarcity == Scarcity::Clock => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Replaces a file again and again. It holds one of its contents, whole, whatever became of each request.
async fn write_files(confined: &Confined, rng: &mut Rng) -> anyhow::Result<()> {
    let Ok(mut client) = Client::connect(&confined.server.url).await else { return Ok(()) };
    let path = confined.inside.join("replaced");
    let mut possible = vec![None];
    for _ in 0..20 {
        let content = vec![rng.u8(..); rng.usize(1..64 << 10)];
        let params = json!({
            "path": format!("file://{}", path.display()),
            "dataBase64": base64_simd::STANDARD.encode_to_string(&content),
            "atomic": true,
        });
        possible.push(Some(content));
        match client.call("fs/writeFile", params).await {
            Ok(response) if response.get("error").is_none() => possible.drain(..possible.len() - 1),
            Ok(response) => {
                ensure!(response["error"]["data"]["kind"].is_string(), "no kind: {response}");
                continue;
            }
            // Its connection ended for want of something.
            Err(_) => break,
        };
    }
    let found = std::fs::read(confined.disk.join("replaced")).ok();
    ensure!(possible.contains(&found), "a file that was replaced is torn");
    Ok(())
}

/// A file of some size can be written and is removed again.
async fn writes_whole_files(confined: &Confined) -> anyhow::Result<()> {
    let mut client = Client::connect(&confined.server.url).await?;
    let content = vec![7; 256 << 10];
    let path = format!("file://{}", confined.inside.join("replaced").display());
    let data = base64_simd::STANDARD.encode_to_string(&content);
    let params = json!({"path": path, "dataBase64": data, "atomic": true});
    let response = client.call("fs/writeFile", params).await?;
    ensure!(response.get("error").is_none(), "{response}");
    ensure!(std::fs::read(confined.disk.join("replaced"))? == content, "not what was written");
    let response = client.call("fs/remove", json!({"path": path})).await?;
    ensure!(response.get("error").is_none(), "{response}");
    Ok(())
}

/// A session as good as any. It may take a moment until the server has what it lacked.
async fn serves(url: &str, token: &str, rng: &mut Rng) -> anyhow::Result<()> {
    let treatment = Treatment { allowed: Allowed::default(), silence: false, confine: true };
    let until = tokio::time::Instant::now() + TIMEOUT;
    loop {
        match session::run(url, token, rng.fork(), treatment).await {
            Ok(()) => return Ok(()),
            Err(error) if tokio::time::Instant::now() > until => return Err(error),
            Err(error) if error.is::<WrongOutput>() => return Err(error),
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

/// Nothing of the round is left: no process, keeper, descriptor or file.
async fn settles(confined: &Confined, token: &str) -> anyhow::Result<()> {
    let pid = confined.server.pid();
    machine::wait_until_none(|| {
        let left = machine::with_token(token);
        (!left.is_empty()).then(|| format!("left behind: {left:?}"))
    })
    .await?;
    machine::wait_until_none(|| machine::unsettled(pid, 0)).await?;
    machine::wait_until_none(|| {
        let open = machine::descriptors(pid);
        (open > 64).then(|| format!("{open} descriptors stay open"))
    })
    .await?;
    machine::wait_until_none(|| {
        let left = confined.left_on_disk();
        (!left.is_empty()).then(|| format!("left on its disk: {left:?}"))
    })
    .await
}

/// Connections that say nothing, as many as are accepted.
async fn crowd(url: &str) -> Vec<TcpStream> {
    let address = url.trim_start_matches("ws://");
    let mut crowd = Vec::new();
    for _ in 0..CROWD {
        crowd.extend(TcpStream::connect(address).await.ok());
    }
    crowd
}
