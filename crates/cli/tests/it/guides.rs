//! The guides in docs/guides, walked through: every command is run, in order, as a reader would, and prints what
//! the page says.
//!
//! | block | |
//! | --- | --- |
//! | `sh` | run by bash; its exports and its directory are those of the blocks after it |
//! | `sh server` | runs beside the rest, until the page ends; the next block waits until it is ready |
//! | `sh terminal` | runs in a terminal |
//! | `keys` | what is typed into the terminal above it |
//! | `text` | what the block above it prints: these lines in this order, with others between; `…` stands for anything |
//!
//! Ports are replaced by free ones; `ssh HOST COMMAND` runs the command here.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;

use tempfile::TempDir;

use crate::support::PATIENCE;
use crate::terminal::Terminal;

/// A fenced block.
#[derive(Debug)]
struct Block {
    /// The words after the fence.
    kind: String,
    text: String,
    line: usize,
}

fn blocks(page: &str) -> Vec<Block> {
    let (mut blocks, mut open): (Vec<Block>, Option<Block>) = (Vec::new(), None);
    for (number, line) in page.lines().enumerate() {
        match (line.strip_prefix("```"), &mut open) {
            (Some(kind), None) => {
                let kind = kind.trim().to_owned();
                open = Some(Block { kind, text: String::new(), line: number + 1 });
            }
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (None, Some(block)) => block.text.extend([line, "\n"]),
            (None, None) => {}
        }
    }
    assert!(open.is_none(), "a block is not closed");
    blocks
}

/// Whether a line matches, in which `…` stands for anything.
fn matches(pattern: &str, line: &str) -> bool {
    let mut parts = pattern.split('…');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = line.strip_prefix(first) else { return false };
    let mut ends_open = false;
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
        ends_open = part.is_empty();
    }
    ends_open || rest.is_empty()
}

#[track_caller]
fn assert_printed(expected: &str, printed: &str, place: &str) {
    let mut lines = printed.lines();
    for pattern in expected.lines() {
        let found = lines.any(|line| matches(pattern.trim_end(), line.trim_end()));
        assert!(found, "{place}: `{pattern}` is not in its place in:\n{printed}");
    }
}

/// A reader with a home of their own.
struct Reader {
    home: TempDir,
    ports: [(&'static str, String); 2],
    servers: Vec<Child>,
}

impl Drop for Reader {
    fn drop(&mut self) {
        for server in &mut self.servers {
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}

impl Reader {
    fn new() -> Self {
        // Not in /tmp, where every sandbox that writes may write.
        let home = tempfile::tempdir_in("/var/tmp").unwrap();
        let programs = home.path().join("bin");
        fs::create_dir(&programs).unwrap();
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_codex"), programs.join("codex")).unwrap();
        let ssh = programs.join("ssh");
        fs::write(&ssh, "#!/bin/sh\nshift\nexec sh -c \"$*\"\n").unwrap();
        fs::set_permissions(&ssh, PermissionsExt::from_mode(0o755)).unwrap();
        fs::create_dir(home.path().join("pages")).unwrap();
        let pages = home.path().join("pages");
        fs::write(home.path().join("directory"), pages.to_str().unwrap()).unwrap();
        fs::write(home.path().join("exports"), "").unwrap();
        let free = || {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            listener.local_addr().unwrap().port().to_string()
        };
        Self { home, ports: [("4500", free()), ("4600", free())], servers: Vec::new() }
    }

    /// A shell that continues where the last block ended.
    fn shell(&self, script: &str) -> Command {
        let mut script = script.to_owned();
        for (port, free) in &self.ports {
            script = script.replace(&format!(":{port}"), &format!(":{free}"));
        }
        let home = self.home.path();
        let path = format!("{}:/usr/local/bin:/usr/bin:/bin", home.join("bin").display());
        let mut command = Command::new("bash");
        command
            .args(["--norc", "-euc"])
            .arg(format!(
                ". \"$HOME/exports\"; cd \"$(cat \"$HOME/directory\")\"\n{script}\n\
                 export -p > \"$HOME/exports\"; pwd > \"$HOME/directory\"\n"
            ))
            .env_clear()
            .env("HOME", home)
            .env("PATH", path)
            .env("SHELL", "/bin/sh")
            .env("XDG_STATE_HOME", home.join("state"))
            .env("XDG_CONFIG_HOME", home.join("config"));
        command
    }

    fn runs(&self, script: &str, place: &str) -> String {
        let output = self.shell(script).stdin(Stdio::null()).output().unwrap();
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{place}: {}\n{printed}{errors}", output.status);
        printed
    }

    /// Starts a server, and waits until it prints its address or has registered.
    fn serves(&mut self, script: &str, place: &str) {
        let mut command = self.shell(&format!("exec env RUST_LOG=info {script}"));
        let mut server = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (ready, is_ready) = mpsc::channel();
        let streams: [Box<dyn std::io::Read + Send>; 2] =
            [Box::new(server.stdout.take().unwrap()), Box::new(server.stderr.take().unwrap())];
        for stream in streams {
            let ready = ready.clone();
            thread::spawn(move || {
                // To the end: a server must not find its stderr closed.
                for line in BufReader::new(stream).lines().map_while(Result::ok) {
                    let is_address = ["ws://", "http://", "unix:"];
                    if is_address.iter().any(|start| line.starts_with(start))
                        || line.contains("connected to the rendezvous")
                    {
                        let _ = ready.send(());
                    }
                }
            });
        }
        drop(ready);
        self.servers.push(server);
        is_ready.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("{place}: it is not ready"));
    }

    /// Types the keys into a terminal, and returns what it showed.
    fn types(&self, script: &str, keys: &str, place: &str) -> String {
        let mut terminal = Terminal::start(&self.shell(script));
        // The prompt of the shell: it reads from now on.
        terminal.shows(if rustix::process::geteuid().is_root() { "# " } else { "$ " });
        for line in keys.lines() {
            // An escape sequence takes effect without Enter.
            terminal.type_in(line);
            if !line.starts_with('~') {
                terminal.type_in("\r");
            }
        }
        let status = terminal.ends();
        assert_eq!(status.code(), Some(0), "{place}");
        let shown = terminal.all_output();
        String::from_utf8_lossy(&shown).replace('\r', "\n")
    }
}

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guides")
}

fn walk(name: &str) {
    let page = fs::read_to_string(directory().join(name)).unwrap();
    let (mut reader, blocks) = (Reader::new(), blocks(&page));
    assert!(blocks.iter().any(|block| block.kind == "sh"), "{name} has no commands");
    let mut printed = String::new();
    let mut terminal: Option<&Block> = None;
    for block in &blocks {
        let place = format!("{name}:{}", block.line);
        match block.kind.as_str() {
            "sh" => printed = reader.runs(&block.text, &place),
            "sh server" => reader.serves(&block.text, &place),
            "sh terminal" => terminal = Some(block),
            "keys" => {
                let command = terminal.take().expect("keys without a terminal");
                printed = reader.types(&command.text, &block.text, &place);
            }
            "text" => assert_printed(&block.text, &printed, &place),
            other => panic!("{place}: no test knows `{other}` blocks"),
        }
    }
    assert!(terminal.is_none(), "{name}: a terminal without keys");
}

#[test]
fn first_five_minutes() {
    walk("first-five-minutes.md");
}

#[test]
fn coding_agent() {
    walk("coding-agent.md");
}

#[test]
fn behind_nat() {
    walk("behind-nat.md");
}

#[test]
fn ssh_and_tmux() {
    walk("ssh-and-tmux.md");
}

#[test]
fn untrusted_code() {
    walk("untrusted-code.md");
}

#[test]
fn every_guide_is_walked_and_listed() {
    let listed = fs::read_to_string(directory().join("README.md")).unwrap();
    let tests = fs::read_to_string(in_this_directory("guides.rs")).unwrap();
    let mut pages = BTreeSet::new();
    for entry in fs::read_dir(directory()).unwrap() {
        pages.insert(entry.unwrap().file_name().into_string().unwrap());
    }
    pages.remove("README.md");
    for page in pages {
        assert!(listed.contains(&format!("]({page})")), "{page} is not in the list");
        // The code of this one is a documentation test of codex-exec-server.
        let walked = page == "embedding.md" || tests.contains(&format!("walk(\"{page}\")"));
        assert!(walked, "no test walks through {page}");
    }
}

fn in_this_directory(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it").join(name)
}

#[test]
fn expected_lines_are_compared_in_order() {
    assert!(matches("a…", "abc") && matches("a…c", "abc") && matches("abc", "abc"));
    assert!(!matches("a", "abc") && !matches("…b", "abc") && !matches("a…d", "abc"));
    assert_printed("a\nc…\n", "a\nb\ncd\n", "here");
    let wrong = std::panic::catch_unwind(|| assert_printed("c\na\n", "a\nb\nc\n", "here"));
    wrong.unwrap_err();
    let page = "x\n```sh server\na\nb\n```\n```text\nc\n```\n";
    let found: Vec<_> = blocks(page).into_iter().map(|block| (block.kind, block.text)).collect();
    let expected = [("sh server", "a\nb\n"), ("text", "c\n")];
    assert_eq!(found, expected.map(|(kind, text)| (kind.to_owned(), text.to_owned())));
}
