//! A server, a registry or an issuer that lies cannot hurt its client: every command of `codex` against
//! [`LyingServer`]. Judged by the client's disk, its terminal, its exit code, and that it ends.
//!
//! `HOSTILE_SEED` replays one seed, `HOSTILE_COMMAND` chooses commands by their words, and `HOSTILE_CASES`
//! sets how many cases each command gets.

use std::collections::BTreeMap;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::commands::{CommandOutput, codex, output};
use crate::lying_server::{Lies, LyingServer, id_token};
use crate::support::Running;
use crate::terminal::Terminal;

/// The client's machine: a home, a working directory with a destination, and a place that is neither.
struct Machine {
    root: tempfile::TempDir,
    runtime: Runtime,
}

impl Machine {
    fn new() -> Self {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(1).enable_all().build().unwrap();
        let machine = Self { root: tempfile::tempdir().unwrap(), runtime };
        for directory in ["home/.ssh", "work/dest/trap", "outside"] {
            std::fs::create_dir_all(machine.path(directory)).unwrap();
        }
        std::fs::write(machine.path("home/.ssh/authorized_keys"), "mine").unwrap();
        std::fs::write(machine.path("work/precious"), "mine").unwrap();
        std::fs::write(machine.path("work/upload"), "content").unwrap();
        std::fs::write(machine.path("work/patch"), PATCH).unwrap();
        std::fs::write(machine.path("outside/precious"), "mine").unwrap();
        // Links of the user's own; all but the last lead out of the destination.
        std::fs::write(machine.path("work/dest/trap/target"), "old").unwrap();
        for (target, link) in [
            ("../../../outside", "link"),
            ("../../precious", "to-precious"),
            ("../../new", "dangling"),
            ("target", "inside"),
        ] {
            let link = machine.path("work/dest/trap").join(link);
            std::os::unix::fs::symlink(target, link).unwrap();
        }
        machine
    }

    fn path(&self, below: &str) -> PathBuf {
        self.root.path().join("client").join(below)
    }

    fn server(&self, real: &Real, lies: Lies) -> LyingServer {
        let forbidden = self.path("outside");
        let started = LyingServer::start(&real.server.url, lies, forbidden.to_str().unwrap());
        self.runtime.block_on(started)
    }

    /// Everything outside the destination and the program's own state.
    fn snapshot(&self) -> BTreeMap<PathBuf, String> {
        let mut found = BTreeMap::new();
        let own = ["work/dest", "home/.local", "home/.codex"].map(|own| self.path(own));
        add(&self.path(""), &own, &mut found);
        found
    }

    /// Runs a command line against a server that lies about one thing.
    fn run(&self, real: &Real, words: &[&str], lies: Lies) -> CommandOutput {
        let server = self.server(real, lies);
        let before = self.snapshot();
        let output = output(&mut self.command(words, &server));
        assert_eq!(self.snapshot(), before, "{output:?}");
        output
    }

    /// The same in a terminal; all that it shows.
    fn show(&self, real: &Real, words: &[&str], lies: Lies) -> String {
        let server = self.server(real, lies);
        let mut terminal = Terminal::start(&self.command(words, &server));
        terminal.ends();
        let output = terminal.all_output();
        assert_eq!(control(&output), None, "{words:?}");
        String::from_utf8(output).unwrap()
    }

    /// `ON` stands for the flags that lead to the server, `HTTP` for its URL as a registry or issuer.
    fn command(&self, words: &[&str], server: &LyingServer) -> Command {
        let mut command = codex();
        let address = server.address;
        for word in words {
            match *word {
                "ON" => command.args(["--on", &format!("ws://{address}"), "--patience", "0"]),
                "HTTP" => command.arg(format!("http://{address}")),
                word => command.arg(word),
            };
        }
        command
            .env("HOME", self.path("home"))
            .env_remove("XDG_STATE_HOME")
            .current_dir(self.path("work"));
        if !words.starts_with(&["login", "status"]) {
            command.env("CODEX_API_KEY", "key-of-the-user");
        }
        command
    }

    /// Stores a session of a server that was honest, at the address of this one.
    fn save_session(&self, real: &Real, server: &LyingServer) {
        let address = real.server.url.strip_prefix("ws://").unwrap().parse().unwrap();
        let honest = LyingServer { address, called: Arc::default() };
        let words = ["run", "ON", "--detach", "job", "--", "sh", "-c", "echo out"];
        let started = output(&mut self.command(&words, &honest));
        assert_eq!(started.code, Some(0), "{started:?}");
        let file = self.path("home/.local/state/codex/sessions/job.json");
        let text = std::fs::read_to_string(&file).unwrap();
        let text = text.replace(&honest.address.to_string(), &server.address.to_string());
        std::fs::write(&file, text).unwrap();
    }

    /// Stores the tokens of a sign-in as someone with this address.
    fn sign_in_as(&self, email: &str) {
        std::fs::create_dir_all(self.path("home/.codex")).unwrap();
        let content = json!({"tokens": {"id_token": id_token(email), "access_token": "a"}});
        let file = self.path("home/.codex/auth.json");
        std::fs::write(&file, content.to_string()).unwrap();
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
    }
}

fn add(directory: &Path, own: &[PathBuf], found: &mut BTreeMap<PathBuf, String>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if own.contains(&path) {
            continue;
        }
        let metadata = path.symlink_metadata().unwrap();
        let mut about = format!("{:o} {} ", metadata.mode(), metadata.ino());
        if metadata.is_dir() {
            add(&path, own, found);
        } else if metadata.is_file() {
            about.push_str(&String::from_utf8_lossy(&std::fs::read(&path).unwrap()));
        }
        found.insert(path, about);
    }
}

/// A real server with some files, which the liar stands in front of.
struct Real {
    _files: tempfile::TempDir,
    server: Running,
}

impl Real {
    fn start() -> Self {
        let files = tempfile::tempdir().unwrap();
        for directory in ["tree/sub/deep", "tree/empty", "app", ".ssh", "trap/link"] {
            std::fs::create_dir_all(files.path().join(directory)).unwrap();
        }
        for file in ["file", "tree/a", "tree/b", "tree/sub/c", "tree/sub/deep/d", "app/notes"] {
            std::fs::write(files.path().join(file), "hello\nworld\n").unwrap();
        }
        for file in ["link/precious", "to-precious", "dangling", "inside"] {
            std::fs::write(files.path().join("trap").join(file), "hello\nworld\n").unwrap();
        }
        std::os::unix::fs::symlink("a", files.path().join("tree/to-file")).unwrap();
        let mut command = codex();
        command.arg("exec-server").current_dir(files.path()).env("HOME", files.path());
        let server = Running::start_with(&mut command);
        Self { _files: files, server }
    }
}

/// A command line, and how it is judged.
struct Case {
    words: &'static [&'static str],
    /// The command prints what a process or a file says, as it is.
    raw: bool,
}

const fn case(words: &'static [&'static str]) -> Case {
    Case { words, raw: false }
}

const fn raw(words: &'static [&'static str]) -> Case {
    Case { words, raw: true }
}

const CASES: &[Case] = &[
    case(&["info", "ON"]),
    case(&["info", "--json", "ON"]),
    case(&["ls", "ON"]),
    case(&["ls", "-la", "ON", "tree"]),
    case(&["cp", "-r", "ON", ":tree", "dest"]),
    case(&["cp", "-qr", "ON", ":trap", "dest"]),
    case(&["cp", "-r", "ON", ":tree", "dest/new"]),
    case(&["cp", "-qr", "ON", ":", "dest/cwd"]),
    case(&["cp", "-q", "ON", ":file", "dest"]),
    case(&["cp", "-q", "ON", ":file", "dest/new-file"]),
    case(&["cp", "-q", "ON", "upload", ":app"]),
    case(&["cp", "-qr", "ON", ":tree", ":app/copy"]),
    case(&["rm", "-rf", "ON", "app/copy"]),
    case(&["search", "ON", "hello"]),
    case(&["search", "-C", "1", "ON", "hello", "tree"]),
    case(&["apply-patch", "ON", "patch"]),
    case(&["run", "ON", "--detach", "job", "--", "sleep", "1000"]),
    case(&["ps", "--patience", "0", "job"]),
    case(&["ps"]),
    case(&["ps", "--json"]),
    case(&["kill", "--patience", "0", "job"]),
    case(&["environments", "list", "--registry", "HTTP"]),
    case(&["environments", "list", "--json", "--registry", "HTTP"]),
    case(&["environments", "show", "laptop", "--registry", "HTTP"]),
    case(&["environments", "show", "laptop", "--json", "--registry", "HTTP"]),
    case(&["environments", "remove", "laptop", "--registry", "HTTP"]),
    case(&["ls", "--on", "env:laptop", "--registry", "HTTP", "--patience", "0"]),
    case(&["login", "--device-auth", "--client-id", "c", "--issuer", "HTTP"]),
    case(&["login", "status"]),
    raw(&["cat", "ON", "file"]),
    raw(&["run", "ON", "--", "sh", "-c", "echo hello; exit 3"]),
    raw(&["run", "--json", "ON", "--", "echo", "hello"]),
    raw(&["run", "-t", "ON", "--", "echo", "hello"]),
    raw(&["shell", "ON"]),
    raw(&["logs", "--patience", "0", "job"]),
    raw(&["attach", "--patience", "0", "job"]),
];

const PATCH: &str =
    "*** Begin Patch\n*** Update File: app/notes\n@@\n-hello\n+HELLO\n*** End Patch\n";

/// The first characters of the output that can control a terminal, beyond line ends and the colours of this
/// program; bidirectional overrides count.
fn control(output: &[u8]) -> Option<String> {
    let text = match std::str::from_utf8(output) {
        Ok(text) => text,
        Err(error) => return Some(format!("not UTF-8: {error}")),
    };
    // A terminal makes \r\n of \n; another \r would hide a line.
    let mut text = text.replace("\r\n", "\n");
    for colour in ["0", "1", "2", "1;31", "32", "1;34", "35"] {
        text = text.replace(&format!("\u{1b}[{colour}m"), "");
    }
    let is_bad = |c: char| {
        (c.is_control() && !matches!(c, '\n' | '\t'))
            || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}')
            || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    let found = text.find(is_bad)?;
    let shown: String = text[found..].chars().take(40).collect();
    Some(format!("{shown:?}"))
}

/// Runs the case in a terminal; returns what was wrong.
fn judge(case: &Case, real: &Real, seed: u64) -> Vec<String> {
    let machine = Machine::new();
    let server = machine.server(real, Lies::Random(seed));
    let needs_session = case.words.contains(&"job") && !case.words.contains(&"--detach");
    if needs_session || case.words[0] == "ps" {
        machine.save_session(real, &server);
    }
    if case.words == ["login", "status"] {
        machine.sign_in_as("\u{1b}]0;evil\u{7}\u{9b}2J\u{202e}moc");
    }
    let before = machine.snapshot();
    let mut terminal = Terminal::start(&machine.command(case.words, &server));
    if case.words[0] == "shell" {
        terminal.type_in("exit\n");
    }
    let status = terminal.ends();
    let output = terminal.all_output();
    let shown = String::from_utf8_lossy(&output).into_owned();
    let mut wrong = Vec::new();
    if status.code().is_none_or(|code| code == 101) || shown.contains("panicked at") {
        wrong.push(format!("it ended with {status}"));
    }
    // A progress bar moves the cursor.
    let progress = case.words[0] == "cp" && !case.words[1].contains('q');
    if !case.raw
        && !progress
        && let Some(found) = control(&output)
    {
        wrong.push(format!("control characters: {found}"));
    }
    let after = machine.snapshot();
    for (path, about) in &after {
        if before.get(path) != Some(about) {
            wrong.push(format!("{} was changed", path.display()));
        }
    }
    let gone = before.keys().filter(|path| !after.contains_key(*path));
    wrong.extend(gone.map(|path| format!("{} is gone", path.display())));
    let words = case.words.join(" ");
    wrong.iter().map(|text| format!("seed {seed}: codex {words}: {text}\n{shown:?}")).collect()
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

/// Calls `check` with every chosen case, several at once; fails with everything that it returned.
fn for_each_case(check: impl Fn(usize, &Case) -> Vec<String> + Sync) {
    let only = std::env::var("HOSTILE_COMMAND").unwrap_or_default();
    let next = AtomicUsize::new(0);
    let wrong = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(case) = CASES.get(at) else { return };
                    if case.words.join(" ").contains(&only) {
                        let found = check(at, case);
                        wrong.lock().unwrap().extend(found);
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{} failures:\n{}", wrong.len(), wrong.join("\n---\n"));
}

#[test]
fn no_lie_of_a_server_hurts_its_client() {
    let real = Real::start();
    for_each_case(|at, case| match number("HOSTILE_SEED") {
        Some(seed) => judge(case, &real, seed),
        None => {
            // The same number is another lie for another command.
            let seeds = (0..number("HOSTILE_CASES").unwrap_or(4)).map(|n| n * 1009 + at as u64);
            seeds.flat_map(|seed| judge(case, &real, seed)).collect()
        }
    });
}

/// What no client needs in order to succeed: notifications, requests about a process that has ended, the
/// document of an issuer that has the usual paths, and the body of a removal that succeeded.
const NEEDLESS: &[&str] = &[
    "initialized",
    "fs/close",
    "process/terminate",
    "process/write",
    "process/resize",
    "process/closeStdin",
    "/.well-known/openid-configuration",
];

#[test]
fn a_response_that_makes_no_sense_is_a_failure() {
    let real = Real::start();
    for_each_case(|_, case| {
        // `ps` shows what is wrong with each server, `login status` asks none.
        let lists_all = case.words[0] == "ps" && !case.words.contains(&"job");
        if lists_all || case.words == ["login", "status"] || case.words.contains(&"remove") {
            return Vec::new();
        }
        let run = |lies: Lies| {
            let machine = Machine::new();
            let server = machine.server(&real, lies);
            if case.words.contains(&"job") && !case.words.contains(&"--detach") {
                machine.save_session(&real, &server);
            }
            let mut terminal = Terminal::start(&machine.command(case.words, &server));
            if case.words[0] == "shell" {
                terminal.type_in("exit\n");
            }
            let status = terminal.ends();
            let output = String::from_utf8_lossy(&terminal.all_output()).into_owned();
            (status, output, server)
        };
        let (_, _, honest) = run(Lies::Result("none".to_owned(), Value::Null));
        let mut called = honest.called.lock().unwrap().clone();
        called.sort();
        called.dedup();
        let mut wrong = Vec::new();
        for method in called.iter().filter(|method| !NEEDLESS.contains(&method.as_str())) {
            for nonsense in [json!(["no", {"sense": "at all"}]), json!("no sense"), json!(7)] {
                let (status, shown, server) = run(Lies::Result(method.clone(), nonsense.clone()));
                let lied = server.called.lock().unwrap().contains(method);
                if lied && matches!(status.code(), None | Some(0 | 101)) {
                    let words = case.words.join(" ");
                    wrong.push(format!(
                        "codex {words}: {nonsense} from {method}: {status}\n{shown:?}"
                    ));
                }
            }
        }
        wrong
    });
}

const ALWAYS: std::ops::Range<usize> = 0..usize::MAX;
const EVIL: &str = "a\u{1b}]0;evil\u{7}\u{9b}2J\u{202e}b";

#[test]
fn the_server_does_not_name_a_local_file() {
    let (real, machine) = (Real::start(), Machine::new());
    let in_ssh = Lies::Change("initialize", ALWAYS, |result| {
        let cwd = &mut result["environmentInfo"]["cwd"];
        *cwd = json!(format!("{}/.ssh", cwd.as_str().unwrap()));
    });
    let copied = machine.run(&real, &["cp", "-r", "ON", ":", "."], in_ssh);
    copied.failed(1, "has no name of its own");

    for uri in [true, false] {
        let outside = match uri {
            true => Lies::Change("fs/readDirectory", ALWAYS, |result| {
                let sub = json!("file:///tmp/../x/..%2Foutside");
                result["entries"].as_array_mut().unwrap().iter_mut().for_each(|entry| {
                    entry["fileNameUri"] = sub.clone();
                });
            }),
            false => Lies::Change("fs/readDirectory", ALWAYS, |result| {
                let names = ["..", "../outside/evil", "", ".", "a/b", "a\0b"];
                let entries = names
                    .map(|name| json!({"fileName": name, "isFile": true, "isDirectory": false}));
                result["entries"] = json!(entries);
            }),
        };
        let to = format!("dest/{uri}");
        let copied = machine.run(&real, &["cp", "-r", "ON", ":tree", &to], outside);
        assert_eq!(copied.code, Some(1), "{copied:?}");
        let count = if uri { 5 } else { 6 };
        assert_eq!(copied.err.matches("not copied").count(), count, "{copied:?}");
        assert_eq!(std::fs::read_dir(machine.path("work").join(to)).unwrap().count(), 0);
    }
}

#[test]
fn a_link_of_the_user_leads_no_download_out_of_its_destination() {
    let (real, machine) = (Real::start(), Machine::new());
    let honest = Lies::Result("none".to_owned(), Value::Null);
    let copied = machine.run(&real, &["cp", "-r", "ON", ":trap", "dest"], honest);
    assert_eq!(copied.code, Some(1), "{copied:?}");
    assert_eq!(copied.err.matches("leads out of the destination").count(), 4, "{copied:?}");
    let inside = std::fs::read_to_string(machine.path("work/dest/trap/inside")).unwrap();
    assert_eq!(inside, "hello\nworld\n", "a link that stays inside is followed");
}

#[test]
fn a_file_that_becomes_a_directory_is_not_copied_as_a_tree() {
    let (real, machine) = (Real::start(), Machine::new());
    for times in 1..4 {
        let turns = Lies::Change("fs/getMetadata", 0..times, |result| {
            result["isDirectory"] = json!(false);
            result["isFile"] = json!(true);
        });
        let copied = machine.run(&real, &["cp", "ON", ":tree", "dest/turned"], turns);
        assert_eq!(copied.code, Some(1), "{copied:?}");
        assert!(!machine.path("work/dest/turned").exists(), "{times}: {copied:?}");
    }
}

#[test]
fn the_umask_applies_to_downloads() {
    let (real, machine) = (Real::start(), Machine::new());
    let all_bits =
        Lies::Change("fs/getMetadata", ALWAYS, |result| result["mode"] = json!(0o107_777));
    let server = machine.server(&real, all_bits);
    let inner = machine.command(&["cp", "-r", "ON", ":tree", "dest/copy"], &server);
    let mut command = Command::new("sh");
    command.args(["-c", "umask 027; exec \"$@\"", "sh"]).arg(inner.get_program());
    command.args(inner.get_args()).current_dir(machine.path("work"));
    command.env("HOME", machine.path("home"));
    let copied = output(&mut command);
    assert_eq!(copied.code, Some(0), "{copied:?}");
    let mode =
        |path: &str| machine.path("work/dest/copy").join(path).metadata().unwrap().mode() & 0o7777;
    for (path, bits) in [("a", 0o750), ("", 0o750), ("sub", 0o750), ("sub/deep/d", 0o750)] {
        assert_eq!(mode(path), bits, "{path} {:o}", mode(path));
    }
}

#[test]
fn text_of_the_other_side_cannot_control_the_terminal() {
    let (real, machine) = (Real::start(), Machine::new());
    let environment = |result: &mut Value| {
        let one = match result.get("environments") {
            Some(_) => &mut result["environments"][0],
            None => result,
        };
        for member in ["environment_id", "executor_registration_id", "security_profile", "token"] {
            one[member] = json!(EVIL);
        }
    };
    let lies = || Lies::Change("/cloud/", ALWAYS, environment);
    for words in [&["environments", "list"][..], &["environments", "show", "laptop"]] {
        for json in [&[][..], &["--json"]] {
            let words = [words, json, &["--registry", "HTTP"]].concat();
            let shown = machine.show(&real, &words, lies());
            assert!(shown.contains("evil"), "{shown}");
        }
    }
    let code = Lies::Change("device", ALWAYS, |result| {
        result["user_code"] = json!(EVIL);
        result["verification_uri"] = json!(EVIL);
        // Adding this to the time of day would panic.
        result["expires_in"] = json!(u64::MAX);
        result["interval"] = json!(1);
    });
    let words = ["login", "--device-auth", "--client-id", "c", "--issuer", "HTTP"];
    let shown = machine.show(&real, &words, code);
    assert!(shown.contains("evil") && shown.contains("Signed in"), "{shown}");
    let info = || {
        Lies::Change("initialize", ALWAYS, |result| {
            let info = &mut result["environmentInfo"];
            info["executorVersion"] = json!(EVIL);
            info["platformOs"] = json!(EVIL);
            info["shell"]["path"] = json!(EVIL);
        })
    };
    assert!(machine.show(&real, &["info", "ON"], info()).contains("evil"));
    let shown = machine.show(&real, &["info", "--json", "ON"], info());
    let parsed: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(parsed["executorVersion"], EVIL, "JSON keeps the value");
    let listing = Lies::Change("fs/readDirectory", ALWAYS, |result| {
        let entry = json!({"fileName": EVIL, "isFile": true, "isDirectory": false});
        result["entries"] = json!([entry]);
    });
    assert!(machine.show(&real, &["ls", "ON"], listing).contains("evil"));
}

#[test]
fn a_tree_without_end_is_refused() {
    let (real, machine) = (Real::start(), Machine::new());
    let endless = Lies::Invent(&["fs/getMetadata", "fs/readDirectory"], |method| match method {
        "fs/getMetadata" => json!({
            "isDirectory": true, "isFile": false, "isSymlink": false, "size": 0, "createdAtMs": 1,
            "modifiedAtMs": 1,
        }),
        _ => json!({"entries": [
            {"fileName": "d".repeat(200), "isFile": false, "isDirectory": true},
        ]}),
    });
    let copied = machine.run(&real, &["cp", "-r", "ON", ":tree", "dest/copy"], endless);
    copied.failed(1, "its path is too long");
}

#[test]
fn a_session_id_does_not_replace_a_saved_session() {
    let (real, machine) = (Real::start(), Machine::new());
    let sessions = machine.path("home/.local/state/codex/sessions");
    std::fs::create_dir_all(&sessions).unwrap();
    std::fs::set_permissions(&sessions, PermissionsExt::from_mode(0o700)).unwrap();
    let saved = json!({"url": "ws://127.0.0.1:1", "sessionId": "mine", "processId": "p"});
    std::fs::write(sessions.join("shell-aaaa.json"), saved.to_string()).unwrap();
    let server = machine.server(
        &real,
        Lies::Change("initialize", ALWAYS, |result| {
            result["sessionId"] = json!("aaaa");
        }),
    );
    let mut terminal = Terminal::start(&machine.command(&["shell", "ON"], &server));
    terminal.type_in("exit\n");
    terminal.ends();
    let kept = std::fs::read_to_string(sessions.join("shell-aaaa.json")).unwrap();
    assert!(kept.contains("mine"), "{kept}");
}
