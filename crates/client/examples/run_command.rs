//! Runs a command on a server and prints its output as it arrives.
//!
//! ```sh
//! cargo run --example run_command -- ws://127.0.0.1:4321 ls -l /
//! ```

use std::io::Write;
use std::process::ExitCode;

use codex_exec_client::{
    ExecCommand, ExecServerClient, ExecServerError, OutputStream, ProcessEvent,
    RemoteExecServerConnectArgs,
};

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let (Some(url), argv) = (arguments.next(), arguments.collect::<Vec<_>>()) else {
        eprintln!("usage: run_command URL PROGRAM [ARGUMENT…]");
        return ExitCode::from(2);
    };
    match run(url, argv).await {
        Ok(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(url: String, argv: Vec<String>) -> Result<i32, ExecServerError> {
    let args = RemoteExecServerConnectArgs::new(url, "run_command");
    let client = ExecServerClient::connect_websocket(args).await?;
    let mut process = client.spawn(ExecCommand::new(argv).terminate_on_drop()).await?;
    // A dropped connection does not show here: the client reconnects and loses nothing.
    while let Some(event) = process.next_event().await {
        match event {
            ProcessEvent::Output { stream: OutputStream::Stderr, bytes } => {
                let _ = std::io::stderr().write_all(&bytes);
            }
            ProcessEvent::Output { bytes, .. } => {
                let _ = std::io::stdout().write_all(&bytes);
            }
            ProcessEvent::Lost(lost) => eprintln!("{lost}"),
            ProcessEvent::Failed(error) => return Err(error),
            ProcessEvent::Exited(_) | ProcessEvent::Closed => {}
        }
    }
    Ok(process.wait().await?.code)
}
