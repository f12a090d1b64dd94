//! Requests that panic, at every stage: each gets a response, and the next one is served.

use codex_exec_host::files::{FileError, FileRequest, Operation, Outcome};
use codex_exec_server_protocol::files::FsGetMetadataParams;
use codex_exec_server_protocol::{FileMethod, SandboxContext};
use serde_json::{Value, json};

use super::*;
use crate::config::ServerConfig;

const NONE: usize = 0;
const TAKE_SANDBOX: usize = 1;
const OPERATION: usize = 2;
const RESPONSE: usize = 3;
const SIZE_HINT: usize = 4;
const ENCODE: usize = 5;
const ENCODE_LARGE: usize = 6;
const ENCODE_HUGE: usize = 7;

fn panic_at<const STAGE: usize>(stage: usize) {
    assert!(STAGE != stage, "on purpose");
}

/// A file request that panics at one stage.
#[derive(Clone)]
struct Panics<const STAGE: usize>(FsGetMetadataParams);

#[derive(serde::Serialize)]
struct TestResponse<const STAGE: usize> {}

impl<const STAGE: usize> From<Panics<STAGE>> for Operation {
    fn from(request: Panics<STAGE>) -> Self {
        panic_at::<STAGE>(OPERATION);
        request.0.into()
    }
}

impl<const STAGE: usize> FileRequest for Panics<STAGE> {
    type Response = TestResponse<STAGE>;
    const METHOD: FileMethod = FileMethod::GetMetadata;

    fn take_sandbox(&mut self) -> Option<SandboxContext> {
        panic_at::<STAGE>(TAKE_SANDBOX);
        self.0.take_sandbox()
    }

    fn only_reads(&self) -> bool {
        self.0.only_reads()
    }

    fn response(_: Outcome) -> Result<TestResponse<STAGE>, FileError> {
        panic_at::<STAGE>(RESPONSE);
        Ok(TestResponse {})
    }
}

impl<const STAGE: usize> Encode for TestResponse<STAGE> {
    fn encode_into(&self, out: &mut Vec<u8>) {
        panic_at::<STAGE>(ENCODE);
        panic_at::<STAGE>(ENCODE_LARGE);
        panic_at::<STAGE>(ENCODE_HUGE);
        out.extend_from_slice(b"{}");
    }

    fn size_hint(&self) -> usize {
        panic_at::<STAGE>(SIZE_HINT);
        match STAGE {
            ENCODE_LARGE => 2 * LARGE_RESPONSE,
            ENCODE_HUGE => 2 * HUGE_RESPONSE,
            _ => 8,
        }
    }
}

/// A connection whose requests this test creates.
struct Fixture {
    client: Connection,
    state: ConnectionState,
    last_id: i64,
}

impl Fixture {
    fn new() -> Self {
        let server = Server::new(ServerConfig::default()).unwrap();
        let (ours, client) = Connection::pair(&server.config().connection);
        let (outbound, transfer) = (ours.outbound().clone(), ours.transfer());
        let state = ConnectionState::new(server, Principal::Embedder, outbound, &transfer);
        Self { client, state, last_id: 0 }
    }

    async fn request(&mut self) -> Request {
        self.last_id += 1;
        self.state.admit_request(RequestId::Integer(self.last_id), "", 100, None).await
    }

    /// Handles one more request as the dispatcher would, and returns the response.
    async fn response<F: Future<Output = ()>>(
        &mut self,
        handle: impl FnOnce(&Files, Request) -> F,
    ) -> Value {
        let request = self.request().await;
        let handled = async { handle(&self.state.files, request).await };
        let _ = AssertUnwindSafe(handled).catch_unwind().await;
        let message = tokio::time::timeout(Duration::from_secs(20), self.client.next()).await;
        let message = message.expect("a response").unwrap().unwrap();
        let response: Value = serde_json::from_slice(&message).unwrap();
        assert_eq!(response["id"], self.last_id, "{response}");
        response
    }

    async fn file<const STAGE: usize>(&mut self, path: &str) {
        let params = FsGetMetadataParams::new(path.parse().unwrap());
        let response = self
            .response(|files, request| {
                files.call(request, Panics::<STAGE>(params));
                std::future::ready(())
            })
            .await;
        match STAGE {
            NONE => assert_eq!(response["result"], json!({})),
            _ => assert_eq!(response["error"]["code"], -32603, "stage {STAGE}: {response}"),
        }
    }
}

#[tokio::test]
async fn a_file_request_that_panics_gets_a_response_at_every_stage() {
    let mut f = Fixture::new();
    // The first round leaves the lane; the second is answered on it.
    for path in ["/", "/", "/proc", "/proc"] {
        f.file::<TAKE_SANDBOX>(path).await;
        f.file::<OPERATION>(path).await;
        f.file::<RESPONSE>(path).await;
        f.file::<SIZE_HINT>(path).await;
        f.file::<ENCODE>(path).await;
        f.file::<ENCODE_LARGE>(path).await;
        f.file::<ENCODE_HUGE>(path).await;
        f.file::<NONE>(path).await;
    }
}

#[tokio::test]
async fn a_request_that_panics_or_is_dropped_gets_an_error() {
    let mut f = Fixture::new();
    let failed = json!({
        "code": -32603,
        "message": "the server failed to handle this request",
        "data": {"kind": "internal"},
    });
    for way in 0..5 {
        let response = f
            .response(|_, request| async move {
                let panics = async { panic!("on purpose") };
                match way {
                    0 => drop(request),
                    1 => request.respond_later::<TestResponse<NONE>>(panics),
                    2 => request.respond_without_waiting(Ok(TestResponse::<ENCODE> {})),
                    3 => drop(request.respond(Ok(TestResponse::<ENCODE_HUGE> {})).await),
                    _ => drop(request.respond(Ok(TestResponse::<NONE> {}))),
                }
            })
            .await;
        assert_eq!(response["error"], failed, "way {way}");
    }
    f.file::<NONE>("/").await;
}

#[tokio::test]
async fn requests_that_panic_return_their_permits() {
    let mut f = Fixture::new();
    let (count, bytes) = (f.state.count.available_permits(), f.state.bytes.available_permits());
    for _ in 0..100 {
        f.file::<ENCODE>("/").await;
    }
    assert_eq!(f.state.count.available_permits(), count);
    assert_eq!(f.state.bytes.available_permits(), bytes);
}
