//! The connection to NATS, which carries the shared state of a cluster and the frames between its nodes.
//!
//! Invariant: every wait for NATS has a timeout. While NATS is unreachable, calls fail at once and the
//! outbound queue is bounded; the library reconnects without limit.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::{self, kv, stream};
use async_nats::{Client, ConnectOptions, Event, ServerAddr, Subscriber};
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::secret::{SigningKey, random_name};
use crate::store::StoreError;
use crate::wire::subject_of;

/// How long a reply of NATS may take.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How often the connection is pinged.
const PING_INTERVAL: Duration = Duration::from_secs(10);
/// Messages that may wait to be written to NATS; more make their senders wait.
const QUEUE_CAPACITY: usize = 256;

/// The addresses of NATS servers, separated by commas: `nats://` or `tls://`, with user and password if
/// needed. `Debug` shows only how many.
#[derive(Clone)]
pub struct NatsServers(Vec<ServerAddr>);

/// The text is not a list of NATS addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("invalid NATS URL: expected nats://HOST:PORT or tls://HOST:PORT, separated by commas")]
pub struct NatsServersError;

impl FromStr for NatsServers {
    type Err = NatsServersError;

    fn from_str(text: &str) -> Result<Self, NatsServersError> {
        let parse = |part: &str| {
            let known = part.starts_with("nats://") || part.starts_with("tls://");
            // The library's error quotes the address, which may hold a password.
            let address: Option<ServerAddr> = part.parse().ok();
            address.filter(|address| known && !address.host().is_empty()).ok_or(NatsServersError)
        };
        Ok(Self(text.split(',').map(|part| parse(part.trim())).collect::<Result<_, _>>()?))
    }
}

impl fmt::Debug for NatsServers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NatsServers({})", self.0.len())
    }
}

/// How to reach and use a cluster's NATS.
#[derive(Debug, Clone)]
pub struct NatsOptions {
    /// The servers.
    pub servers: NatsServers,
    /// On how many servers the buckets are stored; only the node that creates them uses it.
    pub replicas: usize,
}

/// The state of the connection to NATS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ConnectionState {
    pub up: bool,
    /// Counts disconnects: messages in flight before one are lost.
    pub generation: u64,
}

/// A connection, and the buckets of the cluster.
#[derive(Debug)]
pub(crate) struct Nats {
    pub client: Client,
    pub node: Arc<str>,
    pub key: SigningKey,
    pub tokens: kv::Store,
    pub environments: kv::Store,
    pub used: kv::Store,
    pub harnesses: kv::Store,
    state: watch::Receiver<ConnectionState>,
    /// Messages from other nodes; subscribed at the start, so that none is missed.
    inbox: Mutex<Option<Subscriber>>,
}

impl Nats {
    /// Connects, creates missing buckets, and reads or creates the cluster's key. `keep` is how long
    /// entries of the temporary buckets are kept.
    pub(crate) async fn connect(options: &NatsOptions, keep: Duration) -> Result<Self, StoreError> {
        let (client, state) = connect(options).await?;
        let context = context(&client);
        let open = |name, age| bucket(&context, name, options.replicas, age);
        let secrets = open("secrets", Duration::ZERO).await?;
        let node: Arc<str> = random_name("")?[..16].into();
        let inbox = with_timeout(client.subscribe(subject_of(&node))).await?.map_err(nats_error)?;
        Ok(Self {
            inbox: Mutex::new(Some(inbox)),
            node,
            key: signing_key(&secrets).await?,
            tokens: open("tokens", Duration::ZERO).await?,
            environments: open("environments", Duration::ZERO).await?,
            used: open("used", keep).await?,
            harnesses: open("harnesses", keep).await?,
            client,
            state,
        })
    }

    /// Connects and opens only the bucket of tokens.
    pub(crate) async fn tokens(options: &NatsOptions) -> Result<kv::Store, StoreError> {
        let (client, _) = connect(options).await?;
        bucket(&context(&client), "tokens", options.replicas, Duration::ZERO).await
    }

    pub(crate) fn connection_state(&self) -> watch::Receiver<ConnectionState> {
        self.state.clone()
    }

    /// The messages from other nodes; `None` after the first call.
    pub(crate) fn inbox(&self) -> Option<Subscriber> {
        self.inbox.lock().take()
    }

    /// Fails while NATS is unreachable.
    pub(crate) fn up(&self) -> Result<(), StoreError> {
        if self.state.borrow().up { Ok(()) } else { Err(StoreError::NatsGone) }
    }
}

/// Awaits a reply of NATS, with a timeout.
pub(crate) async fn with_timeout<T>(call: impl Future<Output = T>) -> Result<T, StoreError> {
    tokio::time::timeout(TIMEOUT, call).await.map_err(|_| StoreError::NatsGone)
}

/// An error of NATS. Its text may quote keys, never values.
pub(crate) fn nats_error(error: impl fmt::Display) -> StoreError {
    StoreError::Nats(error.to_string())
}

async fn connect(
    options: &NatsOptions,
) -> Result<(Client, watch::Receiver<ConnectionState>), StoreError> {
    let (sender, state) = watch::channel(ConnectionState { up: true, generation: 0 });
    let sender = Arc::new(sender);
    let client = ConnectOptions::new()
        .name("codex rendezvous")
        .connection_timeout(TIMEOUT)
        .request_timeout(Some(TIMEOUT))
        .ping_interval(PING_INTERVAL)
        .client_capacity(QUEUE_CAPACITY)
        .max_reconnects(None)
        .event_callback(move |event| {
            let sender = sender.clone();
            async move {
                match event {
                    Event::Connected => sender.send_modify(|state| state.up = true),
                    Event::Disconnected | Event::Closed => sender.send_modify(|state| {
                        state.up = false;
                        state.generation += 1;
                    }),
                    _ => {}
                }
                // A server error may quote a subject, never a payload.
                tracing::info!(%event, "nats");
            }
        })
        .connect(&options.servers.0[..])
        .await
        .map_err(|error| nats_error(error.kind()))?;
    Ok((client, state))
}

fn context(client: &Client) -> jetstream::Context {
    let mut context = jetstream::new(client.clone());
    context.set_timeout(TIMEOUT);
    context
}

async fn bucket(
    context: &jetstream::Context,
    name: &str,
    num_replicas: usize,
    max_age: Duration,
) -> Result<kv::Store, StoreError> {
    let bucket = format!("codex-rendezvous-{name}");
    if let Ok(known) = context.get_key_value(&bucket).await {
        return never_stale(context, known).await;
    }
    // Created by hand: the library's own call needs a newer server than 2.9.
    let stream = stream::Config {
        name: format!("KV_{bucket}"),
        subjects: vec![format!("$KV.{bucket}.>")],
        max_messages_per_subject: 1,
        max_age,
        num_replicas,
        allow_rollup: true,
        deny_delete: true,
        allow_direct: false,
        discard: stream::DiscardPolicy::New,
        ..stream::Config::default()
    };
    // If another node was first, its stream exists even though this call failed.
    let made = context.create_stream(stream).await.map(drop);
    context.get_key_value(&bucket).await.map_err(|error| {
        let error = made.err().map_or_else(|| error.to_string(), |error| error.to_string());
        nats_error(format!(
            "cannot open bucket {bucket} ({error}); check that JetStream is enabled"
        ))
    })
}

/// Makes reads of a bucket that an earlier version created go to its leader: a replica may be behind, and
/// would still have a token that was revoked.
async fn never_stale(
    context: &jetstream::Context,
    known: kv::Store,
) -> Result<kv::Store, StoreError> {
    let config = &known.stream.cached_info().config;
    if !config.allow_direct {
        return Ok(known);
    }
    let changed = stream::Config { allow_direct: false, ..config.clone() };
    context.update_stream(changed).await.map_err(|error| nats_error(error.kind()))?;
    context.get_key_value(&known.name).await.map_err(|error| nats_error(error.kind()))
}

/// Reads the cluster's key; the first node creates it.
async fn signing_key(secrets: &kv::Store) -> Result<SigningKey, StoreError> {
    let made = SigningKey::generate()?;
    match secrets.create("signing", Bytes::copy_from_slice(made.expose())).await {
        Ok(_) => return Ok(made),
        Err(error) if error.kind() == kv::CreateErrorKind::AlreadyExists => {}
        Err(error) => return Err(nats_error(error.kind())),
    }
    let kept = secrets.get("signing").await.map_err(|error| nats_error(error.kind()))?;
    let kept = kept.and_then(|bytes| SigningKey::from_bytes(&bytes));
    kept.ok_or_else(|| nats_error("the cluster's signing key is damaged; remove it"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nats_urls_are_parsed_without_showing_passwords() {
        let servers: NatsServers = "nats://a:1, tls://user:hunter2@b".parse().unwrap();
        assert_eq!(servers.0.len(), 2);
        assert_eq!(format!("{servers:?}"), "NatsServers(2)");
        for bad in ["", "a:1", "http://a", "nats://a,", "ws://a", "nats://"] {
            bad.parse::<NatsServers>().unwrap_err();
        }
    }
}
