//! Directories that are mounted twice. The server runs in its own mount namespace, so that the mounts do not
//! affect this machine.

use std::process::Command;

use super::{Access, Attempt, attempt, judge_in, narrow, runtime, wide, world::World};
use crate::server::User;
use crate::support::Running;

/// A server that sees these mounts, which are lines of a script.
fn server(world: &World, user: User, mounts: &[&str]) -> Running {
    let mut script = "set -e\n".to_owned();
    for line in mounts {
        script.push_str(&world.expand(line));
        script.push('\n');
    }
    if user == User::Nobody {
        script.push_str("exec setpriv --reuid 65534 --regid 65534 --clear-groups -- \"$@\"\n");
    } else {
        script.push_str("exec \"$@\"\n");
    }
    let mut command = Command::new("unshare");
    command.args(["-m", "--propagation", "private", "sh", "-c", &script, "sh"]);
    command.env_remove("TMPDIR").env("HOME", "/nonexistent");
    command.arg(env!("CARGO_BIN_EXE_codex")).args(["exec-server", "--detach-ttl", "0"]);
    Running::start_with(&mut command)
}

fn attempts() -> Vec<(Vec<&'static str>, Attempt)> {
    let mut all = Vec::new();
    let mut add = |mounts: &[&'static str], made: Attempt| {
        all.push((mounts.to_vec(), made.clone().may_be_refused()));
    };
    // A denied directory, in a readable one.
    let denied = ["mkdir {RO}/alias", "mount --bind {W}/den {RO}/alias"];
    for steps in [
        ["read {RO}/alias/key", "list {RO}/alias"],
        ["copy {RO}/alias/key {W}/taken", "read {W}/taken"],
    ] {
        add(&denied, attempt("a denied directory again, read-only", wide()).run(&steps));
        add(&denied, attempt("a denied directory again, by requests", wide()).files(&steps));
        let policy = narrow().with("{RO}", Access::Read);
        add(&denied, attempt("a denied directory again, narrow", policy).run(&steps));
    }
    // The same inside of what can be written.
    let inside = ["mkdir {W}/alias", "mount --bind {W}/den {W}/alias"];
    let steps = [
        "read {W}/alias/key",
        "list {W}/alias",
        "write {W}/alias/new attack",
        "chmod 777 {W}/alias/key",
    ];
    add(&inside, attempt("a denied directory again, inside", wide()).run(&steps));
    add(&inside, attempt("a denied directory again, inside, by requests", wide()).files(&steps));
    // A file.
    let file = ["touch {RO}/alias", "mount --bind {W}/x.key {RO}/alias"];
    add(&file, attempt("a matched file again", wide()).run(&["read {RO}/alias"]));
    let file = ["touch {W}/alias", "mount --bind {W}/den/key {W}/alias"];
    add(
        &file,
        attempt("a denied file again", wide()).run(&["read {W}/alias", "append {W}/alias attack"]),
    );
    // The workspace, with its `.git`, inside another writable root.
    let workspace = ["mkdir {W2}/alias", "mount --bind {W} {W2}/alias"];
    for policy in [wide().root("{W2}"), narrow().with("{W2}", Access::Write)] {
        let steps = [
            "write {W2}/alias/.git/hooks/post attack",
            "append {W2}/alias/.git/config attack",
            "read {W2}/alias/den/key",
            "read {W2}/alias/x.key",
            "mkdir {W2}/alias/.codex",
            "rename {W2}/alias/.git {W2}/alias/git",
        ];
        add(&workspace, attempt("the workspace in another root", policy.clone()).run(&steps));
        add(
            &workspace,
            attempt("the workspace in another root, by requests", policy).files(&steps),
        );
    }
    let itself = ["mkdir {W}/alias", "mount --bind {W} {W}/alias"];
    let steps =
        ["append {W}/alias/.git/config attack", "read {W}/alias/den/key", "mkdir {W}/alias/.codex"];
    add(&itself, attempt("the workspace inside itself", wide()).run(&steps));
    // `.git` alone.
    let git = ["mkdir {W}/alias", "mount --bind {W}/.git {W}/alias"];
    add(
        &git,
        attempt("`.git` again", wide())
            .run(&["append {W}/alias/config attack", "write {W}/alias/hooks/x attack"]),
    );
    // A directory inside a denied one, elsewhere.
    let part = [
        "mkdir {W}/den/part",
        "echo tczpartq > {W}/den/part/key",
        "mkdir {W}/alias",
        "mount --bind {W}/den/part {W}/alias",
    ];
    add(
        &part,
        attempt("a part of a denied directory", wide())
            .run(&["read {W}/alias/key", "write {W}/alias/new attack"]),
    );
    // The reverse: a mount inside a denied directory.
    let within = ["mkdir {W}/den/part", "mount --bind {OUT} {W}/den/part"];
    add(
        &within,
        attempt("mounted inside a denied directory", wide())
            .run(&["read {W}/den/part/f", "write {W}/den/part/new attack"]),
    );
    // Explicitly denied, and mounted in the workspace.
    let outside = ["mkdir {W}/alias", "mount --bind {OUT} {W}/alias"];
    let policy = wide().with("{OUT}", Access::Deny);
    add(
        &outside,
        attempt("a denied directory beside", policy).run(&[
            "read {W}/alias/f",
            "append {W}/alias/f attack",
            "list {W}/alias",
        ]),
    );
    named_aliases(&mut add);
    // The process table of the machine.
    for place in ["{RO}/proc", "{W}/proc"] {
        let mounts: &[&str] = if place == "{RO}/proc" {
            &["mkdir {RO}/proc", "mount -t proc proc {RO}/proc"]
        } else {
            &["mkdir {W}/proc", "mount -t proc proc {W}/proc"]
        };
        let steps: Vec<String> = [
            "read @/{SERVER}/environ",
            "read @/{SERVER}/root{W}/den/key",
            "read @/{SERVER}/cwd{W}/den/key",
            "append @/{SERVER}/root{OUT}/f attack",
            "list @/{SERVER}/fd",
            "read @/1/root{W}/den/key",
            "append @/1/root{OUT}/f attack",
            "read @/1/environ",
            "open @/sys/kernel/core_pattern w",
            "open @/sysrq-trigger w",
        ]
        .map(|step| step.replace('@', place))
        .to_vec();
        let steps: Vec<&str> = steps.iter().map(String::as_str).collect();
        add(mounts, attempt("another process table", wide()).run(&steps).fails());
        add(mounts, attempt("another process table, by requests", wide()).files(&steps[..7]));
    }
    all
}

/// Entries that name the other mount, and metadata that is writable only through it.
fn named_aliases(add: &mut impl FnMut(&[&'static str], Attempt)) {
    let home = [
        "export CODEX_HOME={B}/home",
        "mkdir {B}/home {B}/m",
        "echo tczauthq > {B}/home/auth.json",
        "chmod 666 {B}/home/auth.json",
        "touch {B}/one",
        "mount --bind {B}/home {B}/m",
        "mount --bind {B}/home/auth.json {B}/one",
    ];
    for (name, access) in [
        ("{B}/m/auth.json", Access::Read),
        ("{B}/m/auth.json", Access::Write),
        ("{B}/m", Access::Write),
        ("{B}/one", Access::Read),
        ("{B}/one", Access::Write),
    ] {
        let steps = ["read {B}/m/auth.json", "read {B}/one", "append {B}/one attack"];
        for policy in [wide(), narrow()] {
            let made = attempt("credentials by another mount", policy.with(name, access));
            add(&home, made.clone().run(&steps).fails().secret("tczauthq"));
            add(&home, made.files(&steps).secret("tczauthq"));
        }
    }
    let twice = [
        "mkdir {B}/sec {B}/m",
        "echo tczdenq > {B}/sec/s",
        "chmod 666 {B}/sec/s",
        "mount --bind {B}/sec {B}/m",
    ];
    for (denied, granted, access) in [
        ("{B}/sec", "{B}/m", Access::Read),
        ("{B}/m", "{B}/sec", Access::Write),
        ("{B}/sec/s", "{B}/m/s", Access::Write),
        ("{B}/sec/s", "{B}/m", Access::Write),
        ("{B}/m/s", "{B}/sec", Access::Read),
    ] {
        let steps = ["read {B}/m/s", "read {B}/sec/s", "append {B}/m/s attack"];
        let policy = wide().with(denied, Access::Deny).with(granted, access);
        let made = attempt("a denied place, named by another mount", policy);
        add(&twice, made.clone().run(&steps).fails().secret("tczdenq"));
        add(&twice, made.files(&steps).secret("tczdenq"));
    }
    let steps = ["write {W2}/m/post attack", "write {W2}/m/hooks/post attack"];
    let pointer: &[&str] = &[
        "mkdir -p {B}/gd/hooks {W2}/m; chmod -R a+rwX {B}/gd; rm -r {W}/.git",
        "echo 'gitdir: {B}/gd' > {W}/.git",
        "mount --bind {B}/gd {W2}/m",
    ];
    let agents: &[&str] = &[
        "mkdir -p {B}/ext/hooks {W2}/m; chmod -R a+rwX {B}/ext; ln -s {B}/ext {W}/.agents",
        "mount --bind {B}/ext {W2}/m",
    ];
    let hooks: &[&str] = &[
        "mkdir -p {B}/ext/hooks {W2}/m; chmod -R a+rwX {B}/ext; rm -r {W}/.git/hooks",
        "ln -s {B}/ext {W}/.git/hooks; mount --bind {B}/ext {W2}/m",
    ];
    let worktree: &[&str] = &[
        "mkdir -p {B}/main/.git/worktrees/w {B}/main/.git/hooks {W2}/m; rm -r {W}/.git",
        "echo 'gitdir: {B}/main/.git/worktrees/w' > {W}/.git",
        "echo ../.. > {B}/main/.git/worktrees/w/commondir; chmod -R a+rwX {B}/main",
        "mount --bind {B}/main/.git {W2}/m",
    ];
    // The reverse: git runs files in a mount whose source is writable.
    let mounted: &[&str] =
        &["mkdir -p {W2}/m/hooks; chmod -R a+rwX {W2}/m; mount --bind {W2}/m {W}/.git/hooks"];
    for mounts in [pointer, agents, hooks, worktree, mounted] {
        let made = attempt("metadata outside, mounted in a root", wide().root("{W2}"));
        add(mounts, made.run(&steps).fails());
    }
}

#[test]
fn catalogue_mounting_a_place_twice_opens_nothing() {
    if User::all().len() < 2 {
        return;
    }
    let mut failures = Vec::new();
    let all = attempts();
    for &user in User::all() {
        for (mounts, made) in &all {
            let mut world = World::new(user);
            let server = server(&world, user, mounts);
            world.served_by(&server);
            for step in world.base().read_dir().unwrap().flatten() {
                user.give(&step.path());
            }
            let judged = runtime().block_on(judge_in(&world, made, &server));
            failures.extend(judged.map(|failure| format!("{user:?}: {}: {failure}", made.name)));
        }
    }
    let count = all.len() * 2;
    assert!(failures.is_empty(), "{} of {count}:\n{}", failures.len(), failures.join("\n"));
}
