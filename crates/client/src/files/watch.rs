//! Watches that outlive their connection.
//!
//! A server's watch ends with its connection. This one registers again after a reconnect, and reports an
//! overflow, since changes in between are unknown: the caller has to look at everything.

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
use crate::subscriptions::Notifications;

/// The number of batches of changes to queue for the caller.
const CHANGE_QUEUE: usize = 16;

/// A batch of changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changes {
    /// The changed paths, and how they changed.
    pub changes: Vec<FsChange>,
    /// There were other changes, which are unknown: look at the whole tree again. True after every
    /// reconnect.
    pub overflow: bool,
}

/// A stream of changes of a file or a tree, from [`Files::watch`]. Ends after an error.
pub struct Watch {
    changes: mpsc::Receiver<Result<Changes, ExecServerError>>,
    task: JoinHandle<()>,
}

impl Files {
    /// Watches a file, or a directory and everything below it, for changes after this returns. After a lost
    /// connection, reports [`Changes::overflow`] once the watch is registered again. Replaces
    /// `params.watch_id`.
    ///
    /// ```no_run
    /// # async fn run(client: codex_exec_client::ExecServerClient) -> Result<(), Box<dyn std::error::Error>> {
    /// use codex_exec_client::protocol::files::FsWatchParams;
    /// use futures_util::StreamExt;
    ///
    /// let params = FsWatchParams::new(0, "/srv/app".parse()?);
    /// let mut watch = client.files().watch(params).await?;
    /// while let Some(changes) = watch.next().await {
    ///     for change in changes?.changes {
    ///         println!("{:?} {}", change.kind, change.path);
    ///     }
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn watch(&self, mut params: FsWatchParams) -> Result<Watch, ExecServerError> {
        /// Unique in this process, so on every connection.
        static LAST: AtomicI64 = AtomicI64::new(0);
        if !self.client.capabilities().fs_watch {
            return Err(ExecServerError::Unsupported {
                what: "watch files".to_owned(),
                instead: "poll them instead".to_owned(),
            });
        }
        params.watch_id = LAST.fetch_add(1, Ordering::Relaxed) + 1;
        let notifications = self.client.subscribe::<notification::FsChanged>();
        let watcher = Watcher { files: self.clone(), params, notifications };
        let epoch = watcher.register().await?;
        let (sender, changes) = mpsc::channel(CHANGE_QUEUE);
        let task = tokio::spawn(watcher.run(epoch, sender));
        Ok(Watch { changes, task })
    }
}

struct Watcher {
    files: Files,
    params: FsWatchParams,
    notifications: Notifications<notification::FsChanged>,
}

impl Watcher {
    /// Registers the watch on the current connection, and returns that connection's number.
    async fn register(&self) -> Result<u64, ExecServerError> {
        let shared = &self.files.client.shared;
        loop {
            let epoch = shared.channel().await?.epoch;
            match self.files.call::<call::FsWatch>(self.params.clone()).await {
                // The connection has not changed meanwhile, so the watch is on this one.
                Ok(_) if shared.channel().await?.epoch == epoch => return Ok(epoch),
                Ok(_) | Err(ExecServerError::Lost(Lost::Response { .. })) => {
                    // It may be registered already; then the server would refuse a second one.
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
            let change = tokio::select! {
                change = self.notifications.next() => change,
                () = client.shared.channel_lost(epoch) => match self.register().await {
                    Ok(new_epoch) => {
                        epoch = new_epoch;
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
            let change = match change {
                Some(Ok(notification)) if notification.watch_id != self.params.watch_id => continue,
                Some(Ok(notification)) => self.changes(notification),
                // Changes arrived faster than the caller read them.
                Some(Err(ExecServerError::Lost(Lost::Notifications { .. }))) => {
                    Ok(Changes { changes: Vec::new(), overflow: true })
                }
                Some(Err(error)) => Err(error),
                // The client has closed; the channel's error says why.
                None => match client.shared.channel().await {
                    Ok(_) => return,
                    Err(error) => Err(error),
                },
            };
            let last = change.is_err();
            if to.send(change).await.is_err() || last {
                return;
            }
        }
    }

    fn changes(&self, change: FsChangedNotification) -> Result<Changes, ExecServerError> {
        match change.ended {
            None => Ok(Changes { changes: change.changes, overflow: change.overflow }),
            Some(why) => Err(ExecServerError::Closed {
                reason: format!("the server ended the watch of {}: {why}", self.params.path),
            }),
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let (files, params) = (self.files.clone(), FsUnwatchParams::new(self.params.watch_id));
        // Without a runtime the connection is about to end, and the watch with it.
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
