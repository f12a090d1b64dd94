//! Changes of a file or a tree as a stream that outlives its connection.
//!
//! A server's watch ends with the connection it was made on. This one is made again on the next, and
//! since nobody knows what changed in between, that is told as an overflow: look at everything.

use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicI64, Ordering};
use std::task::{Context, Poll};

use codex_exec_server_protocol::files::{
    FsChange, FsChangedNotification, FsUnwatchParams, FsWatchParams,
};
use codex_exec_server_protocol::{call, notification};
use futures_util::{Stream, StreamExt};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::Files;
use crate::error::{ExecServerError, Lost};
use crate::notices::Notices;

/// Changes that wait for whoever takes them.
const WAITING: usize = 16;

/// What has changed since the last time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changes {
    /// Which paths, and how.
    pub changes: Vec<FsChange>,
    /// There were others that are not known: look at the whole tree again. So it is after every
    /// reconnect.
    pub overflow: bool,
}

/// Changes of a file or a tree, see [`Files::watch`]. Ends after an error, and when it is dropped.
pub struct Watch {
    changes: mpsc::Receiver<Result<Changes, ExecServerError>>,
    task: JoinHandle<()>,
}

impl Files {
    /// Watches a file, or a directory with all that is below it: what changes after this has
    /// returned is told. A lost connection is told as [`Changes::overflow`] once the watch is there
    /// again. `params.watch_id` is replaced.
    ///
    /// ```no_run
    /// # async fn run(client: codex_exec_client::ExecServerClient) -> Result<(), Box<dyn std::error::Error>> {
    /// use codex_exec_client::protocol::files::FsWatchParams;
    /// use futures_util::StreamExt;
    ///
    /// let params = FsWatchParams::new(0, "/srv/app".parse()?);
    /// let mut watch = client.files().watch(params).await?;
    /// while let Some(told) = watch.next().await {
    ///     for change in told?.changes {
    ///         println!("{:?} {}", change.kind, change.path);
    ///     }
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn watch(&self, mut params: FsWatchParams) -> Result<Watch, ExecServerError> {
        /// Unique in this program, so on every connection.
        static LAST: AtomicI64 = AtomicI64::new(0);
        if !self.client.capabilities().fs_watch {
            return Err(ExecServerError::Unsupported {
                what: "watch files".to_owned(),
                instead: "poll them instead".to_owned(),
            });
        }
        params.watch_id = LAST.fetch_add(1, Ordering::Relaxed) + 1;
        let notices = self.client.subscribe::<notification::FsChanged>();
        let watcher = Watcher { files: self.clone(), params, notices };
        let epoch = watcher.begin().await?;
        let (sender, changes) = mpsc::channel(WAITING);
        let task = tokio::spawn(watcher.run(epoch, sender));
        Ok(Watch { changes, task })
    }
}

struct Watcher {
    files: Files,
    params: FsWatchParams,
    notices: Notices<notification::FsChanged>,
}

impl Watcher {
    /// Makes the watch on the connection that there is, and gives that connection's number.
    async fn begin(&self) -> Result<u64, ExecServerError> {
        let shared = &self.files.client.shared;
        loop {
            let epoch = shared.link().await?.epoch;
            match self.files.call::<call::FsWatch>(self.params.clone()).await {
                // Made on whichever connection there was at the time: the one that still is.
                Ok(_) if shared.link().await?.epoch == epoch => return Ok(epoch),
                Ok(_) | Err(ExecServerError::Lost(Lost::Answer { .. })) => {
                    // It may be there already; then it would be refused as a second one.
                    let params = FsUnwatchParams::new(self.params.watch_id);
                    self.files.call::<call::FsUnwatch>(params).await?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    async fn run(mut self, mut epoch: u64, to: mpsc::Sender<Result<Changes, ExecServerError>>) {
        let client = self.files.client.clone();
        loop {
            let told = tokio::select! {
                told = self.notices.next() => told,
                () = client.shared.link_lost(epoch) => match self.begin().await {
                    Ok(again) => {
                        epoch = again;
                        let lost = Changes { changes: Vec::new(), overflow: true };
                        if to.send(Ok(lost)).await.is_err() {
                            return;
                        }
                        continue;
                    }
                    Err(error) => {
                        let _ = to.send(Err(error)).await;
                        return;
                    }
                },
                () = to.closed() => return,
            };
            let told = match told {
                Some(Ok(notification)) if notification.watch_id != self.params.watch_id => continue,
                Some(Ok(notification)) => self.changes(notification),
                // They came faster than they were taken.
                Some(Err(ExecServerError::Lost(Lost::Notices { .. }))) => {
                    Ok(Changes { changes: Vec::new(), overflow: true })
                }
                Some(Err(error)) => Err(error),
                // The client has ended: why is told when the link is asked for.
                None => match client.shared.link().await {
                    Ok(_) => return,
                    Err(error) => Err(error),
                },
            };
            let last = told.is_err();
            if to.send(told).await.is_err() || last {
                return;
            }
        }
    }

    fn changes(&self, told: FsChangedNotification) -> Result<Changes, ExecServerError> {
        match told.ended {
            None => Ok(Changes { changes: told.changes, overflow: told.overflow }),
            Some(why) => Err(ExecServerError::Closed {
                reason: format!("the server ended the watch of {}: {why}", self.params.path),
            }),
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let (files, params) = (self.files.clone(), FsUnwatchParams::new(self.params.watch_id));
        // Outside of a runtime the connection is about to end, and the watch with it.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                let _ = files.call::<call::FsUnwatch>(params).await;
            });
        }
    }
}

impl Stream for Watch {
    type Item = Result<Changes, ExecServerError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.changes.poll_recv(cx)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}
