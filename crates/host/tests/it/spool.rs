//! Output in a spool file.

use codex_exec_host::process::{ProcessConfig, ProcessHost, Reader, StartError};
use codex_exec_server_protocol::process::{OnFull, ReadParams, Retain, RetainUntil};

use crate::support::*;

fn config(directory: &std::path::Path) -> ProcessConfig {
    {
        let mut config = ProcessConfig::default();
        config.spool_above = 0;
        config.spool_directory = directory.to_owned();
        config.max_retain_bytes = 100 << 20;
        config
    }
}

#[tokio::test]
async fn spool_is_unlinked_and_frees_its_space() {
    let directory = tempfile::tempdir().unwrap();
    let host = ProcessHost::new(config(directory.path())).unwrap();
    let mut params = params("seq 100000; exec sleep 1000");
    params.retain =
        Some(Retain { bytes: 8 << 20, on_full: OnFull::Wait, until: RetainUntil::Sent });
    let handle = start(&host, params).await.unwrap();
    // Without a subscriber nothing is delivered, but the output can be read.
    let expected: String = (1..=100_000).map(|n| format!("{n}\n")).collect();
    let (mut text, mut after) = (String::new(), 0);
    handle.detach();
    while text.len() < expected.len() {
        let params = ReadParams {
            process_id: "p".into(),
            after_seq: Some(after),
            max_bytes: Some(50_000),
            wait_ms: Some(60_000),
        };
        let read = handle.read(params, Reader::Subscriber).await.unwrap();
        after = read.next_seq - 1;
        for chunk in read.chunks {
            text.push_str(std::str::from_utf8(&chunk.chunk).unwrap());
        }
    }
    assert!(text == expected);
    assert_eq!(
        std::fs::read_dir(directory.path()).unwrap().count(),
        0,
        "nothing to be left behind"
    );
    let open = || {
        let all = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        let targets = all.filter_map(|fd| std::fs::read_link(fd.path()).ok());
        targets.filter(|target| target.starts_with(directory.path())).count()
    };
    assert_eq!(open(), 1);
    handle.kill();
    handle.gone().await;
    assert_eq!(open(), 0);
}

#[tokio::test]
async fn failed_spool_is_an_error_at_start() {
    let directory = tempfile::tempdir().unwrap();
    let nowhere = directory.path().join("nowhere");
    let host = ProcessHost::new(config(&nowhere)).unwrap();
    let mut wants = params("true");
    wants.retain = Some(Retain { bytes: 8 << 20, on_full: OnFull::Wait, until: RetainUntil::Sent });
    let error = start(&host, wants.clone()).await.unwrap_err();
    assert!(matches!(error, StartError::Setup { .. }), "{error}");
    wants.retain =
        Some(Retain { bytes: 101 << 20, on_full: OnFull::Wait, until: RetainUntil::Sent });
    let error = start(&host, wants).await.unwrap_err();
    assert!(matches!(error, StartError::Launch(_)), "{error}");
}
