//! The other side of a TUN device: gives each packet to its connection, answers DNS, and refuses the rest.
//!
//! Invariant: what the table of connections holds is bounded by the proxy's places. A SYN for which there
//! is no place is dropped; the client sends it again.

use std::collections::HashMap;
use std::collections::hash_map;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use tracing::debug;

use super::connection;
use super::dns;
use super::endpoint::Endpoint;
use super::link::{Link, MAX_PACKET};
use super::names::Names;
use super::packet::{self, Datagram, Flow, Packet, Segment, Unreachable, unreachable};
use crate::proxy::{Client, Shared};

/// Packets that are read before others have a turn.
const BATCH: usize = 64;
/// The longest SYN that is kept: both headers with all their options.
const MAX_SYN: usize = 160;

pub(super) const DNS_PORT: u16 = 53;

pub(super) struct Stack {
    pub shared: Arc<Shared>,
    pub names: Arc<Names>,
    link: Arc<Link>,
    connections: Mutex<HashMap<Flow, Slot>>,
}

enum Slot {
    /// Being judged or connected. Holds the newest SYN.
    Pending(Vec<u8>),
    Open(Arc<Endpoint>),
}

impl Stack {
    pub(super) fn new(shared: Arc<Shared>, names: Arc<Names>, link: Link) -> Arc<Self> {
        Arc::new(Self { shared, names, link: Arc::new(link), connections: Mutex::default() })
    }

    /// Serves until the device is gone.
    pub(super) async fn run(self: Arc<Self>) -> io::Result<()> {
        let mut buffer = vec![0; MAX_PACKET + 1];
        let mut touched: Vec<Arc<Endpoint>> = Vec::new();
        loop {
            let received =
                self.link.receive(&mut buffer, BATCH, |bytes| self.take(bytes, &mut touched)).await;
            for endpoint in touched.drain(..) {
                endpoint.pump();
            }
            received?;
            tokio::task::yield_now().await;
        }
    }

    fn take(self: &Arc<Self>, bytes: &[u8], touched: &mut Vec<Arc<Endpoint>>) {
        let Some(packet) = Packet::parse(bytes) else { return };
        match packet.protocol {
            packet::TCP => self.take_segment(&packet, touched),
            packet::UDP => self.take_datagram(&packet),
            // An echo request included: no host answers for a synthetic address.
            _ => self.send(unreachable(&packet, Unreachable::Host)),
        }
    }

    fn take_segment(self: &Arc<Self>, packet: &Packet<'_>, touched: &mut Vec<Arc<Endpoint>>) {
        let Some(segment) = Segment::parse(packet) else { return };
        let mut connections = self.connections.lock();
        match connections.entry(segment.flow) {
            hash_map::Entry::Occupied(mut entry) => match entry.get_mut() {
                Slot::Open(endpoint) => {
                    let endpoint = endpoint.clone();
                    drop(connections);
                    endpoint.deliver(packet.bytes);
                    if !touched.iter().any(|known| Arc::ptr_eq(known, &endpoint)) {
                        touched.push(endpoint);
                    }
                }
                Slot::Pending(syn) => {
                    if segment.opens() && packet.bytes.len() <= MAX_SYN {
                        *syn = packet.bytes.to_vec();
                    }
                }
            },
            hash_map::Entry::Vacant(_) if !segment.opens() => {
                drop(connections);
                self.send(segment.reset());
            }
            hash_map::Entry::Vacant(entry) => {
                if packet.bytes.len() > MAX_SYN {
                    return;
                }
                let Some(place) = self.shared.try_place() else {
                    return debug!("connection not accepted yet: too many are open");
                };
                entry.insert(Slot::Pending(packet.bytes.to_vec()));
                drop(connections);
                let client = Client::new(Some(segment.flow.source), place);
                let opening = Opening { stack: self.clone(), flow: segment.flow, endpoint: None };
                self.shared.spawn_for(&client.clone(), connection::serve(opening, client));
            }
        }
    }

    fn take_datagram(&self, packet: &Packet<'_>) {
        let Some(datagram) = Datagram::parse(packet) else { return };
        if datagram.flow.destination.port() != DNS_PORT {
            // The program learns at once that there is no UDP, and tries TCP.
            return self.send(unreachable(packet, Unreachable::Port));
        }
        let answer = dns::answer(datagram.payload, &self.names, &self.shared.policy.rules());
        self.send(answer.and_then(|answer| datagram.reply(&answer)));
    }

    fn send(&self, packet: Option<Vec<u8>>) {
        if let Some(packet) = packet {
            self.link.send(&packet);
        }
    }
}

/// A connection that was asked for. Dropping it leaves the table, and resets the connection unless it is
/// over or was refused.
pub(super) struct Opening {
    pub stack: Arc<Stack>,
    pub flow: Flow,
    endpoint: Option<Arc<Endpoint>>,
}

impl Opening {
    /// Completes the handshake.
    pub(super) fn accept(&mut self) -> Option<Arc<Endpoint>> {
        let Stack { connections, link, shared, .. } = &*self.stack;
        let endpoint =
            Arc::new(Endpoint::new(link.clone(), &self.flow, shared.limits.transparent_buffer));
        let syn = {
            let mut connections = connections.lock();
            let slot = connections.get_mut(&self.flow)?;
            match std::mem::replace(slot, Slot::Open(endpoint.clone())) {
                Slot::Pending(syn) => syn,
                Slot::Open(_) => return None,
            }
        };
        self.endpoint = Some(endpoint.clone());
        endpoint.deliver(&syn);
        endpoint.pump();
        Some(endpoint)
    }

    /// Refuses the connection: with a reset, or with the reason why the target cannot be reached.
    pub(super) fn refuse(self, why: Option<Unreachable>) {
        let slot = self.stack.connections.lock().remove(&self.flow);
        let Some(Slot::Pending(syn)) = slot else { return };
        let Some(packet) = Packet::parse(&syn) else { return };
        self.stack.send(match why {
            Some(why) => unreachable(&packet, why),
            None => Segment::parse(&packet).and_then(|segment| segment.reset()),
        });
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        if let Some(endpoint) = &self.endpoint {
            endpoint.abort();
        }
        let slot = self.stack.connections.lock().remove(&self.flow);
        // Cut while it was being judged or connected.
        if let Some(Slot::Pending(syn)) = slot
            && let Some(packet) = Packet::parse(&syn)
        {
            self.stack.send(Segment::parse(&packet).and_then(|segment| segment.reset()));
        }
    }
}
