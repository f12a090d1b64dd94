//! Whatever the server is, the error message says what to do.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};

use crate::commands::{Server, codex, output};

/// A server that sends `answer` to every connection, and then closes it or not.
fn answering(answer: &'static [u8], close: bool) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        let mut kept = Vec::new();
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(answer);
            if !close {
                kept.push(stream);
            }
        }
    });
    address.to_string()
}

fn info_on(place: &str) -> crate::commands::CommandOutput {
    output(codex().args(["info", "--on", place]))
}

#[test]
fn invalid_places_are_refused() {
    info_on("http://127.0.0.1:1").failed(2, "ws://HOST:PORT");
    info_on("ws://127.0.0.1:0").failed(1, "port 0");
    info_on("stdio:").failed(2, "expected a command");
    info_on("stdio:/no/such/program").failed(1, "check that it is installed");
    info_on("stdio:sh -c 'echo oops >&2; exit 4'").failed(1, "oops");
}

#[test]
fn a_refused_connection_is_reported() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    info_on(&format!("ws://{address}")).failed(1, "check that the server runs");
    output(codex().args(["run", "--on", &format!("ws://{address}"), "--", "ls"]))
        .failed(125, "check that the server runs");
}

#[test]
fn a_server_that_is_no_exec_server_is_reported() {
    let web = answering(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", false);
    info_on(&format!("ws://{web}")).failed(1, "does not speak websocket");
    let garbage = answering(b"220 mail.example.org ESMTP\r\n", true);
    info_on(&format!("ws://{garbage}")).failed(1, "does not speak websocket");
    info_on("stdio:echo hello").failed(1, "exec-server");
    info_on("stdio:cat").failed(1, "exec-server");
}

#[test]
fn a_silent_server_times_out() {
    let silent = answering(b"", false);
    info_on(&format!("ws://{silent}")).failed(1, "check the address");
}

#[test]
fn tls_to_a_plain_port_is_reported() {
    let server = Server::start();
    info_on(&server.url.replace("ws://", "wss://"))
        .failed(1, "use ws:// or http:// for a server without TLS");
}

#[test]
fn token_errors_say_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("token");
    std::fs::write(&file, "the right token here\n").unwrap();
    let file = file.to_str().unwrap();
    let server = Server::with(&["--ws-auth", "capability-token", "--ws-token-file", file]);
    info_on(&server.url).failed(1, "--token-file");
    output(server.codex("info").env("CODEX_EXEC_SERVER_TOKEN", "wrong")).failed(1, "--token-file");
    output(server.codex("info").env("CODEX_EXEC_SERVER_TOKEN", "the right token here")).success();
    output(server.codex("info").args(["--token-file", file])).success();
    output(server.codex("info").args(["--token-file", "/no/such"]))
        .failed(1, "cannot read the token");
}

#[test]
fn unwritable_destinations_are_reported() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "text").unwrap();
    let file = file.to_str().unwrap();
    let cp = |from: &str, to: &str| output(codex().args(["cp", from, to]));
    for there in [":/proc/no-such/file", ":/dev/null/file"] {
        cp(file, there).failed(1, &there[1..]);
    }
    let there = format!(":{file}");
    cp(&there, "/no/such/directory/file").failed(1, "create it first");
    cp(&there, "/proc/no-such-file").failed(1, "cannot write /proc/no-such-file");
    cp("/no/such/file", ":/tmp/").failed(1, "cannot read /no/such/file");
    cp(":/no/such/file", ".").failed(1, "cannot read :/no/such/file");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "nothing is left");
}

#[test]
fn an_invalid_response_is_reported() {
    // It speaks websocket, but sends no valid message.
    let answers: [(&[u8], &str); 3] = [
        (b"\x81\x05hello", "exec-server"),
        (b"\x81\x1b{\"id\":\"initialize\",\"result\"", "exec-server"),
        (b"\x88\x00", "exec-server"),
    ];
    for (answer, words) in answers {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let serving = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(&upgraded(&mut stream.try_clone().unwrap())).unwrap();
            stream.write_all(answer).unwrap();
            let _ = std::io::copy(&mut stream, &mut std::io::sink());
        });
        info_on(&format!("ws://{address}")).failed(1, words);
        serving.join().unwrap();
    }
}

/// Reads an upgrade request, and returns its response.
fn upgraded(stream: &mut TcpStream) -> Vec<u8> {
    let lines = BufReader::new(stream).lines().map(Result::unwrap);
    let mut key = String::new();
    for line in lines.take_while(|line| !line.is_empty()) {
        if let Some((name, value)) = line.split_once(": ")
            && name.eq_ignore_ascii_case("sec-websocket-key")
        {
            key = value.to_owned();
        }
    }
    let accept = base64_simd::STANDARD.encode_to_string(digest(
        &SHA1_FOR_LEGACY_USE_ONLY,
        format!("{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11").as_bytes(),
    ));
    format!(
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Accept: {accept}\r\n\r\n"
    )
    .into_bytes()
}

/// `codex run` on a server that refuses every request with this error.
fn run_refused(error: &serde_json::Value) -> crate::commands::CommandOutput {
    let directory = tempfile::tempdir().unwrap();
    let script = directory.path().join("server");
    let server = r#"
        read -r line
        echo '{"id":"initialize","result":{"sessionId":"s","environmentInfo":{"cwd":"file:///"}}}'
        while read -r line; do
            case $line in *'"id":'*) ;; *) continue ;; esac
            id=${line#*'"id":'}
            printf '{"id":%s,"error":%s}\n' "${id%%,*}" "$ERROR"
        done"#;
    std::fs::write(&script, server).unwrap();
    let place = format!("stdio:sh {}", script.display());
    let mut run = codex();
    run.env("ERROR", error.to_string()).args(["run", "--on", &place, "--", "cmd"]);
    output(&mut run)
}

#[test]
fn exit_codes_and_hints_come_from_the_kind_not_the_message() {
    let cases = [
        ("programNotFound", "gibt es nicht", 127, "check its name"),
        ("programNotExecutable", "geht nicht", 126, "check that it is a program"),
        ("workingDirectoryMissing", "wo denn?", 125, "pass another --cwd"),
        ("workingDirectoryDenied", "nein", 125, "pass another --cwd"),
        ("diskFull", "No such file or directory (os error 2)", 125, "(os error 2)"),
        ("ofTomorrow", "Permission denied (os error 13)", 125, "(os error 13)"),
    ];
    for (kind, message, code, hint) in cases {
        let data = serde_json::json!({"kind": kind, "more": [1]});
        let error = serde_json::json!({"code": -32603, "message": message, "data": data});
        run_refused(&error).failed(code, hint);
    }
    // As another implementation reports it.
    for (message, code) in [
        ("No such file or directory (os error 2)", 127),
        ("Exec format error (os error 8)", 126),
        ("it does not work", 125),
    ] {
        let error = serde_json::json!({"code": -32603, "message": message});
        run_refused(&error).failed(code, "");
    }
}

#[test]
fn shell_without_a_terminal_is_refused() {
    output(codex().args(["run", "-t", "--", "ls"])).failed(125, "-t needs a terminal");
}

#[test]
fn the_variable_names_the_server() {
    let server = Server::start();
    let said = output(codex().arg("info").env("CODEX_EXEC_SERVER_URL", &server.url)).success();
    assert!(said.contains(&server.url), "{said}");
    let said = output(codex().arg("info")).success();
    assert!(said.contains("this machine"), "{said}");
}

#[test]
fn a_stdio_command_can_be_the_server() {
    let binary = env!("CARGO_BIN_EXE_codex");
    let place = format!("stdio:{binary} exec-server --listen stdio");
    let said = output(codex().args(["run", "--on", &place, "--", "echo", "hello"]));
    assert_eq!(said.success(), "hello\n");
}

#[test]
fn info_prints_json() {
    let said = output(codex().args(["info", "--json"])).success();
    let info: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!(info["capabilities"]["processList"], true);
}
