//! Walks a tree of any size as a stream.
//!
//! A server responds to a walk in one piece and truncates it at its limits. The walker discards a
//! truncated piece, lists the directory instead, and walks each of its subdirectories; so every entry
//! appears exactly once.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use codex_exec_server_protocol::files::*;
use codex_exec_server_protocol::{PathUri, call};
use futures_util::Stream;

use super::{Files, entry_name};
use crate::error::ExecServerError;

/// An item of a walk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WalkItem {
    /// A directory or a file.
    Entry(FsWalkEntry),
    /// A path that cannot be read, and why. The walk continues.
    Unreadable(FsPathError),
}

/// The entries of a tree, from [`Files::walk`]. A directory precedes its entries; otherwise the order is
/// the server's.
pub struct Walk {
    state: State,
}

enum State {
    Idle(Box<Walker>),
    Fetching(Pin<Box<dyn Future<Output = (Box<Walker>, Fetched)> + Send>>),
    Done,
}

type Fetched = Result<(), ExecServerError>;

struct Walker {
    files: Files,
    options: FsWalkOptions,
    /// Directories to walk, and their remaining depth.
    pending: VecDeque<(PathUri, u32)>,
    found: VecDeque<WalkItem>,
    /// How many more entries to return.
    remaining: u64,
}

impl Walk {
    pub(super) fn new(files: Files, root: PathUri, options: FsWalkOptions) -> Self {
        // The default requests all that one response can hold; here it means no limit.
        let all = FsWalkOptions::default();
        let depth = if options.max_depth == all.max_depth { u32::MAX } else { options.max_depth };
        let remaining = if options.max_entries == all.max_entries {
            u64::MAX
        } else {
            options.max_entries.into()
        };
        let pending = VecDeque::from([(root, depth)]);
        let walker = Walker { files, options, pending, found: VecDeque::new(), remaining };
        Self { state: State::Idle(Box::new(walker)) }
    }
}

impl Stream for Walk {
    type Item = Result<WalkItem, ExecServerError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            match &mut self.state {
                State::Done => return Poll::Ready(None),
                State::Fetching(fetching) => {
                    let (walker, fetched) = ready!(fetching.as_mut().poll(cx));
                    self.state = State::Idle(walker);
                    if let Err(error) = fetched {
                        self.state = State::Done;
                        return Poll::Ready(Some(Err(error)));
                    }
                }
                State::Idle(walker) => {
                    if let Some(item) = walker.found.pop_front() {
                        return Poll::Ready(Some(Ok(item)));
                    }
                    let next = walker.pending.pop_front().filter(|_| walker.remaining > 0);
                    let State::Idle(mut walker) = std::mem::replace(&mut self.state, State::Done)
                    else {
                        return Poll::Ready(None);
                    };
                    let Some((directory, depth)) = next else { return Poll::Ready(None) };
                    self.state = State::Fetching(Box::pin(async move {
                        let fetched = walker.fetch(directory, depth).await;
                        (walker, fetched)
                    }));
                }
            }
        }
    }
}

impl fmt::Debug for Walk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Walk").finish_non_exhaustive()
    }
}

impl Walker {
    async fn fetch(&mut self, directory: PathUri, depth: u32) -> Result<(), ExecServerError> {
        let at_once = FsWalkOptions::default();
        let options = FsWalkOptions {
            max_depth: depth.min(at_once.max_depth),
            max_entries: at_once.max_entries,
            ..self.options.clone()
        };
        let max_depth = options.max_depth;
        let params = FsWalkParams::new(directory.clone(), options);
        let walked = self.files.call::<call::FsWalk>(params).await?;
        if walked.truncated {
            return self.list(&directory, depth).await;
        }
        if depth > max_depth {
            // Walk the directories at the depth where the server stopped.
            let base = components(&directory);
            let parents: std::collections::HashSet<&[u8]> =
                walked.entries.iter().map(|entry| parent(&entry.path)).collect();
            for entry in &walked.entries {
                let level = components(&entry.path).saturating_sub(base);
                if entry.kind == FsEntryKind::Directory
                    && level >= max_depth as usize
                    && !parents.contains(entry.path.as_bytes())
                {
                    let deeper = depth.saturating_sub(u32::try_from(level).unwrap_or(u32::MAX));
                    self.pending.push_back((entry.path.clone(), deeper));
                }
            }
        }
        self.found.extend(walked.errors.into_iter().map(WalkItem::Unreadable));
        walked.entries.into_iter().for_each(|entry| self.add(entry));
        Ok(())
    }

    /// Lists one level, if a whole walk exceeds one response.
    async fn list(&mut self, directory: &PathUri, depth: u32) -> Result<(), ExecServerError> {
        let listed = self.files.read_directory(directory).await?;
        if listed.truncated {
            let message = "it has more entries than the server lists".to_owned();
            self.found
                .push_back(WalkItem::Unreadable(FsPathError { path: directory.clone(), message }));
        }
        for entry in listed.entries {
            let Ok((path, _)) = entry_name::checked(directory, &entry) else { continue };
            let pruned = self.options.prune_hidden_directories && entry.file_name.starts_with('.');
            if entry.is_directory {
                if self.options.follow_directory_symlinks || !self.is_link(&path).await? {
                    if depth > 0 && !pruned {
                        self.pending.push_back((path.clone(), depth - 1));
                    }
                    self.add(FsWalkEntry { path, kind: FsEntryKind::Directory });
                }
            } else if entry.is_file && !self.is_link(&path).await? {
                self.add(FsWalkEntry { path, kind: FsEntryKind::File });
            }
        }
        Ok(())
    }

    /// Whether the path is a link, which a listing does not say.
    async fn is_link(&self, path: &PathUri) -> Result<bool, ExecServerError> {
        match self.files.metadata(path).await {
            Ok(metadata) => Ok(metadata.is_symlink),
            // The file was removed.
            Err(ExecServerError::Server { .. }) => Ok(true),
            Err(error) => Err(error),
        }
    }

    fn add(&mut self, entry: FsWalkEntry) {
        if self.remaining > 0 {
            self.remaining -= 1;
            self.found.push_back(WalkItem::Entry(entry));
        }
    }
}

fn components(path: &PathUri) -> usize {
    path.as_bytes().split(|&b| b == b'/').filter(|part| !part.is_empty()).count()
}

fn parent(path: &PathUri) -> &[u8] {
    let bytes = path.as_bytes();
    match bytes.iter().rposition(|&b| b == b'/') {
        Some(0) | None => b"/",
        Some(slash) => &bytes[..slash],
    }
}
