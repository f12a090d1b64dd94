//! `codex apply-patch` on files with several names, judged from the disk.

use std::path::Path;
use std::process::Stdio;

use anyhow::Context;
use fastrand::Rng;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use super::patch_model::Case;

/// Applies random patches to random trees.
pub(crate) async fn run(codex: &Path, url: &str, mut rng: Rng) -> anyhow::Result<()> {
    for _ in 0..rng.usize(2..7) {
        let case = Case::random(rng.u64(..));
        let mut child = Command::new(codex)
            .args(["apply-patch", "--on", url, "-C"])
            .arg(case.root())
            .env_remove("CODEX_EXEC_SERVER_URL")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let mut stdin = child.stdin.take().context("no stdin")?;
        stdin.write_all(case.patch().as_bytes()).await?;
        drop(stdin);
        let output = child.wait_with_output().await?;
        let detail = format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
        case.judge(output.status.success(), &detail).map_err(anyhow::Error::msg)?;
    }
    Ok(())
}
