//! Dialers: each can produce a fresh connection to the same server.
//!
//! A client keeps its dialer and asks it again when a connection drops. Whoever adds a transport (a
//! relay, a tunnel) writes a [`Dialer`] and gets reconnect and resume with it.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use codex_exec_rpc::{Connection, ConnectionConfig, WebsocketDial};
use parking_lot::Mutex;
use tokio::io::AsyncReadExt;
use tokio::process::{Child, Command};

use crate::error::DialFailure;

/// The future of [`Dialer::dial`].
pub type Dialling<'a> = Pin<Box<dyn Future<Output = Result<Connection, DialFailure>> + Send + 'a>>;

/// Produces connections to one server.
///
/// ```
/// use codex_exec_client::{Dialer, Dialling, DialFailure};
///
/// struct Nowhere;
///
/// impl Dialer for Nowhere {
///     fn dial(&self) -> Dialling<'_> {
///         Box::pin(async { Err(DialFailure::permanent("there is nothing here")) })
///     }
///     fn endpoint(&self) -> String {
///         "nowhere".into()
///     }
/// }
/// ```
pub trait Dialer: Send + Sync + 'static {
    /// A fresh connection, not yet initialized.
    fn dial(&self) -> Dialling<'_>;

    /// What is dialled, for errors and logs; never a secret.
    fn endpoint(&self) -> String;

    /// Whether a session can outlive a connection of this dialer. Default true.
    fn can_resume(&self) -> bool {
        true
    }

    /// Resolves when every connection of this dialer that was dropped has told the other side so,
    /// or cannot any more; bounded in time. Default at once: what ends with its socket needs no words.
    fn farewell(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(std::future::ready(()))
    }

    /// More about why the last connection ended, if the dialer knows. Default nothing.
    fn obituary(&self) -> Pin<Box<dyn Future<Output = Option<String>> + Send + '_>> {
        Box::pin(std::future::ready(None))
    }
}

/// Dials `ws://` and `wss://`.
#[derive(Debug, Clone)]
pub struct WebsocketDialer {
    /// Where and how.
    pub dial: WebsocketDial,
    /// The connection's limits.
    pub config: ConnectionConfig,
}

impl Dialer for WebsocketDialer {
    fn dial(&self) -> Dialling<'_> {
        Box::pin(async { Ok(Connection::dial(&self.dial, &self.config).await?) })
    }

    fn endpoint(&self) -> String {
        self.dial.redacted_url()
    }
}

/// Starts a command and speaks lines with it, for example
/// `ssh host codex exec-server --listen stdio`.
///
/// Such a server ends with its stdin, so its session cannot be resumed. When it has ended, the last
/// of what it wrote to stderr is part of the error.
pub struct StdioDialer {
    argv: Vec<String>,
    config: ConnectionConfig,
    patience: Duration,
    last: Arc<Mutex<Option<Spawned>>>,
}

struct Spawned {
    child: Child,
    stderr: tokio::task::JoinHandle<Vec<u8>>,
}

/// How much of a command's stderr is kept for the error.
const STDERR_TAIL: usize = 4 << 10;

impl StdioDialer {
    /// This program with these arguments; no shell is involved.
    pub fn new(
        argv: impl IntoIterator<Item = impl Into<String>>,
        config: ConnectionConfig,
    ) -> Self {
        Self {
            argv: argv.into_iter().map(Into::into).collect(),
            config,
            patience: Duration::from_secs(1),
            last: Arc::default(),
        }
    }
}

impl fmt::Debug for StdioDialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StdioDialer").field("program", &self.argv.first()).finish_non_exhaustive()
    }
}

impl Dialer for StdioDialer {
    fn dial(&self) -> Dialling<'_> {
        Box::pin(async {
            let Some((program, arguments)) = self.argv.split_first() else {
                return Err(DialFailure::permanent("the command is empty; pass a program to run"));
            };
            let mut child = Command::new(program)
                .args(arguments)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .kill_on_drop(true)
                .spawn()
                .map_err(|error| {
                    DialFailure::permanent(format!(
                        "cannot start `{program}`: {error}; check that it is installed and in PATH"
                    ))
                })?;
            let (Some(stdin), Some(stdout), Some(stderr)) =
                (child.stdin.take(), child.stdout.take(), child.stderr.take())
            else {
                return Err(DialFailure::permanent(
                    "cannot open the command's stdin, stdout and stderr",
                ));
            };
            let stderr = tokio::spawn(tail(stderr));
            *self.last.lock() = Some(Spawned { child, stderr });
            Ok(Connection::lines(stdout, stdin, &self.config))
        })
    }

    fn endpoint(&self) -> String {
        // Arguments can carry secrets.
        match self.argv.as_slice() {
            [] => "no command".to_owned(),
            [program] => format!("`{program}`"),
            [program, ..] => format!("`{program} …`"),
        }
    }

    fn can_resume(&self) -> bool {
        false
    }

    fn obituary(&self) -> Pin<Box<dyn Future<Output = Option<String>> + Send + '_>> {
        Box::pin(async {
            let mut spawned = self.last.lock().take()?;
            let end = async {
                let status = spawned.child.wait().await.ok()?;
                let stderr = spawned.stderr.await.unwrap_or_default();
                Some((status, stderr))
            };
            let (status, stderr) = tokio::time::timeout(self.patience, end).await.ok()??;
            let stderr = String::from_utf8_lossy(&stderr);
            let stderr = stderr.trim();
            Some(match stderr {
                "" => format!("the command exited ({status})"),
                words => format!("the command exited ({status}): {words}"),
            })
        })
    }
}

/// Reads to the end and keeps the last part.
async fn tail(mut from: impl tokio::io::AsyncRead + Unpin) -> Vec<u8> {
    let mut kept = Vec::new();
    let mut buffer = [0; 1024];
    while let Ok(n @ 1..) = from.read(&mut buffer).await {
        kept.extend_from_slice(&buffer[..n]);
        if kept.len() > 2 * STDERR_TAIL {
            kept.drain(..kept.len() - STDERR_TAIL);
        }
    }
    kept
}

/// One connection that was there already; it cannot be made again.
pub(crate) struct OneConnection(pub(crate) Mutex<Option<Connection>>);

impl Dialer for OneConnection {
    fn dial(&self) -> Dialling<'_> {
        let connection = self.0.lock().take();
        Box::pin(async move {
            connection
                .ok_or_else(|| DialFailure::permanent("the given connection is already used up"))
        })
    }

    fn endpoint(&self) -> String {
        "the given connection".to_owned()
    }

    fn can_resume(&self) -> bool {
        false
    }
}
