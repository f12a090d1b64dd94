//! What `codex run --json` prints: one event per line.

use serde::{Deserialize, Serialize};

use crate::error::ErrorKind;
use crate::permissions::Assurance;
use crate::process::{OutputStream, SandboxType};
use crate::resources::{AppliedLimits, EndedBy, Usage};

/// An event in the output of `codex run --json`. `started` is the first one and, if the command could be
/// run to its end, `closed` the last one, otherwise `failed`; after an approved `asked` a second run begins with `started`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "type", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum RunEvent {
    /// The process has started.
    Started {
        /// The process's id in its session.
        process_id: String,
        /// The session, on servers that have them.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        session_id: Option<String>,
        /// The kind of sandbox around the process; absent if the server does not say.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        sandbox_type: Option<SandboxType>,
        /// The assurance of its sandbox, if it has one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        sandbox_assurance: Option<Assurance>,
        /// The limits in force; absent if there are none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        limits: Option<Box<AppliedLimits>>,
    },
    /// Output: `text`, or `base64` if it is not UTF-8. A character may be split between two events, which
    /// are then both in base64.
    Output {
        /// The stream that it came from.
        stream: OutputStream,
        /// The output, if it is UTF-8.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        text: Option<String>,
        /// The output as base64, if it is not UTF-8.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        base64: Option<crate::Base64Bytes>,
    },
    /// Output is lost here.
    Lost {
        /// How much, and why, for people.
        message: String,
    },
    /// The process has exited.
    Exited {
        /// The exit code; 128 + N if signal N killed the process.
        exit_code: i32,
        /// Whether the sandbox probably caused the failure.
        sandbox_denied: bool,
        /// Why it ended, if it did not exit by itself.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        ended_by: Option<EndedBy>,
        /// What it used.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        usage: Option<Usage>,
    },
    /// There are no more events of this run.
    Closed,
    /// The sandbox denied the command something, and the user was asked whether to run it without.
    Asked {
        /// Whether the user approved.
        approved: bool,
    },
    /// `codex` failed; if the command has started, its outcome is unknown.
    Failed {
        /// Why.
        kind: ErrorKind,
        /// The same, for people.
        message: String,
        /// The exit code of `codex`.
        exit_code: u8,
    },
}
