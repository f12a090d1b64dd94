//! Forwards the messages of a stream to another exec-server and back, unchanged.

use codex_exec_rpc::{Connection, ConnectionConfig, WebsocketDial};

/// Opens a websocket to the other server for this stream. If either side closes, both close.
pub(crate) async fn forward(mut stream: Connection, dial: WebsocketDial, config: ConnectionConfig) {
    let mut server = match Connection::dial(&dial, &config).await {
        Ok(server) => server,
        Err(error) => {
            // Dropping the stream resets it.
            tracing::warn!(%error, "cannot forward a stream");
            return;
        }
    };
    let (to_stream, to_server) = (stream.outbound().clone(), server.outbound().clone());
    let inward = async {
        while let Some(Ok(message)) = stream.next().await {
            if to_server.send(message).await.is_err() {
                break;
            }
        }
    };
    let outward = async {
        while let Some(Ok(message)) = server.next().await {
            if to_stream.send(message).await.is_err() {
                break;
            }
        }
    };
    tokio::select! {
        () = inward => {}
        () = outward => {}
    }
}
