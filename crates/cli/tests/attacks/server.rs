//! Servers of both users, and requests to them.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};

use crate::program::attacker;
use crate::skipped::runs_as_root;
use crate::support::{Client, Running, codex};

/// The user id of `nobody`.
pub(crate) const UNPRIVILEGED: u32 = 65_534;

/// Who runs the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum User {
    /// The tests' user.
    Own,
    Nobody,
}

impl User {
    /// Both if the tests run as root, else their own user only.
    pub(crate) fn all() -> &'static [User] {
        if runs_as_root() { &[User::Own, User::Nobody] } else { &[User::Own] }
    }

    /// Makes this user the owner of a file or a link.
    pub(crate) fn give(self, path: &std::path::Path) {
        if self == User::Nobody {
            std::os::unix::fs::lchown(path, Some(UNPRIVILEGED), Some(UNPRIVILEGED)).unwrap();
        }
    }

    /// A server of this user.
    pub(crate) fn server(self) -> Running {
        self.server_of(codex(), &[])
    }

    /// A server of this user, of some program and with further arguments.
    pub(crate) fn server_of(self, mut command: Command, arguments: &[&str]) -> Running {
        command.env_remove("TMPDIR");
        if self == User::Nobody {
            command.uid(UNPRIVILEGED).gid(UNPRIVILEGED).env("HOME", "/nonexistent");
        }
        command.args(["exec-server", "--detach-ttl", "0"]).args(arguments);
        Running::start_with(&mut command)
    }
}

/// The exit code of a process that was not executed, since its sandbox hides the working directory.
const REFUSED_CODE: i64 = 101;

/// The outcome of a request.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// The whole response, with base64 decoded.
    pub said: String,
    /// The server did not start the process, or refused every call.
    pub refused: bool,
}

/// Runs the attacker with these steps in a sandbox and waits for its end.
pub(crate) async fn run(
    client: &mut Client,
    steps: &[String],
    sandbox: &Value,
    cwd: &str,
    tmpdir: Option<&str>,
) -> Outcome {
    // Unique, since a case may run again while the server keeps its ids.
    static LAST: AtomicUsize = AtomicUsize::new(0);
    let id = &format!("attack-{}", LAST.fetch_add(1, Ordering::Relaxed));
    let mut argv = vec![attacker().to_str().unwrap().to_owned()];
    argv.extend_from_slice(steps);
    let mut env = json!({"PATH": "/usr/bin:/bin"});
    if let Some(tmpdir) = tmpdir {
        env["TMPDIR"] = tmpdir.into();
    }
    let params = json!({"processId": id, "argv": argv, "cwd": cwd, "env": env, "tty": false,
                        "sandbox": sandbox});
    let answer = client.call("process/start", params).await;
    if answer["error"].is_object() {
        return Outcome { said: answer.to_string(), refused: true };
    }
    let (said, code) = client.closed(id).await;
    Outcome { said, refused: code == REFUSED_CODE }
}

/// The text of a response, with its base64 members decoded.
pub(crate) fn decoded_text(answer: &Value) -> String {
    let mut said = answer.to_string();
    for member in ["dataBase64", "chunk"] {
        if let Some(text) = answer["result"][member].as_str()
            && let Ok(bytes) = base64_simd::STANDARD.decode_to_vec(text)
        {
            said.push_str(&String::from_utf8_lossy(&bytes));
        }
    }
    said
}
