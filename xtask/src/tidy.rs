//! Checks that no compiler makes: the first line and the length of files, whether ARCHITECTURE.md is true of
//! files, crate boundaries (see `boundaries`), whether docs/compatibility.md is fresh, whether each dependency has its
//! reason (see `dependencies`), and whether the patches of `holes` apply.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

/// The most lines of a source file. A longer file has more than one subject.
const MAX_LINES: usize = 800;

pub(crate) fn run() -> anyhow::Result<()> {
    let mut complaints = Vec::new();
    for file in tracked_files()? {
        if file.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&file)?;
            complaints.extend(check_source(&file, &text));
        }
    }
    complaints.extend(check_architecture(&std::fs::read_to_string("ARCHITECTURE.md")?)?);
    complaints.extend(crate::boundaries::complaints()?);
    complaints.extend(crate::dependencies::complaints()?);
    complaints.extend(crate::compatibility::complaint()?);
    complaints.extend(crate::holes::complaints()?);
    for complaint in &complaints {
        eprintln!("{complaint}");
    }
    ensure!(complaints.is_empty(), "{} complaints", complaints.len());
    Ok(())
}

fn tracked_files() -> anyhow::Result<Vec<PathBuf>> {
    let listed = Command::new("git").args(["ls-files", "-z"]).output()?;
    ensure!(listed.status.success(), "git ls-files failed");
    let names = String::from_utf8(listed.stdout)?;
    Ok(names.split('\0').filter(|name| !name.is_empty()).map(PathBuf::from).collect())
}

fn check_source(file: &Path, text: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    let mut complain = |what: String| complaints.push(format!("{}: {what}", file.display()));
    let generated = text.contains("@generated");
    if !text.starts_with("//!") && !generated {
        complain("does not start with `//!` and its purpose".into());
    }
    let lines = text.lines().count();
    if lines > MAX_LINES && !generated {
        complain(format!("has {lines} lines, more than {MAX_LINES}"));
    }
    if must_decide_by_kind(file) {
        for number in decisions_by_message(text) {
            complain(format!(
                "line {number}: decides by an error's words; decide by its kind (ErrorKind, \
                 io::ErrorKind), or let client/src/infer_kind.rs recognize it"
            ));
        }
    }
    if bypasses_sandbox_module(file, text) {
        complain(
            "names codex_linux_sandbox; use host/src/sandbox, which has one file per system".into(),
        );
    }
    let unfinished =
        ["TO", "FIX"].map(|word| format!("{word}{}", if word == "TO" { "DO" } else { "ME" }));
    for (number, line) in text.lines().enumerate() {
        if unfinished.iter().any(|word| line.contains(word.as_str())) {
            complain(format!("line {}: left unfinished", number + 1));
        }
    }
    complaints
}

/// Checks that the files ARCHITECTURE.md names exist, and that `unsafe` is only where it says.
fn check_architecture(text: &str) -> anyhow::Result<Vec<String>> {
    let mut complaints = Vec::new();
    for path in named_paths(text).filter(|path| path.contains("/src")) {
        let path = path.split_once(['{', '*']).map_or(path, |(before, _)| before);
        if !Path::new("crates").join(path).exists() && !Path::new(path).exists() {
            complaints.push(format!("ARCHITECTURE.md: there is no `{path}`"));
        }
    }
    let declared = text.split("\n- ").find(|item| item.starts_with("`unsafe` is in"));
    let declared = declared.context("ARCHITECTURE.md does not say where `unsafe` is")?;
    let declared: Vec<_> =
        named_paths(declared).map(|path| Path::new("crates").join(path)).collect();
    for file in tracked_files()? {
        let is_source = file.starts_with("crates") && file.iter().any(|name| name == "src");
        if is_source
            && file.extension().is_some_and(|extension| extension == "rs")
            && !declared.iter().any(|place| file.starts_with(place))
            && has_unsafe(&std::fs::read_to_string(&file)?)
        {
            let file = file.display();
            complaints.push(format!("{file}: `unsafe` outside of the places in ARCHITECTURE.md"));
        }
    }
    Ok(complaints)
}

/// The words between backquotes.
fn named_paths(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2).filter(|word| !word.contains([' ', '\n', '(', '<']))
}

fn has_unsafe(text: &str) -> bool {
    let code = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    let uses = ["unsafe {", "unsafe fn", "unsafe impl", "unsafe extern"];
    code.into_iter().any(|line| uses.iter().any(|used| line.contains(used)))
}

/// The host has one file per operating system's sandbox, and the server uses the host.
fn bypasses_sandbox_module(file: &Path, text: &str) -> bool {
    let behind = ["crates/host/src", "crates/server/src"];
    behind.iter().any(|place| file.starts_with(place))
        && file != Path::new("crates/host/src/sandbox/linux.rs")
        && text.contains("codex_linux_sandbox::")
}

/// Whether this file must decide by the kind of an error, not by its message.
fn must_decide_by_kind(file: &Path) -> bool {
    let crates = [
        "client",
        "cli",
        "credentials",
        "host",
        "network",
        "remote",
        "rendezvous",
        "rpc",
        "server",
    ];
    crates.iter().any(|name| file.starts_with(format!("crates/{name}/src")))
        // The one table of other implementations' messages.
        && file != Path::new("crates/client/src/infer_kind.rs")
        && !file.file_stem().is_some_and(|stem| stem.to_string_lossy().ends_with("tests"))
}

/// The lines that search the text of an error: something just formatted (`to_string`, `format!`), or a
/// variable with a name that error texts have here. Tests and comments are exempt.
fn decisions_by_message(text: &str) -> Vec<usize> {
    const LOOKS: [&str; 5] = [".contains(", ".starts_with(", ".ends_with(", ".find(", ".matches("];
    const TEXTS: [&str; 9] = [
        "message",
        "words",
        "reason",
        "error",
        "problem",
        "detail",
        "said",
        "stderr",
        "description",
    ];
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    // Joins a call that spans lines.
    let mut calls: Vec<(usize, String)> = Vec::new();
    for (number, line) in code.lines().enumerate() {
        let line = line.trim();
        if line.starts_with("//") {
            continue;
        }
        match calls.last_mut() {
            Some((_, call)) if line.starts_with('.') => call.push_str(line),
            _ => calls.push((number + 1, line.to_owned())),
        }
    }
    let decides = |call: &str| {
        LOOKS.iter().any(|look| {
            call.match_indices(look).any(|(at, _)| {
                let (before, after) = (&call[..at], &call[at + look.len()..]);
                // Bytes are data, and a closure searches elements.
                if after.starts_with("b\"") || after.starts_with('|') {
                    return false;
                }
                let name = before.rsplit(|c: char| !c.is_alphanumeric() && c != '_').next();
                before.ends_with(".to_string()")
                    || before.ends_with(".to_lowercase()")
                    || (before.ends_with(')') && before.contains("format!("))
                    || name.is_some_and(|name| TEXTS.contains(&name))
            })
        })
    };
    calls.into_iter().filter(|(_, call)| decides(call)).map(|(number, _)| number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsafe_code_is_distinguished_from_comments() {
        assert!(has_unsafe("let a = unsafe { b() };") && has_unsafe("pub unsafe fn a() {}"));
        assert!(!has_unsafe("// an unsafe { block }\nlet unsafe_fn = 1;"));
        let paths: Vec<_> = named_paths("see `host/src/a.rs` and `b c`, `d`").collect();
        assert_eq!(paths, ["host/src/a.rs", "d"]);
    }

    #[test]
    fn decisions_by_error_message_are_found() {
        for bad in [
            "if error.to_string().contains(\"unknown session id\") {",
            "Err(e) if e.to_string().starts_with(prefix) => {",
            "let refused = words.contains(\"HTTP 401\") || other;",
            "let found = known.iter().find(|(part, _)| words.contains(part));",
            "message.ends_with(\"exists\")",
            "matches!(error, Server { message, .. } if message.contains(\"exist\"))",
            "format!(\"{error:#}\").contains(\"gone\")",
            "let gone = error\n    .to_string()\n    .contains(\"gone\");",
            "answer.message.starts_with(\"no\")",
        ] {
            assert_eq!(decisions_by_message(bad), [1], "{bad}");
        }
        for good in [
            "// error.to_string().contains(\"x\")",
            "path.starts_with(\"/\")",
            "names.contains(&error_name)",
            "parts.last().is_some_and(|last| last.contains(&cause.to_string()))",
            "let empty = message.ends_with(b\"{}}\");",
            "let at = words.find(|c: char| c.is_alphabetic());",
            "f();\n#[cfg(test)]\nmod tests {\nassert!(error.to_string().contains(\"x\"));\n}",
        ] {
            assert_eq!(decisions_by_message(good), Vec::<usize>::new(), "{good}");
        }
        assert!(must_decide_by_kind(Path::new("crates/cli/src/run.rs")));
        assert!(!must_decide_by_kind(Path::new("crates/client/src/infer_kind.rs")));
        assert!(!must_decide_by_kind(Path::new("crates/cli/tests/it/run.rs")));
    }

    #[test]
    fn only_one_file_may_name_the_sandbox_crate() {
        let text = "use codex_linux_sandbox::Launch;";
        for (file, bypasses) in [
            ("crates/host/src/process/host.rs", true),
            ("crates/server/src/sandbox.rs", true),
            ("crates/host/src/sandbox/linux.rs", false),
            ("crates/cli/src/sandbox.rs", false),
        ] {
            assert_eq!(bypasses_sandbox_module(Path::new(file), text), bypasses, "{file}");
        }
    }

    #[test]
    fn source_checks_report_each_problem() {
        let file = Path::new("x.rs");
        assert_eq!(check_source(file, "//! Purpose.\n"), Vec::<String>::new());
        assert_eq!(check_source(file, "fn f() {}\n").len(), 1);
        assert_eq!(check_source(file, &format!("//! P.\n// {}{}\n", "TO", "DO")).len(), 1);
        assert_eq!(check_source(file, &format!("//! P.\n{}", "\n".repeat(MAX_LINES))).len(), 1);
    }
}
