//! The two programs, and how they are started, watched and ended.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Longer than anything takes, even on a busy machine.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// Which of the two implementations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Implementation {
    Ours,
    Theirs,
}

impl Implementation {
    fn path(self) -> String {
        let name = match self {
            Self::Ours => "CODEX_INTEROP_OURS",
            Self::Theirs => "CODEX_INTEROP_BIN",
        };
        std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set; run interop/run"))
    }

    /// The program with this home and without the user's own settings.
    pub(crate) fn program(self, home: &Path) -> Command {
        let mut command = Command::new(self.path());
        for (name, _) in std::env::vars_os() {
            let own = |name: &str| name.starts_with("CODEX_") || name == "RUST_LOG";
            if name.to_str().is_some_and(own) {
                command.env_remove(name);
            }
        }
        // Without login scripts and settings of the user who runs this.
        command.env("HOME", home).env("CODEX_HOME", home).env("XDG_STATE_HOME", home);
        command.env_remove("BASH_ENV").stdin(Stdio::null());
        command
    }

    /// The command that serves over its stdin and stdout.
    pub(crate) fn stdio_argv(self) -> [String; 4] {
        [self.path(), "exec-server".into(), "--listen".into(), "stdio".into()]
    }

    /// The same, as `--on` takes it.
    pub(crate) fn stdio(self) -> String {
        format!("stdio:{}", self.stdio_argv().join(" "))
    }
}

/// A home for one program.
pub(crate) fn home() -> tempfile::TempDir {
    // Not below /tmp, which a workspace-write sandbox leaves open.
    tempfile::tempdir_in("/var/tmp").unwrap()
}

/// A child process that ends with the test.
#[derive(Debug)]
pub(crate) struct Program {
    pub child: Child,
    /// Its stderr so far.
    log: Arc<Mutex<String>>,
}

impl Program {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let log: Arc<Mutex<String>> = Arc::default();
        let (shared, stderr) = (log.clone(), child.stderr.take().unwrap());
        thread::spawn(move || {
            let mut lines = BufReader::new(stderr);
            let mut line = Vec::new();
            while matches!(lines.read_until(b'\n', &mut line), Ok(1..)) {
                shared.lock().unwrap().push_str(&String::from_utf8_lossy(&line));
                line.clear();
            }
        });
        Self { child, log }
    }

    /// The first line that it prints.
    pub(crate) fn first_line(&mut self) -> String {
        let mut line = String::new();
        BufReader::new(self.child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.ends_with('\n'), "no output: {}", self.log());
        line.trim().to_owned()
    }

    /// Its stderr so far.
    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    pub(crate) fn wait(mut self) -> ExitStatus {
        wait(&mut self.child)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn wait(child: &mut Child) -> ExitStatus {
    let until = Instant::now() + TIMEOUT;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        assert!(Instant::now() < until, "the program does not end");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A server on a free port.
#[derive(Debug)]
pub(crate) struct Server {
    pub program: Program,
    pub url: String,
    _home: tempfile::TempDir,
}

impl Server {
    pub(crate) fn start(implementation: Implementation) -> Self {
        Self::with(implementation, |_| {})
    }

    pub(crate) fn with(implementation: Implementation, change: impl FnOnce(&mut Command)) -> Self {
        let home = home();
        let mut command = implementation.program(home.path());
        command.args(["exec-server", "--listen", "ws://127.0.0.1:0"]).stdout(Stdio::piped());
        change(&mut command);
        let mut program = Program::start(&mut command);
        let url = program.first_line();
        assert!(url.starts_with("ws://127.0.0.1:"), "{url}");
        Self { program, url, _home: home }
    }
}

/// The output and exit code of a program.
#[derive(Debug)]
pub(crate) struct ProgramOutput {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl ProgramOutput {
    /// Asserts exit code 0 and an empty stderr; returns stdout.
    #[track_caller]
    pub(crate) fn success(self) -> String {
        assert_eq!((self.code, self.err.as_str()), (Some(0), ""), "{self:?}");
        self.out
    }

    /// Asserts this exit code, and that stderr contains `words`.
    #[track_caller]
    pub(crate) fn assert_failed(&self, code: i32, words: &str) {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert!(self.err.contains(words), "{self:?}");
    }
}

/// Runs a program to its end, with this input.
pub(crate) fn output_of(command: &mut Command, input: &[u8]) -> ProgramOutput {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut stdin, input) = (child.stdin.take().unwrap(), input.to_vec());
    // The program may not read all of it.
    let writing = thread::spawn(move || drop(stdin.write_all(&input)));
    let (mut out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let out = thread::spawn(move || all(&mut out));
    let err = thread::spawn(move || all(&mut err));
    let until = Instant::now() + TIMEOUT;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > until {
            let _ = child.kill();
            let _ = child.wait();
            panic!("it does not end: {command:?}: {} {}", out.join().unwrap(), err.join().unwrap());
        }
        thread::sleep(Duration::from_millis(5));
    };
    writing.join().unwrap();
    ProgramOutput { code: status.code(), out: out.join().unwrap(), err: err.join().unwrap() }
}

/// Runs a program to its end, without input.
pub(crate) fn output(command: &mut Command) -> ProgramOutput {
    output_of(command, b"")
}

fn all(from: &mut impl Read) -> String {
    let mut bytes = Vec::new();
    from.read_to_end(&mut bytes).unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Waits until `holds` returns true.
#[track_caller]
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + TIMEOUT;
    while !holds() {
        assert!(Instant::now() < until, "never: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}
