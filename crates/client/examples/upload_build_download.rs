//! Uploads a source tree to a server, builds it there, and downloads the result.
//!
//! ```sh
//! cargo run --example upload_build_download -- \
//!     ws://127.0.0.1:4321 ./project /tmp/project 'make all' build/program ./program
//! ```

use codex_exec_client::{
    ExecCommand, ExecServerClient, PathUri, RemoteExecServerConnectArgs, TransferOptions,
};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [url, source, workspace, build, result, destination] = &arguments[..] else {
        return Err(
            "usage: upload_build_download URL SOURCE WORKSPACE BUILD RESULT DESTINATION".into()
        );
    };
    let args = RemoteExecServerConnectArgs::new(url, "upload_build_download");
    let client = ExecServerClient::connect_websocket(args).await?;
    let workspace: PathUri = workspace.parse()?;
    let progress = TransferOptions::default().on_progress(|at| {
        eprint!("\r{}/{} files, {}/{} bytes ", at.files, at.total_files, at.bytes, at.total_bytes);
    });

    let report = client.files().upload(source, &workspace, &progress).await?;
    eprintln!("\nsent {} files", report.files);
    for skipped in report.skipped {
        eprintln!("skipped {skipped}");
    }

    let output = client.run(ExecCommand::shell(build).cwd_uri(workspace.clone())).await?;
    eprint!("{}", String::from_utf8_lossy(&output.stdout));
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    if !output.status.success() {
        return Err(format!("the build failed with code {}", output.status.code).into());
    }

    client.files().download(&workspace.join(result)?, destination, &progress).await?;
    eprintln!("\nbuilt {destination}");
    Ok(())
}
