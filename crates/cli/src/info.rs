//! `codex info`: shows what the server is and can do.

use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use codex_exec_server::{EnvironmentInfo, ExecServerClient};
use codex_linux_sandbox::Assurance;

use crate::on::{ConnectOptions, OnArgs, block_on};
use crate::remote_path::display;
use crate::style::{Style, printable};

/// Show what the server is and can do
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex info                                 this machine
  codex info --on ws://127.0.0.1:4500        a server
  codex info --json | jq .capabilities       for programs")]
pub(crate) struct InfoArgs {
    #[command(flatten)]
    on: OnArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &InfoArgs) -> anyhow::Result<ExitCode> {
    block_on(async {
        let connected =
            args.on.connect(ConnectOptions { sandbox: true, ..ConnectOptions::default() }).await?;
        let info = connected.client.info();
        let text = if args.json {
            format!("{}\n", crate::json_text::pretty(&*info)?)
        } else {
            describe(&args.on.display(), &connected.client, &info)
        };
        std::io::stdout().write_all(text.as_bytes())?;
        connected.close().await;
        Ok(ExitCode::SUCCESS)
    })
}

fn describe(server: &str, client: &ExecServerClient, info: &EnvironmentInfo) -> String {
    let style = Style::stdout();
    let mut out = String::new();
    let mut row = |name: &str, value: &str| {
        let value = if value.is_empty() { "(unknown)" } else { value };
        out.push_str(&format!("{}  {value}\n", style.bold(&format!("{name:<18}"))));
    };
    row("server", &printable(server));
    row("version", &printable(&info.executor_version));
    row("system", &printable(&info.platform_os));
    row("working directory", &info.cwd.as_ref().map(display).unwrap_or_default());
    row("home", &info.user_home_dir.as_ref().map(display).unwrap_or_default());
    row("temporary files", &info.temp_dir.as_ref().map(display).unwrap_or_default());
    row("shell", &printable(&info.shell.path));
    let assurance = info.sandbox_assurance.map_or("none", Assurance::as_str);
    row("sandbox assurance", if info.capabilities.sandbox_assurance { assurance } else { "" });
    row("session", &printable(&client.session_id().unwrap_or_default()));
    out.push('\n');
    out.push_str(&format!("{}\n", style.bold("capabilities")));
    for (name, has) in info.capabilities.list() {
        let about = about(name);
        if about.is_empty() {
            continue;
        }
        let mark = if has { style.green("yes") } else { style.dim("no ") };
        out.push_str(&format!("  {mark}  {about}\n"));
    }
    out
}

/// A capability in terms of the command line; empty if the command line does not use it.
fn about(name: &str) -> &'static str {
    match name {
        "sandboxed_file_streaming" => "stream large files under a sandbox",
        "file_write_streaming" => "receive large files in blocks (cp)",
        "process_resize" => "resize terminals (shell, run -t)",
        "process_list" => "list processes (ps)",
        "process_signals" => "send every signal (kill --signal, Ctrl-\\)",
        "process_close_stdin" => "close a command's input (run < FILE)",
        "process_retain" => "keep as much output as requested (run --detach)",
        "process_retain_until_read" => "keep output until the client has received it",
        "process_limits" => "limit what a command uses (run --memory, --pids, --timeout …)",
        "session_sharing" => "share sessions among clients (attach, ps)",
        "process_screen" => "repaint terminals (attach)",
        "session_detach_ttl" => "keep sessions as long as requested (run --detach)",
        "fs_search" => "search files (search)",
        "fs_glob" => "find files by name",
        "fs_watch" => "watch files",
        "fs_rename_link_mode" => "rename, link and set permissions (cp keeps those of directories)",
        "fs_keep_handles" => "continue an upload after a lost connection (cp)",
        "fs_remove_preserve" => "refuse to remove the root, homes and mount points (rm)",
        "fs_atomic_write" => "replace files atomically, with their permissions (cp, apply-patch)",
        "fs_atomic_copy" => "replace files atomically when it copies its own (cp)",
        _ => "",
    }
}
