//! The task beside each process handle: it reads what notifications did not bring.

use std::future::poll_fn;
use std::sync::Arc;

use codex_exec_server_protocol::process::{ProcessId, ReadParams};
use codex_exec_server_protocol::{Effect, ErrorKind, call};

use super::track::{Need, Track};
use super::tracked::Tracked;
use crate::error::ExecServerError;
use crate::shared::Shared;

pub(crate) async fn follow(shared: Arc<Shared>, tracked: Arc<Tracked>, process_id: ProcessId) {
    let patience = shared.tuning.reorder_patience;
    while let Some(need) = poll_fn(|cx| tracked.poll_need(cx, Need::Nothing)).await {
        if need == Need::Soon {
            let settled = poll_fn(|cx| tracked.poll_need(cx, Need::Soon));
            if tokio::time::timeout(patience, settled).await.is_ok() {
                continue;
            }
        }
        let (after, max_bytes) = if need == Need::Acknowledge {
            // The least a read can ask for; its answer is not needed.
            (tracked.feed(Track::acknowledgement), 1)
        } else {
            tracked.peek(|track| (track.delivered(), track.read_size()))
        };
        let params = ReadParams {
            process_id: process_id.clone(),
            after_seq: Some(after),
            max_bytes: Some(max_bytes),
            wait_ms: None,
        };
        let timeout = shared.tuning.request_timeout;
        match shared.call::<call::ProcessRead>(&params, Effect::Reads, timeout).await {
            Ok(_) if need == Need::Acknowledge => {}
            Ok(answer) => tracked.feed(|track| track.read(after, answer)),
            // A forgotten process needs no acknowledgement.
            Err(ExecServerError::Server { .. }) if need == Need::Acknowledge => {}
            Err(error) if error.kind() == ErrorKind::UnknownProcess => {
                tracked.feed(Track::gone);
            }
            Err(error) => tracked.feed(|track| track.fail(error)),
        }
    }
    // Whoever has a handle looks at what is here; nobody needs to be told more.
    if tracked.is_abandoned() {
        shared.untrack_if(&process_id, &tracked);
    }
}
