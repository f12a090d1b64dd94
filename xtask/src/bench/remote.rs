//! Remote mode: what the relay and its encryption add, through a rendezvous on this machine.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use codex_exec_client::remote::{Secret, SignIn};
use codex_exec_client::{
    ExecCommand, ExecServerClient, ExecServerClientConnectOptions, ProcessEvent,
    RemoteExecServerConnectArgs,
};
use tokio::io::AsyncWriteExt;

use super::placement;
use super::report::{Goal, Report, microseconds, p50};
use super::target::Target;

const ENVIRONMENT: &str = "bench";

/// A rendezvous and an environment that can be reached through it.
struct Cloud {
    _data: tempfile::TempDir,
    rendezvous: Target,
    executor: Target,
    token: String,
}

impl Cloud {
    async fn start() -> anyhow::Result<Self> {
        let data = tempfile::tempdir()?;
        let rendezvous = Target::codex(|codex| {
            codex.args(["rendezvous", "serve", "--listen", "127.0.0.1:0", "--data"]);
            codex.arg(data.path());
        })?;
        let mut create = Command::new(Target::program()?);
        create.args(["rendezvous", "token", "create", "--environment", ENVIRONMENT, "--data"]);
        let created = create.arg(data.path()).output()?;
        ensure!(created.status.success(), "{}", String::from_utf8_lossy(&created.stderr));
        let token = String::from_utf8(created.stdout)?.trim().to_owned();
        let executor = Target::silent(|codex| {
            codex.args(["exec-server", "--remote", &rendezvous.url]);
            codex.args(["--environment-id", ENVIRONMENT]).env("CODEX_API_KEY", &token);
        })?;
        let cloud = Self { _data: data, rendezvous, executor, token };
        // It is there once it can be talked to.
        let began = Instant::now();
        while let Err(error) = cloud.connect().await {
            ensure!(began.elapsed() < Duration::from_secs(20), "{error}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(cloud)
    }

    async fn connect(&self) -> anyhow::Result<ExecServerClient> {
        let sign_in = SignIn::bearer(Secret::from(self.token.clone()));
        let options = ExecServerClientConnectOptions::default();
        let (url, id) = (&self.rendezvous.url, ENVIRONMENT);
        Ok(ExecServerClient::connect_environment(url, id, sign_in, options).await?)
    }
}

async fn plain(server: &Target) -> anyhow::Result<ExecServerClient> {
    let args = RemoteExecServerConnectArgs::new(server.url.clone(), "bench");
    Ok(ExecServerClient::connect_websocket(args).await?)
}

/// A key through `cat`, by the relay and by a plain websocket, with the same client.
pub async fn echo(report: &mut Report<'_>, effort: usize) -> anyhow::Result<()> {
    let name = "relay: keystroke echo, p50";
    if !report.wants(name) {
        return Ok(());
    }
    let _apart = placement::apart()?;
    let (cloud, server) = (Cloud::start().await?, Target::exec_server()?);
    let mut times = Vec::new();
    for client in [cloud.connect().await?, plain(&server).await?] {
        let mut process = client.spawn(ExecCommand::new(["cat"]).pipe_stdin()).await?;
        let mut stdin = process.take_stdin().context("stdin")?;
        let mut samples = Vec::new();
        for _ in 0..1000 * effort {
            let began = Instant::now();
            stdin.write_all(b"k").await?;
            stdin.flush().await?;
            let event = process.next_event().await;
            ensure!(matches!(event, Some(ProcessEvent::Output { .. })), "{event:?}");
            samples.push(began.elapsed());
        }
        process.terminate().await?;
        times.push(p50(&mut samples));
    }
    let (measured, floor) = (times[0], times[1]);
    let ratio = measured.as_secs_f64() / floor.as_secs_f64();
    report.figure(name, &microseconds(measured), &microseconds(floor), ratio, Goal::AtMost(3.0));
    Ok(())
}

const STREAM_MIB: usize = 64;

/// Output by the relay and by a plain websocket, with the same client.
pub async fn stream(report: &mut Report<'_>, effort: usize) -> anyhow::Result<()> {
    let name = "relay: 64 MiB through one pipe";
    if !report.wants(name) {
        return Ok(());
    }
    let (cloud, server) = (Cloud::start().await?, Target::exec_server()?);
    let clients = [cloud.connect().await?, plain(&server).await?];
    let mut times = [Vec::new(), Vec::new()];
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
    let [measured, floor] = times.each_mut().map(|times| p50(times));
    let rate = |time: Duration| format!("{:.0} MiB/s", STREAM_MIB as f64 / time.as_secs_f64());
    let ratio = floor.as_secs_f64() / measured.as_secs_f64();
    report.figure(name, &rate(measured), &rate(floor), ratio, Goal::AtLeast(0.5));
    Ok(())
}

const STREAMS: u32 = 50;

/// What streams cost the server: the processor's time from a claim to a session, and idle memory.
pub async fn streams(report: &mut Report<'_>) -> anyhow::Result<()> {
    let (handshake, memory) = ("relay: a handshake and its session", "relay: an idle stream");
    if !report.wants(handshake) && !report.wants(memory) {
        return Ok(());
    }
    let cloud = Cloud::start().await?;
    // Whatever only the first one costs.
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
