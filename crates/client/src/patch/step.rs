//! One change of one file, and its rollback.
//!
//! Invariant: a step that fails with nothing `uncertain` has left everything as it was. A step replaces a
//! file atomically if the server can. Otherwise, and if the file has other names that must see the change,
//! it writes in place and restores the old content on failure. A step is repeated after each lost
//! connection.

use bytes::Bytes;
use codex_exec_server_protocol::PathUri;
use codex_exec_server_protocol::error as code;
use codex_exec_server_protocol::files::{FsGetMetadataParams, FsRemoveParams, FsRenameParams};
use codex_exec_server_protocol::{Call, ErrorKind, call};

use super::{PatchChange, PatchChangeKind};
use crate::error::ExecServerError;
use crate::files::Files;

pub(super) struct Step {
    pub change: PatchChange,
    pub path: PathUri,
    pub work: Work,
}

pub(super) enum Work {
    Write {
        content: Vec<u8>,
        /// The content before the step.
        old: Option<Vec<u8>>,
        /// Permission bits of a new file.
        mode: Option<u32>,
        atomic: bool,
        /// Whether to check first that the file still contains `old`.
        verify_first: bool,
    },
    /// Copies another file, to keep its permissions, and writes this content.
    CopyAndWrite {
        from: PathUri,
        /// The other file's content.
        old: Vec<u8>,
        content: Vec<u8>,
    },
    /// Renames the file, and replaces what has the new name.
    Rename {
        to: PathUri,
    },
    Remove,
}

/// A failed step.
pub(super) struct StepError {
    pub cause: ExecServerError,
    /// The state of the file, if it may have changed.
    pub uncertain: Option<String>,
}

/// The progress of a step.
#[derive(Default)]
struct StepProgress {
    /// Directories that the step creates, innermost first.
    directories: Vec<PathUri>,
    /// The file may be written in part.
    file: bool,
}

impl Step {
    pub(super) async fn execute(&self, files: &Files) -> Result<(), StepError> {
        let mut started = StepProgress::default();
        let Err(cause) = self.attempt(files, &mut started).await else { return Ok(()) };
        let uncertain = self.roll_back(files, &cause, started.file).await;
        if uncertain.is_none() {
            // Fails for a directory that another process uses, which is not empty.
            for directory in started.directories {
                let _ = files.remove(remove_params(directory)).await;
            }
        }
        Err(StepError { cause, uncertain })
    }

    async fn attempt(
        &self,
        files: &Files,
        started: &mut StepProgress,
    ) -> Result<(), ExecServerError> {
        if self.change.kind == PatchChangeKind::Added {
            self.make_parents(files, &mut started.directories).await?;
        }
        match &self.work {
            Work::Write { content, old, mode, atomic, verify_first } => {
                if let (Some(old), true) = (old, verify_first) {
                    self.verify_content(files, old).await?;
                }
                self.write(files, content, *atomic, *mode, &mut started.file).await
            }
            Work::CopyAndWrite { from, content, .. } => {
                started.file = true;
                while unless_interrupted(files.copy(from, &self.path, false).await)?.is_none() {}
                self.write(files, content, true, None, &mut started.file).await
            }
            Work::Rename { .. } | Work::Remove => {
                let mut done = unless_interrupted(self.remove_name(files).await)?;
                // If the name is gone, the request whose response was lost has removed it.
                while done.is_none() && self.has_name(files).await? {
                    done = unless_interrupted(self.remove_name(files).await)?;
                }
                Ok(())
            }
        }
    }

    /// Renames or removes the file.
    async fn remove_name(&self, files: &Files) -> Result<(), ExecServerError> {
        match &self.work {
            Work::Rename { to } => {
                let params = FsRenameParams::new(self.path.clone(), to.clone());
                files.call::<call::FsRename>(params).await.map(drop)
            }
            _ => files.remove(remove_params(self.path.clone())).await,
        }
    }

    /// Whether the name exists, even as a broken link.
    async fn has_name(&self, files: &Files) -> Result<bool, ExecServerError> {
        let mut params = FsGetMetadataParams::new(self.path.clone());
        match files.call::<call::FsGetMetadata>(params.clone()).await {
            Err(error) if error.is_not_found() => {}
            other => return other.map(|_| true),
        }
        params.follow_symlinks = false;
        match files.call::<call::FsGetMetadata>(params).await {
            Err(error) if error.is_not_found() => Ok(false),
            // The server refuses a link without following it.
            Ok(_) | Err(ExecServerError::Server { .. }) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Fails if the file does not contain what the plan expects.
    async fn verify_content(&self, files: &Files, old: &[u8]) -> Result<(), ExecServerError> {
        if files.read_file(&self.path).await? == old {
            return Ok(());
        }
        Err(ExecServerError::Server {
            method: call::FsWriteFile::METHOD.name(),
            code: code::INVALID_REQUEST,
            message: format!(
                "{} has changed since it was read, perhaps through another name",
                self.change.path
            ),
            kind: ErrorKind::Refused,
        })
    }

    async fn write(
        &self,
        files: &Files,
        content: &[u8],
        atomic: bool,
        mode: Option<u32>,
        started: &mut bool,
    ) -> Result<(), ExecServerError> {
        let content = Bytes::copy_from_slice(content);
        if atomic && files.can_write_atomically() {
            match self.write_all(files, &content, true, mode).await {
                // A file may be writable although its directory is not, or although a new file cannot
                // have its owner.
                Err(error) if error.code() == Some(code::INVALID_REQUEST) => {}
                other => return other,
            }
        }
        *started = true;
        self.write_all(files, &content, false, mode).await
    }

    /// Writes the content, and repeats that after each lost connection.
    async fn write_all(
        &self,
        files: &Files,
        content: &Bytes,
        atomic: bool,
        mode: Option<u32>,
    ) -> Result<(), ExecServerError> {
        loop {
            let written = files.write_content(&self.path, content.clone(), atomic, mode).await;
            if unless_interrupted(written)?.is_some() {
                return Ok(());
            }
        }
    }

    /// Creates the missing parent directories.
    async fn make_parents(
        &self,
        files: &Files,
        missing: &mut Vec<PathUri>,
    ) -> Result<(), ExecServerError> {
        let Ok(parent) = self.path.join("..") else { return Ok(()) };
        let mut at = parent.clone();
        loop {
            match files.metadata(&at).await {
                Ok(found) if found.is_directory && missing.is_empty() => return Ok(()),
                Err(error) if error.is_not_found() => missing.push(at.clone()),
                _ => break,
            }
            match at.join("..") {
                Ok(above) if above != at => at = above,
                _ => break,
            }
        }
        files.create_directory(&parent).await
    }

    /// Restores the state before the step after a failure; returns what may have changed.
    async fn roll_back(
        &self,
        files: &Files,
        cause: &ExecServerError,
        started: bool,
    ) -> Option<String> {
        let path = &self.change.path;
        let unsure = cause.may_have_taken_effect()
            || matches!(cause, ExecServerError::Closed { .. } | ExecServerError::Lost(_));
        let (old, content) = match &self.work {
            Work::Remove | Work::Rename { .. } => {
                return unsure.then(|| format!("{path} may be deleted"));
            }
            Work::Write { old, content, .. } => (old.as_deref(), content),
            Work::CopyAndWrite { content, .. } => (None, content),
        };
        match (unsure, started) {
            (false, false) => return None,
            (true, false) => return Some(format!("{path} may be changed")),
            (true, true) => return Some(format!("{path} may be damaged: check it")),
            (false, true) => {}
        }
        let damaged = |why: &ExecServerError| {
            Some(format!(
                "{path} may be damaged: it was written in part and could not be restored ({why})"
            ))
        };
        // Remove only what this step wrote.
        let ours = |now: &[u8]| match &self.work {
            Work::CopyAndWrite { old, .. } => old.starts_with(now) || content.starts_with(now),
            _ => content.starts_with(now),
        };
        match (files.read_file(&self.path).await, old) {
            (Ok(now), Some(old)) if now == old => None,
            (Ok(_), Some(old)) => {
                let old = Bytes::copy_from_slice(old);
                let back = self.write_all(files, &old, false, None).await;
                back.err().and_then(|error| damaged(&error))
            }
            (Ok(now), None) if ours(&now) => {
                let removed = files.remove(remove_params(self.path.clone())).await;
                removed.err().and_then(|error| damaged(&error))
            }
            (Ok(_), None) => Some(format!("{path} exists, but not as this patch wrote it")),
            (Err(error), None) if error.is_not_found() => None,
            (Err(error), _) => damaged(&error),
        }
    }
}

/// `None` if the response was lost with the connection.
fn unless_interrupted<T>(result: Result<T, ExecServerError>) -> Result<Option<T>, ExecServerError> {
    match result {
        Err(error) if error.is_interrupted() => {
            tracing::debug!(%error, "retrying a step of a patch");
            Ok(None)
        }
        other => other.map(Some),
    }
}

/// Parameters that remove this path only, not recursively.
fn remove_params(path: PathUri) -> FsRemoveParams {
    let mut params = FsRemoveParams::new(path);
    params.recursive = false;
    params.force = false;
    params
}
