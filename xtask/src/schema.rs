//! Writes the schema documents. The test that checks them also writes them, so the two cannot differ.

use anyhow::ensure;

use crate::codex;

/// The package and the test that has the documents.
const TEST: [&str; 6] = [
    "test",
    "--package=codex-exec-server-protocol",
    "--test=it",
    "--locked",
    "--quiet",
    "schema::stored_schema_and_openrpc_document_are_fresh",
];

pub(crate) fn run() -> anyhow::Result<()> {
    let status = codex::cargo().args(TEST).env("UPDATE_SNAPSHOTS", "1").status()?;
    ensure!(status.success(), "cargo test failed");
    Ok(())
}
