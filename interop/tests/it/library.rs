//! Our client library on their server.

use codex_exec_client::{
    Approval, ErrorKind, ExecCommand, ExecServerClient, ExecServerClientConnectOptions,
    ExecServerError, Patch, PathUri, PermissionProfile, ProcessEvent, RemoteExecServerConnectArgs,
    SandboxContext,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::programs::{Implementation, Server, home};
use crate::support::soon;

fn server() -> Server {
    Server::start(Implementation::Theirs)
}

async fn connect(server: &Server) -> ExecServerClient {
    let args = RemoteExecServerConnectArgs::new(&server.url, "interop");
    soon(ExecServerClient::connect_websocket(args)).await.unwrap()
}

#[tokio::test]
#[ignore = "interop/run runs it"]
async fn commands_return_output_and_exit_code() {
    let server = server();
    let client = connect(&server).await;
    assert!(client.session_id().is_some());
    let command = ExecCommand::shell("printf out; printf err >&2; exit 3").cwd("/tmp").unwrap();
    let output = soon(client.run(command)).await.unwrap();
    assert_eq!(
        (output.status.code, &*output.stdout, &*output.stderr),
        (3, &b"out"[..], &b"err"[..])
    );
    assert_eq!(client.environment_status().await.unwrap().status, "ready");
    let error = client.run(ExecCommand::new(["no-such-program"])).await.unwrap_err();
    assert!(matches!(error, ExecServerError::Server { code: -32603, .. }), "{error}");
}

#[tokio::test]
#[ignore = "interop/run runs it"]
async fn their_errors_are_recognized() {
    let server = server();
    let client = connect(&server).await;
    let run = async |command: ExecCommand| soon(client.run(command)).await.unwrap_err().kind();
    assert_eq!(run(ExecCommand::new(["no-such-program"])).await, ErrorKind::ProgramNotFound);
    assert_eq!(run(ExecCommand::new(["no-such-program"]).tty()).await, ErrorKind::ProgramNotFound);
    assert_eq!(run(ExecCommand::new(["/etc/passwd"])).await, ErrorKind::ProgramNotExecutable);
    let command = ExecCommand::new(["sleep", "1000"]).process_id("taken").terminate_on_drop();
    let taken = soon(client.spawn(command)).await.unwrap();
    let params = serde_json::json!({"processId": "taken", "argv": ["true"], "cwd": "file:///",
                                    "env": {}, "tty": false});
    let params = serde_json::from_value(params).unwrap();
    let error = soon(client.process_start(params)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ProcessExists, "{error}");
    let mut args = RemoteExecServerConnectArgs::new(&server.url, "interop");
    args.resume_session_id = Some("none".to_owned());
    let error = soon(ExecServerClient::connect_websocket(args)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnknownSession, "{error}");
    let params = codex_exec_client::protocol::process::ReadParams {
        process_id: "none".into(),
        after_seq: None,
        max_bytes: None,
        wait_ms: None,
    };
    let error = soon(client.process_read(params)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnknownProcess, "{error}");
    let missing: PathUri = "/no/such/file".parse().unwrap();
    let error = soon(client.files().read_file(&missing)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PathNotFound, "{error}");
    let below: PathUri = "/etc/passwd/x".parse().unwrap();
    let error = soon(client.files().read_file(&below)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotADirectory, "{error}");
    drop(taken);
}

#[tokio::test]
#[ignore = "interop/run runs it"]
async fn command_environment_extends_the_servers() {
    let server = server();
    let client = connect(&server).await;
    let command = ExecCommand::shell("test -n \"$PATH\" && echo $GREETING").env("GREETING", "hi");
    let output = soon(client.run(command)).await.unwrap();
    assert_eq!(output.stdout, b"hi\n");
}

#[tokio::test]
#[ignore = "interop/run runs it"]
async fn sixteen_mebibytes_of_output_arrive_complete() {
    let server = server();
    let client = connect(&server).await;
    let command = ExecCommand::shell("head -c 16777216 /dev/zero | tr '\\0' x");
    let output = soon(client.run(command)).await.unwrap();
    assert_eq!(output.stdout.len(), 16 << 20);
    assert!(output.stdout.iter().all(|&b| b == b'x'));
}

#[tokio::test]
#[ignore = "interop/run runs it"]
async fn a_terminal_echoes_what_is_typed() {
    let server = server();
    let client = connect(&server).await;
    let mut process = client.spawn(ExecCommand::new(["cat"]).tty()).await.unwrap();
    let mut stdin = process.take_stdin().unwrap();
    let mut stdout = process.take_stdout().unwrap();
    stdin.write_all(b"hello\n").await.unwrap();
    let mut echoed = [0; 14];
    soon(stdout.read_exact(&mut echoed)).await.unwrap();
    assert_eq!(&echoed, b"hello\r\nhello\r\n");
    let error = process.resize(10, 20).await.unwrap_err();
    assert!(matches!(error, ExecServerError::Unsupported { .. }), "{error}");
    // The client types the terminal's EOF character, since the server cannot close stdin.
    soon(stdin.shutdown()).await.unwrap();
    assert_eq!(soon(process.wait()).await.unwrap().code, 0);
}

#[tokio::test]
#[ignore = "interop/run runs it"]
async fn input_is_piped_and_the_process_terminated() {
    let server = server();
    let client = connect(&server).await;
    let mut process = client.spawn(ExecCommand::new(["cat"]).pipe_stdin()).await.unwrap();
    let mut stdin = process.take_stdin().unwrap();
    let mut stdout = process.take_stdout().unwrap();
    let text: Vec<u8> = (0..300_000u32).flat_map(u32::to_le_bytes).collect();
    let mut back = vec![0; text.len()];
    let (wrote, read) =
        soon(async { tokio::join!(stdin.write_all(&text), stdout.read_exact(&mut back)) }).await;
    wrote.unwrap();
    read.unwrap();
    assert!(back == text, "the bytes come back in order");
    let error = soon(stdin.shutdown()).await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::Unsupported, "{error}");
    assert!(process.terminate().await.unwrap());
    assert_eq!(soon(process.wait()).await.unwrap().code, 137);
}

#[tokio::test]
#[ignore = "interop/run runs it"]
async fn a_session_is_resumed_with_its_processes() {
    let server = server();
    let client = connect(&server).await;
    let command = ExecCommand::shell("echo one; sleep 0.5; echo two; exit 4").process_id("job");
    let process = client.spawn(command).await.unwrap();
    let session = client.session_id();
    client.close().await;
    drop((process, client));

    let mut args = RemoteExecServerConnectArgs::new(&server.url, "interop");
    args.resume_session_id = session;
    let client = soon(ExecServerClient::connect_websocket(args)).await.unwrap();
    let process = client.attach("job", 0, ExecCommand::new(["x"])).await.unwrap();
    let output = soon(process.wait_with_output()).await.unwrap();
    assert_eq!((output.status.code, &*output.stdout), (4, &b"one\ntwo\n"[..]));
}

#[tokio::test]
#[ignore = "interop/run runs it"]
async fn stdio_command_serves_a_session() {
    let argv = Implementation::Theirs.stdio_argv();
    let options = ExecServerClientConnectOptions::default();
    let client = soon(ExecServerClient::connect_stdio_command(argv, options)).await.unwrap();
    let mut process = client.spawn(ExecCommand::shell("echo hi")).await.unwrap();
    let mut events = Vec::new();
    while let Some(event) = soon(process.next_event()).await {
        events.push(event);
    }
    // The exit may be published before the output has been read.
    let has = |wanted: fn(&ProcessEvent) -> bool| events.iter().filter(|e| wanted(e)).count() == 1;
    assert!(has(|e| matches!(e, ProcessEvent::Output { .. })), "{events:?}");
    assert!(has(|e| matches!(e, ProcessEvent::Exited(_))), "{events:?}");
    assert!(matches!(events.last(), Some(ProcessEvent::Closed)), "{events:?}");
    client.close().await;
    let error = client.environment_status().await.unwrap_err();
    assert!(matches!(error, ExecServerError::Closed { .. }), "{error}");
}

#[tokio::test]
#[ignore = "interop/run runs it"]
async fn a_denied_command_runs_again_after_approval() {
    let server = server();
    let client = connect(&server).await;
    let directory = home();
    let file = directory.path().join("greeting");
    let root = PathUri::try_from(directory.path()).unwrap();
    let read_only = SandboxContext::in_workspace(PermissionProfile::read_only(), root.clone());
    let command = || {
        ExecCommand::shell(format!("echo hi > {}", file.display()))
            .cwd_uri(root.clone())
            .sandbox(read_only.clone())
    };

    let refused = soon(client.run_with_approval(command(), async |denial| {
        assert!(denial.status.sandbox_denied);
        assert_eq!(denial.command.argv()[0], "/bin/sh");
        Approval::Refused
    }))
    .await
    .unwrap();
    assert!(!refused.status.success() && refused.status.sandbox_denied);
    assert!(!file.exists());

    let approved = soon(client.run_with_approval(command(), async |_| Approval::Approved)).await;
    assert!(approved.unwrap().status.success());
    assert_eq!(std::fs::read(&file).unwrap(), b"hi\n");

    let fine = ExecCommand::shell("exit 3").cwd_uri(root.clone()).sandbox(read_only.clone());
    let fine = soon(client.run_with_approval(fine, async |_| panic!("nothing was denied"))).await;
    assert_eq!(fine.unwrap().status.code, 3);
}

#[tokio::test]
#[ignore = "interop/run runs it"]
async fn patch_cannot_leave_its_workspace() {
    let server = server();
    let client = connect(&server).await;
    let (inside, outside) = (home(), home());
    let root = PathUri::try_from(inside.path()).unwrap();
    let target = outside.path().join("target");
    std::fs::write(&target, "a\n").unwrap();
    std::os::unix::fs::symlink(&target, inside.path().join("link")).unwrap();
    std::fs::write(inside.path().join("one"), "a\n").unwrap();
    std::fs::hard_link(inside.path().join("one"), inside.path().join("two")).unwrap();

    let workspace =
        SandboxContext::in_workspace(PermissionProfile::workspace_write(), root.clone());
    let files = client.files().in_sandbox(workspace);
    let patch = |name: &str| {
        let text = format!("*** Begin Patch\n*** Update File: {name}\n@@\n-a\n+b\n*** End Patch");
        Patch::parse(&text).unwrap()
    };
    let error = soon(files.apply_patch(&patch("link"), &root)).await.unwrap_err();
    assert!(error.to_string().contains("nothing was changed"), "{error}");
    assert_eq!(std::fs::read(&target).unwrap(), b"a\n");
    soon(files.apply_patch(&patch("one"), &root)).await.unwrap();
    assert_eq!(std::fs::read(inside.path().join("two")).unwrap(), b"b\n");
}
