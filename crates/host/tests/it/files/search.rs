//! `fs/search` and `fs/glob`.

use std::sync::Mutex;

use codex_exec_host::files::{Event, FileNotification, Outcome};
use codex_exec_server_protocol::files::*;

use super::*;

fn repository() -> Fixture {
    let f = Fixture::new();
    f.file("src/main.rs", "fn main() {\n    needle();\n}\n");
    f.file("src/lib.rs", "one\ntwo needle two\nthree\nfour\nneedle needle\n");
    f.file("src/deep/er.txt", "Needle\n");
    f.file("target/out.rs", "needle\n");
    f.file(".hidden/x.rs", "needle\n");
    f.file(".gitignore", "target/\n*.log\n");
    f.file("a.log", "needle\n");
    f.file("binary", b"\0\0needle\n");
    f
}

fn found(f: &Fixture, answer: &FsSearchResponse) -> Vec<(String, u64)> {
    let mut all = Vec::new();
    for file in &answer.files {
        let name = file.path.as_path().strip_prefix(&f.root).unwrap().to_str().unwrap().to_owned();
        for line in &file.lines {
            if line.kind == FsSearchLineKind::Match {
                all.push((name.clone(), line.line_number));
            }
        }
    }
    all
}

fn search(f: &Fixture, change: impl FnOnce(&mut FsSearchParams)) -> FsSearchResponse {
    let mut params = FsSearchParams::new(f.path(""), "needle");
    change(&mut params);
    f.run(params).unwrap()
}

fn paths(f: &Fixture, change: impl FnOnce(&mut FsSearchParams)) -> Vec<String> {
    let answer = search(f, change);
    found(f, &answer).into_iter().map(|(name, line)| format!("{name}:{line}")).collect()
}

#[test]
fn ignored_hidden_and_binary_files_are_skipped_by_default() {
    let f = repository();
    let usual = ["src/lib.rs:2", "src/lib.rs:5", "src/main.rs:2"];
    assert_eq!(paths(&f, |_| {}), usual);
    assert_eq!(
        paths(&f, |p| p.respect_gitignore = false),
        ["a.log:1", "src/lib.rs:2", "src/lib.rs:5", "src/main.rs:2", "target/out.rs:1"]
    );
    assert_eq!(paths(&f, |p| p.hidden = true).len(), 4);
    assert_eq!(paths(&f, |p| p.case_insensitive = true).len(), 4);
    assert_eq!(paths(&f, |p| p.include = vec!["*.txt".into(), "main.*".into()]), ["src/main.rs:2"]);
    assert_eq!(paths(&f, |p| p.exclude = vec!["lib.rs".into()]), ["src/main.rs:2"]);
    assert_eq!(paths(&f, |p| p.path = f.path("src/main.rs")), ["src/main.rs:2"]);
    assert_eq!(paths(&f, |p| p.max_file_bytes = Some(30)), ["src/main.rs:2"]);
}

#[test]
fn patterns_are_regular_expressions_unless_literal() {
    let f = Fixture::new();
    f.file("x", "a.c\nabc\nword words\nspan\nning\n");
    assert_eq!(paths(&f, |p| p.pattern = "a.c".into()), ["x:1", "x:2"]);
    let literal = |p: &mut FsSearchParams| (p.pattern, p.literal) = ("a.c".into(), true);
    assert_eq!(paths(&f, literal), ["x:1"]);
    assert_eq!(paths(&f, |p| p.pattern = r"^\w+$".into()).len(), 3);
    let words = search(&f, |p| (p.pattern, p.word) = ("word".into(), true));
    assert_eq!(words.files[0].lines[0].ranges, [FsSearchRange { start: 0, end: 4 }]);
    let span = |p: &mut FsSearchParams| (p.pattern, p.multiline) = ("span\nning".into(), true);
    assert_eq!(paths(&f, span), ["x:4"]);
    for bad in ["(", "a{1000}{1000}{1000}", "[z-a]"] {
        let (code, message) = f.fails(FsSearchParams::new(f.path(""), bad));
        assert_eq!(code, INVALID, "{message}");
    }
    let mut glob = FsSearchParams::new(f.path(""), "x");
    glob.include = vec!["{".into()];
    assert_eq!(f.code(glob), INVALID);
    assert_eq!(f.code(FsSearchParams::new(f.path(""), "x".repeat(70_000))), INVALID);
    assert_eq!(f.code(FsSearchParams::new(f.path("none"), "x")), NOT_FOUND);
}

#[test]
fn context_lines_are_reported_once() {
    let f = Fixture::new();
    f.file("x", "1\n2\nhit\n4\nhit\n6\n7\n");
    let answer = search(&f, |p| {
        p.pattern = "hit".into();
        (p.before_context, p.after_context) = (1, 1);
    });
    let lines: Vec<_> = answer.files[0]
        .lines
        .iter()
        .map(|l| (l.line_number, l.kind == FsSearchLineKind::Match))
        .collect();
    assert_eq!(lines, [(2, false), (3, true), (4, false), (5, true), (6, false)]);
    let mut far = FsSearchParams::new(f.path(""), "x");
    far.before_context = 51;
    assert_eq!(f.code(far), INVALID);
}

#[test]
fn limits_truncate_and_are_reported() {
    let f = Fixture::new();
    for at in 0..5 {
        f.file(&format!("{at}"), "hit\nhit\nhit\n");
    }
    let all = search(&f, |p| p.pattern = "hit".into());
    assert_eq!(
        (all.matches, all.files_matched, all.files_searched, all.truncated),
        (15, 5, 5, false)
    );
    let some = search(&f, |p| (p.pattern, p.max_matches) = ("hit".into(), Some(4)));
    assert_eq!((some.matches, some.truncated), (4, true));
    let exact = search(&f, |p| (p.pattern, p.max_matches) = ("hit".into(), Some(15)));
    assert_eq!((exact.matches, exact.truncated), (15, false));
    let each = search(&f, |p| (p.pattern, p.max_matches_per_file) = ("hit".into(), Some(1)));
    assert_eq!((each.matches, each.truncated), (5, false));
    let mut too_many = FsSearchParams::new(f.path(""), "hit");
    too_many.max_matches = Some(100_001);
    assert_eq!(f.code(too_many), INVALID);
}

#[test]
fn long_lines_are_cut_and_invalid_utf8_is_replaced() {
    let f = Fixture::new();
    let mut long = "é".repeat(3000).into_bytes();
    long.extend(b" hit");
    f.file("long", &long);
    f.file("odd", b"\xf0\xf1 hit \xff\r\n");
    let answer = search(&f, |p| p.pattern = "hit|é".into());
    let long = &answer.files[0].lines[0];
    assert!(long.text_truncated && long.text.len() <= 4096 && long.text.ends_with('é'));
    assert!(long.ranges.iter().all(|range| range.end <= long.text.len() as u64));
    let odd = &answer.files[1].lines[0];
    let range = odd.ranges[0];
    assert_eq!(&odd.text[range.start as usize..range.end as usize], "hit");
    assert!(odd.text.ends_with('\u{fffd}'));
}

#[test]
fn response_stays_within_its_size_limit() {
    let f = Fixture::new();
    f.file("x", "hit \u{1}\u{1}\u{1}\u{1}\u{1}\u{1}\u{1}\u{1}\n".repeat(90_000));
    let answer = search(&f, |p| (p.pattern, p.max_matches) = ("hit".into(), Some(100_000)));
    assert!(answer.truncated);
    assert!(serde_json::to_vec(&answer).unwrap().len() <= 4 << 20);
}

fn streamed(
    f: &Fixture,
    params: FsSearchParams,
    cancel: &Cancel,
    each: impl Fn(&FsSearchMatchesNotification) -> ControlFlow<()>,
) -> (Vec<FsSearchMatchesNotification>, Result<Outcome, FileError>) {
    let sent = Mutex::new(Vec::new());
    let emit = |event| {
        let Event::Notify(FileNotification::SearchMatches(matches)) = event else {
            panic!("{event:?}")
        };
        let next = each(&matches);
        sent.lock().unwrap().push(matches);
        next
    };
    let result = f.executor.execute(params.into(), cancel, &emit);
    (sent.into_inner().unwrap(), result)
}

#[test]
fn streamed_search_sends_the_same_matches_in_batches() {
    let f = Fixture::new();
    for at in 0..40 {
        f.file(&format!("{at:02}"), format!("{} hit\n", "x".repeat(3000)).repeat(3));
    }
    let mut params = FsSearchParams::new(f.path(""), "hit");
    let whole = f.run(params.clone()).unwrap();
    params.search_id = Some("s".into());
    let (sent, result) = streamed(&f, params, &Cancel::new(), |_| ControlFlow::Continue(()));
    let Ok(Outcome::Search(answer)) = result else { panic!("{result:?}") };
    assert!(answer.files.is_empty());
    assert_eq!((answer.matches, answer.files_matched), (whole.matches, whole.files_matched));
    assert!(sent.len() > 3, "{} batches", sent.len());
    let mut files: Vec<FsSearchFile> = Vec::new();
    for (at, batch) in sent.into_iter().enumerate() {
        assert_eq!((batch.seq, batch.search_id.as_str()), (at as u64 + 1, "s"));
        for file in batch.files {
            match files.last_mut() {
                Some(last) if last.path == file.path => last.lines.extend(file.lines),
                _ => files.push(file),
            }
        }
    }
    assert_eq!(files, whole.files);
}

#[test]
fn search_ends_when_cancelled_or_without_a_receiver() {
    let f = Fixture::new();
    for at in 0..40 {
        f.file(&format!("{at:02}"), format!("{} hit\n", "x".repeat(3000)).repeat(30));
    }
    let mut params = FsSearchParams::new(f.path(""), "hit");
    params.search_id = Some("s".into());
    let cancel = Cancel::new();
    let stop = |_: &FsSearchMatchesNotification| {
        cancel.cancel();
        ControlFlow::Continue(())
    };
    let (sent, result) = streamed(&f, params.clone(), &cancel, stop);
    let Ok(Outcome::Search(answer)) = result else { panic!("{result:?}") };
    assert!(answer.cancelled && answer.truncated && answer.files_searched < 40);
    assert!(sent.len() <= 2);
    let (sent, _) = streamed(&f, params, &Cancel::new(), |_| ControlFlow::Break(()));
    assert_eq!(sent.len(), 1);
}

#[test]
fn special_files_and_links_are_not_searched() {
    let f = Fixture::new();
    f.fifo("fifo");
    f.file("outside/x", "needle\n");
    f.dir("tree");
    f.link("../outside/x", "tree/link");
    f.link("../outside", "tree/dir");
    let answer = search(&f, |p| p.path = f.path("tree"));
    assert_eq!(answer.matches, 0);
    f.link("outside", "root-link");
    assert_eq!(search(&f, |p| p.path = f.path("root-link")).matches, 1);
    assert_eq!(search(&f, |p| p.path = f.path("fifo")).files_searched, 0);
}

#[test]
fn unreadable_files_are_reported() {
    let f = repository();
    chmod(&f.root, 0o755);
    chmod(&f.native("src/main.rs"), 0o600);
    chmod(&f.native("src/deep"), 0o700);
    as_nobody(|| {
        let answer = search(&f, |_| {});
        assert_eq!(found(&f, &answer).len(), 2);
        let paths: Vec<_> = answer.errors.iter().map(|error| error.path.clone()).collect();
        assert_eq!(paths.len(), 2, "{:?}", answer.errors);
        assert!(paths.contains(&f.path("src/main.rs")) && paths.contains(&f.path("src/deep")));
        assert!(answer.errors.iter().all(|error| error.message.contains("Permission denied")));
    });
}

fn glob(f: &Fixture, patterns: &[&str], change: impl FnOnce(&mut FsGlobParams)) -> Vec<String> {
    let mut params = FsGlobParams::new(f.path(""), patterns.iter().copied());
    change(&mut params);
    let answer = f.run(params).unwrap();
    answer
        .entries
        .iter()
        .map(|e| e.path.as_path().strip_prefix(&f.root).unwrap().to_str().unwrap().to_owned())
        .collect()
}

#[test]
fn globs_match_names_below_the_path() {
    let f = repository();
    assert_eq!(glob(&f, &["**/*.rs"], |_| {}), ["src/lib.rs", "src/main.rs"]);
    assert_eq!(glob(&f, &["*.rs"], |_| {}), [""; 0]);
    assert_eq!(glob(&f, &["./src/*.rs", "bin*"], |_| {}), ["binary", "src/lib.rs", "src/main.rs"]);
    assert_eq!(
        glob(&f, &["src/{lib,main}.rs"], |p| p.exclude = vec!["lib.rs".into()]),
        ["src/main.rs"]
    );
    assert_eq!(glob(&f, &["**/*.rs"], |p| p.respect_gitignore = false).len(), 3);
    assert_eq!(glob(&f, &["**/*.rs"], |p| p.hidden = true).len(), 3);
    assert_eq!(glob(&f, &["SRC/*.RS"], |p| p.case_insensitive = true).len(), 2);
    assert_eq!(
        glob(&f, &["src/*"], |p| p.directories = true),
        ["src/deep", "src/lib.rs", "src/main.rs"]
    );
    let mut few = FsGlobParams::new(f.path(""), ["**"]);
    few.max_results = Some(2);
    let answer = f.run(few.clone()).unwrap();
    assert_eq!((answer.entries.len(), answer.truncated), (2, true));
    few.max_results = Some(50_001);
    assert_eq!(f.code(few), INVALID);
    assert_eq!(f.code(FsGlobParams::new(f.path(""), ["{"])), INVALID);
    assert_eq!(f.code(FsGlobParams::new(f.path("none"), ["*"])), NOT_FOUND);
}

#[test]
fn hostile_tree_does_not_block_a_search() {
    let f = Fixture::new();
    f.dir("fifo");
    f.fifo("fifo/.gitignore");
    f.socket("fifo/.ignore");
    f.dir("endless");
    f.link("/dev/zero", "endless/.gitignore");
    f.dir("large");
    f.file("large/.gitignore", format!("first\n{}", "x".repeat(5 << 20)));
    f.fifo(".ignore");
    for name in ["fifo", "endless", "large"] {
        f.file(&format!("{name}/first"), "needle\n");
    }
    f.file("endless/.git/info/x", "");
    f.fifo("endless/.git/info/exclude");
    assert_eq!(paths(&f, |_| {}), ["endless/first:1", "fifo/first:1"]);
    assert_eq!(glob(&f, &["*/first"], |_| {}), ["endless/first", "fifo/first"]);
}

#[test]
fn ignore_rules_apply_below_and_the_innermost_decides() {
    let f = Fixture::new();
    f.file("outer/.gitignore", "*.log\n/only-here\n");
    f.file("outer/repo/.git/info/exclude", "excluded\n");
    f.file("outer/repo/.gitignore", "*.tmp\n!keep.tmp\n");
    f.file("outer/repo/.ignore", "!forced.tmp\n");
    f.file("outer/plain/.gitignore", "!a.log\n");
    for name in [
        "outer/a.log",
        "outer/only-here",
        "outer/plain/a.log",
        "outer/plain/b.log",
        "outer/plain/only-here",
        "outer/repo/a.log",
        "outer/repo/a.tmp",
        "outer/repo/keep.tmp",
        "outer/repo/forced.tmp",
        "outer/repo/excluded",
        "outer/repo/deep/x.tmp",
    ] {
        f.file(name, "needle\n");
    }
    let all = [
        "outer/plain/a.log:1",
        "outer/plain/only-here:1",
        "outer/repo/a.log:1",
        "outer/repo/forced.tmp:1",
        "outer/repo/keep.tmp:1",
    ];
    assert_eq!(paths(&f, |_| {}), all);
    // The same from within, where the rules are above the root.
    assert_eq!(paths(&f, |p| p.path = f.path("outer/plain")), all[..2]);
    assert_eq!(paths(&f, |p| p.path = f.path("outer/repo/deep")), [""; 0]);
    f.link("outer/plain", "by-link");
    let by_link = search(&f, |p| p.path = f.path("by-link"));
    assert_eq!(by_link.matches, 2, "rules above a link to the root are found too");
}

/// Which rules apply depends only on the rules that are open at that place.
#[test]
fn ignore_rules_beyond_the_memory_of_a_scan_are_errors() {
    let mut config = FilesConfig::default();
    // Room for two files with a rule of 8 bytes each, which costs 320.
    config.max_ignore_memory = 640;
    let f = Fixture::with(config);
    for directory in ["a", "a/b", "a/b/c", "d", "d/e"] {
        f.file(&format!("{directory}/.gitignore"), "# a comment\n\nignored_\n");
        f.file(&format!("{directory}/ignored_"), "needle\n");
        f.file(&format!("{directory}/seen"), "needle\n");
    }
    f.file("f/.gitignore", "*ignored\n");
    f.file("f/ignored", "needle\n");
    let answer = search(&f, |_| {});
    let failed: Vec<_> = answer.errors.iter().map(|error| error.path.clone()).collect();
    assert_eq!(failed, [f.path("a/b/c/.gitignore"), f.path("f/.gitignore")]);
    let names: Vec<_> = found(&f, &answer).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["a/b/c/seen", "a/b/seen", "a/seen", "d/e/seen", "d/seen", "f/ignored"]);
}
