//! Files: small requests, whole files, streamed blocks, walks.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

use super::client::Client;
use super::placement;
use super::report::{Goal, Report, microseconds, p50};
use super::target::Target;

fn request(method: &str, params: &serde_json::Value) -> String {
    serde_json::json!({ "id": 1, "method": method, "params": params }).to_string()
}

fn uri(path: &Path) -> String {
    format!("file://{}", path.display())
}

/// `fs/getMetadata` and `fs/readFile` of 1 KiB, against a bare websocket that answers as much.
pub(crate) async fn small(report: &mut Report<'_>, effort: usize) -> anyhow::Result<()> {
    for (name, method) in
        [("fs/getMetadata, p50", "fs/getMetadata"), ("fs/readFile of 1 KiB, p50", "fs/readFile")]
    {
        if !report.wants(name) {
            continue;
        }
        let _isolation = placement::isolate_client()?;
        let directory = tempfile::tempdir()?;
        let file = directory.path().join("file");
        std::fs::write(&file, [b'x'; 1024])?;
        let (server, echo) = (Target::exec_server()?, Target::floor("echo")?);
        let mut client = Client::initialize(&server.url).await?;
        let mut bare = Client::connect(&echo.url).await?;
        let request_text = request(method, &serde_json::json!({ "path": uri(&file) }));
        client.send(request_text.clone()).await?;
        let response = client.until("\"result\"").await?;
        let plain = format!("{:<1$}", response.len(), request_text.len());
        let (mut measured, mut floor) = (Vec::new(), Vec::new());
        for _ in 0..3000 * effort {
            let began = Instant::now();
            client.send(request_text.clone()).await?;
            client.next().await?;
            measured.push(began.elapsed());
            let began = Instant::now();
            bare.send(plain.clone()).await?;
            bare.next().await?;
            floor.push(began.elapsed());
        }
        let (measured, floor) = (p50(&mut measured), p50(&mut floor));
        let ratio = measured.as_secs_f64() / floor.as_secs_f64();
        let (measured, floor) = (microseconds(measured), microseconds(floor));
        report.figure(name, &measured, &floor, ratio, Goal::AtMost(2.0));
    }
    Ok(())
}

const LARGE_MIB: usize = 32;

/// `fs/readFile` of 32 MiB, against the same message ready-made; and the memory it takes.
pub(crate) async fn large(report: &mut Report<'_>, effort: usize) -> anyhow::Result<()> {
    let (speed, memory) = ("fs/readFile of 32 MiB", "its peak memory, of the message");
    if !report.wants(speed) && !report.wants(memory) {
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("file");
    std::fs::write(&file, vec![b'x'; LARGE_MIB << 20])?;
    let (server, ready_made) = (Target::exec_server()?, Target::floor("ready-made")?);
    let mut client = Client::initialize(&server.url).await?;
    let mut bare = Client::connect(&ready_made.url).await?;
    let request_text = request("fs/readFile", &serde_json::json!({ "path": uri(&file) }));
    let before = server.most_resident()?;
    let (mut measured, mut floor) = (Vec::new(), Vec::new());
    let mut len = 0;
    for _ in 0..7 * effort {
        let began = Instant::now();
        client.send(request_text.clone()).await?;
        len = client.until("\"result\"").await?.len();
        measured.push(began.elapsed());
        bare.send(format!("1 {len}")).await?;
        bare.next().await?;
        let began = Instant::now();
        bare.send("go").await?;
        bare.next().await?;
        floor.push(began.elapsed());
    }
    let grown = server.most_resident()?.saturating_sub(before);
    let (measured, floor) = (p50(&mut measured), p50(&mut floor));
    let ratio = floor.as_secs_f64() / measured.as_secs_f64();
    report.figure(
        speed,
        &rate(LARGE_MIB, measured),
        &rate(LARGE_MIB, floor),
        ratio,
        Goal::AtLeast(0.5),
    );
    let ratio = grown as f64 / len as f64;
    let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
    report.figure(memory, &mib(grown), &mib(len as u64), ratio, Goal::AtMost(2.5));
    Ok(())
}

const BLOCKS: usize = 256;
const IN_FLIGHT: usize = 4;

/// `fs/readBlock` of 1 MiB each with four in flight, against the same messages ready-made.
pub(crate) async fn blocks(report: &mut Report<'_>, effort: usize) -> anyhow::Result<()> {
    let name = "fs/readBlock, four in flight";
    if !report.wants(name) {
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("file");
    std::fs::write(&file, vec![b'x'; BLOCKS << 20])?;
    let (server, ready_made) = (Target::exec_server()?, Target::floor("ready-made")?);
    let mut client = Client::initialize(&server.url).await?;
    let mut bare = Client::connect(&ready_made.url).await?;
    let open = serde_json::json!({ "handleId": "h", "path": uri(&file), "mode": "read" });
    client.send(request("fs/open", &open)).await?;
    client.until("\"result\"").await?;
    let block = |n: usize| {
        let params = serde_json::json!({ "handleId": "h", "offset": n << 20, "len": 1 << 20 });
        request("fs/readBlock", &params)
    };
    let (mut measured, mut floor) = (Vec::new(), Vec::new());
    for _ in 0..5 * effort {
        let began = Instant::now();
        for n in 0..IN_FLIGHT {
            client.send(block(n)).await?;
        }
        let mut len = 0;
        for n in IN_FLIGHT..BLOCKS + IN_FLIGHT {
            len = client.until("\"result\"").await?.len();
            if n < BLOCKS {
                client.send(block(n)).await?;
            }
        }
        measured.push(began.elapsed());
        bare.send(format!("{BLOCKS} {len}")).await?;
        bare.next().await?;
        let began = Instant::now();
        bare.send("go").await?;
        for _ in 0..BLOCKS {
            bare.next().await?;
        }
        floor.push(began.elapsed());
    }
    let (measured, floor) = (p50(&mut measured), p50(&mut floor));
    let ratio = floor.as_secs_f64() / measured.as_secs_f64();
    let (measured, floor) = (rate(BLOCKS, measured), rate(BLOCKS, floor));
    report.figure(name, &measured, &floor, ratio, Goal::AtLeast(0.6));
    Ok(())
}

const DIRECTORIES: usize = 500;
const FILES_EACH: usize = 99;

/// `fs/walk` of 50,000 entries, against a bare walk that looks at each.
pub(crate) async fn walk(report: &mut Report<'_>, effort: usize) -> anyhow::Result<()> {
    let name = "fs/walk of 50,000 entries";
    if !report.wants(name) {
        return Ok(());
    }
    let root = tempfile::tempdir()?;
    for directory in 0..DIRECTORIES {
        let directory = root.path().join(format!("{directory:03}"));
        std::fs::create_dir(&directory)?;
        for file in 0..FILES_EACH {
            std::fs::write(directory.join(file.to_string()), "")?;
        }
    }
    let server = Target::exec_server()?;
    let mut client = Client::initialize(&server.url).await?;
    let options = serde_json::json!({
        "maxDepth": 64, "maxDirectories": 10_000, "maxEntries": 50_000,
        "followDirectorySymlinks": false,
    });
    let params = serde_json::json!({ "path": uri(root.path()), "options": options });
    let request_text = request("fs/walk", &params);
    let (mut measured, mut floor) = (Vec::new(), Vec::new());
    for _ in 0..7 * effort {
        let began = Instant::now();
        client.send(request_text.clone()).await?;
        let response = client.until("\"result\"").await?;
        measured.push(began.elapsed());
        let tail = response.get(response.len().saturating_sub(40)..).context("an answer")?;
        ensure!(
            String::from_utf8_lossy(tail).contains("\"truncated\":false"),
            "not all was walked"
        );
        let began = Instant::now();
        ensure!(bare_walk(root.path())? == DIRECTORIES * (FILES_EACH + 1), "another tree");
        floor.push(began.elapsed());
    }
    let (measured, floor) = (p50(&mut measured), p50(&mut floor));
    let ratio = measured.as_secs_f64() / floor.as_secs_f64();
    let ms = |time: Duration| format!("{:.1} ms", time.as_secs_f64() * 1e3);
    report.figure(name, &ms(measured), &ms(floor), ratio, Goal::AtMost(1.5));
    Ok(())
}

fn bare_walk(root: &Path) -> anyhow::Result<usize> {
    let (mut count, mut left) = (0, vec![root.to_owned()]);
    while let Some(directory) = left.pop() {
        for entry in std::fs::read_dir(directory)? {
            let path = entry?.path();
            count += 1;
            if std::fs::symlink_metadata(&path)?.is_dir() {
                left.push(path);
            }
        }
    }
    Ok(count)
}

fn rate(mib: usize, time: Duration) -> String {
    format!("{:.0} MiB/s", mib as f64 / time.as_secs_f64())
}
