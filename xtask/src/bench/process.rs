//! Processes: start latency, keystroke echo and output throughput.

use std::process::Command;
use std::time::{Duration, Instant};

use super::client::{Client, start};
use super::placement;
use super::report::{Goal, Report, microseconds, p50};
use super::target::Target;

/// start → closed of `/bin/true`, against a bare spawn and wait.
pub(crate) async fn start_to_closed(report: &mut Report<'_>, effort: usize) -> anyhow::Result<()> {
    let name = "start→closed of /bin/true, p50";
    if !report.wants(name) {
        return Ok(());
    }
    let server = Target::exec_server()?;
    let mut client = Client::initialize(&server.url).await?;
    let (mut measured, mut floor) = (Vec::new(), Vec::new());
    for n in 0..400 * effort {
        let began = Instant::now();
        client.send(start(&n.to_string(), &["/bin/true"], "")).await?;
        client.until("process/closed").await?;
        measured.push(began.elapsed());
        let began = Instant::now();
        Command::new("/bin/true").env_clear().status()?;
        floor.push(began.elapsed());
    }
    let (measured, floor) = (p50(&mut measured), p50(&mut floor));
    let ratio = measured.as_secs_f64() / floor.as_secs_f64();
    report.figure(name, &microseconds(measured), &microseconds(floor), ratio, Goal::AtMost(1.6));
    Ok(())
}

/// process/write → process/output through `cat`, against a bare websocket echo.
pub(crate) async fn keystroke_echo(report: &mut Report<'_>, effort: usize) -> anyhow::Result<()> {
    let name = "keystroke echo through cat, p50";
    if !report.wants(name) {
        return Ok(());
    }
    let _isolation = placement::isolate_client()?;
    let server = Target::exec_server()?;
    let echo = Target::floor("echo")?;
    let mut client = Client::initialize(&server.url).await?;
    let mut bare = Client::connect(&echo.url).await?;
    client.send(start("cat", &["cat"], r#","pipeStdin":true"#)).await?;
    client.until("\"result\"").await?;
    let (mut measured, mut floor) = (Vec::new(), Vec::new());
    for n in 0..2000 * effort {
        let write = format!(
            r#"{{"id":2,"method":"process/write","params":{{"processId":"cat","chunk":"aw==","writeId":"{n}"}}}}"#
        );
        let began = Instant::now();
        client.send(write.clone()).await?;
        client.until("process/output").await?;
        measured.push(began.elapsed());
        let began = Instant::now();
        bare.send(write).await?;
        bare.next().await?;
        floor.push(began.elapsed());
    }
    let (measured, floor) = (p50(&mut measured), p50(&mut floor));
    let ratio = measured.as_secs_f64() / floor.as_secs_f64();
    report.figure(name, &microseconds(measured), &microseconds(floor), ratio, Goal::AtMost(3.0));
    Ok(())
}

const STREAM_MIB: usize = 256;

/// 256 MiB from a pipe, against the same bytes as ready-made messages.
pub(crate) async fn stream(report: &mut Report<'_>, effort: usize) -> anyhow::Result<()> {
    let name = "256 MiB through one pipe";
    if !report.wants(name) {
        return Ok(());
    }
    let server = Target::exec_server()?;
    let ready_made = Target::floor("ready-made")?;
    let mut client = Client::initialize(&server.url).await?;
    let mut bare = Client::connect(&ready_made.url).await?;
    // A cheap writer, since it shares the machine with the server.
    let blocks = format!("count={}", STREAM_MIB << 4);
    let writer = ["dd", "if=/dev/zero", "bs=64k", &blocks, "status=none"];
    let (mut measured, mut floor) = (Vec::new(), Vec::new());
    for n in 0..5 * effort {
        let began = Instant::now();
        client.send(start(&n.to_string(), &writer, "")).await?;
        let (mut messages, mut bytes) = (0, 0);
        loop {
            let message = client.next().await?;
            if message.starts_with(br#"{"method":"process/closed""#) {
                break;
            }
            messages += 1;
            bytes += message.len();
        }
        measured.push(began.elapsed());
        bare.send(format!("{messages} {}", bytes / messages)).await?;
        bare.next().await?;
        let began = Instant::now();
        bare.send("go").await?;
        for _ in 0..messages {
            bare.next().await?;
        }
        floor.push(began.elapsed());
    }
    let (measured, floor) = (p50(&mut measured), p50(&mut floor));
    let rate = |time: Duration| format!("{:.0} MiB/s", STREAM_MIB as f64 / time.as_secs_f64());
    let ratio = floor.as_secs_f64() / measured.as_secs_f64();
    report.figure(name, &rate(measured), &rate(floor), ratio, Goal::AtLeast(0.5));
    Ok(())
}
