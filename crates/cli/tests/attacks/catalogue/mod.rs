//! Known attacks: a table for each class, and the code that runs and judges them.
//!
//! An attempt is a policy, steps that prepare the tree from outside, one or several requests, and a
//! control: a legitimate operation that has to work under the same policy. The generator's model decides by
//! the disk and by the output whether the attempt succeeded.
//!
//! In every word `{W}` is the workspace, `{W2}` another directory like it, `{OUT}` and `{RO}` are
//! beside it, `{B}` is the directory around them; `{SERVER}` and `{PORT}` are the server's.

mod classic;
mod front_door;
mod managed;
mod mounts;
mod names;
mod odd;
mod old_root;
mod protected;
mod sockets;
mod streams;
mod world;

use serde_json::Value;

use crate::generator::model::Model;
use crate::generator::policy::{Access, Entry, Name, Policy};
use crate::generator::snapshot::Snapshot;
use crate::generator::steps::Step;
use crate::server::{self, User};
use crate::support::{Client, Running};
use world::World;

/// How a request executes its steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// By one process.
    Process,
    /// By filesystem requests, each in every possible way.
    Files,
}

#[derive(Debug, Clone)]
struct Request {
    way: Way,
    policy: usize,
    steps: Vec<String>,
}

#[derive(Debug, Clone)]
struct Attempt {
    name: String,
    policies: Vec<Policy>,
    setup: Vec<String>,
    requests: Vec<Request>,
    control: Vec<String>,
    /// Content that must not leak, besides what the model knows.
    secrets: Vec<String>,
    /// No step may succeed, whether or not it leaves a trace.
    fails: bool,
    /// The server may refuse the setup as a whole.
    may_be_refused: bool,
    only: Option<User>,
}

fn strings(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

/// An attempt under a policy; the control is that the workspace can be read and written.
fn attempt(name: &str, policy: Policy) -> Attempt {
    let writes = policy.entries.iter().any(|entry| entry.access == Access::Write);
    let control = if writes { "write {W}/control fine" } else { "read {W}/f" };
    Attempt {
        name: name.to_owned(),
        policies: vec![policy],
        setup: Vec::new(),
        requests: Vec::new(),
        control: strings(&[control]),
        secrets: Vec::new(),
        fails: false,
        may_be_refused: false,
        only: None,
    }
}

impl Attempt {
    /// Steps that prepare the tree.
    fn setup(mut self, steps: &[&str]) -> Self {
        self.setup = strings(steps);
        self
    }

    /// A process, under the first policy.
    fn run(self, steps: &[&str]) -> Self {
        self.by(Way::Process, 0, steps)
    }

    /// Filesystem requests, under the first policy.
    fn files(self, steps: &[&str]) -> Self {
        self.by(Way::Files, 0, steps)
    }

    fn by(mut self, way: Way, policy: usize, steps: &[&str]) -> Self {
        self.requests.push(Request { way, policy, steps: strings(steps) });
        self
    }

    /// Another policy, of another session.
    fn and(mut self, policy: Policy) -> Self {
        self.policies.push(policy);
        self
    }

    fn control(mut self, steps: &[&str]) -> Self {
        self.control = strings(steps);
        self
    }

    fn secret(mut self, text: &str) -> Self {
        self.secrets.push(text.to_owned());
        self
    }

    fn fails(mut self) -> Self {
        self.fails = true;
        self
    }

    fn may_be_refused(mut self) -> Self {
        self.may_be_refused = true;
        self
    }

    /// Not as root, for whom every directory can be listed.
    fn only_unprivileged(self) -> Self {
        match User::all() {
            [_, User::Nobody] => self.only(User::Nobody),
            _ => self,
        }
    }

    fn only(mut self, user: User) -> Self {
        self.only = Some(user);
        self
    }
}

/// The same steps by a process, and by every suitable filesystem method.
fn both(name: &str, policy: &Policy, steps: &[&str]) -> Vec<Attempt> {
    vec![
        attempt(&format!("{name}, by a process"), policy.clone()).run(steps),
        attempt(&format!("{name}, by requests"), policy.clone()).files(steps),
    ]
}

fn entry(name: Name, access: Access) -> Entry {
    Entry { name, access, skip_missing: false }
}

/// Grants what programs need, and the workspace except `den` and `*.key`.
fn narrow() -> Policy {
    Policy {
        entries: vec![
            entry(Name::Minimal, Access::Read),
            entry(Name::ProjectRoots(None), Access::Write),
            entry(Name::Path("{W}/den".into()), Access::Deny),
            entry(Name::Glob("**/*.key".into()), Access::Deny),
        ],
        roots: vec!["{W}".into()],
        cwd: "{W}".into(),
        tmpdir: None,
        glob_depth: None,
        network: false,
    }
}

/// The same with the whole disk readable.
fn wide() -> Policy {
    let mut policy = narrow();
    policy.entries[0] = entry(Name::Root, Access::Read);
    policy
}

fn read_only() -> Policy {
    Policy { entries: vec![entry(Name::Root, Access::Read)], ..narrow() }
}

impl Policy {
    fn with(mut self, path: &str, access: Access) -> Self {
        self.entries.push(entry(Name::Path(path.into()), access));
        self
    }

    fn tmpdir(mut self, path: &str) -> Self {
        self.entries.push(entry(Name::Tmpdir, Access::Write));
        self.tmpdir = Some(path.into());
        self
    }

    fn root(mut self, path: &str) -> Self {
        self.roots.push(path.into());
        self
    }

    fn networked(mut self) -> Self {
        self.network = true;
        self
    }

    fn globs(mut self, pattern: &str) -> Self {
        self.entries.push(entry(Name::Glob(pattern.into()), Access::Deny));
        self
    }

    /// With every placeholder replaced.
    fn within(&self, world: &World) -> Self {
        let mut policy = self.clone();
        let entries = policy.entries.iter_mut().filter_map(|entry| match &mut entry.name {
            Name::Path(text) | Name::Glob(text) => Some(text),
            _ => None,
        });
        let all = entries.chain(&mut policy.roots).chain(&mut policy.tmpdir);
        for text in all.chain([&mut policy.cwd]) {
            *text = world.expand(text);
        }
        policy
    }
}

/// Why an attempt fails the test; `None` if it was prevented and its control worked.
async fn judge(attempt: &Attempt, user: User, server: &Running) -> Option<String> {
    let mut world = World::new(user);
    world.served_by(server);
    world.prepare(&attempt.setup);
    judge_in(&world, attempt, server).await
}

/// The same in a prepared world.
async fn judge_in(world: &World, attempt: &Attempt, server: &Running) -> Option<String> {
    let policies: Vec<Policy> = attempt.policies.iter().map(|it| it.within(world)).collect();
    let mut clients = Vec::new();
    for _ in &policies {
        clients.push(server.client().await);
    }
    let model = Model::new(&policies, Snapshot::take(world.base()));
    let control: Vec<String> = attempt.control.iter().map(|step| world.expand(step)).collect();
    if !control.is_empty() {
        let (said, refused) = send(&mut clients[0], Way::Process, &policies[0], &control).await;
        let worked = (1..=control.len()).all(|n| said.contains(&format!("\n#{n} ok\n")));
        if !(worked || (refused && attempt.may_be_refused)) {
            return Some(format!("the control does not work: {control:?}: {said}"));
        }
    }
    for request in &attempt.requests {
        let steps: Vec<String> = request.steps.iter().map(|step| world.expand(step)).collect();
        let (client, policy) = (&mut clients[request.policy], &policies[request.policy]);
        let (said, _) = send(client, request.way, policy, &steps).await;
        let now = Snapshot::take(world.base());
        if let Some(violation) = model.violation(&now, &said) {
            return Some(format!("{violation}\n    said {said:?}"));
        }
        if let Some(secret) = attempt.secrets.iter().find(|secret| said.contains(secret.as_str())) {
            return Some(format!("leak: {secret}: {said:?}"));
        }
        if attempt.fails && said.contains(" ok\n") {
            return Some(format!("a step succeeded: {said:?}"));
        }
        assert!(!said.contains("unknown step"), "{said}");
    }
    None
}

/// Executes steps under a policy; returns the output, and whether the server refused all of them.
async fn send(client: &mut Client, way: Way, policy: &Policy, steps: &[String]) -> (String, bool) {
    let wire = policy.wire();
    if way == Way::Process {
        let tmpdir = policy.tmpdir.as_deref();
        let outcome = server::run(client, steps, &wire, &policy.cwd, tmpdir).await;
        return (outcome.said, outcome.refused);
    }
    let mut all = String::new();
    for step in steps {
        let step = Step(step.split(' ').map(str::to_owned).collect());
        for requests in step.requests() {
            for (method, params) in requests {
                all.push_str(&call(client, method, params, &wire).await);
            }
        }
    }
    (all, false)
}

async fn call(client: &mut Client, method: &str, mut params: Value, wire: &Value) -> String {
    params["sandbox"] = wire.clone();
    let answer = client.call(method, params).await;
    server::decoded_text(&answer) + "\n"
}

/// A runtime for one test.
fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// Runs the attempts against servers of all users.
fn assert_all_fail(attempts: &[Attempt]) {
    let runtime = runtime();
    let mut failures = Vec::new();
    let mut count = 0;
    runtime.block_on(async {
        for &user in User::all() {
            let server = user.server();
            for attempt in attempts.iter().filter(|it| it.only.is_none_or(|only| only == user)) {
                count += 1;
                if let Some(failure) = judge(attempt, user, &server).await {
                    failures.push(format!("{user:?}: {}: {failure}", attempt.name));
                }
            }
        }
    });
    let (failed, text) = (failures.len(), failures.join("\n"));
    assert!(failures.is_empty(), "{failed} of {count} attempts:\n{text}");
    eprintln!("{count} attempts fought off");
}
