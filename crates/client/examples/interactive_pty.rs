//! Types into a program that runs in a terminal on a server, and watches its screen.
//!
//! ```sh
//! cargo run --example interactive_pty -- ws://127.0.0.1:4321
//! ```
//!
//! It reads lines, so it needs no raw mode; a real terminal client forwards every key.

use codex_exec_client::{
    ConnectionStatus, ExecCommand, ExecServerClient, RemoteExecServerConnectArgs,
};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).ok_or("usage: interactive_pty URL")?;
    let args = RemoteExecServerConnectArgs::new(url, "interactive_pty");
    let client = ExecServerClient::connect_websocket(args).await?;

    // Print when the connection drops; the shell is not affected.
    let mut status = client.status();
    tokio::spawn(async move {
        while status.changed().await.is_ok() {
            if let ConnectionStatus::Reconnecting { attempt, reason } = &*status.borrow_and_update()
            {
                eprintln!("[connection lost: {reason}; attempt {attempt}]");
            }
        }
    });

    let shell = match client.info().shell.path.as_str() {
        "" => "/bin/sh".to_owned(),
        path => path.to_owned(),
    };
    let command = ExecCommand::new([shell]).size(24, 80).env("TERM", "dumb").terminate_on_drop();
    let mut process = client.spawn(command).await?;
    let mut screen = process.take_stdout().ok_or("stdout can be taken once")?;
    let mut keyboard = process.take_stdin().ok_or("a terminal has an input")?;

    let watching =
        tokio::spawn(async move { tokio::io::copy(&mut screen, &mut tokio::io::stdout()).await });
    let typing = tokio::spawn(async move {
        let mut lines = BufReader::new(tokio::io::stdin()).lines();
        while let Some(line) = lines.next_line().await? {
            keyboard.write_all(format!("{line}\n").as_bytes()).await?;
        }
        // At the end of the local input, sends Ctrl-D.
        keyboard.shutdown().await
    });

    let exit = process.wait().await?;
    watching.await??;
    typing.abort();
    eprintln!("[exit code {}]", exit.code);
    // Does not return: a thread still waits for a line, and would keep the program running.
    std::process::exit(exit.code)
}
