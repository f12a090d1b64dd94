//! `http/request`.

use codex_exec_server_protocol::http::*;

use crate::golden::{golden, reads_as, refuses};

fn get() -> HttpRequestParams {
    HttpRequestParams {
        method: "GET".into(),
        url: "https://x/y".into(),
        headers: Vec::new(),
        body: None,
        timeout_ms: None,
        redirect_policy: HttpRedirectPolicy::Follow,
        request_id: "r".into(),
        stream_response: false,
    }
}

#[test]
fn requests() {
    golden(
        &get(),
        r#"{"method":"GET","url":"https://x/y","headers":[],"redirectPolicy":"follow","requestId":"r","streamResponse":false}"#,
    );
    reads_as(
        r#"{"method":"GET","url":"https://x/y","requestId":"r","bodyBase64":null,"timeoutMs":null}"#,
        &get(),
    );
    let post = HttpRequestParams {
        method: "POST".into(),
        headers: vec![
            HttpHeader { name: "A".into(), value: "b".into(), value_env_var: None },
            HttpHeader {
                name: "A".into(),
                value: "Bearer ".into(),
                value_env_var: Some("T".into()),
            },
        ],
        body: Some(b"hi".to_vec().into()),
        timeout_ms: Some(1000),
        redirect_policy: HttpRedirectPolicy::Stop,
        stream_response: true,
        ..get()
    };
    golden(
        &post,
        r#"{"method":"POST","url":"https://x/y","headers":[{"name":"A","value":"b"},{"name":"A","value":"Bearer ","valueEnvVar":"T"}],"bodyBase64":"aGk=","timeoutMs":1000,"redirectPolicy":"stop","requestId":"r","streamResponse":true}"#,
    );
    refuses::<HttpRequestParams>("{}");
    refuses::<HttpRequestParams>(r#"{"method":"GET"}"#);
    refuses::<HttpRequestParams>(r#"{"method":"GET","url":"x"}"#);
    refuses::<HttpRequestParams>(
        r#"{"method":"GET","url":"x","requestId":"r","redirectPolicy":"maybe"}"#,
    );
    refuses::<HttpRequestParams>(r#"{"method":"GET","url":"x","requestId":"r","bodyBase64":"?"}"#);
    refuses::<HttpRequestParams>(r#"{"method":"GET","url":"x","headers":{"a":"b"}}"#);
}

#[test]
fn http_responses_and_deltas_match_golden_json() {
    golden(
        &HttpRequestResponse {
            status: 404,
            headers: vec![HttpHeader { name: "a".into(), value: "b".into(), value_env_var: None }],
            body: b"no".to_vec().into(),
        },
        r#"{"status":404,"headers":[{"name":"a","value":"b"}],"bodyBase64":"bm8="}"#,
    );
    let mut piece = HttpRequestBodyDeltaNotification {
        request_id: "r".into(),
        seq: 1,
        delta: b"hi".to_vec().into(),
        done: false,
        error: None,
    };
    golden(&piece, r#"{"requestId":"r","seq":1,"deltaBase64":"aGk=","done":false,"error":null}"#);
    (piece.seq, piece.done, piece.error) = (2, true, Some("cut".into()));
    piece.delta = Vec::new().into();
    golden(&piece, r#"{"requestId":"r","seq":2,"deltaBase64":"","done":true,"error":"cut"}"#);
    reads_as(
        r#"{"requestId":"r","seq":2,"deltaBase64":"","done":true,"error":"cut","x":1}"#,
        &piece,
    );
}

#[test]
fn debug_shows_no_credentials() {
    let mut request = get();
    request.url = "https://user:password@x/?key=password".into();
    request.headers =
        vec![HttpHeader { name: "A".into(), value: "password".into(), value_env_var: None }];
    let shown = format!("{request:?} {:?}", request.headers);
    assert!(!shown.contains("password"), "{shown}");
}
