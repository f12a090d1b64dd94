//! `/..`, and the root under a policy that does not grant it.

use super::{Attempt, assert_all_fail, attempt, both, narrow, read_only, wide};

/// Paths to a name that start outside its directory.
const PREFIXES: [&str; 8] = [
    "/..",
    "/../..",
    "/proc/self/root",
    "/proc/self/root/..",
    "/proc/1/root/..",
    "/proc/self/cwd/../../../../../../..",
    "/proc/thread-self/root/..",
    "/dev/../..",
];

fn attempts() -> Vec<Attempt> {
    let mut all = Vec::new();
    for prefix in PREFIXES {
        let steps = [
            "read @{W}/den/key",
            "read @{W}/x.key",
            "read @{OUT}/f",
            "list @{OUT}",
            "write @{W}/.git/hooks/post attack",
            "append @{OUT}/f attack",
            "chmod 777 @{OUT}/f",
            "utimes @{OUT}/f",
            "mkdir @{W}/.codex",
            "symlink x @{OUT}/link",
            "link @{W}/den/key {W}/taken",
            "rename @{OUT}/f {W}/taken",
            "unlink @{OUT}/f",
        ];
        let steps = steps.map(|step| step.replace('@', prefix));
        for (what, steps) in [("read", &steps[..4]), ("changed", &steps[4..])] {
            let steps: Vec<&str> = steps.iter().map(String::as_str).collect();
            all.push(attempt(&format!("{what} through {prefix}"), narrow()).run(&steps));
        }
    }
    for target in ["/..", "/../..", "/proc/self/root/..", "/"] {
        let link = format!("symlink {target} {{W}}/up");
        let reads = [
            &link,
            "read {W}/up{W}/den/key",
            "list {W}/up{OUT}",
            "stat {W}/up{W}/den/key",
            "copy {W}/up{OUT}/f {W}/taken",
        ];
        let changes = [
            &link,
            "write {W}/up{W}/.git/config attack",
            "write {W}/up{OUT}/new attack",
            "chmod 777 {W}/up{OUT}/f",
            "copy {W}/f {W}/up{OUT}/newer",
            "rename {W}/up{OUT}/f {W}/taken",
            "rename {W}/f {W}/up{OUT}/newest",
            "mkdir {W}/up{OUT}/directory",
            "symlink x {W}/up{OUT}/link",
            "unlink {W}/up{OUT}/f",
        ];
        all.extend(both(&format!("read through a link to {target}"), &narrow(), &reads));
        all.extend(both(&format!("changed through a link to {target}"), &narrow(), &changes));
        // Created in one request and used in the next, which another helper may serve.
        let title = format!("a link to {target} from a request before");
        all.push(attempt(&title, narrow()).run(&[&link]).files(&reads[1..]).files(&changes[1..]));
        all.push(attempt(&title, narrow()).files(&[&link]).run(&reads[1..]).run(&changes[1..]));
    }
    let by_descriptor = ["read-at / ..{W}/den/key", "write-at / ..{OUT}/new attack"];
    let by_directory =
        ["chdir /..", "read .{W}/den/key", "write .{W}/.git/x attack", "list .{OUT}"];
    for policy in [narrow(), wide(), read_only()] {
        all.push(attempt("from a descriptor of the root", policy.clone()).run(&by_descriptor));
        all.push(attempt("from the directory above", policy.clone()).run(&by_directory));
        let from_root = ["chdir /", "read ..{W}/den/key", "append ..{OUT}/f attack"];
        all.push(attempt("from the root as directory", policy.clone()).run(&from_root));
    }
    all
}

#[test]
fn catalogue_no_name_leads_above_the_root() {
    assert_all_fail(&attempts());
}
