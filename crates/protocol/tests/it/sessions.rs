//! `initialize` and `initialized`.

use codex_exec_server_protocol::environment::EnvironmentInfo;
use codex_exec_server_protocol::session::*;

use crate::golden::{golden, reads_as, refuses};

fn hello() -> InitializeParams {
    InitializeParams {
        client_name: "me".into(),
        resume_session_id: None,
        detach_ttl_ms: None,
        attach: None,
        session_name: None,
    }
}

#[test]
fn initialize_params_match_golden_json() {
    golden(&hello(), r#"{"clientName":"me"}"#);
    reads_as(r#"{"clientName":"me","resumeSessionId":null}"#, &hello());
    reads_as(r#"{"clientName":"me","detachTtlMs":null,"capabilities":{"x":[1]}}"#, &hello());
    let resume = InitializeParams {
        resume_session_id: Some("s".into()),
        detach_ttl_ms: Some(5000),
        ..hello()
    };
    golden(&resume, r#"{"clientName":"me","resumeSessionId":"s","detachTtlMs":5000}"#);
    refuses::<InitializeParams>("{}");
    refuses::<InitializeParams>(r#"{"clientName":null}"#);
    refuses::<InitializeParams>(r#"{"client_name":"me"}"#);
    refuses::<InitializeParams>(r#"{"clientName":"me","resumeSessionId":5}"#);
    refuses::<InitializeParams>(r#"{"clientName":"me","detachTtlMs":-1}"#);
}

#[test]
fn initialize_responses_of_every_revision_parse() {
    golden(&InitializeResponse::default(), "{}");
    let session = InitializeResponse { session_id: Some("s".into()), ..Default::default() };
    golden(&session, r#"{"sessionId":"s"}"#);
    reads_as(r#"{"sessionId":"s","environmentInfo":null,"new":1}"#, &session);
    let info = EnvironmentInfo::default();
    let newest = InitializeResponse { environment_info: Some(info), ..session };
    let text = serde_json::to_string(&newest).unwrap();
    assert!(text.starts_with(r#"{"sessionId":"s","environmentInfo":{"shell":{"name":"#), "{text}");
    reads_as(&text, &newest);
}

#[test]
fn initialized_notification_has_no_members() {
    golden(&InitializedParams {}, "{}");
    reads_as(r#"{"anything":[1]}"#, &InitializedParams {});
}
