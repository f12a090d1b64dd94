//! Requests that panic on their way, at every stage: each is answered, and the next one is served.

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
const ENCODE_VAST: usize = 7;

fn panic_at<const STAGE: usize>(stage: usize) {
    assert!(STAGE != stage, "on purpose");
}

/// A request for a file that panics at one stage.
#[derive(Clone)]
struct Panics<const STAGE: usize>(FsGetMetadataParams);

#[derive(serde::Serialize)]
struct Answer<const STAGE: usize> {}

impl<const STAGE: usize> From<Panics<STAGE>> for Operation {
    fn from(request: Panics<STAGE>) -> Self {
        panic_at::<STAGE>(OPERATION);
        request.0.into()
    }
}

impl<const STAGE: usize> FileRequest for Panics<STAGE> {
    type Response = Answer<STAGE>;
    const METHOD: FileMethod = FileMethod::GetMetadata;

    fn take_sandbox(&mut self) -> Option<SandboxContext> {
        panic_at::<STAGE>(TAKE_SANDBOX);
        self.0.take_sandbox()
    }

    fn response(_: Outcome) -> Result<Answer<STAGE>, FileError> {
        panic_at::<STAGE>(RESPONSE);
        Ok(Answer {})
    }
}

impl<const STAGE: usize> Encode for Answer<STAGE> {
    fn encode_into(&self, out: &mut Vec<u8>) {
        panic_at::<STAGE>(ENCODE);
        panic_at::<STAGE>(ENCODE_LARGE);
        panic_at::<STAGE>(ENCODE_VAST);
        out.extend_from_slice(b"{}");
    }

    fn size_hint(&self) -> usize {
        panic_at::<STAGE>(SIZE_HINT);
        match STAGE {
            ENCODE_LARGE => 2 * LARGE,
            ENCODE_VAST => 2 * VAST,
            _ => 8,
        }
    }
}

/// A connection whose requests are made here.
struct Fixture {
    client: Connection,
    serving: Serving,
    last_id: i64,
}

impl Fixture {
    fn new() -> Self {
        let server = Server::new(ServerConfig::default()).unwrap();
        let (ours, client) = Connection::pair(&server.config().connection);
        let (outbound, transfer) = (ours.outbound().clone(), ours.transfer());
        let serving = Serving::new(server, Principal::Embedder, outbound, &transfer);
        Self { client, serving, last_id: 0 }
    }

    async fn request(&mut self) -> Request {
        self.last_id += 1;
        self.serving.request(RequestId::Integer(self.last_id), "", 100, None).await
    }

    /// Handles one more request as the dispatcher would, and tells what is answered.
    async fn answer<F: Future<Output = ()>>(
        &mut self,
        handle: impl FnOnce(&Files, Request) -> F,
    ) -> Value {
        let request = self.request().await;
        let handled = async { handle(&self.serving.files, request).await };
        let _ = AssertUnwindSafe(handled).catch_unwind().await;
        let message = tokio::time::timeout(Duration::from_secs(20), self.client.next()).await;
        let message = message.expect("an answer").unwrap().unwrap();
        let answer: Value = serde_json::from_slice(&message).unwrap();
        assert_eq!(answer["id"], self.last_id, "{answer}");
        answer
    }

    async fn file<const STAGE: usize>(&mut self, path: &str) {
        let params = FsGetMetadataParams::new(path.parse().unwrap());
        let answer = self
            .answer(|files, request| {
                files.call(request, Panics::<STAGE>(params));
                std::future::ready(())
            })
            .await;
        match STAGE {
            NONE => assert_eq!(answer["result"], json!({})),
            _ => assert_eq!(answer["error"]["code"], -32603, "stage {STAGE}: {answer}"),
        }
    }
}

#[tokio::test]
async fn a_file_request_that_panics_is_answered_at_every_stage() {
    let mut f = Fixture::new();
    // The second round is answered on the spot where the first left the lane.
    for path in ["/", "/", "/proc", "/proc"] {
        f.file::<TAKE_SANDBOX>(path).await;
        f.file::<OPERATION>(path).await;
        f.file::<RESPONSE>(path).await;
        f.file::<SIZE_HINT>(path).await;
        f.file::<ENCODE>(path).await;
        f.file::<ENCODE_LARGE>(path).await;
        f.file::<ENCODE_VAST>(path).await;
        f.file::<NONE>(path).await;
    }
}

#[tokio::test]
async fn an_answer_that_panics_or_is_dropped_is_an_error() {
    let mut f = Fixture::new();
    let failed = json!({
        "code": -32603,
        "message": "the server failed to handle this request",
        "data": {"kind": "internal"},
    });
    for way in 0..5 {
        let answer = f
            .answer(|_, request| async move {
                let panics = async { panic!("on purpose") };
                match way {
                    0 => drop(request),
                    1 => request.answer_later::<Answer<NONE>>(panics),
                    2 => request.answer_soon(Ok(Answer::<ENCODE> {})),
                    3 => drop(request.answer(Ok(Answer::<ENCODE_VAST> {})).await),
                    _ => drop(request.answer(Ok(Answer::<NONE> {}))),
                }
            })
            .await;
        assert_eq!(answer["error"], failed, "way {way}");
    }
    f.file::<NONE>("/").await;
}

#[tokio::test]
async fn what_the_requests_took_is_given_back() {
    let mut f = Fixture::new();
    let (count, bytes) = (f.serving.count.available_permits(), f.serving.bytes.available_permits());
    for _ in 0..100 {
        f.file::<ENCODE>("/").await;
    }
    assert_eq!(f.serving.count.available_permits(), count);
    assert_eq!(f.serving.bytes.available_permits(), bytes);
}
