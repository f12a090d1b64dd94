//! What processes may use: the operator's defaults and maxima, and the budgets of sessions and of the
//! server.
//!
//! A budget is spent when a process starts and returned when its last descendant has ended. It counts
//! what a process may use, not what it uses, so the sum holds without anything to measure.

use std::fmt;
use std::sync::Arc;

use codex_exec_server_protocol::resources::{Resource, ResourceLimits};
use codex_exec_server_protocol::{ErrorKind, RpcError};
use parking_lot::Mutex;

/// Limits of processes, sessions and the server. By default there are none.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct LimitConfig {
    /// Limits of a process whose request names no other (default: none).
    pub default: ResourceLimits,
    /// The largest limits that a request may name, and those of a request that names none where there is
    /// no default (default: none). A request for more is refused.
    pub max: ResourceLimits,
    /// What the processes of a session may use together (default: no limit).
    pub session: Quota,
    /// What all processes may use together (default: no limit).
    pub server: Quota,
}

/// What several processes may use together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Quota {
    /// Processes that were started and whose descendants have not all ended (default: no limit).
    pub processes: Option<u64>,
    /// Sum of their limits on memory, in bytes (default: no limit). With this, every process needs a limit.
    pub memory_bytes: Option<u64>,
    /// Sum of their limits on processes (default: no limit). With this, every process needs a limit.
    pub pids: Option<u64>,
}

impl Quota {
    fn is_unlimited(self) -> bool {
        self == Self::default()
    }
}

impl LimitConfig {
    /// The limits of a process that asks for these.
    pub(crate) fn resolve(
        &self,
        requested: Option<ResourceLimits>,
    ) -> Result<Option<ResourceLimits>, RpcError> {
        let mut limits = requested.unwrap_or_default();
        for &resource in Resource::ALL {
            let (default, max) = (self.default.get(resource), self.max.get(resource));
            match (limits.get(resource), max) {
                (Some(asked), Some(max)) if asked > max => {
                    let name = resource.name();
                    let message =
                        format!("limits.{name} is {asked}; this server allows at most {max}");
                    return Err(RpcError::invalid_params(ErrorKind::LimitReached, message));
                }
                (Some(_), _) => {}
                (None, Some(max)) => limits.set(resource, Some(default.unwrap_or(max).min(max))),
                (None, None) => limits.set(resource, default),
            }
        }
        Ok((!limits.is_empty()).then_some(limits))
    }
}

/// What is spent of a quota. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Ledger {
    whose: Whose,
    quota: Quota,
    spent: Arc<Mutex<Amounts>>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Whose {
    Session,
    Server,
}

impl fmt::Display for Whose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Session => "session",
            Self::Server => "server",
        })
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Amounts {
    processes: u64,
    memory_bytes: u64,
    pids: u64,
}

/// A process's part of the budgets; dropping it returns that.
#[derive(Debug)]
pub(crate) struct Admission {
    _parts: [Option<Part>; 2],
}

#[derive(Debug)]
struct Part {
    ledger: Ledger,
    amounts: Amounts,
}

impl Drop for Part {
    fn drop(&mut self) {
        let mut spent = self.ledger.spent.lock();
        spent.processes -= self.amounts.processes;
        spent.memory_bytes -= self.amounts.memory_bytes;
        spent.pids -= self.amounts.pids;
    }
}

impl Ledger {
    pub(crate) fn new(whose: Whose, quota: Quota) -> Self {
        Self { whose, quota, spent: Arc::default() }
    }

    fn spend(&self, limits: &ResourceLimits) -> Result<Option<Part>, RpcError> {
        if self.quota.is_unlimited() {
            return Ok(None);
        }
        let whose = self.whose;
        let of = |resource: Resource, quota: Option<u64>| match (limits.get(resource), quota) {
            (Some(limit), _) => Ok(limit),
            (None, None) => Ok(0),
            (None, Some(_)) => {
                let name = resource.name();
                let message = format!("this {whose} has a budget, so limits.{name} must be given");
                Err(RpcError::invalid_params(ErrorKind::InvalidParams, message))
            }
        };
        let amounts = Amounts {
            processes: 1,
            memory_bytes: of(Resource::Memory, self.quota.memory_bytes)?,
            pids: of(Resource::Pids, self.quota.pids)?,
        };
        let mut spent = self.spent.lock();
        let add = |spent: u64, amount: u64, quota: Option<u64>, what: &str| {
            let sum = spent.saturating_add(amount);
            match quota {
                Some(quota) if sum > quota => {
                    let message = format!(
                        "this {whose} may use {quota} {what}; {spent} are in use, and this process \
                         asks for {amount}"
                    );
                    Err(RpcError::invalid_request(ErrorKind::LimitReached, message))
                }
                _ => Ok(sum),
            }
        };
        let quota = self.quota;
        *spent = Amounts {
            processes: add(spent.processes, amounts.processes, quota.processes, "processes")?,
            memory_bytes: add(
                spent.memory_bytes,
                amounts.memory_bytes,
                quota.memory_bytes,
                "bytes of memory",
            )?,
            pids: add(spent.pids, amounts.pids, quota.pids, "process ids")?,
        };
        drop(spent);
        Ok(Some(Part { ledger: self.clone(), amounts }))
    }
}

/// Spends what a process may use; `None` if there are no budgets.
pub(crate) fn admit(
    session: &Ledger,
    server: &Ledger,
    limits: Option<&ResourceLimits>,
) -> Result<Option<Admission>, RpcError> {
    let none = ResourceLimits::default();
    let limits = limits.unwrap_or(&none);
    let parts = [session.spend(limits)?, server.spend(limits)?];
    Ok(parts.iter().any(Option::is_some).then_some(Admission { _parts: parts }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_hold_for_random_admissions() {
        let mut random = fastrand::Rng::with_seed(15);
        for _ in 0..200 {
            let some = |random: &mut fastrand::Rng, top| random.bool().then(|| random.u64(1..top));
            let mut quota = || Quota {
                processes: some(&mut random, 6),
                memory_bytes: some(&mut random, 100),
                pids: some(&mut random, 20),
            };
            let (session, server) = (quota(), quota());
            let ledgers =
                [Ledger::new(Whose::Session, session), Ledger::new(Whose::Server, server)];
            let mut model: Vec<(Amounts, Option<Admission>)> = Vec::new();
            for _ in 0..60 {
                if !model.is_empty() && random.u8(..3) == 0 {
                    model.swap_remove(random.usize(..model.len()));
                    continue;
                }
                let limits = ResourceLimits {
                    memory_bytes: Some(random.u64(1..40)),
                    pids: Some(random.u64(1..8)),
                    ..ResourceLimits::default()
                };
                let sum = |of: fn(&Amounts) -> u64| -> u64 {
                    model.iter().map(|(amounts, _)| of(amounts)).sum()
                };
                let (memory_bytes, pids) = (limits.memory_bytes.unwrap(), limits.pids.unwrap());
                let fits = |quota: Quota| {
                    let within = |quota: Option<u64>, sum| quota.is_none_or(|quota| sum <= quota);
                    within(quota.processes, model.len() as u64 + 1)
                        && within(quota.memory_bytes, sum(|a| a.memory_bytes) + memory_bytes)
                        && within(quota.pids, sum(|a| a.pids) + pids)
                };
                let expected = fits(session) && fits(server);
                match admit(&ledgers[0], &ledgers[1], Some(&limits)) {
                    Ok(admission) => {
                        assert!(expected);
                        let unlimited = session.is_unlimited() && server.is_unlimited();
                        assert_eq!(admission.is_none(), unlimited);
                        model.push((Amounts { processes: 1, memory_bytes, pids }, admission));
                    }
                    Err(error) => {
                        assert!(!expected);
                        assert_eq!(error.kind, Some(ErrorKind::LimitReached));
                    }
                }
            }
            drop(model);
            for ledger in ledgers {
                assert_eq!(*ledger.spent.lock(), Amounts::default(), "all is returned");
            }
        }
    }

    #[test]
    fn requests_get_defaults_within_the_maxima() {
        let limits = |wall_ms, pids| ResourceLimits { wall_ms, pids, ..Default::default() };
        let config = LimitConfig {
            default: limits(Some(10), None),
            max: limits(Some(20), Some(5)),
            ..LimitConfig::default()
        };
        let resolved = |requested| config.resolve(requested).map_err(|error| error.kind.unwrap());
        assert_eq!(resolved(None), Ok(Some(limits(Some(10), Some(5)))));
        assert_eq!(resolved(Some(limits(Some(20), Some(1)))), Ok(Some(limits(Some(20), Some(1)))));
        assert_eq!(resolved(Some(limits(Some(21), None))), Err(ErrorKind::LimitReached));
        assert_eq!(LimitConfig::default().resolve(None).unwrap(), None);
        let budget = Ledger::new(Whose::Server, Quota { pids: Some(9), ..Quota::default() });
        let refused = admit(&budget, &budget, None).unwrap_err();
        assert_eq!(refused.kind, Some(ErrorKind::InvalidParams), "without a limit");
    }
}
