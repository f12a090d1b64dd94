//! Processes that programs leave behind when they exit: their keepers, recorded per group and killed
//! with the group.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::descendants;
use super::keeper::{Keeper, KeeperHandle};

/// Processes that are killed together: those of one client's session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Group(pub u64);

/// The leftovers of a host. Clones share their state.
#[derive(Debug, Clone, Default)]
pub(super) struct Leftovers(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    groups: HashMap<Group, HashMap<u64, KeeperHandle>>,
    last: u64,
}

impl Leftovers {
    /// Records a keeper until it ends; returns its id. Call it inside a runtime.
    pub(super) fn add(&self, group: Group, keeper: Keeper) -> u64 {
        let id = {
            let mut state = self.lock();
            state.last += 1;
            let id = state.last;
            state.groups.entry(group).or_default().insert(id, keeper.handle());
            id
        };
        let leftovers = self.clone();
        tokio::spawn(async move {
            keeper.wait_ended().await;
            let mut state = leftovers.lock();
            if let Some(of_group) = state.groups.get_mut(&group) {
                of_group.remove(&id);
                if of_group.is_empty() {
                    state.groups.remove(&group);
                }
            }
        });
        id
    }

    /// The keeper of a program's leftovers, unless it has ended.
    pub(super) fn get(&self, group: Group, id: u64) -> Option<KeeperHandle> {
        self.lock().groups.get(&group)?.get(&id).cloned()
    }

    /// Kills the leftovers of a group. Blocks.
    pub(super) fn kill_group(&self, group: Group) {
        let of_group = self.lock().groups.remove(&group).unwrap_or_default();
        descendants::kill_all(of_group.into_values().collect());
    }

    /// Kills all leftovers. Blocks.
    pub(super) fn kill_all(&self) {
        let groups = std::mem::take(&mut self.lock().groups);
        descendants::kill_all(groups.into_values().flat_map(HashMap::into_values).collect());
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }
}
