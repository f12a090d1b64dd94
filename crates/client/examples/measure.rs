//! Measures a stream and a short command: the floor that clients in other languages are compared with.
//!
//! ```sh
//! cargo run --release --example measure -- ws://127.0.0.1:4321 268435456 200
//! ```
//!
//! Prints bytes per second of a stream of so many bytes, and the seconds of each of so many commands.

use std::io::Write;
use std::time::Instant;

use codex_exec_client::{
    ExecCommand, ExecServerClient, ExecServerError, ProcessEvent, RemoteExecServerConnectArgs,
};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [url, bytes, commands] = &arguments[..] else {
        return Err("usage: measure URL BYTES COMMANDS".into());
    };
    let (bytes, commands): (u64, usize) = (bytes.parse()?, commands.parse()?);
    let args = RemoteExecServerConnectArgs::new(url, "measure");
    let client = ExecServerClient::connect_websocket(args).await?;

    let begun = Instant::now();
    let received = stream(&client, bytes).await?;
    let seconds = begun.elapsed().as_secs_f64();
    if received != bytes {
        return Err(format!("the stream had {received} bytes instead of {bytes}").into());
    }
    let mut out = std::io::stdout();
    writeln!(out, "{}", received as f64 / seconds)?;
    for _ in 0..commands {
        let begun = Instant::now();
        client.run(ExecCommand::new(["true"])).await?;
        writeln!(out, "{}", begun.elapsed().as_secs_f64())?;
    }
    Ok(())
}

async fn stream(client: &ExecServerClient, bytes: u64) -> Result<u64, ExecServerError> {
    let command = ExecCommand::new(["head", "-c", &bytes.to_string(), "/dev/zero"]);
    let mut process = client.spawn(command.terminate_on_drop()).await?;
    let mut received = 0;
    while let Some(event) = process.next_event().await {
        match event {
            ProcessEvent::Output { bytes, .. } => received += bytes.len() as u64,
            ProcessEvent::Failed(error) => return Err(error),
            ProcessEvent::Lost(_) | ProcessEvent::Exited(_) | ProcessEvent::Closed => {}
        }
    }
    Ok(received)
}
