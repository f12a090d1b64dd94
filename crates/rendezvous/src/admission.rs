//! Room for connections: in all, and for each address until it has authenticated.
//!
//! Invariant: a connection counts from its acceptance, before TLS, until it ends. For its address it counts
//! until a websocket on it had a valid pass, so that one address without a token cannot take all the room.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The room of a service.
#[derive(Debug)]
pub(crate) struct Admissions {
    all: Arc<Semaphore>,
    total: usize,
    per_address: usize,
    unauthenticated: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

/// One connection's room, until it is dropped.
#[derive(Debug)]
pub(crate) struct Admission {
    _permit: OwnedSemaphorePermit,
    address: Mutex<Option<AddressPermit>>,
}

#[derive(Debug)]
struct AddressPermit {
    address: IpAddr,
    counts: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

/// Why there is no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    Total,
    Address,
}

impl Admissions {
    pub(crate) fn new(total: usize, per_address: usize) -> Self {
        let all = Arc::new(Semaphore::new(total));
        Self { all, total, per_address, unauthenticated: Arc::default() }
    }

    /// Admits a connection from this address.
    pub(crate) fn admit(&self, from: IpAddr) -> Result<Arc<Admission>, Refusal> {
        let permit = self.all.clone().try_acquire_owned().map_err(|_| Refusal::Total)?;
        let address = network(from);
        let mut counts = self.unauthenticated.lock();
        let count = counts.entry(address).or_default();
        if *count >= self.per_address {
            return Err(Refusal::Address);
        }
        *count += 1;
        drop(counts);
        let address = AddressPermit { address, counts: self.unauthenticated.clone() };
        Ok(Arc::new(Admission { _permit: permit, address: Mutex::new(Some(address)) }))
    }

    /// Connections that are open.
    pub(crate) fn open(&self) -> usize {
        self.total - self.all.available_permits()
    }
}

impl Admission {
    /// The connection no longer counts for its address.
    pub(crate) fn authenticated(&self) {
        drop(self.address.lock().take());
    }
}

impl Drop for AddressPermit {
    fn drop(&mut self) {
        let mut counts = self.counts.lock();
        if let Some(count) = counts.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.address);
            }
        }
    }
}

/// The address that is counted: of IPv6 the first 64 bits, which one machine has to itself.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_matches_a_model_under_random_arrivals() {
        let (total, per_address) = (20, 5);
        let admissions = Admissions::new(total, per_address);
        let mut random = fastrand::Rng::with_seed(8);
        // The open connections: their address, and whether they have authenticated.
        let mut open: Vec<(usize, bool, Arc<Admission>)> = Vec::new();
        let addresses = ["10.0.0.1", "10.0.0.2", "2001:db8::1", "2001:db8:0:1::1", "10.0.0.3"];
        for _ in 0..20_000 {
            match random.u32(..3) {
                0 if !open.is_empty() => drop(open.swap_remove(random.usize(..open.len()))),
                1 if !open.is_empty() => {
                    let at = random.usize(..open.len());
                    open[at].2.authenticated();
                    open[at].1 = true;
                }
                _ => {
                    let address = random.usize(..addresses.len());
                    let held = open.iter().filter(|(from, done, _)| *from == address && !done);
                    let wanted = match (open.len(), held.count()) {
                        (all, _) if all >= total => Err(Refusal::Total),
                        (_, held) if held >= per_address => Err(Refusal::Address),
                        _ => Ok(()),
                    };
                    let admitted = admissions.admit(addresses[address].parse().unwrap());
                    assert_eq!(admitted.as_ref().map(drop).map_err(|error| *error), wanted);
                    open.extend(admitted.map(|admission| (address, false, admission)));
                }
            }
            assert_eq!(admissions.open(), open.len());
        }
        open.clear();
        assert!(admissions.unauthenticated.lock().is_empty());
        let same = |a: &str, b: &str| network(a.parse().unwrap()) == network(b.parse().unwrap());
        assert!(same("2001:db8::1", "2001:db8::ffff") && same("::ffff:10.0.0.1", "10.0.0.1"));
    }
}
