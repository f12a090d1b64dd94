//! Names in a policy that an attacker redirects.

use super::{Access, Attempt, Way, assert_all_fail, attempt, narrow, wide};
use crate::generator::policy::{Name, Policy};

/// The first request replaces a granted name by a link, and the second uses it, by processes and by
/// filesystem requests.
fn replaced(what: &str, name: &str, policy: &Policy) -> Vec<Attempt> {
    let mut all = Vec::new();
    let away = format!("rename {name} {{W}}/away");
    let steps = [
        "read {OUT}/f",
        "read @/f",
        "list @",
        "list {OUT}",
        "write {OUT}/new attack",
        "write @/new attack",
        "append {OUT}/f attack",
        "append @/f attack",
        "chmod 777 @/f",
        "unlink @/f",
    ];
    let then: Vec<String> = steps.iter().map(|step| step.replace('@', name)).collect();
    let then: Vec<&str> = then.iter().map(String::as_str).collect();
    for target in ["{OUT}", "{B}", "/..{OUT}", "../../out"] {
        let link = format!("symlink {target} {name}");
        let made = attempt(&format!("{what}: {name} becomes a link to {target}"), policy.clone());
        let first = [away.as_str(), &link];
        all.push(made.clone().run(&first).run(&then));
        if target == "{OUT}" {
            all.push(made.clone().files(&first).files(&then));
            all.push(made.run(&first).files(&then));
        }
    }
    all
}

fn attempts() -> Vec<Attempt> {
    let mut all = replaced("TMPDIR", "{W}/td", &narrow().tmpdir("{W}/td"));
    all.extend(replaced("a nested entry", "{W}/sub", &narrow().with("{W}/sub", Access::Write)));
    all.extend(replaced("a nested root", "{W}/sub", &narrow().root("{W}/sub")));
    all.extend(replaced("a missing entry", "{W}/no", &narrow().with("{W}/no", Access::Write)));
    all.extend(replaced("a missing TMPDIR", "{W}/no", &narrow().tmpdir("{W}/no")));
    all.extend(replaced("a file", "{W}/f", &narrow().with("{W}/f", Access::Write)));
    all.extend(replaced("a readable name", "{W}/sub", &narrow().with("{W}/sub", Access::Read)));
    let below = {
        let mut policy = narrow();
        policy.entries[1].name = Name::ProjectRoots(Some("sub".into()));
        policy.with("{W}", Access::Write)
    };
    all.extend(replaced("a subpath", "{W}/sub", &below));
    // A workspace behind a link that lies in a writable directory.
    let linked = narrow().root("{W}/way/sub");
    for (target, then) in [("{B}", "write {OUT}/new attack"), ("{OUT}", "read {OUT}/d/f")] {
        let swap = format!("symlink {target} {{W}}/way");
        all.push(
            attempt("a workspace behind a link", linked.clone())
                .setup(&["symlink {W2} {W}/way"])
                .may_be_refused()
                .run(&["unlink {W}/way", &swap, "mkdir {W}/way/sub"])
                .run(&[then, "read {OUT}/f"]),
        );
    }
    // Session A swaps the workspace of session B.
    let mut other = narrow();
    other.roots = vec!["{W}/sub".into()];
    other.cwd = "{W}/sub".into();
    for target in ["{OUT}", "{B}", "/..{OUT}"] {
        let link = format!("symlink {target} {{W}}/sub");
        let swap = ["rename {W}/sub {W}/away", link.as_str()];
        let use_it = ["write {OUT}/new attack", "write new attack", "read {OUT}/f", "read f"];
        all.push(
            attempt(&format!("another session's workspace becomes {target}"), narrow())
                .and(other.clone())
                .run(&swap)
                .by(Way::Process, 1, &use_it)
                .by(Way::Files, 1, &use_it[..1]),
        );
    }
    // Moved away under a denied or matched name.
    let mut anchored = wide();
    anchored.entries.truncate(3);
    for (name, policy) in [
        ("a pattern with a directory", anchored.globs("sub/deep/*.key")),
        ("a pattern at any depth", wide()),
        ("a denied file", wide().with("{W}/sub/deep/y.key", Access::Deny)),
    ] {
        for (moved, there) in
            [("{W}/sub", "{W}/moved/deep/y.key"), ("{W}/sub/deep", "{W}/moved/y.key")]
        {
            let away = format!("rename {moved} {{W}}/moved");
            let read = format!("read {there}");
            for first in [vec![away.as_str()], vec![away.as_str(), "mkdir {W}/sub"]] {
                let title = format!("{name}: {first:?}, {read}");
                all.push(attempt(&title, policy.clone()).run(&first).run(&[&read]));
                all.push(attempt(&title, policy.clone()).files(&first).files(&[&read]));
            }
        }
    }
    // Deeper than the scan of patterns.
    let mut shallow = wide();
    shallow.glob_depth = Some(2);
    all.push(
        attempt("a matched file is moved below the depth of the search", shallow)
            .run(&["mkdir {W}/a", "mkdir {W}/a/b", "rename {W}/sub {W}/a/b/sub"])
            .run(&["read {W}/a/b/sub/x.key"]),
    );
    // The directory that patterns are relative to.
    let mut relative = wide();
    relative.cwd = "{W}/sub".into();
    all.push(
        attempt("the working directory is moved away from its patterns", relative)
            .control(&["write {W}/sub/control fine"])
            .run(&["rename {W}/sub {W}/moved", "mkdir {W}/sub"])
            .run(&["read {W}/moved/x.key", "read {W}/moved/deep/y.key"]),
    );
    all
}

#[test]
fn catalogue_no_name_of_a_policy_comes_to_lead_elsewhere() {
    assert_all_fail(&attempts());
}
