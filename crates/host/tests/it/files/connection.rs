//! File requests of a connection: order, handles, cancellation.

use std::future::Future;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use codex_exec_host::files::{Backend, FileConnection, FileNotification};
use codex_exec_server_protocol::files::*;
use tokio::sync::mpsc;

use super::*;

/// A connection and its notifications.
pub(super) struct Client {
    pub f: Fixture,
    pub connection: FileConnection,
    pub backend: Backend,
    pub notifications: mpsc::Receiver<FileNotification>,
}

impl Client {
    pub(super) fn new() -> Self {
        Self::with(FilesConfig::default(), Backend::Here)
    }

    pub(super) fn with(config: FilesConfig, backend: Backend) -> Self {
        let (sink, notifications) = mpsc::channel(64);
        let connection =
            FileConnection::new(Arc::new(config), Arc::new(sink), Arc::new(UnboundedMemory));
        Self { f: Fixture::new(), connection, backend, notifications }
    }

    pub(super) async fn call<R: FileRequest>(&self, request: R) -> Result<R::Response, FileError> {
        let answer = self.connection.call(self.backend.clone(), request).await?;
        Ok(answer.into_response())
    }

    /// The next notification; a test that waits longer fails.
    pub(super) async fn next(&mut self) -> FileNotification {
        let next = tokio::time::timeout(Duration::from_secs(20), self.notifications.recv()).await;
        next.expect("a notification in time").expect("a living connection")
    }
}

#[tokio::test]
async fn requests_take_effect_in_order() {
    let c = Client::new();
    let path = c.f.path("x");
    let mut futures: Vec<std::pin::Pin<Box<dyn Future<Output = ()> + Send>>> = Vec::new();
    for at in 0..50u8 {
        let write = FsWriteFileParams::new(path.clone(), vec![at; 10_000]);
        let write = c.connection.call(Backend::Here, write);
        let read = c.connection.call(Backend::Here, FsReadFileParams::new(path.clone()));
        let stat = c.connection.call(Backend::Here, FsGetMetadataParams::new(path.clone()));
        futures.push(Box::pin(async move { drop(write.await.unwrap()) }));
        futures.push(Box::pin(async move {
            let data = read.await.unwrap().into_response().data;
            assert!(data.len() == 10_000 && data.iter().all(|byte| *byte == at), "{at}");
        }));
        futures.push(Box::pin(async move { assert_eq!(stat.await.unwrap().size, 10_000) }));
    }
    // Polled in reverse: the order of the calls counts, not that of the polls.
    let tasks: Vec<_> = futures.into_iter().rev().map(tokio::spawn).collect();
    for task in tasks {
        task.await.unwrap();
    }
}

#[tokio::test]
async fn handle_can_be_used_before_its_open_has_responded() {
    let c = Client::new();
    let path = c.f.path("x");
    let here = || Backend::Here;
    let open =
        c.connection.call(here(), FsOpenParams::new("h", path.clone(), FsOpenMode::ReplaceAtomic));
    let write = c.connection.call(here(), FsWriteBlockParams::new("h", 0, b"abc".to_vec()));
    let close =
        c.connection.call(here(), FsCloseParams { commit: true, ..FsCloseParams::new("h") });
    let read = c.connection.call(here(), FsReadFileParams::new(path));
    let (read, close, write, open) = tokio::join!(read, close, write, open);
    open.unwrap();
    write.unwrap();
    close.unwrap();
    assert_eq!(read.unwrap().data[..], b"abc"[..]);
}

#[tokio::test]
async fn slow_scan_delays_no_other_request() {
    // Each line is a separate notification: more than fit between the search and its call.
    let mut config = FilesConfig::default();
    config.search_batch_bytes = 1;
    let mut c = Client::with(config, Backend::Here);
    let path = c.f.file("x", "abc\n".repeat(500));
    let search =
        FsSearchParams { search_id: Some("s".into()), ..FsSearchParams::new(c.f.path(""), "abc") };
    let mut scan = Box::pin(c.connection.call(Backend::Here, search));
    // The scan has begun and is not polled again.
    let mut context = Context::from_waker(Waker::noop());
    assert!(matches!(scan.as_mut().poll(&mut context), Poll::Pending));
    c.call(FsWriteFileParams::new(path.clone(), vec![1])).await.unwrap();
    c.call(FsReadFileParams::new(path)).await.unwrap();
    let drain = async { while c.notifications.recv().await.is_some() {} };
    tokio::select! {
        answer = scan => drop(answer.unwrap()),
        () = drain => panic!("the connection ended"),
    }
}

#[tokio::test]
async fn handle_limit_spans_backends_and_handles_end_with_the_connection() {
    let c = Client::new();
    let path = c.f.file("x", "abc");
    for at in 0..128 {
        c.call(FsOpenParams::new(at.to_string(), path.clone(), FsOpenMode::Read)).await.unwrap();
    }
    let open = |id: &str| c.call(FsOpenParams::new(id, path.clone(), FsOpenMode::Read));
    assert!(matches!(open("more").await, Err(FileError::TooMany { .. })));
    assert!(matches!(open("7").await, Err(FileError::HandleTaken { .. })));
    assert!(matches!(open(&"n".repeat(33)).await, Err(FileError::OutOfRange { .. })));
    c.call(FsCloseParams::new("7")).await.unwrap();
    let temporary = FsOpenParams::new("t", c.f.path("new"), FsOpenMode::ReplaceAtomic);
    c.call(temporary).await.unwrap();
    c.call(FsWriteBlockParams::new("t", 0, vec![1; 100])).await.unwrap();
    let unknown = c.call(FsReadBlockParams::new("7", 0, 1)).await;
    assert!(matches!(unknown, Err(FileError::UnknownHandle { .. })));
    let held = || {
        let root = c.f.root.clone();
        std::fs::read_dir("/proc/self/fd")
            .unwrap()
            .filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok())
            .filter(|target| target.starts_with(&root))
            .count()
    };
    assert!(held() >= 128);
    drop(c.connection);
    assert_eq!(held(), 0);
    assert_eq!(c.f.names(""), ["x"]);
}

#[tokio::test]
async fn failed_read_frees_the_handle_id() {
    let c = Client::new();
    let path: PathUri = "/proc/self/mem".parse().unwrap();
    c.call(FsOpenParams::new("h", path.clone(), FsOpenMode::Read)).await.unwrap();
    let failed = c.call(FsReadBlockParams::new("h", 0, 1)).await;
    assert!(matches!(failed, Err(FileError::Os { .. })));
    let unknown = c.call(FsReadBlockParams::new("h", 0, 1)).await;
    assert!(matches!(unknown, Err(FileError::UnknownHandle { .. })));
    c.call(FsOpenParams::new("h", path, FsOpenMode::Read)).await.unwrap();
}

#[tokio::test]
async fn dropped_call_is_cancelled_and_ends_its_turn() {
    let c = Client::new();
    for at in 0..300 {
        c.f.file(&format!("tree/{at}/a/b/c/file"), "needle\n".repeat(3000));
    }
    let search = FsSearchParams {
        search_id: Some("s".into()),
        max_matches: Some(100_000),
        ..FsSearchParams::new(c.f.path("tree"), "needle")
    };
    {
        let mut scan = Box::pin(c.connection.call(Backend::Here, search.clone()));
        let mut context = Context::from_waker(Waker::noop());
        assert!(scan.as_mut().poll(&mut context).is_pending());
    }
    // The id is free again, and so is the thread.
    let search = FsSearchParams { max_matches: Some(1), ..search };
    let answer = c.call(search).await.unwrap();
    assert_eq!(answer.matches, 1);
    // Dropping a change before its turn releases the next one.
    let path = c.f.path("x");
    drop(c.connection.call(Backend::Here, FsWriteFileParams::new(path.clone(), vec![1])));
    assert_eq!(
        c.call(FsGetMetadataParams::new(path)).await.unwrap_err().kind(),
        ErrorKind::PathNotFound
    );
}

#[tokio::test]
async fn streamed_search_sends_all_matches_before_its_response() {
    let mut c = Client::new();
    for at in 0..20 {
        c.f.file(&format!("{at:02}"), format!("{} hit\n", "x".repeat(3000)).repeat(30));
    }
    let mut search = FsSearchParams::new(c.f.path(""), "hit");
    search.search_id = Some("s".into());
    let answer = c.call(search).await.unwrap();
    let (mut lines, mut seq) = (0, 0);
    while let Ok(FileNotification::SearchMatches(batch)) = c.notifications.try_recv() {
        seq += 1;
        assert_eq!(batch.seq, seq);
        lines += batch.files.iter().map(|file| file.lines.len() as u64).sum::<u64>();
    }
    assert_eq!(lines, answer.matches);
    assert_eq!(answer.matches, 600);
}

#[tokio::test]
async fn search_can_be_cancelled_by_its_id() {
    let mut c = Client::new();
    for at in 0..60 {
        c.f.file(&format!("{at:02}"), format!("{} hit\n", "x".repeat(3000)).repeat(300));
    }
    let mut search = FsSearchParams::new(c.f.path(""), "hit");
    (search.search_id, search.max_matches) = (Some("s".into()), Some(100_000));
    let running = tokio::spawn(c.connection.call(Backend::Here, search.clone()));
    c.next().await;
    let taken = c.call(FsSearchParams { search_id: Some("s".into()), ..search }).await;
    assert!(matches!(taken, Err(FileError::IdTaken { .. })), "{taken:?}");
    c.call(FsCancelSearchParams::new("s")).await.unwrap();
    c.call(FsCancelSearchParams::new("unknown")).await.unwrap();
    let drain = async { while c.notifications.recv().await.is_some() {} };
    let answer = tokio::select! {
        answer = running => answer.unwrap().unwrap().into_response(),
        () = drain => panic!("the connection ended"),
    };
    assert!(answer.cancelled && answer.truncated);
}

#[tokio::test]
async fn cached_requests_run_at_once_if_it_is_their_turn() {
    let c = Client::new();
    let path = c.f.file("x", "abc");
    let stat = FsGetMetadataParams::new(path.clone());
    let read = FsReadFileParams::new(path.clone());
    // The first request classifies the filesystem.
    assert!(c.connection.call_if_cached(&stat).is_none());
    assert_eq!(c.connection.call(Backend::Here, stat.clone()).await.unwrap().size, 3);
    assert_eq!(c.connection.call_if_cached(&stat).unwrap().unwrap().size, 3);
    assert_eq!(&*c.connection.call_if_cached(&read).unwrap().unwrap().data, b"abc");
    let write = c.connection.call(Backend::Here, FsWriteFileParams::new(path.clone(), vec![1]));
    assert!(c.connection.call_if_cached(&stat).is_none());
    write.await.unwrap();
    assert_eq!(c.connection.call_if_cached(&stat).unwrap().unwrap().size, 1);
    let large = FsReadFileParams::new(c.f.file("large", vec![0; 1 << 20]));
    assert!(c.connection.call_if_cached(&large).is_none(), "too much to keep others waiting for");
    assert!(c.connection.call_if_cached(&FsReadFileParams::new(c.f.path("none"))).is_none());
}

/// A single-threaded runtime continues while the filesystem is busy.
#[tokio::test(flavor = "current_thread")]
async fn the_runtime_is_never_stalled() {
    let c = Client::new();
    for at in 0..2000 {
        c.f.file(&format!("{}/{at}", at % 40), "");
    }
    // The scheduler may give the processor to the walk until it has ended, but not every time.
    for _ in 0..1_000 {
        let walk = FsWalkParams::new(c.f.path(""), FsWalkOptions::default());
        let walk = tokio::spawn(c.connection.call(Backend::Here, walk));
        let mut ticks = 0u64;
        while !walk.is_finished() {
            tokio::task::yield_now().await;
            ticks += 1;
        }
        assert_eq!(walk.await.unwrap().unwrap().entries.len(), 2040);
        if ticks > 1 {
            return;
        }
    }
    panic!("the runtime stood still during every walk");
}
