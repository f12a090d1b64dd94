//! Helpers that run the binary, and a server for it.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

/// The binary, without the tester's own settings.
pub(crate) fn codex() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_codex"));
    let own = |name: &str| name.starts_with("CODEX_") || matches!(name, "NO_COLOR" | "RUST_LOG");
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(own) {
            command.env_remove(name);
        }
    }
    command.stdin(Stdio::null());
    command
}

/// Runs the command to its end.
pub(crate) fn output(command: &mut Command) -> CommandOutput {
    command_output(&command.output().expect("the binary runs"))
}

/// Runs the command to its end with this input.
pub(crate) fn output_of(command: &mut Command, input: &[u8]) -> CommandOutput {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    let mut stdin = child.stdin.take().expect("a pipe");
    let input = input.to_vec();
    let writer = std::thread::spawn(move || {
        // The command may not read all of it.
        let _ = stdin.write_all(&input);
    });
    let output = child.wait_with_output().expect("it ends");
    writer.join().expect("the writer ends");
    command_output(&output)
}

/// The output and exit code of a command.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct CommandOutput {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

fn command_output(output: &Output) -> CommandOutput {
    CommandOutput {
        code: output.status.code(),
        out: String::from_utf8_lossy(&output.stdout).into_owned(),
        err: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

impl CommandOutput {
    /// Asserts success with an empty stderr; returns stdout.
    #[track_caller]
    pub(crate) fn success(self) -> String {
        assert_eq!((self.code, self.err.as_str()), (Some(0), ""), "{self:?}");
        self.out
    }

    /// Asserts this exit code and a message that contains these words.
    #[track_caller]
    pub(crate) fn failed(&self, code: i32, words: &str) {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert!(self.err.contains(words), "{self:?}");
    }
}

/// A server of the test.
#[derive(Debug)]
pub(crate) struct Server {
    child: Child,
    pub url: String,
}

impl Server {
    pub(crate) fn start() -> Self {
        Self::with(&[])
    }

    pub(crate) fn with(arguments: &[&str]) -> Self {
        let mut child = codex()
            .arg("exec-server")
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .expect("the server starts");
        let mut url = String::new();
        let stdout = child.stdout.take().expect("a pipe");
        BufReader::new(stdout).read_line(&mut url).expect("it tells where it listens");
        Self { child, url: url.trim().to_owned() }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// A command on this server.
    pub(crate) fn codex(&self, subcommand: &str) -> Command {
        let mut command = codex();
        command.args([subcommand, "--on", &self.url]);
        command
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs the same test with the embedded server and with one behind a websocket.
pub(crate) fn everywhere(test: impl Fn(&dyn Fn(&str) -> Command)) {
    test(&|subcommand| {
        let mut command = codex();
        command.arg(subcommand);
        command
    });
    let server = Server::start();
    test(&|subcommand| server.codex(subcommand));
}

/// A file's content.
pub(crate) fn read(path: impl AsRef<Path>) -> String {
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{:?}: {error}", path.as_ref()))
}

/// Reads until the text has appeared.
pub(crate) fn read_until(from: &mut impl Read, text: &str) -> String {
    let mut all = Vec::new();
    let mut buffer = [0; 1024];
    while !String::from_utf8_lossy(&all).contains(text) {
        let len = from.read(&mut buffer).expect("readable");
        assert!(len > 0, "ended before `{text}`: {}", String::from_utf8_lossy(&all));
        all.extend_from_slice(&buffer[..len]);
    }
    String::from_utf8_lossy(&all).into_owned()
}
