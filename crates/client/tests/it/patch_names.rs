//! Patches of files that have several names do what the system calls would.

use codex_exec_client::{ExecServerClient, Patch, PatchError, PathUri};

use crate::embedded::embedded;
use crate::patch_model::Case;

async fn case(client: &ExecServerClient, seed: u64) -> bool {
    let case = Case::random(seed);
    let patch = Patch::parse(&case.patch()).unwrap();
    let cwd = PathUri::try_from(case.root()).unwrap();
    let applied = client.files().apply_patch(&patch, &cwd).await;
    case.judge(applied.is_ok(), &format!("{applied:?}")).unwrap();
    assert!(!matches!(applied, Err(PatchError::Partial { .. })), "seed {seed}: {applied:?}");
    applied.is_ok()
}

#[tokio::test]
async fn patches_of_files_with_several_names_match_the_system_calls() {
    let (server, client) = embedded().await;
    let mut fit = 0;
    for seed in 0..600 {
        fit += usize::from(case(&client, seed).await);
    }
    assert!(fit > 150, "{fit} patches fit");
    server.shut_down().await;
}
