//! Persistent handles, whose requests may be repeated.

use codex_exec_host::files::{Answer, Backend, FileConnection, PersistentHandles};
use codex_exec_server_protocol::files::*;
use proptest::prelude::*;
use tokio::sync::mpsc;

use super::*;

/// A connection of the session with these handles.
fn connection(kept: &Arc<PersistentHandles>) -> FileConnection {
    let (sink, _none) = mpsc::channel(1);
    let connection = FileConnection::new(
        Arc::new(FilesConfig::default()),
        Arc::new(sink),
        Arc::new(UnboundedMemory),
    );
    connection.persist_handles_in(kept.clone());
    connection
}

fn keep(id: &str, path: &PathUri) -> FsOpenParams {
    let mut params = FsOpenParams::new(id, path.clone(), FsOpenMode::ReplaceAtomic);
    params.keep = true;
    params
}

fn commit(id: &str) -> FsCloseParams {
    FsCloseParams { commit: true, ..FsCloseParams::new(id) }
}

async fn run<R: FileRequest>(at: &FileConnection, request: R) -> Result<R::Response, FileError> {
    at.call(Backend::Here, request).await.map(Answer::into_response)
}

/// What happens between two requests.
#[derive(Debug, Clone, Copy)]
enum Trouble {
    None,
    /// The connection ends during the request, which is repeated on the next one.
    Cut,
    /// The request is sent twice at once, the second time on the next connection.
    Overlap,
}

fn troubles() -> impl Strategy<Value = Vec<Trouble>> {
    let trouble = prop_oneof![Just(Trouble::None), Just(Trouble::Cut), Just(Trouble::Overlap)];
    proptest::collection::vec(trouble, 1..40)
}

/// Sends a request despite disturbances; all responses must be equal.
async fn request<R>(
    kept: &Arc<PersistentHandles>,
    at: &mut FileConnection,
    trouble: Trouble,
    request: R,
) -> Result<R::Response, FileError>
where
    R: FileRequest + Clone,
    R::Response: PartialEq + std::fmt::Debug,
{
    match trouble {
        Trouble::None => run(at, request).await,
        Trouble::Cut => {
            let lost = at.call(Backend::Here, request.clone());
            let mut lost = Box::pin(lost);
            // It may have begun or not.
            std::future::poll_fn(|cx| {
                let _ = lost.as_mut().poll(cx);
                std::task::Poll::Ready(())
            })
            .await;
            drop(lost);
            *at = connection(kept);
            run(at, request).await
        }
        Trouble::Overlap => {
            let next = connection(kept);
            let (first, second) = tokio::join!(run(at, request.clone()), run(&next, request));
            assert_eq!(first, second);
            *at = next;
            first
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn repeated_requests_take_effect_once(
        blocks in proptest::collection::vec((0u64..3000, 1usize..900, any::<u8>()), 0..12),
        troubles in troubles(),
        commits: bool,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let f = Fixture::new();
            let path = f.file("x", "old");
            let kept = Arc::new(PersistentHandles::new(Arc::new(FilesConfig::default())));
            let mut at = connection(&kept);
            let mut troubles = troubles.into_iter().cycle();
            let mut next = || troubles.next().unwrap();
            let opened = request(&kept, &mut at, next(), keep("h", &path)).await;
            assert_eq!(opened.unwrap().handle_id, "h");
            let (mut want, mut asked) = (Vec::new(), Vec::new());
            for (offset, len, byte) in blocks {
                let end = offset as usize + len;
                if want.len() < end {
                    want.resize(end, 0);
                }
                want[offset as usize..].iter_mut().take(len).for_each(|at| *at = byte);
                let params = FsWriteBlockParams::new("h", offset, vec![byte; len]);
                asked.push(params.clone());
                request(&kept, &mut at, next(), params).await.unwrap();
            }
            assert_eq!(std::fs::read(f.native("x")).unwrap(), b"old", "not before the commit");
            let close = if commits { commit("h") } else { FsCloseParams::new("h") };
            request(&kept, &mut at, next(), close.clone()).await.unwrap();
            let want = if commits { want } else { b"old".to_vec() };
            assert!(std::fs::read(f.native("x")).unwrap() == want);
            // Later changes by others are kept.
            std::fs::write(f.native("x"), "later").unwrap();
            run(&connection(&kept), close.clone()).await.unwrap();
            // A client that received no response and repeats everything gets the same responses.
            let opened = request(&kept, &mut at, next(), keep("h", &path)).await;
            assert_eq!(opened.unwrap().handle_id, "h");
            for params in asked {
                request(&kept, &mut at, next(), params).await.unwrap();
            }
            request(&kept, &mut at, next(), close).await.unwrap();
            let late = FsWriteBlockParams::new("h", 0, b"late".to_vec());
            run(&connection(&kept), late).await.unwrap_err();
            assert_eq!(std::fs::read(f.native("x")).unwrap(), b"later");
            assert_eq!(std::fs::read_dir(&f.root).unwrap().count(), 1);
        });
    }
}

#[tokio::test]
async fn failed_commit_is_reported_again() {
    let f = Fixture::new();
    let path = f.path("sub/x");
    f.dir("sub");
    let kept = Arc::new(PersistentHandles::new(Arc::new(FilesConfig::default())));
    let at = connection(&kept);
    run(&at, keep("h", &path)).await.unwrap();
    std::fs::remove_dir(f.native("sub")).unwrap();
    let first = run(&at, commit("h")).await.unwrap_err();
    f.dir("sub");
    assert_eq!(run(&connection(&kept), commit("h")).await.unwrap_err(), first);
}

#[tokio::test]
async fn other_handles_end_with_their_connection_and_ids_are_not_shared() {
    let f = Fixture::new();
    let (path, other) = (f.path("x"), f.path("y"));
    let kept = Arc::new(PersistentHandles::new(Arc::new(FilesConfig::default())));
    let at = connection(&kept);
    run(&at, FsOpenParams { keep: false, ..keep("h", &path) }).await.unwrap();
    assert_eq!(run(&at, keep("h", &path)).await.unwrap_err().kind(), ErrorKind::IdInUse);
    drop(at);
    let at = connection(&kept);
    assert_eq!(run(&at, commit("h")).await.unwrap_err().kind(), ErrorKind::UnknownFileHandle);
    run(&at, keep("k", &path)).await.unwrap();
    run(&at, keep("k", &path)).await.unwrap();
    let taken = run(&at, keep("k", &other)).await.unwrap_err();
    assert!(matches!(taken, FileError::HandleTaken { .. }), "{taken}");
    drop((at, kept));
    assert_eq!(std::fs::read_dir(&f.root).unwrap().count(), 0);
}

/// A write that has begun completes even if its connection is lost, and the next connection's writes
/// come after it, however long it takes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_of_a_connection_that_died_comes_before_those_of_the_next() {
    let f = Fixture::new();
    let path = f.path("file");
    let kept = Arc::new(PersistentHandles::new(Arc::new(FilesConfig::default())));
    let write = |content: Vec<u8>| {
        let mut params = FsWriteFileParams::new(path.clone(), content);
        params.atomic = true;
        params
    };
    for round in 0..60u8 {
        let first = connection(&kept);
        let writing = tokio::spawn(first.call(Backend::Here, write(vec![b'x'; 4 << 20])));
        for _ in 0..u32::from(round) * 37 % 200 {
            tokio::task::yield_now().await;
        }
        writing.abort();
        drop(first);
        let next = connection(&kept);
        run(&next, write(vec![round])).await.unwrap();
        for _ in 0..20 {
            let read = run(&next, FsReadFileParams::new(path.clone())).await.unwrap();
            assert!(read.data.0 == [round][..], "round {round}");
        }
    }
}

/// The memory of a closed handle is bounded, and what is forgotten is not a success.
#[tokio::test]
async fn recent_blocks_of_a_closed_handle_are_remembered() {
    let f = Fixture::new();
    let path = f.file("x", "old");
    let kept = Arc::new(PersistentHandles::new(Arc::new(FilesConfig::default())));
    let at = connection(&kept);
    run(&at, keep("h", &path)).await.unwrap();
    let block = |n: u64| FsWriteBlockParams::new("h", n * 9, format!("block {n:03}").into_bytes());
    for n in 0..300 {
        run(&at, block(n)).await.unwrap();
    }
    // A failure is remembered as a failure.
    let bad = FsWriteBlockParams::new("h", u64::MAX, b"x".to_vec());
    let refused = run(&at, bad.clone()).await.unwrap_err();
    let torn = run(&at, commit("h")).await.unwrap_err();
    let at = connection(&kept);
    run(&at, keep("h", &path)).await.unwrap();
    for n in 0..300 {
        let again = run(&at, block(n)).await;
        assert_eq!(again.is_ok(), n >= 300 - 255, "{n}: {again:?}");
    }
    assert_eq!(run(&at, bad).await.unwrap_err(), refused);
    let other = FsWriteBlockParams::new("h", 299 * 9, b"block 298".to_vec());
    assert_eq!(run(&at, other).await.unwrap_err().kind(), ErrorKind::UnknownFileHandle);
    assert_eq!(run(&at, commit("h")).await.unwrap_err(), torn);
    assert_eq!(std::fs::read(f.native("x")).unwrap(), b"old");
}
