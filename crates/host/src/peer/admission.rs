//! Decides whether to admit a connection, given the processes that hold its other end. Pure.

use std::collections::HashMap;
use std::io;

use super::{Refusal, owners};

/// A process, as far as admission needs to know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KnownProcess {
    /// `None` at the top of the tree.
    pub parent: Option<i32>,
    /// The process has a restriction that this process does not have, or may have one.
    pub restricted: bool,
}

/// Restrictions of a process that are visible from outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Restrictions {
    /// Its user namespace.
    pub user_namespace: Option<Vec<u8>>,
    /// Number of seccomp filters.
    pub seccomp_filters: Option<u32>,
}

/// This process, and how to recognize its sandboxes.
#[derive(Debug)]
pub(super) struct AdmissionPolicy {
    pub own_pid: i32,
    pub restrictions: Restrictions,
    /// Orphaned descendants become children of this process.
    pub adopts_orphans: bool,
}

/// The processes that hold a socket, and those of their ancestors that could be read.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Owners {
    pub holders: Vec<i32>,
    pub known: HashMap<i32, KnownProcess>,
}

impl AdmissionPolicy {
    pub(super) fn of_this_process(adopts_orphans: bool) -> io::Result<Self> {
        let own_pid = rustix::process::getpid().as_raw_nonzero().get();
        let restrictions = owners::own_restrictions()?;
        Ok(Self { own_pid, restrictions, adopts_orphans })
    }

    /// Whether a process with these restrictions may be in a sandbox. Each of our sandboxes has its own
    /// user namespace or, where there are none, one more seccomp filter than this process.
    pub(super) fn is_restricted(&self, restrictions: &Restrictions) -> bool {
        let own = &self.restrictions;
        restrictions.user_namespace.is_none()
            || restrictions.user_namespace != own.user_namespace
            || restrictions.seccomp_filters.is_none()
            || restrictions.seccomp_filters > own.seccomp_filters
    }

    /// Refuses a socket that a sandbox of ours holds, one without a holder, and one of this process, whose
    /// proxies connect for sandboxes. A program that only embeds the host may connect to itself.
    pub(super) fn check(&self, owners: &Owners) -> Result<(), Refusal> {
        if owners.holders.is_empty() {
            return Err(Refusal::Unknown);
        }
        for holder in &owners.holders {
            if *holder == self.own_pid && self.adopts_orphans {
                return Err(Refusal::Proxied);
            }
            match owners.known.get(holder) {
                None => return Err(Refusal::Unknown),
                Some(known_process)
                    if known_process.restricted && self.may_be_ours(*holder, owners) =>
                {
                    return Err(Refusal::Sandboxed);
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// Whether a process is, or may be, a descendant of this one: its ancestors cannot be followed to
    /// the root, or orphans leave the tree so that the ancestors prove nothing.
    fn may_be_ours(&self, pid: i32, owners: &Owners) -> bool {
        let mut at = pid;
        // A reused pid could make the chain circular.
        for _ in 0..=owners.known.len() {
            match owners.known.get(&at) {
                _ if at == self.own_pid => return true,
                Some(KnownProcess { parent: Some(parent), .. }) => at = *parent,
                Some(KnownProcess { parent: None, .. }) => return !self.adopts_orphans,
                None => return true,
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: i32 = 100;

    fn admission(adopts_orphans: bool) -> AdmissionPolicy {
        let restrictions =
            Restrictions { user_namespace: Some(b"user:[1]".to_vec()), seccomp_filters: Some(1) };
        AdmissionPolicy { own_pid: OWN, restrictions, adopts_orphans }
    }

    fn owners(holders: &[i32], known: &[(i32, Option<i32>, bool)]) -> Owners {
        let known = known
            .iter()
            .map(|&(pid, parent, restricted)| (pid, KnownProcess { parent, restricted }))
            .collect();
        Owners { holders: holders.to_vec(), known }
    }

    #[test]
    fn only_sandboxed_descendants_are_refused() {
        let known = [
            (1, None, false),
            (OWN, Some(1), false),
            (200, Some(OWN), false),
            (201, Some(200), true),
            (202, Some(200), false),
            (300, Some(1), true),
            (400, Some(399), true),
        ];
        let verdict = |adopts, holders: &[i32]| admission(adopts).check(&owners(holders, &known));
        assert_eq!(verdict(true, &[201]), Err(Refusal::Sandboxed));
        assert_eq!(verdict(true, &[202]), Ok(()), "a descendant without a sandbox");
        assert_eq!(verdict(true, &[300]), Ok(()), "somebody else's sandbox");
        assert_eq!(verdict(false, &[300]), Err(Refusal::Sandboxed), "maybe an orphan of ours");
        assert_eq!(verdict(true, &[202, 201]), Err(Refusal::Sandboxed), "one of them is enough");
        assert_eq!(verdict(true, &[400]), Err(Refusal::Sandboxed), "its line is lost");
        assert_eq!(verdict(true, &[OWN]), Err(Refusal::Proxied), "maybe for a sandbox");
        assert_eq!(verdict(false, &[OWN]), Ok(()), "a client in the same program");
        assert_eq!(verdict(true, &[]), Err(Refusal::Unknown));
        assert_eq!(verdict(true, &[202, 500]), Err(Refusal::Unknown));
    }

    #[test]
    fn unknown_restrictions_count_as_a_sandbox() {
        let admission = admission(true);
        let restrictions = |user: Option<&str>, seccomp_filters| Restrictions {
            user_namespace: user.map(|user| user.as_bytes().to_vec()),
            seccomp_filters,
        };
        for (restrictions, restricted) in [
            (restrictions(Some("user:[1]"), Some(1)), false),
            (restrictions(Some("user:[1]"), Some(0)), false),
            (restrictions(Some("user:[1]"), Some(2)), true),
            (restrictions(Some("user:[2]"), Some(0)), true),
            (restrictions(None, Some(0)), true),
            (restrictions(Some("user:[1]"), None), true),
        ] {
            assert_eq!(admission.is_restricted(&restrictions), restricted, "{restrictions:?}");
        }
    }

    /// Random process trees, checked against a set model.
    #[test]
    fn random_trees_are_judged_like_the_model() {
        for seed in 1..=20_000_u64 {
            let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let mut below = |n: usize| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 33) as usize % n
            };
            // Pids from 99 up, OWN among them. Some parents are unknown, some form cycles.
            let known: Vec<(i32, Option<i32>, bool)> = (0..below(10))
                .map(|n| {
                    let parent = (below(5) > 0).then(|| 97 + below(14) as i32);
                    (99 + n as i32, parent, below(2) == 0)
                })
                .collect();
            let holders: Vec<i32> = (0..below(4)).map(|_| 99 + below(10) as i32).collect();
            let adopts = below(2) == 0;

            // Unrelated processes: their chain ends at a process without a parent and does not contain
            // us.
            let mut strangers: Vec<i32> = Vec::new();
            for _ in 0..known.len() {
                for (pid, parent, _) in &known {
                    let ends = parent.is_none_or(|parent| strangers.contains(&parent));
                    if *pid != OWN && ends && !strangers.contains(pid) {
                        strangers.push(*pid);
                    }
                }
            }
            let row = |pid: &i32| known.iter().find(|(known, ..)| known == pid);
            let refused = |pid: &i32| match row(pid) {
                None => true,
                Some(_) if *pid == OWN && adopts => true,
                Some((_, _, restricted)) => *restricted && !(adopts && strangers.contains(pid)),
            };
            let expected = !holders.is_empty() && !holders.iter().any(refused);

            let verdict = admission(adopts).check(&owners(&holders, &known));
            assert_eq!(verdict.is_ok(), expected, "seed {seed}: {holders:?} {known:?}");
        }
    }
}
