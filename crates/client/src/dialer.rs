//! Dialers: each opens connections to one server.
//!
//! A client calls its dialer again when a connection drops. A new transport (a relay, a tunnel)
//! implements [`Dialer`] and gets reconnect and resume.

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
pub type DialFuture<'a> =
    Pin<Box<dyn Future<Output = Result<Connection, DialFailure>> + Send + 'a>>;

/// Opens connections to one server.
///
/// ```
/// use codex_exec_client::{Dialer, DialFuture, DialFailure};
///
/// struct Nowhere;
///
/// impl Dialer for Nowhere {
///     fn dial(&self) -> DialFuture<'_> {
///         Box::pin(async { Err(DialFailure::permanent("this dialer reaches no server")) })
///     }
///     fn endpoint(&self) -> String {
///         "nowhere".into()
///     }
/// }
/// ```
pub trait Dialer: Send + Sync + 'static {
    /// Opens a new connection, not yet initialized.
    fn dial(&self) -> DialFuture<'_>;

    /// The server's address for errors and logs; never contains a secret.
    fn endpoint(&self) -> String;

    /// Whether the server keeps a session without a connection, so that the client can resume it. Default
    /// true.
    fn can_resume(&self) -> bool {
        true
    }

    /// Resolves once the peer can see that the dropped connections of this dialer are closed, or after a
    /// bounded time. Default: at once, which is right if closing the socket closes the connection.
    fn closed(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(std::future::ready(()))
    }

    /// More about why the last connection ended, if the dialer knows. Default none.
    fn failure_detail(&self) -> Pin<Box<dyn Future<Output = Option<String>> + Send + '_>> {
        Box::pin(std::future::ready(None))
    }
}

/// Dials `ws://` and `wss://` URLs.
#[derive(Debug, Clone)]
pub struct WebsocketDialer {
    /// The URL, the token and the socket's options.
    pub dial: WebsocketDial,
    /// The connection's limits.
    pub config: ConnectionConfig,
}

impl Dialer for WebsocketDialer {
    fn dial(&self) -> DialFuture<'_> {
        Box::pin(async { Ok(Connection::dial(&self.dial, &self.config).await?) })
    }

    fn endpoint(&self) -> String {
        self.dial.redacted_url()
    }
}

/// Starts a command and exchanges lines with it, for example
/// `ssh host codex exec-server --listen stdio`.
///
/// Such a server ends with its stdin, so the client cannot resume its session. After it has exited, errors
/// contain the end of its stderr.
pub struct StdioDialer {
    argv: Vec<String>,
    config: ConnectionConfig,
    patience: Duration,
    last: Arc<Mutex<Option<RunningCommand>>>,
}

struct RunningCommand {
    child: Child,
    stderr: tokio::task::JoinHandle<Vec<u8>>,
}

/// How much of a command's stderr errors contain, in bytes.
const STDERR_TAIL: usize = 4 << 10;

impl StdioDialer {
    /// Runs this program with these arguments, without a shell.
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
    fn dial(&self) -> DialFuture<'_> {
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
            let stderr = tokio::spawn(read_tail(stderr));
            *self.last.lock() = Some(RunningCommand { child, stderr });
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

    fn failure_detail(&self) -> Pin<Box<dyn Future<Output = Option<String>> + Send + '_>> {
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

/// Reads to the end and returns the last [`STDERR_TAIL`] bytes, or up to twice that.
async fn read_tail(mut from: impl tokio::io::AsyncRead + Unpin) -> Vec<u8> {
    let mut last = Vec::new();
    let mut buffer = [0; 1024];
    while let Ok(n @ 1..) = from.read(&mut buffer).await {
        last.extend_from_slice(&buffer[..n]);
        if last.len() > 2 * STDERR_TAIL {
            last.drain(..last.len() - STDERR_TAIL);
        }
    }
    last
}

/// An existing connection, which cannot be dialled again.
pub(crate) struct SingleConnection(pub(crate) Mutex<Option<Connection>>);

impl Dialer for SingleConnection {
    fn dial(&self) -> DialFuture<'_> {
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
