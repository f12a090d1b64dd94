//! The task beside each process handle: it reads events that notifications did not deliver.

use std::future::poll_fn;
use std::sync::Arc;

use codex_exec_server_protocol::process::{ProcessId, ReadParams};
use codex_exec_server_protocol::{Effect, ErrorKind, call};

use super::sequencer::{EventSequencer, Need};
use super::shared_sequencer::SharedSequencer;
use crate::error::ExecServerError;
use crate::shared::Shared;

pub(crate) async fn follow(
    shared: Arc<Shared>,
    events: Arc<SharedSequencer>,
    process_id: ProcessId,
) {
    let reorder_timeout = shared.tuning.reorder_timeout;
    while let Some(need) = poll_fn(|cx| events.poll_need(cx, Need::Nothing)).await {
        if need == Need::Soon {
            let settled = poll_fn(|cx| events.poll_need(cx, Need::Soon));
            if tokio::time::timeout(reorder_timeout, settled).await.is_ok() {
                continue;
            }
        }
        let (after, max_bytes) = if need == Need::Acknowledge {
            // The smallest read; its response is not needed.
            (events.feed(EventSequencer::acknowledgement), 1)
        } else {
            events.peek(|sequencer| (sequencer.delivered(), sequencer.read_size()))
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
            Ok(response) => events.feed(|sequencer| sequencer.read(after, response)),
            // A process that the server no longer knows needs no acknowledgement.
            Err(ExecServerError::Server { .. }) if need == Need::Acknowledge => {}
            Err(error) if error.kind() == ErrorKind::UnknownProcess => {
                events.feed(EventSequencer::gone);
            }
            Err(error) => events.feed(|sequencer| sequencer.fail(error)),
        }
    }
    // Without a handle, nothing else needs the events.
    if events.is_abandoned() {
        shared.untrack_if(&process_id, &events);
    }
}
