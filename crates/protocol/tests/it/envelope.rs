//! Whole messages, as they go over the wire.

use codex_exec_server_protocol::process::*;
use codex_exec_server_protocol::session::InitializedParams;
use codex_exec_server_protocol::{
    Call, DecodeLimits, ErrorKind, Incoming, Method, RequestId, RpcError, call, encode,
    notification, parse_params,
};

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap()
}

#[test]
fn outgoing_messages_match_golden_json() {
    let terminate = TerminateParams { process_id: "p".into() };
    assert_eq!(
        text(encode::request::<call::ProcessTerminate>(&7.into(), &terminate)),
        r#"{"id":7,"method":"process/terminate","params":{"processId":"p"}}"#
    );
    let id = RequestId::Text("a\"b".into());
    assert_eq!(
        text(encode::response(&id, &TerminateResponse { running: true })),
        r#"{"id":"a\"b","result":{"running":true}}"#
    );
    assert_eq!(
        text(encode::error(
            &RequestId::UNKNOWN,
            &RpcError::invalid_request(ErrorKind::MalformedMessage, "no")
        )),
        r#"{"error":{"code":-32600,"message":"no","data":{"kind":"malformedMessage"}},"id":-1}"#
    );
    assert_eq!(
        text(encode::notification::<notification::Initialized>(&InitializedParams {})),
        r#"{"method":"initialized","params":{}}"#
    );
    let output = ExecOutputDeltaNotification {
        process_id: "é\n".into(),
        seq: 1,
        stream: OutputStream::Stdout,
        chunk: b"hi".to_vec().into(),
    };
    assert_eq!(
        text(encode::notification::<notification::ProcessOutput>(&output)),
        "{\"method\":\"process/output\",\"params\":{\"processId\":\"é\\n\",\"seq\":1,\"stream\":\"stdout\",\"chunk\":\"aGk=\"}}"
    );
}

#[test]
fn error_codes_match_the_contract() {
    for (error, code) in [
        (RpcError::invalid_request(ErrorKind::Refused, "x"), -32600),
        (RpcError::method_not_found("x"), -32601),
        (RpcError::invalid_params(ErrorKind::InvalidParams, "x"), -32602),
        (RpcError::internal(ErrorKind::Internal, "x"), -32603),
        (RpcError::not_found(ErrorKind::PathNotFound, "x"), -32004),
        (RpcError::session_attached("x"), -32010),
    ] {
        assert_eq!(error.code, code);
    }
}

/// What one side sends, the other side reads: every method by its name, params as they were.
#[test]
fn requests_round_trip() {
    let write = WriteParams {
        process_id: "p".into(),
        chunk: (0..=255).collect::<Vec<u8>>().into(),
        write_id: Some("w".into()),
        close_stdin: true,
    };
    let message = encode::request::<call::ProcessWrite>(&RequestId::Integer(i64::MIN), &write);
    match Incoming::parse(&message, &DecodeLimits::default()).unwrap() {
        Incoming::Request { id, method, params, trace } => {
            assert_eq!(id, RequestId::Integer(i64::MIN));
            assert_eq!(Method::from_name(&method), Some(call::ProcessWrite::METHOD));
            assert_eq!(parse_params::<WriteParams>(params), Ok(write));
            assert_eq!(trace, None);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn absent_params_are_an_empty_object() {
    assert_eq!(parse_params::<ListParams>(None), Ok(ListParams {}));
    let error = parse_params::<TerminateParams>(None).unwrap_err();
    assert_eq!((error.code, error.message.as_str()), (-32602, "missing field `processId`"));
}
