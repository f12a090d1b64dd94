//! interop/compatibility.toml against both programs: what the newest release has is in it, and ours does what it
//! says.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use toml::Table;

use crate::environment::Plain;
use crate::programs::{Implementation, home, output};

/// The names of one kind, with the rating of ours.
fn rows(kind: &str) -> Vec<(String, String)> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/compatibility.toml");
    let data: Table = std::fs::read_to_string(path).unwrap().parse().unwrap();
    let rows = data[kind].as_table().unwrap();
    rows.iter()
        .map(|(name, row)| (name.clone(), row["ours"].as_str().unwrap().to_owned()))
        .collect()
}

fn names(kind: &str) -> BTreeSet<String> {
    rows(kind).into_iter().map(|(name, _)| name).collect()
}

/// The long flags that the help lists.
fn flags(implementation: Implementation) -> BTreeSet<String> {
    let home = home();
    let help = output(implementation.program(home.path()).args(["exec-server", "--help"])).out;
    let flag = |line: &str| {
        let line = line.trim_start();
        let long = line.strip_prefix("-c, ").unwrap_or(line);
        let end = long.find(|c: char| !c.is_ascii_alphanumeric() && c != '-').unwrap_or(long.len());
        (long.starts_with("--") && line.starts_with('-')).then(|| long[..end].to_owned())
    };
    let flags: BTreeSet<_> = help.lines().filter_map(flag).collect();
    assert!(flags.contains("--listen"), "{help}");
    flags.into_iter().filter(|flag| flag != "--help").collect()
}

#[track_caller]
fn assert_listed(what: &str, theirs: &BTreeSet<String>) {
    let listed = names(what);
    let new: Vec<_> = theirs.difference(&listed).collect();
    let gone: Vec<_> = listed.difference(theirs).collect();
    assert!(
        new.is_empty() && gone.is_empty(),
        "the newest release has a new {what}: {new:?}, and no longer has: {gone:?}; \
         bring interop/compatibility.toml up to date"
    );
}

#[test]
#[ignore = "interop/run runs it"]
fn every_flag_of_the_newest_release_is_listed() {
    assert_listed("flag", &flags(Implementation::Theirs));
    let ours = flags(Implementation::Ours);
    for (name, rating) in rows("flag") {
        assert_eq!(ours.contains(&name), rating != "absent", "{name}");
    }
}

fn members(value: &Value) -> BTreeSet<String> {
    value.as_object().unwrap().keys().cloned().collect()
}

#[test]
#[ignore = "interop/run runs it"]
fn every_capability_of_the_newest_release_is_listed() {
    let home = home();
    let info = |implementation| {
        Plain::start(implementation, home.path()).call("environment/info", &json!({}))
    };
    let [theirs, ours] = [Implementation::Theirs, Implementation::Ours].map(info);
    assert_listed("member", &members(&theirs));
    assert_listed("capability", &members(&theirs["capabilities"]));
    for (name, _) in rows("member") {
        assert!(ours.get(&name).is_some(), "{name}");
    }
    assert_eq!(ours["prependPathDirs"], json!([]));
    // Their client uses some features only from a release on.
    let release = |info: &Value| {
        info["executorVersion"].as_str().unwrap().split('+').next().map(str::to_owned)
    };
    assert_eq!(release(&ours), release(&theirs), "bring EXECUTOR_VERSION up to date");
    for (name, rating) in rows("capability") {
        let (theirs, ours) = (&theirs["capabilities"][&name], &ours["capabilities"][&name]);
        assert_eq!(ours == theirs, rating != "absent", "{name}: {ours} beside {theirs}");
    }
}

/// A name can only be asked for: what is listed exists, and none of our extensions has come to exist there.
#[test]
#[ignore = "interop/run runs it"]
fn every_listed_method_exists() {
    let home = home();
    let exists = |implementation, name: &str| {
        let answer = Plain::start(implementation, home.path()).call(name, &json!({"x": 1}));
        answer["code"] != -32601
    };
    for (name, rating) in rows("method") {
        assert!(exists(Implementation::Theirs, &name), "{name} is gone from the newest release");
        assert_eq!(exists(Implementation::Ours, &name), rating != "absent", "{name}");
    }
    for name in [
        "process/list",
        "process/resize",
        "fs/search",
        "fs/glob",
        "fs/watch",
        "fs/rename",
        "fs/symlink",
        "fs/setMode",
        "capabilities/loadDiscoveries",
    ] {
        assert!(!exists(Implementation::Theirs, name), "{name} is new in the newest release");
    }
}
