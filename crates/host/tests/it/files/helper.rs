//! Operations in a helper process.

use std::process::Stdio;

use codex_exec_host::files::{Backend, FileNotification, HelperClient, serve_helper};
use codex_exec_server_protocol::files::*;

use super::connection::Client;
use super::*;
use crate::skipped::{runs_as_root, skipped};

/// The example beside this test's executable.
fn helper_program() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let program = own.parent().unwrap().parent().unwrap().join("examples/file_helper");
    assert!(program.exists(), "run `cargo build -p codex-exec-host --examples` first");
    program
}

fn start() -> (tokio::process::Child, HelperClient) {
    let mut child = tokio::process::Command::new(helper_program())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let (output, input) = (child.stdout.take().unwrap(), child.stdin.take().unwrap());
    let helper = HelperClient::new(output, input, &FilesConfig::default());
    (child, helper)
}

fn client() -> (tokio::process::Child, Client) {
    let (child, helper) = start();
    (child, Client::with(FilesConfig::default(), Backend::Helper(helper)))
}

#[tokio::test]
async fn operations_in_a_helper_match_local_ones() {
    let (mut child, mut c) = client();
    let data: Vec<u8> = (0..5_000_000u32).map(|at| at as u8).collect();
    let path = c.f.path("x");
    c.call(FsWriteFileParams::new(path.clone(), data.clone())).await.unwrap();
    assert_eq!(c.call(FsReadFileParams::new(path.clone())).await.unwrap().data[..], data[..]);
    assert_eq!(c.call(FsGetMetadataParams::new(path.clone())).await.unwrap().size, 5_000_000);
    let none = c.call(FsReadFileParams::new(c.f.path("none"))).await.unwrap_err();
    assert_eq!(none.kind(), ErrorKind::PathNotFound);

    c.call(FsOpenParams::new("h", path.clone(), FsOpenMode::Read)).await.unwrap();
    let block = c.call(FsReadBlockParams::new("h", 4_999_990, 100)).await.unwrap();
    assert_eq!((&block.chunk[..], block.eof), (&data[4_999_990..], true));
    c.call(FsCloseParams::new("h")).await.unwrap();

    c.f.file("d/e/f", "needle\n");
    let walk = c.call(FsWalkParams::new(c.f.path(""), FsWalkOptions::default())).await.unwrap();
    assert_eq!(walk.entries.len(), 4);
    let search = FsSearchParams {
        search_id: Some("s".into()),
        ..FsSearchParams::new(c.f.path("d"), "needle")
    };
    assert_eq!(c.call(search).await.unwrap().matches, 1);
    assert!(matches!(c.next().await, FileNotification::SearchMatches(_)));

    c.call(FsWatchParams { debounce_ms: Some(20), ..FsWatchParams::new(1, c.f.path("d")) })
        .await
        .unwrap();
    c.f.file("d/new", "");
    let FileNotification::Changed(told) = c.next().await else { panic!("another kind") };
    assert_eq!(told.changes[0].path, c.f.path("d/new"));
    c.call(FsUnwatchParams::new(1)).await.unwrap();

    // The helper ends when its input does.
    drop(c.connection);
    drop(c.backend);
    assert!(child.wait().await.unwrap().success());
}

#[tokio::test]
async fn events_beyond_the_window_wait_for_acknowledgement() {
    let (_child, mut c) = client();
    for at in 0..60 {
        c.f.file(&format!("{at:02}"), format!("{} hit\n", "x".repeat(3000)).repeat(40));
    }
    let mut search = FsSearchParams::new(c.f.path(""), "hit");
    (search.search_id, search.max_matches) = (Some("s".into()), Some(100_000));
    let running = tokio::spawn(c.connection.call(c.backend.clone(), search));
    // While the matches are not consumed, other requests continue.
    for _ in 0..50 {
        c.call(FsGetMetadataParams::new(c.f.path("00"))).await.unwrap();
    }
    let mut lines = 0;
    while lines < 2400 {
        let FileNotification::SearchMatches(batch) = c.next().await else { panic!("another kind") };
        lines += batch.files.iter().map(|file| file.lines.len()).sum::<usize>();
    }
    assert_eq!(running.await.unwrap().unwrap().matches, 2400);
}

#[tokio::test]
async fn search_in_a_helper_can_be_cancelled_by_its_id() {
    let (_child, mut c) = client();
    for at in 0..60 {
        c.f.file(&format!("{at:02}"), format!("{} hit\n", "x".repeat(3000)).repeat(300));
    }
    let mut search = FsSearchParams::new(c.f.path(""), "hit");
    (search.search_id, search.max_matches) = (Some("s".into()), Some(100_000));
    let running = tokio::spawn(c.connection.call(c.backend.clone(), search));
    c.next().await;
    c.call(FsCancelSearchParams::new("s")).await.unwrap();
    let drain = async { while c.told.recv().await.is_some() {} };
    let answer = tokio::select! {
        answer = running => answer.unwrap().unwrap().into_response(),
        () = drain => panic!("the connection ended"),
    };
    assert!(answer.cancelled);
}

#[tokio::test]
async fn killed_helper_keeps_the_old_file_and_leaves_no_temporary_file() {
    let (mut child, c) = client();
    c.f.file("x", "old");
    for (id, name) in [("a", "x"), ("b", "new")] {
        c.call(FsOpenParams::new(id, c.f.path(name), FsOpenMode::ReplaceAtomic)).await.unwrap();
        c.call(FsWriteBlockParams::new(id, 0, vec![1; 1 << 20])).await.unwrap();
    }
    child.kill().await.unwrap();
    assert_eq!(c.f.names(""), ["x"]);
    assert_eq!(c.f.content("x"), b"old");
    // Later requests fail and say why.
    let error = c.call(FsGetMetadataParams::new(c.f.path("x"))).await.unwrap_err();
    assert!(matches!(error, FileError::Helper { .. }), "{error}");
    let error = c.call(FsWriteBlockParams::new("a", 0, vec![1])).await.unwrap_err();
    assert!(matches!(error, FileError::Helper { .. }), "{error}");
}

#[tokio::test]
async fn handle_is_used_where_it_was_opened() {
    let (_child, c) = client();
    let path = c.f.file("x", "abc");
    c.call(FsOpenParams::new("h", path.clone(), FsOpenMode::Read)).await.unwrap();
    let here = c.connection.call(Backend::Here, FsReadBlockParams::new("h", 0, 3)).await.unwrap();
    assert_eq!(here.chunk[..], b"abc"[..]);
    let taken =
        c.connection.call(Backend::Here, FsOpenParams::new("h", path, FsOpenMode::Read)).await;
    assert!(matches!(taken, Err(FileError::HandleTaken { .. })));
}

#[tokio::test]
async fn sandbox_refusals_are_reported_as_not_permitted() {
    if !runs_as_root() {
        return;
    }
    let (output, input, _child) = {
        let mut command = tokio::process::Command::new(helper_program());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        command.uid(65534).gid(65534);
        let Ok(mut child) = command.spawn() else {
            return skipped("nobody cannot reach the helper program");
        };
        (child.stdout.take().unwrap(), child.stdin.take().unwrap(), child)
    };
    let helper = HelperClient::new(output, input, &FilesConfig::default());
    let c = Client::with(FilesConfig::default(), Backend::Helper(helper));
    chmod(&c.f.root, 0o755);
    let path = c.f.file("secret", "x");
    chmod(path.as_path(), 0o600);
    let RpcError { code, message, .. } =
        c.call(FsReadFileParams::new(path)).await.unwrap_err().into();
    assert_eq!(code, INVALID);
    assert!(message.starts_with("Operation not permitted: "), "{message}");
    assert!(message.contains("/secret: Permission denied"), "{message}");
}

/// Over in-memory pipes, without a process.
#[tokio::test]
async fn helper_can_run_in_a_thread() {
    let (input_read, input_write) = rustix::pipe::pipe().unwrap();
    let (output_read, output_write) = rustix::pipe::pipe().unwrap();
    let helper = std::thread::spawn(move || {
        let (input, output) = (std::fs::File::from(input_read), std::fs::File::from(output_write));
        serve_helper(input, output, Arc::new(FilesConfig::default()))
    });
    let receiver = tokio::net::unix::pipe::Receiver::from_owned_fd(output_read).unwrap();
    let sender = tokio::net::unix::pipe::Sender::from_owned_fd(input_write).unwrap();
    let client = HelperClient::new(receiver, sender, &FilesConfig::default());
    let c = Client::with(FilesConfig::default(), Backend::Helper(client));
    let path = c.f.file("x", "abc");
    let many: Vec<_> = (0..300)
        .map(|_| {
            tokio::spawn(c.connection.call(c.backend.clone(), FsReadFileParams::new(path.clone())))
        })
        .collect();
    for one in many {
        assert_eq!(one.await.unwrap().unwrap().data[..], b"abc"[..]);
    }
    drop(c);
    tokio::task::spawn_blocking(|| helper.join().unwrap().unwrap()).await.unwrap();
}

#[tokio::test]
async fn damaged_input_ends_the_helper_and_damaged_output_fails_its_calls() {
    use std::io::Cursor;
    let config = Arc::new(FilesConfig::default());
    assert!(serve_helper(Cursor::new([0xff; 64]), Vec::new(), config.clone()).is_err());
    assert!(serve_helper(Cursor::new([1, 0, 0, 0, 0]), Vec::new(), config.clone()).is_err());
    assert!(serve_helper(Cursor::new([]), Vec::new(), config.clone()).is_ok());
    let (near, far) = tokio::io::duplex(4096);
    let (output, input) = tokio::io::split(near);
    let client = HelperClient::new(output, input, &config);
    let c = Client::with(FilesConfig::default(), Backend::Helper(client.clone()));
    let call =
        tokio::spawn(c.connection.call(c.backend.clone(), FsReadFileParams::new(c.f.path("x"))));
    let (_read, mut write) = tokio::io::split(far);
    tokio::io::AsyncWriteExt::write_all(&mut write, &[0xff; 64]).await.unwrap();
    let error = call.await.unwrap().unwrap_err();
    assert!(
        matches!(&error, FileError::Helper { reason } if reason.contains("longer than")),
        "{error}"
    );
    assert!(client.ended().is_some());
}
