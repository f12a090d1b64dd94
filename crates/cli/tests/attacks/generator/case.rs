//! One case: a tree, policies and requests, all from one seed; and its execution and verdict.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::model::Model;
use super::policy::{Access, Name, Policy};
use super::random::Random;
use super::snapshot::{self, Snapshot};
use super::steps::{Attacker, Step};
use super::tree::{Tree, What};
use crate::server::{self, Outcome, User};
use crate::support::Client;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Process,
    Files,
}

#[derive(Debug, Clone)]
pub(super) struct Request {
    pub way: Way,
    /// The policy; each has its own session.
    pub policy: usize,
    pub steps: Vec<Step>,
}

#[derive(Debug, Clone)]
pub(super) struct Case {
    pub seed: u64,
    pub user: User,
    pub tree: Tree,
    pub policies: Vec<Policy>,
    pub requests: Vec<Request>,
}

/// The verdict on a case.
#[derive(Debug, Default)]
pub(super) struct Verdict {
    pub violation: Option<String>,
    pub requests: usize,
    pub refused: usize,
    /// Whether the first request was refused although the tree and the policy gave no reason.
    pub honest: Option<bool>,
    /// The server's reason.
    pub reason: Option<String>,
    /// The output of the first request, for a replayed case.
    pub said: Vec<String>,
}

impl Case {
    /// The user of the server for a seed.
    pub(super) fn user_of(seed: u64) -> User {
        let users = User::all();
        users[(seed % users.len() as u64) as usize]
    }

    pub(super) fn generate(seed: u64) -> Self {
        let user = Self::user_of(seed);
        let mut random = Random::new(seed);
        let parent = match random.below(20) {
            0 => "/tmp",
            1 => "/dev/shm",
            _ => "/var/tmp",
        };
        let base = format!("{parent}/atk-{}-{seed:x}", std::process::id());
        let tree = Tree::generate(&mut random, &base, seed);
        let count = if random.percent(15) { 2 } else { 1 };
        let policies: Vec<Policy> =
            (0..count).map(|_| Policy::generate(&mut random, &tree)).collect();
        let mut mind = Attacker::new(&tree, &policies);
        let mut requests: Vec<Request> = Vec::new();
        let mut left_over = Vec::new();
        let count = random.between(2, 4);
        for number in 0..count {
            let way = if number > 0 && random.percent(25) { Way::Files } else { Way::Process };
            let mut steps = std::mem::take(&mut left_over);
            for _ in 0..random.between(1, 5) {
                steps.push(mind.step(&mut random));
            }
            if number + 1 < count && random.percent(80) {
                let (first, then) = mind.two_request_attack(&mut random);
                steps.extend(first);
                left_over = then;
            }
            let policy = random.below(policies.len());
            requests.push(Request { way, policy, steps });
        }
        let mut case = Self { seed, user, tree, policies, requests };
        if let Ok(known) = std::env::var("ATTACK_WITHOUT") {
            case.leave_out(&known);
        }
        case
    }

    /// Removes known holes from the case, to find others.
    fn leave_out(&mut self, known: &str) {
        let base = self.tree.base.clone();
        for word in self.requests.iter_mut().flat_map(|it| &mut it.steps).flat_map(|it| &mut it.0) {
            if known.contains("up") && (word.starts_with("/..") || word.starts_with("..")) {
                *word = word.find(&base).map_or_else(|| base.clone(), |at| word[at..].to_owned());
            }
            if known.contains("up")
                && (word.starts_with("/proc") || word.rfind(&base).is_some_and(|at| at > 0))
            {
                *word = word.rfind(&base).map_or_else(|| base.clone(), |at| word[at..].to_owned());
            }
            if known.contains("set-id") && matches!(word.as_str(), "4755" | "2755") {
                *word = "755".into();
            }
        }
        for object in &mut self.tree.objects {
            match &mut object.what {
                What::Link(target) if known.contains("up") && target.starts_with("/..") => {
                    *target = target[3..].to_owned();
                }
                _ => {}
            }
            let pointer = matches!(&object.what, What::File(text) if text.starts_with("gitdir"))
                || (object.path.ends_with("/.git") && matches!(object.what, What::Link(_)));
            if known.contains("git") && pointer {
                object.what = What::File("nothing".into());
            }
        }
        if known.contains("shm") && base.starts_with("/dev/shm") {
            self.requests.truncate(1);
            self.requests[0].steps.clear();
        }
    }

    /// Whether a policy makes the whole disk writable. A server remembers what its sandboxes could write, and
    /// no longer trusts links there, `/bin` among them; so these cases have their own servers.
    pub(super) fn writes_everywhere(&self) -> bool {
        self.policies.iter().any(|policy| {
            policy
                .entries
                .iter()
                .any(|entry| matches!(entry.name, Name::Root) && entry.access == Access::Write)
        })
    }

    /// Runs the case with one client per policy, all of one server.
    pub(super) async fn run(&self, clients: &mut [Client]) -> Verdict {
        let base = Path::new(&self.tree.base);
        snapshot::remove(base);
        self.tree.create(self.user);
        let model = Model::new(&self.policies, Snapshot::take(base));
        let verdict = self.attack(&model, clients).await;
        snapshot::remove(base);
        verdict
    }

    async fn attack(&self, model: &Model, clients: &mut [Client]) -> Verdict {
        let mut verdict = Verdict::default();
        let mut random = Random::new(!self.seed);
        for (number, request) in self.requests.iter().enumerate() {
            let policy = &self.policies[request.policy];
            let client = &mut clients[request.policy];
            let wire = policy.wire();
            let mut controls = Vec::new();
            if number == 0 && request.policy == 0 {
                controls = self.controls(model);
            }
            let outcome = match request.way {
                Way::Process => {
                    let mut steps: Vec<String> = controls.clone();
                    steps.extend(request.steps.iter().map(Step::text));
                    let tmpdir = policy.tmpdir.as_deref();
                    server::run(client, &steps, &wire, &policy.cwd, tmpdir).await
                }
                Way::Files => files(client, request, &wire, &mut random).await,
            };
            verdict.requests += 1;
            verdict.refused += usize::from(outcome.refused);
            if number == 0 && self.is_honest(model) {
                verdict.honest = Some(outcome.refused);
                verdict.reason = outcome.refused.then(|| outcome.said.clone());
            }
            verdict.said.push(outcome.said.clone());
            let now = Snapshot::take(Path::new(&self.tree.base));
            if let Some(violation) = model.violation(&now, &outcome.said) {
                verdict.violation = Some(format!("request {number}: {violation}"));
                return verdict;
            }
            let failed = !outcome.refused && !self.is_usable(model, &controls, &outcome);
            if failed && self.tree.plain {
                verdict.violation = Some(format!("control: {controls:?} failed: {}", outcome.said));
                return verdict;
            }
        }
        verdict
    }

    /// Operations that must work in the first request, before the attack.
    fn controls(&self, model: &Model) -> Vec<String> {
        let write = model.may_write.as_ref().map(|path| format!("write {} fine", path.display()));
        let read = model.may_read.as_ref().map(|(path, _)| format!("read {}", path.display()));
        write.into_iter().chain(read).collect()
    }

    fn is_usable(&self, model: &Model, controls: &[String], outcome: &Outcome) -> bool {
        let worked = |number: usize| outcome.said.contains(&format!("\n#{number} ok\n"));
        let read = model.may_read.as_ref().is_none_or(|(_, token)| outcome.said.contains(token));
        controls.is_empty() || ((1..=controls.len()).all(worked) && read)
    }

    /// Whether the server has no reason to refuse: no links, no closed directories, no missing targets.
    fn is_honest(&self, model: &Model) -> bool {
        let straight = |path: &String| {
            let path = PathBuf::from(path);
            path.canonicalize().is_ok_and(|found| found == path)
        };
        let directory = |path: &String| Path::new(path).is_dir();
        self.tree.plain
            && self.requests[0].policy == 0
            && model.enters
            && self.policies[0].roots.iter().all(directory)
            && self.policies[0].named().iter().all(straight)
    }
}

/// A batch of filesystem requests.
async fn files(
    client: &mut Client,
    request: &Request,
    sandbox: &Value,
    random: &mut Random,
) -> Outcome {
    let mut outcome = Outcome { said: String::new(), refused: true };
    for step in &request.steps {
        let mut ways = step.requests();
        for (method, mut params) in ways.swap_remove(random.below(ways.len())) {
            params["sandbox"] = sandbox.clone();
            let answer = client.call(method, params).await;
            outcome.refused &= answer["error"]["code"] == -32602;
            outcome.said.push_str(&server::decoded_text(&answer));
            outcome.said.push('\n');
        }
    }
    outcome
}
