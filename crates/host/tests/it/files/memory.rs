//! Memory for large responses: reserved before they are built, and freed afterwards.

use std::os::unix::ffi::OsStrExt;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};

use codex_exec_host::files::{
    AnswerMemory, Backend, FileConnection, Operation, Reservation, SMALL_ANSWER,
};
use codex_exec_server_protocol::files::*;
use proptest::prelude::*;
use tokio::sync::{Semaphore, mpsc};

use super::*;

/// A budget of memory, and a file that grows with each reservation.
struct Memory {
    left: Arc<Semaphore>,
    /// The last reservation.
    given: AtomicU64,
    grows: Vec<(std::path::PathBuf, u64)>,
}

const ALL: u32 = 8 << 20;

impl AnswerMemory for Memory {
    fn reserve(&self, bytes: u64) -> Pin<Box<dyn Future<Output = Reservation> + Send + '_>> {
        Box::pin(async move {
            let permits = u32::try_from(bytes).unwrap().min(ALL);
            let permit = self.left.clone().acquire_many_owned(permits).await.unwrap();
            self.given.store(bytes, Ordering::SeqCst);
            for (path, by) in &self.grows {
                let file = std::fs::File::options().append(true).open(path).unwrap();
                file.set_len(file.metadata().unwrap().len() + by).unwrap();
            }
            Reservation::new(permit)
        })
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// In whatever order files are read, beside responses that are never consumed: a response carries
    /// no more than its reservation, and without one it is small.
    #[test]
    fn response_never_exceeds_its_reserved_memory(
        sizes in prop::collection::vec(0u64..3 << 20, 1..12),
        growth in prop::sample::select(vec![0u64, 1, 4096, 1 << 20]),
        held in 0usize..3,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let f = Fixture::new();
            let files: Vec<_> = sizes.iter().enumerate().map(|(at, &size)| {
                let path = f.file(&format!("f{at}"), "");
                let native = f.native(format!("f{at}"));
                std::fs::File::options().write(true).open(&native).unwrap().set_len(size).unwrap();
                (path, native)
            }).collect();
            let left = Arc::new(Semaphore::new(ALL as usize));
            let memory = Arc::new(Memory {
                left: left.clone(),
                given: AtomicU64::new(0),
                grows: files.iter().map(|(_, native)| (native.clone(), growth)).collect(),
            });
            let (sink, _none) = mpsc::channel(1);
            let config = Arc::new(FilesConfig::default());
            let connection = FileConnection::new(config, Arc::new(sink), memory.clone());
            let mut untaken = Vec::new();
            for (path, native) in &files {
                memory.given.store(0, Ordering::SeqCst);
                let reading = connection.call(Backend::Here, FsReadFileParams::new(path.clone()));
                // It may have to wait until the unconsumed responses are dropped.
                tokio::pin!(reading);
                let mut answer = loop {
                    tokio::select! {
                        biased;
                        answer = &mut reading => break answer.unwrap(),
                        () = tokio::task::yield_now(), if !untaken.is_empty() => {
                            if left.available_permits() < ALL as usize / 2 {
                                untaken.remove(0);
                            }
                        }
                    }
                };
                let carried = answer.data.len() as u64;
                let given = memory.given.load(Ordering::SeqCst);
                let memory = answer.take_memory();
                prop_assert_eq!(memory.is_some(), given > 0);
                prop_assert!(carried <= given.max(SMALL_ANSWER), "{} of {}", carried, given);
                prop_assert!(carried <= std::fs::metadata(native).unwrap().len());
                if untaken.len() < held {
                    untaken.push((answer, memory));
                }
            }
            drop(untaken);
            prop_assert_eq!(left.available_permits(), ALL as usize, "all of it came back");
            Ok(())
        })?;
    }
}

/// A directory of `count` names below a long path; without UTF-8, each entry carries that path.
fn listing(f: &Fixture, depth: usize, byte: u8, count: usize) -> PathUri {
    let mut path = f.root.clone();
    for _ in 0..depth {
        path.push(std::ffi::OsStr::from_bytes(&[byte; 200]));
    }
    std::fs::create_dir_all(&path).unwrap();
    for at in 0..count {
        let name = [&[byte; 200][..], at.to_string().as_bytes()].concat();
        std::fs::File::create(path.join(std::ffi::OsStr::from_bytes(&name))).unwrap();
    }
    uri(&path)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Whatever a directory holds: its listing, as values and as a message, fits the reserved memory,
    /// which has a limit, and is complete unless it says otherwise.
    #[test]
    fn listing_never_exceeds_its_reserved_memory(
        depth in 0usize..15,
        byte in prop::sample::select(vec![b'a', 0x01, b'"', 0xff]),
        count in 0usize..400,
        limit in prop::sample::select(vec![400usize << 10, 24 << 20]),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let f = Fixture::new();
            let path = listing(&f, depth, byte, count);
            let left = Arc::new(Semaphore::new(64 << 20));
            let memory = Arc::new(Memory { left, given: AtomicU64::new(0), grows: Vec::new() });
            let (sink, _none) = mpsc::channel(1);
            let mut config = FilesConfig::default();
            config.max_directory_answer_bytes = limit;
            let connection = FileConnection::new(Arc::new(config), Arc::new(sink), memory.clone());
            let mut answer =
                connection.call(Backend::Here, FsReadDirectoryParams::new(path)).await.unwrap();
            let given = memory.given.load(Ordering::SeqCst);
            prop_assert_eq!(answer.take_memory().is_some(), given > 0);
            prop_assert!(given <= 2 * limit as u64);
            let carried = serde_json::to_vec(&*answer).unwrap().len() as u64;
            prop_assert!(carried <= given.max(SMALL_ANSWER), "{} of {}", carried, given);
            let values: usize = answer.entries.iter().map(|entry| {
                let path = entry.file_name_uri.as_ref().map_or(0, |path| path.as_bytes().len());
                size_of::<FsReadDirectoryEntry>() + entry.file_name.len() + path
            }).sum();
            prop_assert!(values as u64 <= given.max(SMALL_ANSWER), "{} of {}", values, given);
            let listed = answer.entries.len();
            prop_assert_eq!(answer.truncated, listed < count);
            Ok(())
        })?;
    }
}

/// Blocks and searches reserve their maximum in advance.
#[tokio::test]
async fn memory_of_known_size_is_reserved_up_front() {
    let f = Fixture::new();
    let path = f.file("x", "abc\n");
    let left = Arc::new(Semaphore::new(0));
    let memory = Memory { left: left.clone(), given: AtomicU64::new(0), grows: Vec::new() };
    let (sink, _none) = mpsc::channel(1);
    let connection =
        FileConnection::new(Arc::new(FilesConfig::default()), Arc::new(sink), Arc::new(memory));
    let run = |operation: Operation| {
        let connection = &connection;
        async move {
            match operation {
                Operation::ReadBlock(params) => {
                    connection.call(Backend::Here, params).await.map(drop)
                }
                Operation::Glob(params) => connection.call(Backend::Here, params).await.map(drop),
                Operation::Search(params) => connection.call(Backend::Here, params).await.map(drop),
                other => panic!("{other:?}"),
            }
        }
    };
    let open = FsOpenParams::new("h", path, FsOpenMode::Read);
    connection.call(Backend::Here, open).await.unwrap();
    run(FsReadBlockParams::new("h", 0, SMALL_ANSWER).into()).await.unwrap();
    let large: [Operation; 3] = [
        FsReadBlockParams::new("h", 0, SMALL_ANSWER + 1).into(),
        FsGlobParams::new(f.path(""), ["*"]).into(),
        FsSearchParams::new(f.path(""), "abc").into(),
    ];
    for operation in large {
        let waiting = run(operation.clone());
        tokio::pin!(waiting);
        tokio::select! {
            biased;
            _ = &mut waiting => panic!("{operation:?} did not ask"),
            () = tokio::task::yield_now() => left.add_permits(64 << 20),
        }
        waiting.await.unwrap();
        left.forget_permits(usize::MAX >> 4);
    }
    let streamed =
        FsSearchParams { search_id: Some("s".into()), ..FsSearchParams::new(f.path(""), "zzz") };
    run(streamed.into()).await.unwrap();
}
