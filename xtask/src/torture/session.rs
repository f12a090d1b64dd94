//! One client's session: concurrent random programs, followed to their end in a random way.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::{Context, ensure};
use fastrand::Rng;
use serde_json::json;

use super::client::{Client, Disconnect};
use super::script::Script;

/// What faults may change in the recorded events.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Allowed {
    /// A start may be refused, because the warden or the keeper was killed.
    pub refused: bool,
    /// A program may be killed early, with its keeper.
    pub killed: bool,
}

/// A program's output or exit is not what the model says. No fault excuses it.
#[derive(Debug)]
pub(crate) struct WrongOutput;

impl std::fmt::Display for WrongOutput {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("wrong output")
    }
}

/// How a round treats its sessions.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Treatment {
    pub allowed: Allowed,
    /// Every session's connection goes silent once.
    pub silence: bool,
    /// Some programs run in a sandbox.
    pub confine: bool,
}

/// How a client follows its processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FollowMode {
    Pushed,
    Slow,
    Polling,
}

/// Runs programs that carry `token` and checks their recorded events. Leaves their daemons running.
pub(crate) async fn run(
    url: &str,
    token: &str,
    mut rng: Rng,
    treatment: Treatment,
) -> anyhow::Result<()> {
    let mut running = HashMap::new();
    let result = follow(url, token, &mut rng, treatment, &mut running).await;
    result.with_context(|| {
        let texts = running.iter().map(|(id, script)| format!("{id}: {:?}", script.text));
        texts.collect::<Vec<_>>().join("\n")
    })
}

async fn follow(
    url: &str,
    token: &str,
    rng: &mut Rng,
    treatment: Treatment,
    running: &mut HashMap<String, Script>,
) -> anyhow::Result<()> {
    let allowed = treatment.allowed;
    let mut client = Client::connect(url).await?;
    let count = rng.usize(1..6);
    let silence_at = treatment.silence.then(|| rng.usize(..count));
    for n in 0..count {
        let id = format!("p{n}");
        let mut script = Script::random(rng, token);
        script.confined &= treatment.confine;
        if start(&mut client, &id, &script, token, allowed).await? {
            running.insert(id.clone(), script);
            write_input(&mut client, &id, &running[&id], rng, allowed).await?;
        }
        if silence_at == Some(n) {
            client.reconnect(Disconnect::Silence).await?;
        } else if rng.u8(..4) == 0 {
            client.reconnect(random_disconnect(rng)).await?;
        }
    }
    let mode = [FollowMode::Pushed, FollowMode::Slow, FollowMode::Polling][rng.usize(..3)];
    while !running.keys().all(|id| client.is_complete(id)) {
        let ids: Vec<String> = running.keys().cloned().collect();
        for id in &ids {
            let seen = client.seen.entry(id.clone()).or_default();
            // Its streams end with the process it left behind, which terminate kills after the exit too.
            if running[id].held && seen.exit.is_some() && seen.closed.is_none() {
                let response = client.call("process/terminate", json!({"processId": id})).await?;
                ensure!(response["result"]["running"] == false, "{id} has exited: {response}");
                while !client.is_complete(id) {
                    client.read(id, 500, None).await?;
                }
            } else if mode == FollowMode::Polling && !seen.is_complete() {
                let most = rng.bool().then(|| rng.u64(1..200_000));
                client.read(id, rng.u64(..20), most).await?;
            }
        }
        if rng.u8(..12) == 0 {
            client.reconnect(random_disconnect(rng)).await?;
        } else if mode != FollowMode::Polling {
            // The last event may have arrived meanwhile.
            if !ids.iter().all(|id| client.is_complete(id))
                && !ids.iter().any(|id| running[id].held)
            {
                client.listen(rng, mode == FollowMode::Slow).await?;
            } else {
                for id in &ids {
                    client.read(id, 5, None).await?;
                }
            }
        }
    }
    for (id, script) in &*running {
        check_output(&client, id, script, allowed)
            .with_context(|| id.clone())
            .context(WrongOutput)?;
    }
    Ok(())
}

fn random_disconnect(rng: &mut Rng) -> Disconnect {
    match rng.u8(..20) {
        // Rarely, since the server waits seconds for a silent connection.
        0 => Disconnect::Silence,
        1..10 => Disconnect::Close,
        _ => Disconnect::Reset,
    }
}

/// Starts a program. Returns whether it was started.
async fn start(
    client: &mut Client,
    id: &str,
    script: &Script,
    token: &str,
    allowed: Allowed,
) -> anyhow::Result<bool> {
    let mut params = json!({
        "processId": id,
        "argv": ["/bin/sh", "-c", script.text],
        "cwd": "file:///",
        "env": {"PATH": "/usr/bin:/bin", "TORTURE": token},
        "tty": script.tty,
        "pipeStdin": !script.input.is_empty(),
    });
    if script.confined {
        params["sandbox"] = json!({"permissions": {"type": "read-only"}, "cwd": "file:///"});
    }
    let response = client.call("process/start", params).await?;
    if response["result"]["processId"] == id {
        // Its first output may go to a connection that is about to be dropped.
        client.seen.entry(id.to_owned()).or_default();
        return Ok(true);
    }
    ensure!(allowed.refused, "not started: {response}");
    Ok(false)
}

/// Writes its input, some of it twice with the same write id.
async fn write_input(
    client: &mut Client,
    id: &str,
    script: &Script,
    rng: &mut Rng,
    allowed: Allowed,
) -> anyhow::Result<()> {
    for (n, line) in script.input.iter().enumerate() {
        let chunk = base64_simd::STANDARD.encode_to_string(format!("{line}\n"));
        let params = json!({"processId": id, "chunk": chunk, "writeId": format!("w{n}")});
        for _ in 0..rng.usize(1..3) {
            let response = client.call("process/write", params.clone()).await?;
            let status = &response["result"]["status"];
            ensure!(status == "accepted" || allowed.killed, "{id}: not written: {response}");
        }
        if rng.u8(..4) == 0 {
            tokio::time::sleep(Duration::from_millis(rng.u64(..10))).await;
        }
    }
    Ok(())
}

/// Compares the recorded events with the model.
fn check_output(
    client: &Client,
    id: &str,
    script: &Script,
    allowed: Allowed,
) -> anyhow::Result<()> {
    let seen = client.seen.get(id).context("never heard of")?;
    let (_, code) = seen.exit.context("no exit")?;
    if allowed.killed && code == 128 + 9 {
        return Ok(());
    }
    ensure!(code == script.code, "exited with {code}, not {}", script.code);
    let streams = match script.tty {
        true => vec![("pty", &script.stdout)],
        false => vec![("stdout", &script.stdout), ("stderr", &script.stderr)],
    };
    for (name, expected) in streams {
        let got = seen.stream(name);
        let same = got.iter().zip(expected.as_bytes()).take_while(|(a, b)| a == b).count();
        ensure!(
            got == expected.as_bytes(),
            "{name}: {} bytes, not {}; the first {same} are right",
            got.len(),
            expected.len()
        );
    }
    Ok(())
}
