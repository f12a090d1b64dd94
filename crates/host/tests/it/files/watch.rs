//! `fs/watch`, `fs/unwatch`, `fs/watchMissing`.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use codex_exec_host::files::{Backend, ChangeMemory, FileConnection, FileNotification};
use codex_exec_server_protocol::files::*;

use tokio::sync::mpsc;

use super::connection::Client;
use super::*;

impl Client {
    async fn watch(&self, params: FsWatchParams) -> Result<FsDone, FileError> {
        self.call(FsWatchParams { debounce_ms: Some(20), ..params }).await
    }

    /// Collects changes until all of `wanted` were reported.
    async fn changes(
        &mut self,
        wanted: &[(&str, FsChangeKind)],
    ) -> BTreeMap<PathUri, FsChangeKind> {
        let mut all = BTreeMap::new();
        while !wanted.iter().all(|(name, kind)| all.get(&self.f.path(name)) == Some(kind)) {
            let FileNotification::Changed(changed) = self.next().await else {
                panic!("another kind")
            };
            assert!(!changed.overflow && changed.ended.is_none(), "{changed:?}");
            all.extend(changed.changes.into_iter().map(|change| (change.path, change.kind)));
        }
        all
    }

    /// Everything reported so far, up to a final change.
    async fn until_marker(&mut self, marker: &str) -> BTreeMap<PathUri, FsChangeKind> {
        self.f.file(marker, "");
        self.changes(&[(marker, FsChangeKind::Created)]).await
    }
}

use FsChangeKind::{Created, Modified, Removed};

#[tokio::test]
async fn changes_in_a_tree_are_reported() {
    let mut c = Client::new();
    c.f.file("w/old", "x");
    c.f.file("w/sub/deep/file", "x");
    c.f.file("other", "x");
    c.watch(FsWatchParams::new(1, c.f.path("w"))).await.unwrap();
    c.f.file("w/new", "x");
    c.f.file("w/sub/deep/file", "changed");
    std::fs::remove_file(c.f.native("w/old")).unwrap();
    c.f.file("other", "not ours");
    let all =
        c.changes(&[("w/new", Created), ("w/sub/deep/file", Modified), ("w/old", Removed)]).await;
    assert!(!all.contains_key(&c.f.path("other")));
    std::fs::rename(c.f.native("w/new"), c.f.native("w/sub/moved")).unwrap();
    c.changes(&[("w/new", Removed), ("w/sub/moved", Created)]).await;
}

#[tokio::test]
async fn content_of_a_new_directory_is_reported_however_fast_it_was_filled() {
    let mut c = Client::new();
    c.f.dir("w");
    c.watch(FsWatchParams::new(1, c.f.path("w"))).await.unwrap();
    for round in 0..10 {
        let names: Vec<String> = (0..5).map(|at| format!("w/{round}/a/b/{at}")).collect();
        for name in &names {
            c.f.file(name, "x");
        }
        let mut all = BTreeMap::new();
        while !names.iter().all(|name| all.contains_key(&c.f.path(name))) {
            let FileNotification::Changed(changed) = c.next().await else { panic!("another kind") };
            all.extend(changed.changes.into_iter().map(|change| (change.path, change.kind)));
        }
    }
}

#[tokio::test]
async fn non_recursive_watch_reports_direct_entries_only() {
    let mut c = Client::new();
    c.f.dir("w/sub");
    let params = FsWatchParams { recursive: false, ..FsWatchParams::new(1, c.f.path("w")) };
    c.watch(params).await.unwrap();
    c.f.file("w/sub/below", "x");
    let all = c.until_marker("w/marker").await;
    assert!(!all.contains_key(&c.f.path("w/sub/below")), "{all:?}");
}

#[tokio::test]
async fn file_watch_survives_replacement() {
    let mut c = Client::new();
    let path = c.f.file("config", "1");
    c.f.file("beside", "x");
    c.watch(FsWatchParams::new(1, path.clone())).await.unwrap();
    for round in 0..3 {
        let write = FsWriteFileParams::new(path.clone(), vec![round; 10]);
        c.f.run(FsWriteFileParams { atomic: true, ..write }).unwrap();
        c.f.file("beside", [round]);
        let FileNotification::Changed(changed) = c.next().await else { panic!("another kind") };
        assert!(changed.changes.iter().all(|change| change.path == path), "{changed:?}");
    }
    std::fs::remove_file(path.as_path()).unwrap();
    c.changes(&[("config", Removed)]).await;
}

#[tokio::test]
async fn ended_watch_reports_why_and_frees_its_id() {
    let mut c = Client::new();
    c.f.dir("w");
    c.watch(FsWatchParams::new(1, c.f.path("w"))).await.unwrap();
    std::fs::remove_dir(c.f.native("w")).unwrap();
    loop {
        let FileNotification::Changed(changed) = c.next().await else { panic!("another kind") };
        if changed.ended.is_some() {
            break;
        }
    }
    c.f.dir("w");
    loop {
        match c.watch(FsWatchParams::new(1, c.f.path("w"))).await {
            Ok(_) => break,
            // The task that sent this forgets the watch right after.
            Err(FileError::IdTaken { .. }) => tokio::task::yield_now().await,
            Err(error) => panic!("{error}"),
        }
    }
}

#[tokio::test]
async fn too_many_changes_are_an_overflow() {
    let mut config = FilesConfig::default();
    config.max_watch_changes = 10;
    let mut c = Client::with(config, codex_exec_host::files::Backend::Here);
    c.f.dir("w");
    c.watch(FsWatchParams::new(1, c.f.path("w"))).await.unwrap();
    for at in 0..200 {
        c.f.file(&format!("w/{at}"), "");
    }
    loop {
        let FileNotification::Changed(changed) = c.next().await else { panic!("another kind") };
        assert!(changed.changes.len() <= 10);
        if changed.overflow {
            break;
        }
    }
}

#[tokio::test]
async fn stopped_watch_sends_nothing() {
    let mut c = Client::new();
    c.f.dir("a");
    c.f.dir("b");
    for (id, name) in [(1, "a"), (2, "b")] {
        c.watch(FsWatchParams::new(id, c.f.path(name))).await.unwrap();
    }
    let taken = c.watch(FsWatchParams::new(1, c.f.path("b"))).await;
    assert!(matches!(taken, Err(FileError::IdTaken { .. })));
    c.f.file("a/x", "");
    c.call(FsUnwatchParams::new(1)).await.unwrap();
    c.call(FsUnwatchParams::new(77)).await.unwrap();
    while c.notifications.try_recv().is_ok() {}
    c.f.file("a/y", "");
    c.f.file("b/marker", "");
    loop {
        let FileNotification::Changed(changed) = c.next().await else { panic!("another kind") };
        assert_eq!(changed.watch_id, 2);
        if changed.changes.iter().any(|change| change.path == c.f.path("b/marker")) {
            break;
        }
    }
    c.watch(FsWatchParams::new(1, c.f.path("a"))).await.unwrap();
}

#[tokio::test]
async fn number_of_watches_is_bounded() {
    let mut config = FilesConfig::default();
    config.max_watches = 3;
    config.max_missing_paths = 2;
    let c = Client::with(config, codex_exec_host::files::Backend::Here);
    let missing = |id| FsWatchMissingParams::new(id, vec![c.f.path("none")], None);
    c.watch(FsWatchParams::new(1, c.f.path(""))).await.unwrap();
    c.call(missing(1)).await.unwrap();
    c.call(missing(2)).await.unwrap();
    assert!(matches!(c.call(missing(3)).await, Err(FileError::TooMany { .. })));
    // A watch that replaces another with the same id counts once.
    c.call(missing(2)).await.unwrap();
    let long = FsWatchMissingParams::new(9, vec![c.f.path("none"); 3], None);
    c.call(FsUnwatchParams::new(1)).await.unwrap();
    assert!(matches!(c.call(long).await, Err(FileError::OutOfRange { .. })));
    let slow = FsWatchParams { debounce_ms: Some(60_001), ..FsWatchParams::new(5, c.f.path("")) };
    assert!(matches!(c.call(slow).await, Err(FileError::OutOfRange { .. })));
    let none = c.call(FsWatchParams::new(5, c.f.path("none"))).await;
    assert_eq!(kind(none), ErrorKind::PathNotFound);
    c.call(FsWatchParams::new(5, c.f.path(""))).await.unwrap();
}

impl Client {
    async fn missing(&self, id: i64, missing: &[&str], present: Option<&str>) -> bool {
        let missing = missing.iter().map(|name| self.f.path(name)).collect();
        let present = present.map(|name| self.f.path(name));
        self.call(FsWatchMissingParams::new(id, missing, present)).await.unwrap().watching
    }

    async fn told_missing(&mut self) -> i64 {
        match self.next().await {
            FileNotification::MissingChanged(changed) => changed.watch_id,
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn missing_path_that_appears_is_reported_once() {
    let mut c = Client::new();
    assert!(c.missing(1, &["a/b/c/file", "other"], None).await);
    c.f.dir("a");
    c.f.dir("a/b/c");
    c.f.file("a/b/c/beside", "");
    c.f.file("a/b/c/file", "");
    assert_eq!(c.told_missing().await, 1);
    c.f.file("other", "");
    // A second notification would come before this one.
    assert!(c.missing(2, &["last"], None).await);
    c.f.dir("last");
    assert_eq!(c.told_missing().await, 2);
}

#[tokio::test]
async fn present_path_that_changes_is_reported() {
    let mut c = Client::new();
    c.f.file("p", "1");
    c.f.dir("d");
    assert!(c.missing(1, &[], Some("p")).await);
    c.f.file("p", "2");
    assert_eq!(c.told_missing().await, 1);
    assert!(c.missing(2, &["none"], Some("p")).await);
    std::fs::remove_file(c.f.native("p")).unwrap();
    assert_eq!(c.told_missing().await, 2);
    assert!(c.missing(3, &[], Some("d")).await);
    c.f.file("d/new", "");
    assert_eq!(c.told_missing().await, 3);
    assert!(c.missing(4, &[], Some("d/new")).await);
    c.f.file("replacement", "");
    std::fs::rename(c.f.native("replacement"), c.f.native("d/new")).unwrap();
    assert_eq!(c.told_missing().await, 4);
}

#[tokio::test]
async fn existing_path_is_reported_after_the_response() {
    let mut c = Client::new();
    c.f.file("there", "");
    let params = FsWatchMissingParams::new(5, vec![c.f.path("there")], None);
    let answer = c.connection.call(c.backend.clone(), params).await.unwrap();
    assert!(answer.watching);
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(c.notifications.try_recv().is_err(), "the answer has not been sent yet");
    drop(answer);
    assert_eq!(c.told_missing().await, 5);
}

#[tokio::test]
async fn empty_watch_does_not_start_and_dangling_links_count_as_missing() {
    let mut config = FilesConfig::default();
    config.missing_recheck = Duration::from_millis(50);
    let mut c = Client::with(config, codex_exec_host::files::Backend::Here);
    assert!(!c.missing(1, &[], None).await);
    c.f.link("elsewhere/target", "link");
    assert!(c.missing(2, &["link"], None).await);
    c.f.file("elsewhere/target", "");
    assert_eq!(c.told_missing().await, 2);
}

#[tokio::test]
async fn watches_end_with_their_connection() {
    let c = Client::new();
    c.watch(FsWatchParams::new(1, c.f.path(""))).await.unwrap();
    assert!(c.missing(1, &["none"], None).await);
    let Client { f, connection, mut notifications, .. } = c;
    drop(connection);
    // The threads end and drop the last sender.
    let ended = tokio::time::timeout(Duration::from_secs(20), notifications.recv()).await;
    assert_eq!(ended.expect("an end in time"), None);
    drop(f);
}

/// Runs a test as a user to whom permissions apply.
fn held_back(test: impl AsyncFnOnce() + Send) {
    let run = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(test());
    };
    if rustix::process::geteuid().is_root() { as_nobody(run) } else { run() }
}

fn close(c: &Client, name: &str) {
    std::fs::create_dir_all(c.f.native(name)).unwrap();
    std::fs::set_permissions(c.f.native(name), PermissionsExt::from_mode(0o000)).unwrap();
}

#[test]
fn unreadable_directory_does_not_prevent_watching_others() {
    held_back(async || {
        let mut c = Client::new();
        // Around, beside and below it, in any order of listing.
        for name in ["w/a", "w/sub/a", "w/sub/z/deep", "w/z"] {
            std::fs::create_dir_all(c.f.native(name)).unwrap();
        }
        for name in ["w/m", "w/sub/m", "w/sub/z/m"] {
            close(&c, name);
        }
        c.watch(FsWatchParams::new(1, c.f.path("w"))).await.unwrap();
        let all = ["w/new", "w/a/new", "w/sub/new", "w/sub/a/new", "w/sub/z/deep/new", "w/z/new"];
        for name in all {
            c.f.file(name, "x");
        }
        c.changes(&all.map(|name| (name, Created))).await;
        // New directories, one of them unreadable.
        for name in ["w/sub/later/a", "w/sub/later/z"] {
            std::fs::create_dir_all(c.f.native(name)).unwrap();
        }
        close(&c, "w/sub/later/m");
        c.changes(&[("w/sub/later/a", Created), ("w/sub/later/z", Created)]).await;
        c.until_marker("w/one").await;
        c.until_marker("w/two").await;
        for name in ["w/sub/later/a/new", "w/sub/later/z/new"] {
            c.f.file(name, "x");
            c.changes(&[(name, Created)]).await;
        }
        // An unreadable directory alone cannot be watched.
        let refused = c.watch(FsWatchParams::new(2, c.f.path("w/m"))).await;
        assert!(refused.is_err(), "{refused:?}");
    });
}

#[test]
fn missing_paths_are_watched_where_possible() {
    held_back(async || {
        let mut c = Client::new();
        close(&c, "closed");
        std::fs::create_dir(c.f.native("open")).unwrap();
        assert!(!c.missing(1, &["closed/x"], None).await);
        assert!(c.missing(2, &["closed/x", "open/new"], None).await);
        c.f.file("open/new", "");
        assert_eq!(c.told_missing().await, 2);
    });
}

/// What the watches of a connection hold for a client that does not read stays within its limit; what they
/// drop they report as an overflow, and each goes on afterwards.
#[tokio::test]
async fn unread_changes_stay_within_the_memory_for_them() {
    let mut config = FilesConfig::default();
    (config.max_watch_memory, config.max_watch_change_bytes) = (256 << 10, 16 << 10);
    let (sink, mut notifications) = mpsc::channel(1);
    let all = ChangeMemory::new(256 << 10, None);
    let memory = Arc::new(Changes(all.clone()));
    let connection = FileConnection::new(Arc::new(config), Arc::new(sink), memory);
    let f = Fixture::new();
    let deep = format!("w/{}", vec!["d".repeat(200); 10].join("/"));
    f.dir(&deep);
    for id in 0..4 {
        let watch = FsWatchParams { debounce_ms: Some(20), ..FsWatchParams::new(id, f.path("w")) };
        connection.call(Backend::Here, watch).await.unwrap();
    }
    for at in 0..2000 {
        f.file(&format!("{deep}/{at}"), "");
    }
    // The memory is used up: the kernel's events for the unread notifications fill it.
    let is_full = || all.take(4 << 10).is_none();
    while !is_full() {
        tokio::time::sleep(Duration::from_millis(5)).await;
        f.file(&format!("{deep}/more"), "");
    }
    let mut overflowed = std::collections::BTreeSet::new();
    let mut seen = std::collections::BTreeSet::new();
    f.file("w/last", "");
    while seen.len() < 4 {
        let next = tokio::time::timeout(Duration::from_secs(20), notifications.recv()).await;
        let Some(FileNotification::Changed(changed)) = next.expect("a notification in time") else {
            panic!("another kind")
        };
        assert!(serde_json::to_vec(&changed).unwrap().len() <= (16 << 10) + 100);
        let is_last = |change: &FsChange| change.path == f.path("w/last");
        if changed.overflow {
            overflowed.insert(changed.watch_id);
            // The client reads the tree again; only what follows must be reported.
            std::fs::write(f.native("w/last"), "again").unwrap();
        } else if changed.changes.iter().any(is_last) {
            seen.insert(changed.watch_id);
        }
    }
    assert!(!overflowed.is_empty());
    drop(connection);
    // Everything comes back once the watches have ended.
    let everything = async {
        while all.take(256 << 10).is_none() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), everything).await.expect("all of it came back");
}

/// Memory for changes only.
struct Changes(Arc<ChangeMemory>);

impl AnswerMemory for Changes {
    fn reserve(&self, _bytes: u64) -> Pin<Box<dyn Future<Output = Reservation> + Send + '_>> {
        Box::pin(std::future::ready(Reservation::new(())))
    }

    fn changes(&self) -> Option<Arc<ChangeMemory>> {
        Some(self.0.clone())
    }
}
