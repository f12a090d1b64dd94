//! One MCP client: what it may ask, and the commands that it started.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use tokio::sync::oneshot;

use crate::message::{
    self, INVALID_PARAMS, INVALID_REQUEST, Incoming, METHOD_NOT_FOUND, Malformed, Replies,
};
use crate::processes::Processes;
use crate::resources;
use crate::tools::{self, Context, Progress};
use crate::workspace::Workspace;

/// The revisions of MCP that this server speaks, newest first.
pub(crate) const REVISIONS: [&str; 4] = ["2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"];

/// What a model reads about the server as a whole.
const INSTRUCTIONS: &str = "Tools for a workspace on one machine: run commands, read, edit and search files. \
    Relative paths start at the workspace. A command that takes long keeps running under a handle: read its \
    output later with `output`. The sandbox policy is fixed; no argument changes it.";

/// A failed request.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: i64,
    pub(crate) message: String,
}

impl Failure {
    pub(crate) fn new(code: i64, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

/// The session of one MCP client. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Session {
    workspace: Arc<Workspace>,
    processes: Arc<Processes>,
    /// The requests under way, by id, each with what cancels it.
    pending: Arc<Mutex<HashMap<String, oneshot::Sender<()>>>>,
}

impl Session {
    /// A session without commands.
    pub fn new(workspace: Arc<Workspace>) -> Self {
        Self { workspace, processes: Arc::default(), pending: Arc::default() }
    }

    /// Kills the commands that still run.
    pub async fn end(&self) {
        self.processes.kill_all().await;
    }

    pub(crate) fn has_running(&self) -> bool {
        self.processes.has_running()
    }

    pub(crate) fn workspace(&self) -> &Workspace {
        &self.workspace
    }

    /// Handles a message; what belongs to it goes into `replies`, the response last.
    pub(crate) async fn handle(&self, message: Result<Incoming, Malformed>, replies: &Replies) {
        match message {
            Ok(Incoming::Request { id, method, params }) => {
                let (cancel, cancelled) = oneshot::channel();
                let key = id.to_string();
                if self.pending.lock().contains_key(&key) {
                    let error =
                        message::error(&id, INVALID_REQUEST, "a request with this id is under way");
                    return replies.send(error).await;
                }
                self.pending.lock().insert(key.clone(), cancel);
                let _pending = Pending { session: self, key };
                let response = tokio::select! {
                    response = self.request(&method, params, replies) => response,
                    // A cancelled request gets no response. A command that it started stays under its handle.
                    Ok(()) = cancelled => return,
                };
                replies
                    .send(match response {
                        Ok(result) => message::response(&id, &result),
                        Err(failure) => message::error(&id, failure.code, &failure.message),
                    })
                    .await;
            }
            Ok(Incoming::Notification { method, params }) => {
                if method == "notifications/cancelled"
                    && let Some(id) = params.get("requestId")
                    && let Some(cancel) = self.pending.lock().remove(&id.to_string())
                {
                    let _ = cancel.send(());
                }
            }
            Ok(Incoming::Response) => {}
            Err(malformed) => replies.send(malformed.response()).await,
        }
    }

    async fn request(
        &self,
        method: &str,
        mut params: Map<String, Value>,
        replies: &Replies,
    ) -> Result<Value, Failure> {
        match method {
            "initialize" => Ok(initialize(&params)),
            "ping" => Ok(json!({})),
            "tools/list" => Ok(tools::list(&self.workspace)),
            "tools/call" => {
                let Some(name) = params.get("name").and_then(Value::as_str).map(str::to_owned)
                else {
                    return Err(Failure::new(INVALID_PARAMS, "`name` has to be a string"));
                };
                let arguments = match params.remove("arguments") {
                    None | Some(Value::Null) => Map::new(),
                    Some(Value::Object(arguments)) => arguments,
                    Some(_) => {
                        return Err(Failure::new(
                            INVALID_PARAMS,
                            "`arguments` has to be an object",
                        ));
                    }
                };
                let token = params.get("_meta").and_then(|meta| meta.get("progressToken"));
                let token = token.filter(|token| token.is_string() || token.is_number());
                let context = Context {
                    workspace: self.workspace.clone(),
                    processes: self.processes.clone(),
                    progress: token
                        .map(|token| Progress { token: token.clone(), replies: replies.clone() }),
                };
                let result = tools::call(context, &name, arguments).await;
                result.map(crate::content::ToolResult::into_json).ok_or_else(|| {
                    let shown = crate::workspace::shown(&name);
                    Failure::new(INVALID_PARAMS, format!("unknown tool `{shown}`"))
                })
            }
            "resources/list" => resources::list(&self.workspace, &params).await,
            "resources/templates/list" => Ok(resources::templates(&self.workspace)),
            "resources/read" => resources::read(&self.workspace, &params).await,
            _ => {
                let shown = crate::workspace::shown(method);
                Err(Failure::new(METHOD_NOT_FOUND, format!("unknown method `{shown}`")))
            }
        }
    }
}

/// A request under way.
struct Pending<'a> {
    session: &'a Session,
    key: String,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        self.session.pending.lock().remove(&self.key);
    }
}

fn initialize(params: &Map<String, Value>) -> Value {
    let asked = params.get("protocolVersion").and_then(Value::as_str).unwrap_or_default();
    let revision = REVISIONS.into_iter().find(|known| *known == asked).unwrap_or(REVISIONS[0]);
    json!({
        "protocolVersion": revision,
        "capabilities": {"tools": {"listChanged": false}, "resources": {}},
        "serverInfo": {
            "name": "codex-exec-server",
            "title": "codex exec-server",
            "version": env!("CARGO_PKG_VERSION"),
        },
        "instructions": INSTRUCTIONS,
    })
}
