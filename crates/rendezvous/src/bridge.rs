//! The two ends of a wire: the harness's socket at one node, and the harness's seat at its environment's
//! home.
//!
//! Invariant: the home treats a wire like a socket. It has a queue bounded in bytes, it is closed when it
//! takes nothing, and the task that reads a frame from it delivers that frame.

use std::sync::Arc;

use bytes::Bytes;
use codex_exec_relay_core::peek;
use codex_exec_rpc::OutboundQueue;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::config::Config;
use crate::environment::{Environment, HarnessHandle};
use crate::hub::Hub;
use crate::metrics::Metrics;
use crate::socket::{self, ENDED, GOING_AWAY, Outbound, Reader, Received};
use crate::table::Dropped;
use crate::wire::{WireReceiver, WireSender};

/// A harness that was admitted to an environment over a wire.
#[derive(Debug)]
pub(crate) struct Admitted {
    pub environment: Arc<Environment>,
    pub harness: HarnessHandle,
    pub outbound: Outbound,
    pub queue: OutboundQueue,
}

/// The home's end: passes frames between the wire and the environment.
pub(crate) fn serve(
    hub: &Arc<Hub>,
    admitted: Admitted,
    mut sender: WireSender,
    mut receiver: WireReceiver,
) {
    let Admitted { environment, harness, outbound, mut queue } = admitted;
    let timeout = hub.config().close_timeout;
    hub.tasks().spawn(async move {
        let (close_deadline, closed) = (queue.close_deadline(timeout), sender.closed());
        let sending = async {
            while let Some((frame, _room)) = queue.next_message().await {
                if !sender.send(&frame).await {
                    break;
                }
            }
        };
        tokio::select! {
            () = sending => {}
            () = close_deadline => {}
            () = closed => {}
        }
        sender.close(socket::reason(&queue)).await;
    });
    let hub = hub.clone();
    hub.tasks().clone().spawn(async move {
        while let Some(frame) = receiver.next().await {
            let len = frame.len();
            environment.harness_frame(&harness, frame).await;
            receiver.release(len).await;
        }
        outbound.close(ENDED);
        hub.harness_gone(&environment, &harness);
    });
}

/// The harness's end: passes frames between the harness's socket and the wire.
pub(crate) async fn run<T: AsyncRead + AsyncWrite + Unpin>(
    mut reader: Reader<T>,
    outbound: Outbound,
    mut sender: WireSender,
    mut receiver: WireReceiver,
    config: Arc<Config>,
    metrics: &Metrics,
) {
    let delivering = tokio::spawn({
        let config = config.clone();
        async move {
            while let Some(frame) = receiver.next().await {
                let len = frame.len();
                if !outbound.deliver(frame, &config).await {
                    return;
                }
                receiver.release(len).await;
            }
            outbound.close(receiver.reason());
        }
    });
    while let Some(received) = reader.next().await {
        let frame: Bytes = match received {
            Received::Binary(frame) if peek(&frame, &config.frame).is_ok() => frame,
            _ => {
                metrics.dropped(Dropped::Invalid);
                continue;
            }
        };
        if !sender.send(&frame).await {
            // Frames received before the wire was closed are still delivered.
            let _ = delivering.await;
            sender.close(GOING_AWAY).await;
            return;
        }
    }
    sender.close(ENDED).await;
    drop(reader);
    delivering.abort();
}
