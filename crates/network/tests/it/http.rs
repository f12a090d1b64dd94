//! The HTTP proxy.

use std::net::Ipv4Addr;

use codex_exec_network::decide::Mode;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::world::{Notebook, World, allow, body, exchange, read_head, request, rules, status};

#[tokio::test]
async fn requests_pass_without_hop_headers() {
    let world = World::new().await;
    let proxy = world.allowing(&["good.com"]).await;
    let answer = exchange(
        proxy.http_port(),
        b"GET http://good.com/x?y HTTP/1.1\r\nHost: good.com\r\nProxy-Connection: keep-alive\r\n\
          Connection: close, X-Mine\r\nX-Mine: 1\r\nKeep-Alive: 5\r\nTE: trailers\r\n\
          Proxy-Authorization: Basic x\r\nVia: 1.1 me\r\nUpgrade: h2c\r\n\r\n",
    )
    .await;
    assert_eq!(status(&answer), 200);
    assert_eq!(body(&answer), "GET /x?y HTTP/1.1|Host: good.com|Via: 1.1 me||");
    let head = answer.split("\r\n\r\n").next().unwrap().to_lowercase();
    for gone in ["keep-alive", "proxy-authenticate", "x-hop"] {
        assert!(!head.contains(gone), "{head}");
    }
    assert!(head.contains("x-origin: yes"));
    assert_eq!(world.internet.connected(), ["93.184.216.34:80"]);
    let [record] = &world.notebook.take()[..] else { panic!() };
    assert_eq!((record.host.as_str(), record.port), ("good.com", 80));
    assert_eq!(record.method.as_deref(), Some("GET"));
    assert_eq!(record.protocol.as_str(), "http");
    assert_eq!(record.scope.as_str(), "domain");
    assert!(record.client.as_deref().unwrap().starts_with("127.0.0.1:"));
}

#[tokio::test]
async fn origin_form_needs_a_host_header() {
    let world = World::new().await;
    let proxy = world.allowing(&["good.com"]).await;
    let port = proxy.http_port();
    assert_eq!(
        body(&request(port, "GET /x", "good.com:8").await),
        "GET /x HTTP/1.1|Host: good.com:8||"
    );
    assert_eq!(
        body(&request(port, "OPTIONS *", "good.com").await),
        "OPTIONS * HTTP/1.1|Host: good.com||"
    );
    let answer = exchange(port, b"GET /x HTTP/1.1\r\nConnection: close\r\n\r\n").await;
    assert_eq!((status(&answer), body(&answer)), (400, "missing host"));
    let answer = exchange(port, b"GET http://good.com/x HTTP/1.0\r\n\r\n").await;
    assert_eq!(body(&answer), "GET /x HTTP/1.1|host: good.com||");
}

#[tokio::test]
async fn each_request_of_a_connection_is_judged() {
    let world = World::new().await;
    let proxy = world.allowing(&["good.com"]).await;
    let answer = exchange(
        proxy.http_port(),
        b"GET http://good.com/1 HTTP/1.1\r\nHost: good.com\r\n\r\n\
          GET http://other.com/2 HTTP/1.1\r\nHost: other.com\r\n\r\n\
          GET http://good.com/3 HTTP/1.1\r\nHost: good.com\r\nConnection: close\r\n\r\n",
    )
    .await;
    let statuses: Vec<_> = answer
        .match_indices("HTTP/1.1 ")
        .filter_map(|(at, _)| answer.get(at + 9..at + 12))
        .collect();
    // The bodies of the answers hold request lines, which end in the same words.
    let statuses: Vec<_> =
        statuses.into_iter().filter(|code| code.parse::<u16>().is_ok()).collect();
    assert_eq!(statuses, ["200", "403", "200"]);
    assert_eq!(world.internet.connected(), ["93.184.216.34:80", "93.184.216.34:80"]);
    assert_eq!(
        Notebook::words(&world.notebook.take()),
        [
            ("allow", "baseline_policy", "allow".into()),
            ("deny", "baseline_policy", "not_allowed".into()),
            ("allow", "baseline_policy", "allow".into()),
        ]
    );
}

#[tokio::test]
async fn refusals_have_the_words_of_the_protocol() {
    let world = World::new().await;
    world.internet.name("inside.com", &["10.0.0.1"]);
    let mut config = world.config(rules(&["good.com", "inside.com"], &["bad.com"], &[]));
    config.mode = Mode::Limited;
    let proxy = world.start(config).await;
    for (method, host, reason, kind, source, message) in [
        (
            "GET",
            "new.com",
            "not_allowed",
            "blocked-by-allowlist",
            "baseline_policy",
            "Domain not in allowlist.",
        ),
        (
            "GET",
            "bad.com",
            "denied",
            "blocked-by-denylist",
            "baseline_policy",
            "Domain denied by the sandbox policy.",
        ),
        (
            "GET",
            "inside.com",
            "not_allowed_local",
            "blocked-by-allowlist",
            "baseline_policy",
            "Sandbox policy blocks local/private network addresses.",
        ),
        (
            "POST",
            "good.com",
            "method_not_allowed",
            "blocked-by-method-policy",
            "mode_guard",
            "Method not allowed in limited mode.",
        ),
    ] {
        let answer = request(
            proxy.http_port(),
            &format!("{method} http://{host}:81/"),
            &format!("{host}:81"),
        )
        .await;
        assert_eq!(status(&answer), 403);
        assert!(answer.contains(&format!("\r\nx-proxy-error: {kind}\r\n")), "{answer}");
        assert!(answer.contains("\r\ncontent-type: application/json\r\n"), "{answer}");
        let expected = format!(
            r#"{{"status":"blocked","host":"{host}","reason":"{reason}","decision":"deny","source":"{source}","protocol":"http","port":81,"message":"{message}"}}"#
        );
        assert_eq!(body(&answer), expected);
    }
    let records = world.notebook.take();
    assert_eq!(records.len(), 5, "the host passes before the method is judged");
    assert_eq!(records[4].scope.as_str(), "non_domain");
    for (target, kind, message) in [
        ("new.com:443", "blocked-by-allowlist", "Domain not in allowlist."),
        ("bad.com:443", "blocked-by-denylist", "Domain denied by the sandbox policy."),
        ("good.com:443", "blocked-by-mitm-required", "MITM required for limited HTTPS."),
    ] {
        let answer = request(proxy.http_port(), &format!("CONNECT {target}"), target).await;
        assert_eq!((status(&answer), body(&answer)), (403, message));
        assert!(answer.contains(&format!("\r\nx-proxy-error: {kind}\r\n")), "{answer}");
        assert!(answer.contains("\r\ncontent-type: text/plain\r\n"), "{answer}");
    }
    assert_eq!(world.internet.connected(), Vec::<String>::new());
}

#[tokio::test]
async fn tunnels_carry_bytes_to_any_port() {
    let world = World::new().await;
    let proxy = world.allowing(&["good.com"]).await;
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.http_port())).await.unwrap();
    // Bytes that follow the request belong to the tunnel.
    stream
        .write_all(b"CONNECT good.com:2222 HTTP/1.1\r\nHost: x\r\n\r\nGET /in HTTP/1.1\r\n\r\n")
        .await
        .unwrap();
    assert!(read_head(&mut stream).await.unwrap().starts_with("HTTP/1.1 200 OK\r\n"));
    assert!(read_head(&mut stream).await.unwrap().starts_with("HTTP/1.1 200 OK\r\n"));
    let mut echoed = [0; 18];
    stream.read_exact(&mut echoed).await.unwrap();
    assert_eq!(&echoed, b"GET /in HTTP/1.1||");
    assert_eq!(world.internet.connected(), ["93.184.216.34:2222"]);
    // The end of one side is passed on to the other.
    stream.shutdown().await.unwrap();
    assert_eq!(stream.read(&mut echoed).await.unwrap(), 0);
}

#[tokio::test]
async fn a_tunnel_is_promised_before_its_target_is_reached() {
    let world = World::new().await;
    let proxy = world.allowing(&["good.com"]).await;
    let answer =
        exchange(proxy.http_port(), b"CONNECT good.com:1 HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert_eq!((status(&answer), body(&answer)), (200, ""));
    let answer = request(proxy.http_port(), "GET http://good.com:1/", "good.com:1").await;
    assert_eq!((status(&answer), body(&answer)), (502, "upstream failure"));
}

#[tokio::test]
async fn an_upgraded_connection_carries_bytes() {
    let world = World::new().await;
    let asked = b"GET http://good.com/ws HTTP/1.1\r\nHost: good.com\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n";
    let proxy = world.allowing(&["good.com"]).await;
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.http_port())).await.unwrap();
    stream.write_all(asked).await.unwrap();
    let head = read_head(&mut stream).await.unwrap().to_lowercase();
    assert!(head.starts_with("http/1.1 101 ") && head.contains("upgrade: echo"), "{head}");
    stream.write_all(b"ping").await.unwrap();
    let mut echoed = [0; 4];
    stream.read_exact(&mut echoed).await.unwrap();
    assert_eq!(&echoed, b"ping");
    // In limited mode nobody could see what is sent there: the request passes without its upgrade.
    let mut config = world.config(allow(&["good.com"]));
    config.mode = Mode::Limited;
    let proxy = world.start(config).await;
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.http_port())).await.unwrap();
    stream.write_all(asked).await.unwrap();
    assert!(read_head(&mut stream).await.unwrap().starts_with("HTTP/1.1 200 "));
}

#[tokio::test]
async fn unix_sockets_are_unsupported() {
    let world = World::new().await;
    let proxy = world.allowing(&["good.com"]).await;
    let answer = exchange(
        proxy.http_port(),
        b"GET http://good.com/ HTTP/1.1\r\nHost: good.com\r\nx-unix-socket: /x\r\nConnection: close\r\n\r\n",
    )
    .await;
    assert_eq!((status(&answer), body(&answer)), (501, "unix sockets unsupported"));
    let [record] = &world.notebook.take()[..] else { panic!() };
    assert_eq!((record.host.as_str(), record.port), ("unix-socket", 0));
    assert_eq!(record.reason, "unix_socket_unsupported");
    assert_eq!((record.scope.as_str(), record.source.as_str()), ("non_domain", "proxy_state"));
    assert_eq!(world.internet.connected(), Vec::<String>::new());
}

/// More than any buffer, both ways, and each way waits for the other.
#[tokio::test]
async fn bodies_are_streamed() {
    const PIECES: usize = 400;
    const PIECE: usize = 16 * 1024;
    let world = World::new().await;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    *world.internet.origin.lock().unwrap() = Some(listener.local_addr().unwrap());
    let proxy = world.allowing(&["good.com"]).await;
    // The server answers each piece of the request with a piece of its own, and sends none before.
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let head = read_head(&mut stream).await.unwrap().to_lowercase();
        assert!(head.contains("transfer-encoding: chunked"), "{head}");
        stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").await.unwrap();
        let mut decoded = 0;
        let mut sent = 0;
        while decoded < PIECES * PIECE {
            let size = read_line(&mut stream).await;
            let size = usize::from_str_radix(&size, 16).unwrap();
            let mut piece = vec![0; size + 2];
            stream.read_exact(&mut piece).await.unwrap();
            decoded += size;
            while sent < decoded / PIECE {
                let chunk =
                    [format!("{PIECE:x}\r\n").into_bytes(), vec![b'b'; PIECE], b"\r\n".to_vec()];
                stream.write_all(&chunk.concat()).await.unwrap();
                sent += 1;
            }
        }
        assert_eq!(read_line(&mut stream).await, "0");
        stream.write_all(b"0\r\n\r\n").await.unwrap();
    });
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.http_port())).await.unwrap();
    let head = b"POST http://good.com/ HTTP/1.1\r\nHost: good.com\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n";
    stream.write_all(head).await.unwrap();
    let mut received = Vec::new();
    for _ in 0..PIECES {
        let chunk =
            [format!("{PIECE:x}\r\n").into_bytes(), vec![b'a'; PIECE], b"\r\n".to_vec()].concat();
        stream.write_all(&chunk).await.unwrap();
        let seen = received.iter().filter(|byte| **byte == b'b').count();
        while received.iter().filter(|byte| **byte == b'b').count() < seen + PIECE {
            assert!(stream.read_buf(&mut received).await.unwrap() > 0);
        }
        received.clear();
    }
    stream.write_all(b"0\r\n\r\n").await.unwrap();
    stream.read_to_end(&mut received).await.unwrap();
    assert!(received.ends_with(b"0\r\n\r\n"));
    server.await.unwrap();
}

async fn read_line(stream: &mut TcpStream) -> String {
    let mut line = Vec::new();
    while !line.ends_with(b"\r\n") {
        line.push(stream.read_u8().await.unwrap());
    }
    String::from_utf8(line).unwrap().trim_end().to_owned()
}
