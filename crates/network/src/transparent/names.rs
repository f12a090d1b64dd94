//! Synthetic addresses, each pinned to the name that was asked for.
//!
//! Invariant: an address leads to one name as long as the table knows it, and while a connection to it
//! lives it is not forgotten. Addresses are given out in turn, so one that was forgotten is not used for
//! another name before all others were.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::host::Host;

/// The network of synthetic IPv4 addresses, 198.18.0.0/15. Its first and last 256 addresses lead to no
/// name: a namespace may have one of them.
pub const SYNTHETIC_V4: (Ipv4Addr, u8) = (Ipv4Addr::new(198, 18, 0, 0), 15);
/// The network of synthetic IPv6 addresses, a /64 of unique local ones. The first 65,536 lead to no name.
pub const SYNTHETIC_V6: (Ipv6Addr, u8) = (Ipv6Addr::new(0xfd63, 0x6f64, 0x6578, 0, 0, 0, 0, 0), 64);

const FIRST_V4: u32 = 256;
const FIRST_V6: u64 = 1 << 16;
/// How many pairs of addresses there are.
const PAIRS: u32 = (1 << 17) - 2 * FIRST_V4;

/// The names that a process asked for.
pub(super) struct Names {
    state: Mutex<State>,
    capacity: usize,
    search_domains: Vec<Host>,
}

#[derive(Default)]
struct State {
    by_host: HashMap<Host, u32>,
    by_number: HashMap<u32, Entry>,
    /// Names without a connection, the one used longest ago first.
    idle: BTreeMap<u64, u32>,
    uses: u64,
    next: u32,
}

struct Entry {
    host: Host,
    /// Its key in `idle`, if it is there.
    used: u64,
    connections: usize,
}

/// The two addresses of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pair {
    pub v4: Ipv4Addr,
    pub v6: Ipv6Addr,
}

impl Pair {
    fn of(number: u32) -> Self {
        let v4 = u32::from(SYNTHETIC_V4.0) + FIRST_V4 + number;
        let v6 = u128::from(SYNTHETIC_V6.0) + u128::from(FIRST_V6) + u128::from(number);
        Self { v4: v4.into(), v6: v6.into() }
    }
}

/// The name of an address, which stays its name until this is dropped.
pub(super) struct Pinned {
    names: Arc<Names>,
    number: u32,
    pub host: Host,
}

/// Where a packet leads.
pub(super) enum Target {
    Name(Pinned),
    /// The address itself.
    Address,
    /// A synthetic address without a name.
    Nowhere,
}

impl Names {
    /// A table of at most `capacity` names, for programs whose resolver appends `search_domains`.
    pub(super) fn new(capacity: usize, search_domains: Vec<Host>) -> Self {
        let capacity = capacity.clamp(1, PAIRS as usize / 2);
        Self { state: Mutex::default(), capacity, search_domains }
    }

    /// Whether a resolver may have made this name by appending a search domain to another.
    pub(super) fn may_be_expanded(&self, host: &Host) -> bool {
        self.search_domains.iter().any(|domain| {
            let prefix = host.as_str().strip_suffix(domain.as_str());
            prefix.is_some_and(|prefix| prefix.ends_with('.'))
        })
    }

    /// The addresses of a name. `None`: the table is full of names with connections.
    pub(super) fn addresses(&self, host: &Host) -> Option<Pair> {
        let mut state = self.state.lock();
        if let Some(number) = state.by_host.get(host).copied() {
            state.touch(number);
            return Some(Pair::of(number));
        }
        if state.by_number.len() >= self.capacity {
            let (_, oldest) = state.idle.pop_first()?;
            if let Some(entry) = state.by_number.remove(&oldest) {
                state.by_host.remove(&entry.host);
            }
        }
        while state.by_number.contains_key(&state.next) {
            state.next = (state.next + 1) % PAIRS;
        }
        let number = state.next;
        state.next = (number + 1) % PAIRS;
        state.by_host.insert(host.clone(), number);
        state.by_number.insert(number, Entry { host: host.clone(), used: 0, connections: 0 });
        state.touch(number);
        Some(Pair::of(number))
    }

    /// Finds out where an address leads, for a connection to it.
    pub(super) fn target(self: &Arc<Self>, address: IpAddr) -> Target {
        let Some(offset) = synthetic_offset(address) else { return Target::Address };
        let Some(number) = offset else { return Target::Nowhere };
        let mut state = self.state.lock();
        let Some(entry) = state.by_number.get_mut(&number) else { return Target::Nowhere };
        entry.connections += 1;
        let (host, used) = (entry.host.clone(), entry.used);
        state.idle.remove(&used);
        Target::Name(Pinned { names: self.clone(), number, host })
    }
}

impl State {
    /// Makes a name the one that was used last.
    fn touch(&mut self, number: u32) {
        self.uses += 1;
        let uses = self.uses;
        let Some(entry) = self.by_number.get_mut(&number) else { return };
        if entry.connections > 0 {
            return;
        }
        let former = std::mem::replace(&mut entry.used, uses);
        self.idle.remove(&former);
        self.idle.insert(uses, number);
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let mut state = self.names.state.lock();
        if let Some(entry) = state.by_number.get_mut(&self.number) {
            entry.connections -= 1;
        }
        state.touch(self.number);
    }
}

/// `None`: not synthetic. `Some(None)`: synthetic, and never given out.
fn synthetic_offset(address: IpAddr) -> Option<Option<u32>> {
    let (offset, first) = match address {
        IpAddr::V4(v4) => {
            let offset = u32::from(v4).wrapping_sub(u32::from(SYNTHETIC_V4.0));
            if offset >> 17 != 0 {
                return None;
            }
            (u64::from(offset), u64::from(FIRST_V4))
        }
        IpAddr::V6(v6) => {
            let (bits, network) = (u128::from(v6), u128::from(SYNTHETIC_V6.0));
            if bits >> 64 != network >> 64 {
                return None;
            }
            ((bits & u128::from(u64::MAX)) as u64, FIRST_V6)
        }
    };
    let number = offset.checked_sub(first).and_then(|number| u32::try_from(number).ok());
    Some(number.filter(|number| *number < PAIRS))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(index: usize) -> Host {
        Host::parse(&format!("n{index}.example")).unwrap()
    }

    fn name(names: &Arc<Names>, address: impl Into<IpAddr>) -> Option<String> {
        match names.target(address.into()) {
            Target::Name(pinned) => Some(pinned.host.as_str().to_owned()),
            Target::Address | Target::Nowhere => None,
        }
    }

    #[test]
    fn addresses_are_in_their_networks_and_lead_back() {
        let names = Arc::new(Names::new(4, Vec::new()));
        let pair = names.addresses(&host(1)).unwrap();
        assert_eq!(pair, names.addresses(&host(1)).unwrap());
        assert_eq!(name(&names, pair.v4).as_deref(), Some("n1.example"));
        assert_eq!(name(&names, pair.v6).as_deref(), Some("n1.example"));
        let last = Pair::of(PAIRS - 1);
        assert_eq!(last.v4, Ipv4Addr::new(198, 19, 254, 255));
        for (text, known) in [
            ("198.17.255.255", true),
            ("198.20.0.0", true),
            ("93.184.216.34", true),
            ("fd63:6f64:6578:1::", true),
            ("198.18.0.1", false),
            ("198.19.255.255", false),
            ("fd63:6f64:6578::1", false),
            ("fd63:6f64:6578:0:ffff::", false),
        ] {
            let target = names.target(text.parse().unwrap());
            assert_eq!(matches!(target, Target::Address), known, "{text}");
            assert_eq!(matches!(target, Target::Nowhere), !known, "{text}");
        }
    }

    /// Random lookups, connections and their ends against a list that is searched from the front.
    #[test]
    fn the_least_recently_used_name_without_a_connection_goes() {
        let seed = fastrand::u64(..);
        let mut dice = fastrand::Rng::with_seed(seed);
        let names = Arc::new(Names::new(8, Vec::new()));
        // Model: index, address, connections; the one used last at the end.
        let mut model: Vec<(usize, Pair, usize)> = Vec::new();
        let mut open: Vec<(usize, Pinned)> = Vec::new();
        for step in 0..50_000 {
            let context = format!("seed {seed}, step {step}");
            match dice.u8(..4) {
                0 | 1 => {
                    let index = dice.usize(..14);
                    let known = model.iter().position(|(known, ..)| *known == index);
                    let found = names.addresses(&host(index));
                    if let Some(at) = known {
                        assert_eq!(found, Some(model[at].1), "{context}");
                        if model[at].2 == 0 {
                            let entry = model.remove(at);
                            model.push(entry);
                        }
                        continue;
                    }
                    if model.len() == 8 {
                        let Some(oldest) = model.iter().position(|(.., open)| *open == 0) else {
                            assert_eq!(found, None, "{context}");
                            continue;
                        };
                        model.remove(oldest);
                    }
                    let pair = found.unwrap_or_else(|| panic!("{context}"));
                    assert!(model.iter().all(|(_, other, _)| *other != pair), "{context}");
                    model.push((index, pair, 0));
                }
                2 if !model.is_empty() && open.len() < 20 => {
                    let at = dice.usize(..model.len());
                    let entry = &mut model[at];
                    let address =
                        if dice.bool() { entry.1.v4.into() } else { IpAddr::from(entry.1.v6) };
                    let Target::Name(pinned) = names.target(address) else { panic!("{context}") };
                    assert_eq!(pinned.host, host(entry.0), "{context}");
                    entry.2 += 1;
                    open.push((entry.0, pinned));
                }
                _ if !open.is_empty() => {
                    let (index, pinned) = open.swap_remove(dice.usize(..open.len()));
                    drop(pinned);
                    let at = model.iter().position(|(known, ..)| *known == index).unwrap();
                    model[at].2 -= 1;
                    if model[at].2 == 0 {
                        let entry = model.remove(at);
                        model.push(entry);
                    }
                }
                _ => {}
            }
        }
        let state = names.state.lock();
        assert_eq!(state.by_host.len(), state.by_number.len());
        assert!(state.by_number.len() <= 8);
    }
}
