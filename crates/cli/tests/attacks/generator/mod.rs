//! Random policies, trees and attackers, judged by a model of the contract.
//!
//! `ATTACK_SEED` is the first seed (default 0), `ATTACK_CASES` the number of cases (default 10,000). A single
//! case is printed in full. `ATTACK_ALL` lists every failure, one line each, instead of stopping after a few.
//! `ATTACK_WITHOUT` excludes known holes: any of `up,shm,set-id,git`.

mod case;
pub(crate) mod model;
pub(crate) mod policy;
pub(crate) mod random;
pub(crate) mod snapshot;
pub(crate) mod steps;
mod tree;

use std::panic::AssertUnwindSafe;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use futures_util::FutureExt;

use crate::program::attacker;
use crate::server::User;
use crate::support::{Client, Running, codex};
use case::{Case, Verdict};

/// Number of failures after which the search stops.
const ENOUGH: usize = 5;

/// Concurrent sessions per user.
const WORKERS: usize = 2;

fn number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} is no number: {text}")),
        Err(_) => default,
    }
}

#[derive(Default)]
struct Totals {
    cases: AtomicUsize,
    requests: AtomicUsize,
    refused: AtomicUsize,
    honest: AtomicUsize,
    honest_refused: AtomicUsize,
    reasons: Mutex<Vec<String>>,
    failures: Mutex<Vec<(Case, Verdict)>>,
}

impl Totals {
    fn add(&self, case: Case, verdict: Verdict) {
        self.cases.fetch_add(1, Ordering::Relaxed);
        self.requests.fetch_add(verdict.requests, Ordering::Relaxed);
        self.refused.fetch_add(verdict.refused, Ordering::Relaxed);
        if let Some(refused) = verdict.honest {
            self.honest.fetch_add(1, Ordering::Relaxed);
            self.honest_refused.fetch_add(usize::from(refused), Ordering::Relaxed);
        }
        if let Some(reason) = &verdict.reason {
            self.reasons.lock().unwrap().push(format!("{}: {reason}", case.seed));
        }
        if verdict.violation.is_some() {
            self.failures.lock().unwrap().push((case, verdict));
        }
    }

    fn failed(&self) -> usize {
        self.failures.lock().unwrap().len()
    }
}

/// A connection for each of a case's policies.
async fn clients(server: &Running) -> Vec<Client> {
    vec![server.client().await, server.client().await]
}

/// Runs a case; a server that hangs or exits fails it.
async fn judge(case: &Case, server: &Running, held: &mut Vec<Client>) -> Verdict {
    if held.is_empty() {
        *held = clients(server).await;
    }
    let judged = AssertUnwindSafe(case.run(held)).catch_unwind().await;
    judged.unwrap_or_else(|panic| {
        held.clear();
        let said = panic.downcast_ref::<String>().cloned();
        let said = said.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()));
        let violation = Some(format!("server: {}", said.unwrap_or_default()));
        Verdict { violation, ..Verdict::default() }
    })
}

/// The first word of a violation, after the number of its request.
fn kind(verdict: &Verdict) -> Option<String> {
    let text = verdict.violation.as_deref()?;
    let text = text.strip_prefix("request ").map_or(text, |rest| &rest[2..]);
    text.split(':').next().map(|word| word.trim().to_owned())
}

/// Removes every step and entry that the failure does not need.
async fn shrink(case: &Case, server: &Running, held: &mut Vec<Client>) -> (Case, Verdict) {
    let mut best = case.clone();
    let mut verdict = judge(&best, server, held).await;
    let wanted = kind(&verdict);
    for request in (0..best.requests.len()).rev() {
        for step in (0..best.requests[request].steps.len()).rev() {
            let mut smaller = best.clone();
            smaller.requests[request].steps.remove(step);
            let again = judge(&smaller, server, held).await;
            if again.violation.is_some() && kind(&again) == wanted {
                (best, verdict) = (smaller, again);
            }
        }
    }
    for policy in 0..best.policies.len() {
        for entry in (0..best.policies[policy].entries.len()).rev() {
            let mut smaller = best.clone();
            smaller.policies[policy].entries.remove(entry);
            let again = judge(&smaller, server, held).await;
            if again.violation.is_some() && kind(&again) == wanted {
                (best, verdict) = (smaller, again);
            }
        }
    }
    (best, verdict)
}

fn describe(case: &Case, verdict: &Verdict) -> String {
    use std::fmt::Write as _;
    let mut text = format!(
        "seed {} ({:?}): {}\n",
        case.seed,
        case.user,
        verdict.violation.as_deref().unwrap_or("nothing found")
    );
    for (number, policy) in case.policies.iter().enumerate() {
        let entries: Vec<String> = policy
            .entries
            .iter()
            .map(|entry| format!("{:?} {:?}", entry.access, entry.name))
            .collect();
        writeln!(
            text,
            "  policy {number}: {} | roots {:?} | cwd {} | tmpdir {:?} | depth {:?}",
            entries.join(", "),
            policy.roots,
            policy.cwd,
            policy.tmpdir,
            policy.glob_depth,
        )
        .unwrap();
    }
    for (number, request) in case.requests.iter().enumerate() {
        writeln!(text, "  request {number} ({:?}, policy {})", request.way, request.policy)
            .unwrap();
        for step in &request.steps {
            writeln!(text, "    {}", step.text()).unwrap();
        }
    }
    let links: Vec<String> = case
        .tree
        .objects
        .iter()
        .filter_map(|object| match &object.what {
            tree::What::Link(target) | tree::What::Hard(target) => {
                Some(format!("{} -> {target}", object.path))
            }
            tree::What::File(content) if content.starts_with("gitdir") => {
                Some(format!("{}: {}", object.path, content.trim_end()))
            }
            _ => None,
        })
        .collect();
    writeln!(text, "  links {links:?}").unwrap();
    format!("{} below {}\n", text.replace(&case.tree.base, "@").trim_end(), case.tree.base)
        + &format!(
            "  replay: ATTACK_SEED={} ATTACK_CASES=1 cargo test -p codex --test attacks generator\n",
            case.seed
        )
}

#[test]
fn generator_no_random_attacker_reads_or_changes_what_no_policy_grants() {
    let (first, count) = (number("ATTACK_SEED", 0), number("ATTACK_CASES", 10_000));
    let all = std::env::var_os("ATTACK_ALL").is_some();
    attacker();
    let totals = Totals::default();
    let began = std::time::Instant::now();
    std::thread::scope(|scope| {
        for &user in User::all() {
            // A separate server for policies that write everywhere, after which no link is trusted; each with
            // and without cached plans.
            let servers = ["on", "off"].map(|cache| {
                let start = || user.server_of(codex(), &["--sandbox-plan-cache", cache]);
                [start(), start()]
            });
            let servers = std::sync::Arc::new(servers);
            let next = std::sync::Arc::new(AtomicU64::new(first));
            for _ in 0..WORKERS {
                let (totals, servers, next) = (&totals, servers.clone(), next.clone());
                scope.spawn(move || {
                    let runtime =
                        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                    runtime.block_on(async {
                        let mut held_of = [const { [const { Vec::new() }; 2] }; 2];
                        while all || totals.failed() < ENOUGH {
                            let seed = next.fetch_add(1, Ordering::Relaxed);
                            if seed >= first + count {
                                break;
                            }
                            if Case::user_of(seed) != user {
                                continue;
                            }
                            let mut case = Case::generate(seed);
                            let which = usize::from(case.writes_everywhere());
                            // The parity of a seed selects its user.
                            let cache = (seed / 2 % 2) as usize;
                            let server = &servers[cache][which];
                            let held = &mut held_of[cache][which];
                            if which == 1 {
                                // Used too rarely to answer the server's pings in time.
                                held.clear();
                            }
                            let mut verdict = judge(&case, server, held).await;
                            if verdict.violation.is_some() && !all {
                                let (smaller, again) = shrink(&case, server, held).await;
                                if again.violation.is_some() {
                                    (case, verdict) = (smaller, again);
                                }
                            }
                            if count == 1 {
                                eprintln!("{}{:#?}", describe(&case, &verdict), verdict.said);
                            }
                            totals.add(case, verdict);
                        }
                    });
                });
            }
        }
    });
    let of = |number: &AtomicUsize| number.load(Ordering::Relaxed);
    eprintln!(
        "{} cases, {} requests, {} of them refused, {} of {} honest ones, in {:?}",
        of(&totals.cases),
        of(&totals.requests),
        of(&totals.refused),
        of(&totals.honest_refused),
        of(&totals.honest),
        began.elapsed()
    );
    if all {
        for reason in totals.reasons.lock().unwrap().iter().take(20) {
            eprintln!("refused {reason}");
        }
    }
    let failures = totals.failures.into_inner().unwrap();
    if all {
        for (case, verdict) in &failures {
            let violation = verdict.violation.as_deref().unwrap_or_default();
            eprintln!("{} {:?}: {}", case.seed, case.user, violation.replace(&case.tree.base, "@"));
        }
    } else {
        for (case, verdict) in &failures {
            eprintln!("{}", describe(case, verdict));
        }
    }
    assert!(failures.is_empty(), "{} cases failed", failures.len());
    assert!(
        totals.honest_refused.into_inner() * 2 <= totals.honest.into_inner(),
        "the sandbox refuses what it should enforce"
    );
}
