//! Attacks on protected paths: closing, exchanging and aliasing them; set-id modes.

use super::{Access, Attempt, assert_all_fail, attempt, both, narrow, read_only, wide};
use crate::server::User;

fn attempts() -> Vec<Attempt> {
    let mut all = Vec::new();
    // Closed in one request, opened again in the next.
    let denied = wide().with("{W}/sub/deep/y.key", Access::Deny).with("{W}/sub/deep", Access::Deny);
    for mode in ["000", "555", "311", "400"] {
        for (closed, policy, then) in [
            ("{W}/sub", &denied, ["read {W}/sub/deep/y.key", "list {W}/sub/deep"]),
            ("{W}", &wide(), ["read {W}/den/key", "read {W}/sub/x.key"]),
            ("{W}/sub", &wide(), ["read {W}/sub/x.key", "read {W}/sub/deep/y.key"]),
            ("{W}/sub/deep", &wide(), ["read {W}/sub/deep/y.key", "chmod 777 {W}/sub/deep/y.key"]),
            ("{W}", &wide(), ["write {W}/.git/config attack", "mkdir {W}/.codex"]),
            ("{W}", &wide(), ["write {W}/.agents attack", "symlink x {W}/.codex"]),
            ("{W2}", &wide().root("{W2}"), ["write {W2}/.git/config attack", "mkdir {W2}/.codex"]),
        ] {
            let (close, open) = (format!("chmod {mode} {closed}"), format!("chmod 755 {closed}"));
            let title = format!("{close}, {then:?}");
            let then = [open.as_str(), then[0], then[1]];
            all.push(attempt(&title, policy.clone()).run(&[&close]).run(&then));
            all.push(attempt(&title, policy.clone()).files(&[&close]).files(&then));
        }
    }
    // A link in the path of a denied file is replaced.
    for access in [Access::Deny, Access::Read] {
        for name in ["{W}/way/f", "{W}/way"] {
            let then = ["read {W}/sub/f", "append {W}/sub/f attack", "chmod 777 {W}/sub/f"];
            let then = if access == Access::Read { &then[1..] } else { &then[..] };
            let policy = narrow().with(name, access);
            let made = attempt(&format!("a link to {name} ({access:?}) is replaced"), policy)
                .setup(&["symlink sub {W}/way"])
                .may_be_refused();
            all.push(made.clone().run(&["unlink {W}/way", "symlink td {W}/way"]).run(then));
            all.push(made.clone().run(&["rename {W}/way {W}/away", "mkdir {W}/way"]).run(then));
            all.push(made.files(&["unlink {W}/way", "symlink td {W}/way"]).files(then));
        }
    }
    all.extend(exchanged());
    all.extend(git());
    all.extend(set_id());
    all.extend(read_only_metadata());
    all
}

/// Within one request.
fn exchanged() -> Vec<Attempt> {
    let mut all = Vec::new();
    for steps in [
        vec!["exchange {W}/.git {W}/sub"],
        vec!["exchange {W}/sub {W}/.git"],
        vec!["exchange {W}/den {W}/sub", "read {W}/sub/key"],
        vec!["exchange {W}/x.key {W}/f", "read {W}/f"],
        vec!["rename {W}/.git {W}/git"],
        vec!["rename {W}/den {W}/open", "read {W}/open/key"],
        vec!["rename {W}/sub {W}/.git"],
        vec!["rename {W}/f {W}/.codex"],
        vec!["rename {W}/sub {W}/.agents"],
        vec!["symlink sub {W}/.codex"],
        vec!["link {W}/f {W}/.codex"],
        vec!["mkdir {W}/.agents"],
        vec!["write {W}/.codex attack"],
        vec!["mkfifo {W}/.codex"],
        vec!["rmdir {W}/.codex", "mkdir {W}/.codex"],
        vec!["chmod 777 {W}/.codex", "write {W}/.codex/x attack"],
        vec!["link {W}/.git/config {W}/config", "append {W}/config attack"],
        vec!["link {OUT}/f {W}/taken", "append {W}/taken attack"],
        vec!["rename {OUT}/f {W}/taken"],
        vec!["rename {W}/f {OUT}/new"],
        vec!["link {W}/f {OUT}/new"],
        vec!["copy {W}/den/key {W}/taken"],
        vec!["copy {W}/x.key {W}/taken"],
        vec!["copy {W}/f {W}/.git/config"],
        vec!["truncate {W}/.git/config 0"],
        vec!["fallocate {W}/.git/config"],
        vec!["utimes {W}/.git/config", "utimes {W}/.git", "utimes {OUT}/f"],
        vec!["setxattr {W}/.git/config", "setxattr {OUT}/f", "setxattr {OUT}"],
        vec!["chmod 777 {W}/.git/config", "fchmod 777 {W}/.git", "fchmodat2 777 {OUT}/f"],
        vec!["chown 65534 65534 {W}/.git/config", "lchown 65534 65534 {OUT}/f"],
        vec!["temporary {OUT} {OUT}/new attack"],
        vec!["temporary {W} {OUT}/new attack"],
        vec!["temporary {W} {W}/.git/new attack"],
        vec!["reopen-write {OUT}/f attack", "reopen-write {W}/.git/config attack"],
        vec!["reopen-read {W}/den/key", "reopen-read {W}/x.key"],
        vec!["symlink {OUT}/f {W}/l", "write {W}/l attack", "truncate {W}/l 0", "chmod 777 {W}/l"],
        vec!["symlink {W}/den {W}/l", "read {W}/l/key", "list {W}/l"],
        vec!["symlink .git {W}/l", "write {W}/l/hooks/post attack", "unlink {W}/l/config"],
        vec!["symlink {OUT} {W}/l", "write {W}/l/new attack", "mkdir {W}/l/new"],
        vec!["symlink /proc/self/cwd/../out {W}/l", "write {W}/l/new attack"],
        vec!["symlink /proc/self/fd/0 {W}/l", "write {W}/l attack"],
        vec!["symlink l2 {W}/l", "symlink {OUT}/new {W}/l2", "write {W}/l attack"],
        vec!["mkdir {W}/a", "symlink ../../out {W}/a/l", "write {W}/a/l/new attack"],
        vec!["stat {W}/den/key", "readlink {W}/den/key", "statfs {W}/den/key", "list {W}/den"],
        vec!["list {W}/den/", "read {W}/den/../x.key", "read {W}/sub/../den/key"],
        vec!["rmdir {W}/den", "unlink {W}/x.key", "mkdir {W}/den/new", "write {W}/den/new x"],
        vec!["lock {W}/.git", "lease {W}/.git/config", "write {W}/.git/config attack"],
        vec!["immutable {W}/.git", "immutable {OUT}/f"],
        vec!["mknod-block {W}/device", "mknod-char {W}/device2"],
        vec!["bind-unix {OUT}/socket", "bind-unix {W}/.codex"],
        vec!["race 300 {W}/sub {W}/l {W}/sub/f attack"],
    ] {
        for policy in [wide(), narrow()] {
            all.push(attempt(&format!("{steps:?}"), policy).run(&steps));
        }
        let has_request = |step: &&str| {
            let word = step.split(' ').next().unwrap_or_default();
            matches!(
                word,
                "read"
                    | "write"
                    | "rename"
                    | "exchange"
                    | "mkdir"
                    | "symlink"
                    | "chmod"
                    | "list"
                    | "rmdir"
                    | "unlink"
                    | "copy"
                    | "link"
                    | "stat"
                    | "truncate"
                    | "append"
            )
        };
        if steps.iter().all(has_request) {
            all.push(attempt(&format!("{steps:?}, by requests"), wide()).files(&steps));
        }
    }
    // A path that alternates between a link and a directory.
    for (one, other, name) in [("{W}/sub", "{W}/l", "{W}/sub/f"), ("{W}/a", "{W}/b", "{W}/a")] {
        let race = format!("race 2000 {one} {other} {name} attack");
        let made = attempt(&race, narrow()).setup(&[
            "symlink {OUT} {W}/l",
            "symlink {OUT}/f {W}/a",
            "write {W}/b x",
        ]);
        all.push(made.run(&[&race]));
    }
    all
}

/// Steps against a repository, by a process and by filesystem requests.
fn written(what: &str, setup: &[&str], steps: &[String]) -> Vec<Attempt> {
    let steps: Vec<&str> = steps.iter().map(String::as_str).collect();
    let made = attempt(what, wide()).setup(setup).may_be_refused();
    vec![made.clone().run(&steps), made.files(&steps)]
}

/// `.git` in its other forms.
fn git() -> Vec<Attempt> {
    let mut all = Vec::new();
    let writes = |at: &str| {
        vec![
            format!("write {at}/hooks/post-checkout attack"),
            format!("write {at}/config attack"),
            format!("chmod 777 {at}/config"),
            format!("rename {at}/hooks {{W}}/hooks"),
            format!("unlink {at}/config"),
            format!("exchange {at} {{W}}/td"),
        ]
    };
    let repository = [
        "mkdir {W}/lib",
        "mkdir {W}/lib/g",
        "mkdir {W}/lib/g/hooks",
        "write {W}/lib/g/config tczgq",
    ];
    let moved = "rename {W}/.git {B}/oldgit";
    for (what, last, at) in [
        ("a pointer", "write {W}/.git gitdir:\u{1f}{W}/lib/g", "{W}/lib/g"),
        ("a relative pointer", "write {W}/.git gitdir:\u{1f}lib/g", "{W}/lib/g"),
        ("a link", "symlink lib/g {W}/.git", "{W}/lib/g"),
        ("a link to a link", "symlink l {W}/.git", "{W}/lib/g"),
        ("a pointer through `/..`", "write {W}/.git gitdir:\u{1f}/..{W}/lib/g", "{W}/lib/g"),
    ] {
        let mut setup = vec![moved];
        setup.extend(repository);
        setup.extend(["symlink lib/g {W}/l", last]);
        all.extend(written(what, &setup, &writes(at)));
    }
    // A pointer file behind a link.
    let mut setup = vec![moved];
    setup.extend(repository);
    setup.extend(["write {W}/lib/p gitdir:\u{1f}{W}/lib/g", "symlink lib/p {W}/.git"]);
    all.extend(written("a pointer behind a link", &setup, &writes("{W}/lib/g")));
    // A worktree: the repository that it belongs to.
    let mut setup = vec![moved];
    setup.extend(repository);
    setup.extend([
        "mkdir {W}/lib/g/worktrees",
        "mkdir {W}/lib/g/worktrees/one",
        "write {W}/lib/g/worktrees/one/commondir ../..",
        "write {W}/.git gitdir:\u{1f}{W}/lib/g/worktrees/one",
    ]);
    all.extend(written("a worktree", &setup, &writes("{W}/lib/g")));
    // Links in the repository to files of the workspace, which git runs and reads.
    for (link, target) in [
        ("{W}/.git/hooks/post-checkout", "../../sub/f"),
        ("{W}/.git/hooks/post-checkout", "{W}/sub/f"),
        ("{W}/.git/hooks/post-checkout", "../../way/f"),
        ("{W}/.git/info", "../sub"),
        ("{W}/.git/config.worktree", "../sub/f"),
    ] {
        let steps = [
            "append {W}/sub/f attack",
            "chmod 777 {W}/sub/f",
            "unlink {W}/sub/f",
            "rename {W}/sub {W}/elsewhere",
            "rename {W}/td {W}/way",
            "exchange {W}/sub {W}/td",
            "exchange {W}/way {W}/td",
        ];
        let link = format!("symlink {target} {link}");
        let setup = ["symlink sub {W}/way", &link];
        all.extend(written(&link, &setup, &steps.map(str::to_owned)));
    }
    for (link, target) in
        [("hooks", "../hk"), ("hooks/update", "../../hk/new"), ("config", "../hk")]
    {
        let setup = [
            format!("rename {{W}}/.git/{link} {{B}}/was"),
            format!("symlink {target} {{W}}/.git/{link}"),
        ];
        let setup: Vec<&str> =
            setup.iter().map(String::as_str).skip(usize::from(link == "hooks/update")).collect();
        let steps = [
            "write {W}/hk attack",
            "mkdir {W}/hk",
            "write {W}/hk/new attack",
            "symlink sub {W}/hk",
        ];
        all.extend(written(&format!("a dangling {link}"), &setup, &steps.map(str::to_owned)));
        let mut setup = setup;
        setup.insert(0, "mkdir {W}/hk");
        all.extend(written(&format!("a linked {link}"), &setup, &steps.map(str::to_owned)));
    }
    for name in [".agents", ".codex"] {
        let setup = [format!("mkdir {{W}}/{name}"), format!("symlink ../sub/f {{W}}/{name}/rules")];
        let setup: Vec<&str> = setup.iter().map(String::as_str).collect();
        let steps = ["append {W}/sub/f attack", "rename {W}/sub {W}/elsewhere"];
        all.extend(written(name, &setup, &steps.map(str::to_owned)));
    }
    // Broken links: the target must not be created.
    for (what, last) in [
        ("a dangling pointer", "write {W}/.git gitdir:\u{1f}{W}/lib"),
        ("a dangling relative pointer", "write {W}/.git gitdir:\u{1f}lib"),
        ("a dangling link", "symlink lib {W}/.git"),
        ("a dangling link through a link", "symlink l/lib {W}/.git"),
    ] {
        for steps in [
            vec!["mkdir {W}/lib", "mkdir {W}/lib/hooks", "write {W}/lib/config attack"],
            vec!["rename {W}/sub {W}/lib"],
            vec!["symlink sub {W}/lib"],
        ] {
            let made = attempt(&format!("{what}: {steps:?}"), wide())
                .setup(&[moved, "symlink . {W}/l", last])
                .may_be_refused();
            all.push(made.clone().run(&steps));
            all.push(made.files(&steps));
        }
    }
    all
}

/// Programs that run as their owner.
fn set_id() -> Vec<Attempt> {
    let mut all = Vec::new();
    for mode in ["4755", "2755", "6755"] {
        for step in [
            "chmod @ {W}/f",
            "fchmod @ {W}/f",
            "fchmodat2 @ {W}/f",
            "create @ {W}/new",
            "mknod @ {W}/new",
            "mkdir-mode @ {W}/new",
        ] {
            let step = step.replace('@', mode);
            all.push(attempt(&step, wide()).run(&[&step]));
        }
        let step = format!("chmod {mode} {{W}}/f");
        all.push(attempt(&format!("{step}, by requests"), wide()).files(&[&step]));
        let chowned = ["chown 1 1 {W}/f", &step];
        all.push(attempt(&format!("{chowned:?}"), wide()).run(&chowned));
    }
    all
}

/// Metadata that no process may change under a read-only policy.
fn read_only_metadata() -> Vec<Attempt> {
    let mut all = Vec::new();
    for device in ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"]
    {
        // Set to their current values, so that success would do no harm.
        let steps = ["touch @", "chmod 666 @", "fchmod 666 @"].map(|it| it.replace('@', device));
        let steps: Vec<&str> = steps.iter().map(String::as_str).collect();
        for policy in [read_only(), wide(), narrow()] {
            all.push(attempt(&format!("{steps:?}"), policy).run(&steps).fails().only(User::Own));
        }
    }
    for steps in [
        ["chmod 777 {OUT}/f", "chmod 777 {W}/f"],
        ["chown 65534 65534 {W}/f", "lchown 1 1 {W}"],
        ["utimes {W}/f", "setxattr {W}"],
        ["write {W}/new x", "mkdir {W}/newer"],
        ["unlink {W}/f", "rename {W}/f {W}/g"],
        ["append {W}/f x", "truncate {W}/f 0"],
        ["symlink x {W}/new", "link {W}/f {W}/newer"],
    ] {
        all.extend(both(&format!("read-only: {steps:?}"), &read_only(), &steps));
    }
    all
}

#[test]
fn catalogue_what_is_protected_stays_as_it_is() {
    assert_all_fail(&attempts());
}
