//! Whether docs/configuration.md is complete: it names the variable of every argument, every variable that the sources
//! name, and no other.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory};

/// What libraries read. Their names are in no source here.
const OF_LIBRARIES: [&str; 6] = [
    "CLICOLOR",
    "CLICOLOR_FORCE",
    "RUST_BACKTRACE",
    "RUST_LOG",
    "SSL_CERT_DIR",
    "TOKIO_WORKER_THREADS",
];

/// Words of the page that look like variables: in units of systemd, not in the program.
const OF_UNITS: [&str; 1] = ["PUBLIC_URL"];

/// Words of the sources that look like variables: cargo's, at build time, and options of bash that a snapshot drops.
const NO_VARIABLES: [&str; 3] = ["CARGO_MANIFEST_DIR", "CARGO_PKG_VERSION", "POSIXLY_CORRECT"];

fn page() -> String {
    fs::read_to_string(root().join("docs/configuration.md")).unwrap()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Whether a word has the form of a variable that stands out: capitals and digits with an underscore.
fn stands_out(word: &str) -> bool {
    word.contains('_')
        && !word.ends_with('_')
        && word.starts_with(|c: char| c.is_ascii_uppercase())
        && word.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_')
}

/// The variables on the page: words in backquotes.
fn documented(page: &str) -> BTreeSet<String> {
    let words = page.split('`').skip(1).step_by(2);
    words.filter(|word| is_variable(word)).map(str::to_owned).collect()
}

fn is_variable(word: &str) -> bool {
    word.len() > 1 && (stands_out(word) || word.chars().all(|c| c.is_ascii_uppercase()))
}

/// The words in quotes that may be variables, and whether they must be: they stand out, or the environment is asked
/// for them. Tests, at the end of a source, and comments do not count.
fn candidates(source: &str) -> BTreeMap<String, bool> {
    let code = source.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    let mut words = BTreeMap::new();
    for line in code.lines().filter(|line| !line.trim_start().starts_with("//")) {
        let mut parts = line.split('"');
        while let (Some(before), Some(word)) = (parts.next(), parts.next()) {
            if is_variable(word) {
                let asked = ["var(", "var_os(", "text("].iter().any(|call| before.ends_with(call));
                *words.entry(word.to_owned()).or_default() |= asked || stands_out(word);
            }
        }
    }
    words
}

/// The candidates of all sources of the program.
fn of_sources() -> BTreeMap<String, bool> {
    let (mut words, mut open) = (BTreeMap::new(), Vec::new());
    for package in fs::read_dir(root().join("crates")).unwrap() {
        open.push(package.unwrap().path().join("src"));
    }
    while let Some(path) = open.pop() {
        if path.is_dir() {
            open.extend(fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
        } else if !is_for_tests(&path) {
            for (word, must) in candidates(&fs::read_to_string(&path).unwrap()) {
                *words.entry(word).or_default() |= must;
            }
        }
    }
    words.retain(|word, _| !NO_VARIABLES.contains(&word.as_str()));
    words
}

/// Whether a file is no source of the program: a file of tests, this one and that of the manual among them.
fn is_for_tests(path: &Path) -> bool {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let ours =
        ["manual.rs", "configuration.rs"].map(|name| root().join("crates/cli/src").join(name));
    stem.ends_with("tests") || ours.iter().any(|file| file == path)
}

/// The variables of arguments, with their flags.
fn of_arguments(command: &Command, found: &mut BTreeSet<(String, String)>) {
    for argument in command.get_arguments() {
        if let (Some(variable), Some(flag)) = (argument.get_env(), argument.get_long()) {
            found.insert((variable.to_str().unwrap().to_owned(), format!("--{flag}")));
        }
    }
    for below in command.get_subcommands() {
        of_arguments(below, found);
    }
}

#[test]
fn the_page_has_a_row_for_the_variable_of_every_flag() {
    let page = page();
    let mut arguments = BTreeSet::new();
    of_arguments(&super::Cli::command(), &mut arguments);
    assert!(arguments.contains(&("CODEX_EXEC_SERVER_URL".to_owned(), "--on".to_owned())));
    for (variable, flag) in arguments {
        let row = format!("| `{variable}` | `{flag}` | ");
        assert!(page.contains(&row), "docs/configuration.md has no row that begins with {row}");
    }
}

#[test]
fn the_page_names_every_variable_of_the_sources() {
    let documented = documented(&page());
    let sources = of_sources();
    let required = sources.iter().filter(|(_, must)| **must).map(|(word, _)| word);
    let missing = Vec::from_iter(required.filter(|word| !documented.contains(*word)));
    assert!(missing.is_empty(), "docs/configuration.md does not name {missing:?}");
}

#[test]
fn the_page_names_no_variable_that_nothing_reads() {
    let sources = of_sources();
    let known: BTreeSet<_> =
        sources.keys().map(String::as_str).chain(OF_LIBRARIES).chain(OF_UNITS).collect();
    let documented = documented(&page());
    let unknown = Vec::from_iter(documented.iter().filter(|word| !known.contains(word.as_str())));
    assert!(unknown.is_empty(), "docs/configuration.md names {unknown:?}, which nothing reads");
}

#[test]
fn variables_are_found_in_code_and_not_in_tests_or_comments() {
    let source = "\
        // \"A_COMMENT\"\n\
        let a = std::env::var(\"HOME\").ok();\n\
        #[arg(long, env = \"AN_ARGUMENT\")]\n\
        const LIST: [&str; 2] = [\"IN_A_LIST\", \"PLAIN\"];\n\
        bail!(\"not A_WORD in a text\");\n\
        #[cfg(test)]\nmod tests {\n    let x = \"IN_A_TEST\";\n";
    let found = candidates(source);
    let found: Vec<_> = found.iter().map(|(word, must)| (word.as_str(), *must)).collect();
    let expected = [("AN_ARGUMENT", true), ("HOME", true), ("IN_A_LIST", true), ("PLAIN", false)];
    assert_eq!(found, expected);
    let page = "| `A_B`, `TERM` | `--flag`, `x_y` | `FILE NAME` | A_WORD |";
    assert_eq!(Vec::from_iter(documented(page)), ["A_B", "TERM"]);
}
