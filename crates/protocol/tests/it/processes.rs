//! `process/*`.

use codex_exec_server_protocol::network::ManagedNetwork;
use codex_exec_server_protocol::process::*;
use codex_exec_server_protocol::resources::*;
use codex_exec_server_protocol::{Assurance, PathUri};

use crate::golden::{golden, reads_as, refuses};

fn path(text: &str) -> PathUri {
    text.parse().unwrap()
}

fn least() -> ExecParams {
    ExecParams {
        process_id: "p".into(),
        argv: vec!["ls".into(), "-l".into()],
        cwd: path("/tmp"),
        env: [("A", "1")].into_iter().collect(),
        env_policy: None,
        tty: false,
        pipe_stdin: false,
        arg0: None,
        sandbox: None,
        enforce_managed_network: false,
        metadata: None,
        managed_network: None,
        network_proxy: None,
        shell_snapshot: None,
        size: None,
        retain: None,
        limits: None,
    }
}

const PROXY: &str = r#"{"proxy":{"enabled":true,"enableSocks5":true,"enableSocks5Udp":false,"allowUpstreamProxy":false,"dangerouslyAllowAllUnixSockets":false,"mode":"full","domains":{"a.com":"allow"},"allowLocalBinding":false,"matchPorts":true}}"#;

fn opaque(text: &str) -> Option<Opaque> {
    Some(serde_json::from_str(text).unwrap())
}

#[test]
fn starts() {
    golden(
        &least(),
        r#"{"processId":"p","argv":["ls","-l"],"cwd":"file:///tmp","env":{"A":"1"},"tty":false,"pipeStdin":false}"#,
    );
    // The newest client's nulls, an older one's absences, a native path.
    reads_as(
        r#"{"processId":"p","argv":["ls","-l"],"cwd":"/tmp","env":{"A":"1"},"envPolicy":null,"tty":false,"arg0":null,"sandbox":null,"metadata":null,"managedNetwork":null,"networkProxy":null,"shellSnapshot":null,"enforceManagedNetwork":false,"size":null,"retain":null,"limits":null,"future":{"x":[1]}}"#,
        &least(),
    );
    let most = ExecParams {
        env_policy: Some(EnvPolicy::default()),
        tty: true,
        pipe_stdin: true,
        arg0: Some("-sh".into()),
        enforce_managed_network: true,
        metadata: opaque(r#"{"threadId":"t","toolCallId":"c"}"#),
        managed_network: Some(ManagedNetwork { loopback_ports: vec![80], ..Default::default() }),
        network_proxy: Some(serde_json::from_str(PROXY).unwrap()),
        shell_snapshot: Some(ShellSnapshotParams {
            scope_id: "s".into(),
            shell: SnapshotShell { name: "bash".into(), path: "/bin/bash".into() },
        }),
        size: Some(TerminalSize { rows: 5, cols: 7 }),
        retain: Some(Retain { bytes: 9, on_full: OnFull::Drop, until: RetainUntil::Sent }),
        ..least()
    };
    golden(
        &most,
        r#"{"processId":"p","argv":["ls","-l"],"cwd":"file:///tmp","env":{"A":"1"},"envPolicy":{"inherit":"all","ignoreDefaultExcludes":false,"exclude":[],"set":{},"includeOnly":[]},"tty":true,"pipeStdin":true,"arg0":"-sh","enforceManagedNetwork":true,"metadata":{"threadId":"t","toolCallId":"c"},"managedNetwork":{"loopbackPorts":[80],"allowLocalBinding":false},"networkProxy":{"proxy":{"enabled":true,"enableSocks5":true,"enableSocks5Udp":false,"allowUpstreamProxy":false,"dangerouslyAllowAllUnixSockets":false,"mode":"full","domains":{"a.com":"allow"},"allowLocalBinding":false,"matchPorts":true},"auditMetadata":{}},"shellSnapshot":{"scopeId":"s","shell":{"name":"bash","path":"/bin/bash"}},"size":{"rows":5,"cols":7},"retain":{"bytes":9,"onFull":"drop"}}"#,
    );
    reads_as(
        r#"{"processId":"p","argv":["ls","-l"],"cwd":"/tmp","env":{"A":"1"},"managedNetwork":{}}"#,
        &ExecParams { managed_network: Some(ManagedNetwork::default()), ..least() },
    );
    refuses::<ExecParams>(r#"{"processId":"p","argv":["ls"],"cwd":"/","networkProxy":{"a":[1]}}"#);
    refuses::<ExecParams>(r#"{"argv":["ls"],"cwd":"/"}"#);
    refuses::<ExecParams>(r#"{"processId":"p","cwd":"/"}"#);
    refuses::<ExecParams>(r#"{"processId":"p","argv":["ls"]}"#);
    refuses::<ExecParams>(r#"{"processId":"p","argv":["ls"],"cwd":"here"}"#);
    refuses::<ExecParams>(r#"{"processId":"p","argv":["ls"],"cwd":"/","env":null}"#);
    refuses::<ExecParams>(r#"{"processId":"p","argv":["ls"],"cwd":"/","env":{"A":1}}"#);
}

#[test]
fn env_policies_match_golden_json() {
    let policy = EnvPolicy {
        inherit: EnvInherit::Core,
        ignore_default_excludes: true,
        exclude: vec!["A*".into()],
        set: [("B", "c")].into_iter().collect(),
        include_only: vec!["B".into()],
    };
    golden(
        &policy,
        r#"{"inherit":"core","ignoreDefaultExcludes":true,"exclude":["A*"],"set":{"B":"c"},"includeOnly":["B"]}"#,
    );
    reads_as("{}", &EnvPolicy::default());
    golden(&EnvInherit::None, r#""none""#);
    refuses::<EnvPolicy>(r#"{"inherit":"most"}"#);
}

#[test]
fn limits_match_golden_json() {
    let mut limits = ResourceLimits::default();
    golden(&limits, "{}");
    let mut applied = AppliedLimits::default();
    for (n, &resource) in (1..).zip(Resource::ALL) {
        limits.set(resource, Some(n));
        applied.set(resource, Some(AppliedLimit { value: n, by: LimitMechanism::Watchdog }));
        assert_eq!(limits.get(resource), Some(n));
    }
    golden(
        &limits,
        r#"{"wallMs":1,"idleMs":2,"cpuMs":3,"cpusMilli":4,"memoryBytes":5,"pids":6,"openFiles":7,"outputBytes":8,"diskBytes":9}"#,
    );
    let text = serde_json::to_string(&applied).unwrap();
    assert!(text.starts_with(r#"{"wallMs":{"value":1,"by":"watchdog"},"idleMs""#), "{text}");
    let start =
        |limits: &str| format!(r#"{{"processId":"p","argv":["ls"],"cwd":"/","limits":{limits}}}"#);
    let parsed: ExecParams = serde_json::from_str(&start(r#"{"pids":6}"#)).unwrap();
    assert_eq!(parsed.limits.unwrap().iter().collect::<Vec<_>>(), [(Resource::Pids, 6)]);
    // A limit that this version does not know would not be enforced.
    refuses::<ExecParams>(&start(r#"{"threads":6}"#));
    refuses::<ExecParams>(&start(r#"{"pids":-1}"#));
    // A newer server's are ignored.
    reads_as(r#"{"threads":{"value":1,"by":"magic"}}"#, &AppliedLimits::default());
    assert_eq!(
        serde_json::from_str::<LimitMechanism>(r#""magic""#).unwrap(),
        LimitMechanism::Other
    );
    for ended in [
        EndedBy::Oom,
        EndedBy::Wall,
        EndedBy::Idle,
        EndedBy::Cpu,
        EndedBy::Pids,
        EndedBy::Output,
        EndedBy::Disk,
        EndedBy::Signal,
        EndedBy::Terminate,
        EndedBy::Server,
    ] {
        golden(&ended, &format!("{:?}", ended.name()));
    }
    assert_eq!(serde_json::from_str::<EndedBy>(r#""magic""#).unwrap(), EndedBy::Other);
}

#[test]
fn retention_options_match_golden_json() {
    reads_as(
        r#"{"bytes":9}"#,
        &Retain { bytes: 9, on_full: OnFull::Wait, until: RetainUntil::Sent },
    );
    golden(
        &Retain { bytes: 9, on_full: OnFull::Wait, until: RetainUntil::Sent },
        r#"{"bytes":9,"onFull":"wait"}"#,
    );
    refuses::<Retain>(r#"{"onFull":"wait"}"#);
    refuses::<Retain>(r#"{"bytes":9,"onFull":"grow"}"#);
}

#[test]
fn start_responses_of_every_revision_parse() {
    let mut answer = ExecResponse {
        process_id: "p".into(),
        sandbox_type: Some(SandboxType::None),
        sandbox_assurance: None,
        network: None,
        limits: None,
    };
    golden(&answer, r#"{"processId":"p","sandboxType":"none"}"#);
    for (kind, name) in [
        (SandboxType::LinuxSeccomp, "linuxSeccomp"),
        (SandboxType::MacosSeatbelt, "macosSeatbelt"),
        (SandboxType::WindowsRestrictedToken, "windowsRestrictedToken"),
    ] {
        answer.sandbox_type = Some(kind);
        golden(&answer, &format!(r#"{{"processId":"p","sandboxType":"{name}"}}"#));
    }
    answer.sandbox_type = Some(SandboxType::Other);
    reads_as(r#"{"processId":"p","sandboxType":"somethingNew"}"#, &answer);
    answer.sandbox_type = None;
    golden(&answer, r#"{"processId":"p"}"#);
    reads_as(r#"{"processId":"p","sandboxType":null}"#, &answer);
    reads_as(r#"{"processId":"p","sandboxAssurance":"somethingNew"}"#, &answer);
    answer.sandbox_type = Some(SandboxType::LinuxSeccomp);
    for level in Assurance::ALL {
        answer.sandbox_assurance = Some(level);
        let text = r#"{"processId":"p","sandboxType":"linuxSeccomp","sandboxAssurance":"#;
        golden(&answer, &format!(r#"{text}"{level}"}}"#));
    }
}

#[test]
fn process_notifications_match_golden_json() {
    let output = |stream| ExecOutputDeltaNotification {
        process_id: "p".into(),
        seq: 7,
        stream,
        chunk: b"hi".to_vec().into(),
    };
    for (stream, name) in [
        (OutputStream::Stdout, "stdout"),
        (OutputStream::Stderr, "stderr"),
        (OutputStream::Pty, "pty"),
    ] {
        golden(
            &output(stream),
            &format!(r#"{{"processId":"p","seq":7,"stream":"{name}","chunk":"aGk="}}"#),
        );
    }
    let mut exited = ExecExitedNotification {
        process_id: "p".into(),
        seq: 8,
        exit_code: 137,
        sandbox_denied: false,
        ended_by: None,
        usage: None,
    };
    golden(&exited, r#"{"processId":"p","seq":8,"exitCode":137,"sandboxDenied":false}"#);
    reads_as(r#"{"processId":"p","seq":8,"exitCode":137}"#, &exited);
    (exited.exit_code, exited.sandbox_denied) = (-1, true);
    golden(&exited, r#"{"processId":"p","seq":8,"exitCode":-1,"sandboxDenied":true}"#);
    exited.ended_by = Some(EndedBy::Oom);
    exited.usage =
        Some(Usage { cpu_us: 1, peak_memory_bytes: Some(2), read_bytes: 3, written_bytes: 4 });
    golden(
        &exited,
        r#"{"processId":"p","seq":8,"exitCode":-1,"sandboxDenied":true,"endedBy":"oom","usage":{"cpuUs":1,"peakMemoryBytes":2,"readBytes":3,"writtenBytes":4}}"#,
    );
    let closed = |seq| ExecClosedNotification { process_id: "p".into(), seq };
    golden(&closed(Some(9)), r#"{"processId":"p","seq":9}"#);
    golden(&closed(None), r#"{"processId":"p"}"#);
}

#[test]
fn reads() {
    let mut params =
        ReadParams { process_id: "p".into(), after_seq: None, max_bytes: None, wait_ms: None };
    golden(&params, r#"{"processId":"p"}"#);
    reads_as(r#"{"processId":"p","afterSeq":null,"maxBytes":null,"waitMs":null}"#, &params);
    (params.after_seq, params.max_bytes, params.wait_ms) = (Some(1), Some(2), Some(u64::MAX));
    golden(&params, r#"{"processId":"p","afterSeq":1,"maxBytes":2,"waitMs":18446744073709551615}"#);
    for bad in [r#""afterSeq":-1"#, r#""afterSeq":1.5"#, r#""maxBytes":"1""#, r#""waitMs":-1"#] {
        refuses::<ReadParams>(&format!(r#"{{"processId":"p",{bad}}}"#));
    }

    let mut read = ReadResponse { next_seq: 1, ..ReadResponse::default() };
    golden(
        &read,
        r#"{"chunks":[],"nextSeq":1,"exited":false,"exitCode":null,"closed":false,"failure":null,"sandboxDenied":false}"#,
    );
    reads_as(r#"{"chunks":[],"nextSeq":1,"exited":false,"exitCode":null,"closed":false}"#, &read);
    read = ReadResponse {
        chunks: vec![ProcessOutputChunk {
            seq: 3,
            stream: OutputStream::Pty,
            chunk: b"hi".to_vec().into(),
        }],
        next_seq: 6,
        exited: true,
        exit_code: Some(0),
        closed: true,
        failure: Some("disk full".into()),
        sandbox_denied: true,
        dropped_bytes: 12,
        ..ReadResponse::default()
    };
    golden(
        &read,
        r#"{"chunks":[{"seq":3,"stream":"pty","chunk":"aGk="}],"nextSeq":6,"exited":true,"exitCode":0,"closed":true,"failure":"disk full","sandboxDenied":true,"droppedBytes":12}"#,
    );
}

#[test]
fn writes() {
    let mut write = WriteParams {
        process_id: "p".into(),
        chunk: b"hi".to_vec().into(),
        write_id: None,
        close_stdin: false,
    };
    golden(&write, r#"{"processId":"p","chunk":"aGk="}"#);
    reads_as(r#"{"processId":"p","chunk":"aGk=","writeId":null,"closeStdin":false}"#, &write);
    (write.write_id, write.close_stdin) = (Some("w".into()), true);
    golden(&write, r#"{"processId":"p","chunk":"aGk=","writeId":"w","closeStdin":true}"#);
    refuses::<WriteParams>(r#"{"processId":"p"}"#);
    refuses::<WriteParams>(r#"{"processId":"p","chunk":"aGk"}"#);
    refuses::<WriteParams>(r#"{"processId":"p","chunk":[104,105]}"#);
    for (status, name) in [
        (WriteStatus::Accepted, "accepted"),
        (WriteStatus::UnknownProcess, "unknownProcess"),
        (WriteStatus::StdinClosed, "stdinClosed"),
        (WriteStatus::Starting, "starting"),
    ] {
        golden(&WriteResponse { status }, &format!(r#"{{"status":"{name}"}}"#));
    }
}

#[test]
fn signals() {
    for (signal, name) in [
        (ProcessSignal::Interrupt, "interrupt"),
        (ProcessSignal::Terminate, "terminate"),
        (ProcessSignal::Kill, "kill"),
        (ProcessSignal::Hangup, "hangup"),
        (ProcessSignal::Quit, "quit"),
        (ProcessSignal::User1, "user1"),
        (ProcessSignal::User2, "user2"),
        (ProcessSignal::Stop, "stop"),
        (ProcessSignal::Continue, "continue"),
    ] {
        let params = SignalParams { process_id: "p".into(), signal };
        golden(&params, &format!(r#"{{"processId":"p","signal":"{name}"}}"#));
    }
    golden(&SignalResponse {}, "{}");
    refuses::<SignalParams>(r#"{"processId":"p","signal":"SIGINT"}"#);
    refuses::<SignalParams>(r#"{"processId":"p","signal":2}"#);
    golden(&TerminateParams { process_id: "p".into() }, r#"{"processId":"p"}"#);
    golden(&TerminateResponse { running: true }, r#"{"running":true}"#);
}

#[test]
fn sizes_and_lists() {
    golden(
        &ResizeParams { process_id: "p".into(), rows: 50, cols: 132, fit: None },
        r#"{"processId":"p","rows":50,"cols":132}"#,
    );
    refuses::<ResizeParams>(r#"{"processId":"p","rows":65536,"cols":1}"#);
    golden(&ResizeResponse { size: None }, "{}");
    golden(&ListParams {}, "{}");
    golden(&ListResponse::default(), r#"{"processes":[]}"#);
    let line = ProcessInfo {
        process_id: "p".into(),
        argv: vec!["ls".into()],
        cwd: path("/tmp"),
        tty: true,
        pid: Some(7),
        started_at_ms: 1_700_000_000_000,
        exited: true,
        exit_code: Some(3),
        closed: false,
        next_seq: 4,
        limits: None,
        ended_by: None,
        usage: None,
    };
    golden(
        &ListResponse { processes: vec![line] },
        r#"{"processes":[{"processId":"p","argv":["ls"],"cwd":"file:///tmp","tty":true,"pid":7,"startedAtMs":1700000000000,"exited":true,"exitCode":3,"closed":false,"nextSeq":4}]}"#,
    );
}

#[test]
fn debug_hides_environment_values() {
    let mut start = least();
    start.env = [("NAME", "password")].into_iter().collect();
    start.env_policy = Some(EnvPolicy { set: start.env.clone(), ..EnvPolicy::default() });
    start.metadata = opaque(r#""password""#);
    let shown = format!("{start:?}");
    assert!(shown.contains("NAME") && !shown.contains("password"), "{shown}");
    let write = WriteParams {
        process_id: "p".into(),
        chunk: b"password".to_vec().into(),
        write_id: None,
        close_stdin: false,
    };
    assert!(!format!("{write:?}").contains("password"));
}
