//! Remote mode: the cost of relayed streams and their encryption, through a local relay that only forwards
//! frames and, for information, through a rendezvous.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use codex_exec_client::remote::Secret;
use codex_exec_client::{
    ExecCommand, ExecServerClient, ExecServerClientConnectOptions, ProcessEvent,
    RemoteExecServerConnectArgs,
};
use codex_exec_credentials::SignIn;
use tokio::io::AsyncWriteExt;

use super::placement;
use super::report::{Goal, Report, microseconds, p50};
use super::target::Target;

const ENVIRONMENT: &str = "bench";

/// A relay and an environment that can be reached through it.
struct Cloud {
    relay: Target,
    executor: Target,
    token: String,
    _data: Option<tempfile::TempDir>,
}

impl Cloud {
    /// Behind a relay that only forwards frames.
    async fn behind_forwarder() -> anyhow::Result<Self> {
        Self::start(Target::floor("forwarder")?, "token".to_owned(), None).await
    }

    /// Behind a rendezvous.
    async fn behind_rendezvous() -> anyhow::Result<Self> {
        let data = tempfile::tempdir()?;
        let rendezvous = Target::codex(|codex| {
            codex.args(["rendezvous", "serve", "--listen", "127.0.0.1:0", "--data"]);
            codex.arg(data.path());
        })?;
        let mut create = Command::new(Target::program()?);
        create.args([
            "rendezvous",
            "token",
            "create",
            "--can",
            "register,connect",
            "--environment",
            ENVIRONMENT,
            "--data",
        ]);
        let created = create.arg(data.path()).output()?;
        ensure!(created.status.success(), "{}", String::from_utf8_lossy(&created.stderr));
        let token = String::from_utf8(created.stdout)?.trim().to_owned();
        Self::start(rendezvous, token, Some(data)).await
    }

    async fn start(
        relay: Target,
        token: String,
        data: Option<tempfile::TempDir>,
    ) -> anyhow::Result<Self> {
        let executor = Target::silent(|codex| {
            codex.args(["exec-server", "--remote", &relay.url]);
            codex.args(["--environment-id", ENVIRONMENT]).env("CODEX_API_KEY", &token);
        })?;
        let cloud = Self { relay, executor, token, _data: data };
        // The environment is online once a client can connect.
        let began = Instant::now();
        loop {
            let tried = tokio::time::timeout(Duration::from_secs(1), cloud.connect()).await;
            if let Ok(Ok(_)) = tried {
                return Ok(cloud);
            }
            ensure!(began.elapsed() < Duration::from_secs(20), "{tried:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn connect(&self) -> anyhow::Result<ExecServerClient> {
        let sign_in = SignIn::bearer(Secret::from(self.token.clone()));
        let options = ExecServerClientConnectOptions::default();
        let (url, id) = (&self.relay.url, ENVIRONMENT);
        Ok(ExecServerClient::connect_environment(url, id, sign_in, options).await?)
    }
}

async fn plain(server: &Target) -> anyhow::Result<ExecServerClient> {
    let args = RemoteExecServerConnectArgs::new(server.url.clone(), "bench");
    Ok(ExecServerClient::connect_websocket(args).await?)
}

/// A key through `cat`, by a relay and by a plain websocket, with the same client.
pub(crate) async fn echo(report: &mut Report<'_>, effort: usize) -> anyhow::Result<()> {
    let (bare, whole) = ("relay: keystroke echo, p50", "rendezvous: keystroke echo, p50");
    if !report.wants(bare) && !report.wants(whole) {
        return Ok(());
    }
    let _isolation = placement::isolate_client()?;
    let (relay, rendezvous) = (Cloud::behind_forwarder().await?, Cloud::behind_rendezvous().await?);
    let server = Target::exec_server()?;
    let mut times = Vec::new();
    for client in [plain(&server).await?, relay.connect().await?, rendezvous.connect().await?] {
        times.push(p50(&mut keys(&client, 1000 * effort).await?));
    }
    let floor = times[0];
    for (name, time, goal) in [(bare, times[1], Goal::AtMost(3.0)), (whole, times[2], Goal::None)] {
        let ratio = time.as_secs_f64() / floor.as_secs_f64();
        report.figure(name, &microseconds(time), &microseconds(floor), ratio, goal);
    }
    Ok(())
}

/// The echo times of `count` keystrokes through `cat`.
async fn keys(client: &ExecServerClient, count: usize) -> anyhow::Result<Vec<Duration>> {
    let mut process = client.spawn(ExecCommand::new(["cat"]).pipe_stdin()).await?;
    let mut stdin = process.take_stdin().context("stdin")?;
    let mut samples = Vec::new();
    for _ in 0..count {
        let began = Instant::now();
        stdin.write_all(b"k").await?;
        stdin.flush().await?;
        let event = process.next_event().await;
        ensure!(matches!(event, Some(ProcessEvent::Output { .. })), "{event:?}");
        samples.push(began.elapsed());
    }
    process.terminate().await?;
    Ok(samples)
}

/// Keys on one stream while another of the same server's takes all the output it can get; the same
/// with two plain websockets, which may have a processor each.
pub(crate) async fn echo_beside_a_flood(
    report: &mut Report<'_>,
    effort: usize,
) -> anyhow::Result<()> {
    let name = "rendezvous: keystroke beside a flood, p50";
    if !report.wants(name) {
        return Ok(());
    }
    let (rendezvous, server) = (Cloud::behind_rendezvous().await?, Target::exec_server()?);
    let plain = [plain(&server).await?, plain(&server).await?];
    let relayed = [rendezvous.connect().await?, rendezvous.connect().await?];
    let mut times = Vec::new();
    for [flooded, client] in [plain, relayed] {
        let mut flood = flooded.spawn(ExecCommand::new(["cat", "/dev/zero"])).await?;
        ensure!(flood.next_event().await.is_some(), "no flood");
        let draining = tokio::spawn(async move { while flood.next_event().await.is_some() {} });
        times.push(p50(&mut keys(&client, 300 * effort).await?));
        draining.abort();
    }
    let ratio = times[1].as_secs_f64() / times[0].as_secs_f64();
    report.figure(name, &microseconds(times[1]), &microseconds(times[0]), ratio, Goal::None);
    Ok(())
}

const STREAM_MIB: usize = 64;

/// Output by a relay and by a plain websocket, with the same client.
pub(crate) async fn stream(report: &mut Report<'_>, effort: usize) -> anyhow::Result<()> {
    let bare = "relay: 64 MiB through one pipe";
    let whole = "rendezvous: 64 MiB through one pipe";
    if !report.wants(bare) && !report.wants(whole) {
        return Ok(());
    }
    let (relay, rendezvous) = (Cloud::behind_forwarder().await?, Cloud::behind_rendezvous().await?);
    let server = Target::exec_server()?;
    let clients = [plain(&server).await?, relay.connect().await?, rendezvous.connect().await?];
    let mut times = [Vec::new(), Vec::new(), Vec::new()];
    let blocks = format!("count={}", STREAM_MIB << 4);
    for _ in 0..5 * effort {
        for (client, times) in clients.iter().zip(&mut times) {
            let began = Instant::now();
            let writer = ["dd", "if=/dev/zero", "bs=64k", &blocks, "status=none"];
            let mut process = client.spawn(ExecCommand::new(writer)).await?;
            let mut len = 0;
            while let Some(event) = process.next_event().await {
                if let ProcessEvent::Output { bytes, .. } = event {
                    len += bytes.len();
                }
            }
            ensure!(len == STREAM_MIB << 20, "{len} bytes came");
            times.push(began.elapsed());
        }
    }
    let [floor, relayed, rendezvoused] = times.each_mut().map(|times| p50(times));
    let rate = |time: Duration| format!("{:.0} MiB/s", STREAM_MIB as f64 / time.as_secs_f64());
    for (name, time, goal) in
        [(bare, relayed, Goal::AtLeast(0.5)), (whole, rendezvoused, Goal::None)]
    {
        let ratio = floor.as_secs_f64() / time.as_secs_f64();
        report.figure(name, &rate(time), &rate(floor), ratio, goal);
    }
    Ok(())
}

const STREAMS: u32 = 100;

/// What streams cost the server: the processor's time from a claim to a session, and idle memory.
pub(crate) async fn streams(report: &mut Report<'_>) -> anyhow::Result<()> {
    let (handshake, memory) = ("relay: a handshake and its session", "relay: an idle stream");
    if !report.wants(handshake) && !report.wants(memory) {
        return Ok(());
    }
    let cloud = Cloud::behind_rendezvous().await?;
    // One-time costs of the first connection.
    let _first = cloud.connect().await?;
    let (time, resident) = (cloud.executor.processor_time()?, cloud.executor.resident()?);
    let mut clients = Vec::new();
    for _ in 0..STREAMS {
        clients.push(cloud.connect().await?);
    }
    let time = (cloud.executor.processor_time()? - time) / STREAMS;
    let each = cloud.executor.resident()?.saturating_sub(resident) as f64 / f64::from(STREAMS);
    let (limit, kib) = (Duration::from_millis(2), each / 1024.0);
    let ratio = time.as_secs_f64() / limit.as_secs_f64();
    let goal = Goal::AtMost(1.0);
    report.figure(handshake, &microseconds(time), &microseconds(limit), ratio, goal);
    report.figure(memory, &format!("{kib:.1} KiB"), "40 KiB", kib / 40.0, goal);
    Ok(())
}
