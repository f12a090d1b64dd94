//! Copies of files and trees within the server.
//!
//! Invariant: a copy copies, skips and reports the same as an upload or a download of the same tree. With
//! the capability `fsAtomicCopy` a file appears under its name only when it is complete.

use std::path::{Path, PathBuf};

use codex_exec_server_protocol::files::*;
use codex_exec_server_protocol::{PathUri, call};

use super::transfer::{Counters, tolerate_file_error};
use super::{Files, TransferOptions, TransferReport, local};
use crate::error::ExecServerError;

impl Files {
    /// Copies a file or a tree on the server to `destination`, which becomes that file or directory.
    /// Unlike [`copy`](Self::copy), it follows links to files, replaces an existing file atomically (with
    /// the capability `fsAtomicCopy`), and continues with the rest of a tree if a part of it cannot be
    /// copied.
    pub async fn copy_within(
        &self,
        source: &PathUri,
        destination: &PathUri,
        options: &TransferOptions,
    ) -> Result<TransferReport, ExecServerError> {
        let metadata = self.metadata(source).await?;
        if !metadata.is_directory {
            let counters = Counters::new(options, 1, 0);
            self.copy_file(source, destination, &counters).await?;
            return Ok(counters.report());
        }
        options.check_directory(&local::display(source))?;
        self.refuse_into_itself(source, destination).await?;
        // The scan completes before anything is created, so that it does not see the copy.
        let mut tree = self.scan_tree(source, Path::new(""), options).await?;
        let counters = Counters::new(options, tree.files.len() as u64, 0);
        let deferred_modes =
            self.make_directories(destination, &tree.directories, &mut tree.failed).await?;
        let copy = |(from, to): (PathUri, PathBuf)| {
            let counters = &counters;
            async move {
                let to = local::below(destination, &to)?;
                let message = tolerate_file_error(self.copy_file(&from, &to, counters).await)?;
                // The server's message names the target of a link.
                let shown = local::display(&from);
                Ok(message.map(|message| format!("{shown}: {message}")))
            }
        };
        tree.failed.extend(counters.transfer_each(tree.files, copy).await?);
        self.set_deferred_modes(deferred_modes, &mut tree.failed).await?;
        Ok(counters.report_tree(tree.directories.len(), tree.skipped, tree.failed))
    }

    async fn copy_file(
        &self,
        from: &PathUri,
        to: &PathUri,
        counters: &Counters,
    ) -> Result<(), ExecServerError> {
        let metadata = self.metadata(from).await?;
        counters.expect(metadata.size);
        // The server would copy a link as a link.
        let from = match metadata.is_symlink {
            true => self.canonicalize(from).await?,
            false => from.clone(),
        };
        let mut params = FsCopyParams::new(from, to.clone(), false);
        params.atomic = self.client.capabilities().fs_atomic_copy;
        self.call::<call::FsCopy>(params).await?;
        counters.add(to, metadata.size);
        counters.file_done(to);
        Ok(())
    }

    /// Compares the resolved paths of the source and of the destination, or of its nearest existing parent.
    async fn refuse_into_itself(
        &self,
        source: &PathUri,
        destination: &PathUri,
    ) -> Result<(), ExecServerError> {
        let inner = self.canonicalize(source).await?;
        let mut at = destination.clone();
        let real = loop {
            match self.canonicalize(&at).await {
                Err(error) if error.is_not_found() => {}
                real => break real?,
            }
            match at.join("..") {
                Ok(above) if above != at => at = above,
                _ => return Ok(()),
            }
        };
        let below = real.as_bytes().strip_prefix(inner.as_bytes());
        let is_root = inner.as_bytes() == b"/";
        if below.is_some_and(|tail| is_root || tail.is_empty() || tail.starts_with(b"/")) {
            return Err(ExecServerError::Invalid(format!(
                "cannot copy {} into itself, to {}",
                local::display(source),
                local::display(destination)
            )));
        }
        Ok(())
    }
}
