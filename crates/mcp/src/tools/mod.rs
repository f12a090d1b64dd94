//! The tools: what a model sees of each, and what runs it.

mod commands;
mod fetch;
mod files;
mod listing;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use crate::content::ToolResult;
use crate::message::Replies;
use crate::processes::Processes;
use crate::workspace::Workspace;

/// What a call has at hand.
#[derive(Debug, Clone)]
pub(crate) struct Context {
    pub(crate) workspace: Arc<Workspace>,
    pub(crate) processes: Arc<Processes>,
    pub(crate) progress: Option<Progress>,
}

/// Where the progress of a call is reported.
#[derive(Debug, Clone)]
pub(crate) struct Progress {
    pub(crate) token: Value,
    pub(crate) replies: Replies,
}

impl Progress {
    fn report(&self, progress: f64, message: &str) {
        self.replies.offer(json!({
            "jsonrpc": "2.0",
            "method": "notifications/progress",
            "params": {"progressToken": self.token, "progress": progress, "message": message},
        }));
    }
}

type Outcome = Result<ToolResult, String>;
type Call = Pin<Box<dyn Future<Output = Outcome> + Send>>;

/// A tool.
struct Tool {
    name: &'static str,
    title: &'static str,
    description: &'static str,
    /// The JSON Schema of its arguments.
    input: fn() -> Value,
    effect: ToolEffect,
    call: fn(Context, Map<String, Value>) -> Call,
}

/// What a tool does to the world, for clients that ask people before some calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ToolEffect {
    Reads,
    Changes,
    /// It reaches other machines.
    ReadsNetwork,
}

macro_rules! tools {
    ($($name:literal $title:literal $effect:ident $module:ident::$function:ident $schema:ident
        $description:literal;)*) => {
        const TOOLS: &[Tool] = &[$(Tool {
            name: $name,
            title: $title,
            description: $description,
            input: $module::$schema,
            effect: ToolEffect::$effect,
            call: |context, arguments| Box::pin(async move {
                $module::$function(&context, parse(arguments)?).await
            }),
        },)*];
    };
}

tools! {
    "run" "Run a command" Changes commands::run run_schema
        "Run a command and return its output. A command that takes longer than wait_seconds keeps running: the \
         result then has a handle for the tools output, write and kill. Give either command (for /bin/sh) or \
         argv.";
    "output" "Read the output of a command" Reads commands::output output_schema
        "Read more output of a command started with run, from where the last result ended or from an offset. \
         Waits up to wait_seconds for new output.";
    "write" "Write to a command" Changes commands::write write_schema
        "Write text to the standard input of a running command, then return what it prints. The command has to \
         be started with keep_stdin or tty.";
    "kill" "End a command" Changes commands::kill kill_schema
        "Kill a command and everything it started, or send it a signal.";
    "list" "List commands" Reads commands::list list_schema
        "List the commands of this session: handle, state, command line.";
    "read_file" "Read a file" Reads files::read_file read_file_schema
        "Read a file: text by lines (start_line, lines) or bytes (offset, length); an image is returned as an \
         image.";
    "write_file" "Write a file" Changes files::write_file write_file_schema
        "Write a whole file; replaces what is there and creates missing directories. To change a part of a \
         file, use edit.";
    "edit" "Edit files" Changes files::edit edit_schema
        "Change files by a patch, which is applied as a whole or not at all. Format: a line `*** Begin Patch`, \
         then for each file `*** Add File: PATH` (lines with +), `*** Delete File: PATH` or `*** Update File: \
         PATH` (optionally `*** Move to: PATH`; hunks that begin with a line `@@`, lines with a space for \
         context, - to remove, + to add), then `*** End Patch`.";
    "search" "Search files" Reads listing::search search_schema
        "Search file contents by a regular expression (Rust syntax), below a directory. Skips hidden and binary \
         files and what .gitignore excludes.";
    "glob" "Find files" Reads listing::glob glob_schema
        "Find files by name patterns such as `**/*.rs`, below a directory. Skips hidden files and what \
         .gitignore excludes.";
    "ls" "List a directory" Reads listing::ls ls_schema
        "List the entries of a directory; directories end in a slash.";
    "fetch" "Fetch a URL" ReadsNetwork fetch::fetch fetch_schema
        "Make an HTTP request from the machine that the commands run on, and return status and body.";
}

/// The tools as `tools/list` shows them.
pub(crate) fn list(workspace: &Workspace) -> Value {
    let shown = TOOLS.iter().filter(|tool| is_offered(tool, workspace)).map(|tool| {
        json!({
            "name": tool.name,
            "title": tool.title,
            "description": tool.description,
            "inputSchema": (tool.input)(),
            "annotations": {
                "title": tool.title,
                "readOnlyHint": tool.effect != ToolEffect::Changes,
                "destructiveHint": tool.effect == ToolEffect::Changes,
                "openWorldHint": tool.effect == ToolEffect::ReadsNetwork,
            },
        })
    });
    json!({"tools": shown.collect::<Vec<_>>()})
}

fn is_offered(tool: &Tool, workspace: &Workspace) -> bool {
    tool.effect != ToolEffect::ReadsNetwork || workspace.policy.may_fetch()
}

/// Calls a tool; `None` if there is no such tool.
pub(crate) async fn call(
    context: Context,
    name: &str,
    arguments: Map<String, Value>,
) -> Option<ToolResult> {
    let tool = TOOLS.iter().find(|tool| tool.name == name)?;
    let outcome = match is_offered(tool, &context.workspace) {
        true => (tool.call)(context, arguments).await,
        false => {
            Err("the policy of this server does not permit requests to the network".to_owned())
        }
    };
    Some(outcome.unwrap_or_else(ToolResult::failure))
}

fn parse<T: DeserializeOwned>(arguments: Map<String, Value>) -> Result<T, String> {
    serde_json::from_value(Value::Object(arguments))
        .map_err(|error| format!("invalid arguments: {error}"))
}

/// The schema of an object without other members than these.
fn object(properties: &Value, required: &[&str]) -> Value {
    json!({
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": false,
    })
}

/// A number of seconds that a model gave, within the limit.
fn seconds(given: Option<f64>, default: Duration, max: Duration) -> Duration {
    match given {
        Some(seconds) => Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(max).min(max),
        None => default.min(max),
    }
}

/// How many bytes a result may have.
fn result_bytes(workspace: &Workspace, given: Option<u64>) -> usize {
    let config = &workspace.config;
    let given = given.map(|given| usize::try_from(given).unwrap_or(usize::MAX));
    given.unwrap_or(config.default_result_bytes).clamp(256, config.max_result_bytes)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use schemars::JsonSchema;

    use super::*;

    fn agrees<T: JsonSchema>(name: &str, given: &Value) {
        let derived = schemars::schema_for!(T).to_value();
        let members = |schema: &Value| -> BTreeSet<String> {
            schema["properties"]
                .as_object()
                .into_iter()
                .flatten()
                .map(|(name, _)| name.clone())
                .collect()
        };
        let required = |schema: &Value| -> BTreeSet<String> {
            let list = schema["required"].as_array().cloned().unwrap_or_default();
            list.iter().filter_map(|name| name.as_str().map(str::to_owned)).collect()
        };
        assert_eq!(members(&derived), members(given), "{name}");
        assert_eq!(required(&derived), required(given), "{name}");
        assert_eq!(derived["additionalProperties"], false, "{name} ignores unknown arguments");
        for (member, schema) in given["properties"].as_object().into_iter().flatten() {
            assert!(schema["description"].is_string(), "{name}.{member} has no description");
            let types = |schema: &Value| match &schema["type"] {
                Value::Array(types) => types.iter().filter(|t| *t != "null").cloned().collect(),
                one => vec![one.clone()],
            };
            let derived = &derived["properties"][member];
            if derived.get("type").is_some() {
                assert_eq!(types(derived), types(schema), "{name}.{member}");
            }
        }
    }

    /// A model is shown exactly the arguments that are read.
    #[test]
    fn shown_schemas_agree_with_the_arguments_that_are_read() {
        let schema = |name: &str| {
            let tool = TOOLS.iter().find(|tool| tool.name == name).expect("a tool");
            (tool.input)()
        };
        agrees::<commands::RunArgs>("run", &schema("run"));
        agrees::<commands::OutputArgs>("output", &schema("output"));
        agrees::<commands::WriteArgs>("write", &schema("write"));
        agrees::<commands::KillArgs>("kill", &schema("kill"));
        agrees::<commands::ListArgs>("list", &schema("list"));
        agrees::<files::ReadFileArgs>("read_file", &schema("read_file"));
        agrees::<files::WriteFileArgs>("write_file", &schema("write_file"));
        agrees::<files::EditArgs>("edit", &schema("edit"));
        agrees::<listing::SearchArgs>("search", &schema("search"));
        agrees::<listing::GlobArgs>("glob", &schema("glob"));
        agrees::<listing::LsArgs>("ls", &schema("ls"));
        agrees::<fetch::FetchArgs>("fetch", &schema("fetch"));
        assert_eq!(TOOLS.len(), 12, "a new tool needs a line above");
    }

    #[test]
    fn seconds_of_a_model_stay_within_the_limit() {
        let (default, max) = (Duration::from_secs(5), Duration::from_secs(50));
        for (given, expected) in [
            (None, 5.0),
            (Some(-1.0), 0.0),
            (Some(0.5), 0.5),
            (Some(1e300), 50.0),
            (Some(f64::NAN), 0.0),
            (Some(f64::INFINITY), 50.0),
        ] {
            assert_eq!(seconds(given, default, max).as_secs_f64(), expected, "{given:?}");
        }
    }
}
