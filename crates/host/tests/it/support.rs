//! Processes without a server.

use std::time::{Duration, Instant};

use codex_exec_host::process::{
    Group, Launch, ProcessHandle, ProcessHost, Reader, StartError, environment,
};
use codex_exec_server_protocol::process::{ExecParams, ReadParams};

pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn params(script: &str) -> ExecParams {
    serde_json::from_value(serde_json::json!({
        "processId": "p",
        "argv": ["/bin/sh", "-c", script],
        "cwd": "/",
        "env": {"PATH": "/usr/bin:/bin"},
    }))
    .unwrap()
}

pub(crate) async fn start(
    host: &ProcessHost,
    params: ExecParams,
) -> Result<ProcessHandle, StartError> {
    let launch = async move {
        let environment = environment(&params, &[])?;
        Ok::<_, StartError>(Launch::new(params, &environment, Group(0))?)
    };
    let (handle, started) = host.start(launch, |_| None);
    started.await.unwrap().map(|_| handle)
}

/// All output of a process after a sequence number, once there is some.
pub(crate) async fn read(handle: &ProcessHandle, after: u64) -> String {
    let params = ReadParams {
        process_id: "p".into(),
        after_seq: Some(after),
        max_bytes: None,
        wait_ms: Some(60_000),
    };
    let read = handle.read(params, Reader::Subscriber).await.unwrap();
    let bytes: Vec<u8> = read.chunks.iter().flat_map(|chunk| chunk.chunk.to_vec()).collect();
    String::from_utf8(bytes).unwrap()
}

pub(crate) fn is_running(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// Polls for a condition that has no event. Blocks.
pub(crate) fn eventually(what: &str, condition: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < until, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
