//! Sends the events of processes to the client, each encoded once, straight into its message.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use codex_exec_host::process::{EventKind, EventSink, ProcessEvent, SinkClosed};
use codex_exec_rpc::{Closed, Outbound, Slot};
use codex_exec_server_protocol::process::{
    ExecClosedNotification, ExecExitedNotification, ExecOutputDeltaNotification,
    ProcessResizedNotification,
};
use codex_exec_server_protocol::{Base64Bytes, encode, notification};

use crate::metrics::Metrics;

type Arrival = Pin<Box<dyn Future<Output = ()> + Send>>;
type Reservation = Pin<Box<dyn Future<Output = Result<Slot, Closed>> + Send>>;

/// Sends a process's events as notifications.
pub(crate) struct NotificationSink {
    outbound: Outbound,
    /// Its position in the queue for room on the connection.
    reservation: Option<Reservation>,
    slot: Option<Slot>,
    /// Resolves once the client has received what was sent.
    arrival: Option<Arrival>,
    metrics: Option<Arc<Metrics>>,
    /// Whether the client knows the events of shared sessions.
    knows_roles: bool,
}

impl NotificationSink {
    pub(crate) fn new(
        outbound: Outbound,
        metrics: Option<Arc<Metrics>>,
        knows_roles: bool,
    ) -> Self {
        Self { outbound, reservation: None, slot: None, arrival: None, metrics, knows_roles }
    }
}

impl EventSink for NotificationSink {
    fn poll_ready(
        &mut self,
        cx: &mut Context<'_>,
        event: &ProcessEvent,
    ) -> Poll<Result<(), SinkClosed>> {
        if self.slot.is_some() {
            return Poll::Ready(Ok(()));
        }
        if self.reservation.is_none() {
            let head = if event.is_empty() { 256 } else { 128 };
            let len = head + event.process_id.0.len() + event.len().div_ceil(3) * 4;
            self.slot = self.outbound.try_reserve(len);
            if self.slot.is_some() {
                return Poll::Ready(Ok(()));
            }
            let outbound = self.outbound.clone();
            self.reservation = Some(Box::pin(async move { outbound.reserve(len).await }));
        }
        if let Some(reservation) = &mut self.reservation {
            let slot = ready!(reservation.as_mut().poll(cx));
            self.reservation = None;
            self.slot = Some(slot.map_err(|Closed| SinkClosed)?);
        }
        Poll::Ready(Ok(()))
    }

    fn send(&mut self, event: ProcessEvent) {
        let Some(slot) = self.slot.take() else { return };
        if matches!(event.kind, EventKind::Resized { .. }) && !self.knows_roles {
            return;
        }
        let message = notification(event);
        if let Some(metrics) = &self.metrics {
            metrics.sent(message.len());
        }
        slot.send(message);
    }

    fn poll_arrived(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let outbound = &self.outbound;
        let arrival = self.arrival.get_or_insert_with(|| Box::pin(outbound.arrived()));
        ready!(arrival.as_mut().poll(cx));
        self.arrival = None;
        Poll::Ready(())
    }
}

fn notification(event: ProcessEvent) -> Vec<u8> {
    let ProcessEvent { process_id, seq, kind } = event;
    match kind {
        EventKind::Output { stream, bytes } => {
            encode::notification::<notification::ProcessOutput>(&ExecOutputDeltaNotification {
                process_id,
                seq,
                stream,
                chunk: Base64Bytes(bytes),
            })
        }
        EventKind::Exited { code, sandbox_denied, ended_by, usage } => {
            encode::notification::<notification::ProcessExited>(&ExecExitedNotification {
                process_id,
                seq,
                exit_code: code,
                sandbox_denied,
                ended_by,
                usage,
            })
        }
        EventKind::Resized { size, resizes } => {
            encode::notification::<notification::ProcessResized>(&ProcessResizedNotification {
                process_id,
                after_seq: seq,
                resizes,
                size,
            })
        }
        EventKind::Closed => {
            encode::notification::<notification::ProcessClosed>(&ExecClosedNotification {
                process_id,
                seq: Some(seq),
            })
        }
    }
}
