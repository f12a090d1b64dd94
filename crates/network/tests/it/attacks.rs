//! Attacks on the proxy, through its sockets. Each must end without a connection to where it wants.

use std::net::Ipv4Addr;
use std::time::Duration;

use codex_exec_network::decide::Mode;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use crate::world::{Notebook, World, allow, body, exchange, read_head, request, rules, status};

/// Requests that two readers could take for different targets: status and body of the answer.
#[tokio::test]
async fn ambiguous_targets_are_refused() {
    let world = World::new().await;
    let proxy = world.start(world.config(rules(&["good.com"], &["bad.com"], &[]))).await;
    for (name, head, expected) in [
        (
            "smuggled host",
            "GET http://good.com/ HTTP/1.1\r\nHost: bad.com",
            "Host header does not match request target",
        ),
        (
            "smuggled target",
            "GET http://bad.com/ HTTP/1.1\r\nHost: good.com",
            "Host header does not match request target",
        ),
        (
            "other port",
            "GET http://good.com:80/ HTTP/1.1\r\nHost: good.com:22",
            "Host header does not match request target",
        ),
        (
            "two hosts",
            "GET http://good.com/ HTTP/1.1\r\nHost: good.com\r\nHost: bad.com",
            "multiple Host headers",
        ),
        (
            "two hosts, origin form",
            "GET / HTTP/1.1\r\nHost: good.com\r\nHost: bad.com",
            "multiple Host headers",
        ),
        (
            "userinfo",
            "GET http://good.com@bad.com/ HTTP/1.1\r\nHost: good.com",
            "Host header does not match request target",
        ),
        ("userinfo in Host", "GET / HTTP/1.1\r\nHost: good.com@bad.com", "missing host"),
        ("list in Host", "GET / HTTP/1.1\r\nHost: good.com, bad.com", "missing host"),
        ("path in Host", "GET / HTTP/1.1\r\nHost: bad.com/good.com", "missing host"),
        ("port out of range", "GET / HTTP/1.1\r\nHost: good.com:65616", "missing host"),
        ("port that is none", "GET / HTTP/1.1\r\nHost: good.com:80:443", "missing host"),
        (
            "other scheme",
            "GET https://good.com/ HTTP/1.1\r\nHost: good.com",
            "unsupported request scheme",
        ),
        (
            "other scheme",
            "GET ftp://good.com/ HTTP/1.1\r\nHost: good.com",
            "unsupported request scheme",
        ),
    ] {
        let answer = exchange(
            proxy.http_port(),
            format!("{head}\r\nConnection: close\r\n\r\n0\r\n\r\n").as_bytes(),
        )
        .await;
        assert_eq!((status(&answer), body(&answer)), (400, expected), "{name}");
    }
    // What is no HTTP at all, or ends in two places.
    for bytes in [
        &b"GET http://%67ood.com/ HTTP/1.1\r\nHost: %67ood.com\r\n\r\n"[..],
        b"GET http://good.com/ HTTP/1.1\r\nHost : good.com\r\n\r\n",
        b"GET http://good.com/\0 HTTP/1.1\r\nHost: good.com\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
        b"POST http://good.com/ HTTP/1.1\r\nHost: good.com\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"POST http://good.com/ HTTP/1.1\r\nHost: good.com\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    ] {
        let answer = exchange(proxy.http_port(), bytes).await;
        assert_eq!(status(&answer), 400, "{answer}");
    }
    assert_eq!(world.internet.connected(), Vec::<String>::new());
    assert_eq!(world.notebook.take(), []);
}

/// A body that ends elsewhere for whoever believes the other header: only one of them is passed on.
#[tokio::test]
async fn a_request_has_one_length_on_its_way_out() {
    let world = World::new().await;
    let proxy = world.allowing(&["good.com"]).await;
    let head = "POST http://good.com/ HTTP/1.1\r\nHost: good.com\r\nContent-Length: 60\r\n\
                Transfer-Encoding: chunked\r\nConnection: close, content-length\r\n\r\n0\r\n\r\n";
    let smuggled = "GET http://bad.com/ HTTP/1.1\r\nHost: bad.com\r\n\r\n";
    let answer = exchange(proxy.http_port(), format!("{head}{smuggled}").as_bytes()).await;
    assert_eq!(body(&answer), "POST / HTTP/1.1|Host: good.com|Transfer-Encoding: chunked||");
    assert_eq!(world.internet.connected(), ["93.184.216.34:80"]);
}

#[tokio::test]
async fn userinfo_is_neither_judged_nor_passed_on() {
    let world = World::new().await;
    let proxy = world.start(world.config(rules(&["good.com"], &["bad.com"], &[]))).await;
    let answer = request(proxy.http_port(), "GET http://bad.com@good.com/x", "good.com").await;
    assert_eq!(body(&answer), "GET /x HTTP/1.1|Host: good.com||");
    let answer = request(proxy.http_port(), "GET http://good.com:80@bad.com/x", "bad.com").await;
    assert_eq!(status(&answer), 403);
    let answer = request(proxy.http_port(), "CONNECT good.com@bad.com:443", "good.com").await;
    assert_eq!(status(&answer), 403);
    assert_eq!(world.internet.connected(), ["93.184.216.34:80"]);
}

/// A name that was public when it was judged, and is not when the connection is made.
#[tokio::test]
async fn a_rebound_name_is_connected_to_where_it_was_judged() {
    let world = World::new().await;
    let proxy = world.allowing(&["rebind.com"]).await;
    for line in ["GET http://rebind.com/", "CONNECT rebind.com:80"] {
        world.internet.name("rebind.com", &["93.184.216.40"]);
        world
            .internet
            .rebound
            .lock()
            .unwrap()
            .insert("rebind.com".into(), vec![Ipv4Addr::LOCALHOST.into()]);
        let mut stream =
            TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.http_port())).await.unwrap();
        let head = format!("{line} HTTP/1.1\r\nHost: rebind.com\r\n\r\nGET / HTTP/1.1\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        assert!(read_head(&mut stream).await.unwrap().starts_with("HTTP/1.1 200 "));
        if line.starts_with("CONNECT") {
            assert!(read_head(&mut stream).await.unwrap().starts_with("HTTP/1.1 200 "));
        }
        let connected = std::mem::take(&mut *world.internet.connected.lock().unwrap());
        assert_eq!(connected, ["93.184.216.40:80".parse().unwrap()], "{line}");
        // The next request finds the new address, and is refused.
        let answer = request(proxy.http_port(), "GET http://rebind.com/", "rebind.com").await;
        assert!(body(&answer).contains("not_allowed_local"), "{answer}");
        assert_eq!(world.internet.connected(), Vec::<String>::new());
    }
}

#[tokio::test]
async fn names_of_private_addresses_are_refused() {
    let world = World::new().await;
    let proxy = world.allowing(&["*"]).await;
    for (index, addresses) in [
        &["127.0.0.1"][..],
        &["10.0.0.1"],
        &["169.254.169.254"],
        &["::1"],
        &["::ffff:127.0.0.1"],
        &["::7f00:1"],
        &["64:ff9b::7f00:1"],
        &["93.184.216.34", "192.168.0.1"],
        &["0.0.0.0"],
        &["fe80::1"],
        &["224.0.0.1"],
    ]
    .iter()
    .enumerate()
    {
        let name = format!("n{index}.com");
        world.internet.name(&name, addresses);
        let answer = request(proxy.http_port(), &format!("GET http://{name}/"), &name).await;
        assert!(
            body(&answer).contains(r#""reason":"not_allowed_local""#),
            "{addresses:?}: {answer}"
        );
    }
    let answer = request(proxy.http_port(), "GET http://unknown.com/", "unknown.com").await;
    assert!(body(&answer).contains(r#""reason":"not_allowed_local""#), "{answer}");
    assert_eq!(world.internet.connected(), Vec::<String>::new());
}

/// Spellings of private addresses, in every place where a host can stand.
#[tokio::test]
async fn spellings_of_private_addresses_are_refused() {
    let world = World::new().await;
    let proxy = world.allowing(&["*"]).await;
    let port = proxy.http_port();
    for host in [
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "0",
        "127.0.0.1.",
        "localhost",
        "LocalHost.",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[::127.0.0.1]",
        "10.0.0.1",
        "0xa.1",
        "169.254.169.254",
        "2852039166",
        "[fd00::1]",
        "[64:ff9b::127.0.0.1]",
    ] {
        for (line, named) in [
            (format!("GET http://{host}/"), host),
            ("GET /".to_owned(), host),
            (format!("CONNECT {host}:443"), "good.com"),
        ] {
            let answer = request(port, &line, named).await;
            let is_local = answer.contains("not_allowed_local")
                || answer.contains("Sandbox policy blocks local/private network addresses.");
            assert!(status(&answer) == 403 && is_local, "{line}: {answer}");
        }
    }
    assert_eq!(world.internet.connected(), Vec::<String>::new());
    assert_eq!(*world.internet.looked_up.lock().unwrap(), Vec::<String>::new());
}

/// No lookup tells a name server about a name that the rules refuse anyway.
#[tokio::test]
async fn refused_names_are_not_looked_up() {
    let world = World::new().await;
    let mut config = world.config(rules(&["good.com"], &["bad.com"], &["look.com"]));
    config.ask_timeout = Some(Duration::from_secs(1));
    world
        .controller
        .replies
        .lock()
        .unwrap()
        .insert("secret.attacker.com".into(), Err(codex_exec_network::NoReply));
    world
        .controller
        .replies
        .lock()
        .unwrap()
        .insert("look.com".into(), Err(codex_exec_network::NoReply));
    let proxy = world.start(config).await;
    for host in ["secret.attacker.com", "bad.com", "look.com"] {
        assert_eq!(
            status(&request(proxy.http_port(), &format!("GET http://{host}/"), host).await),
            403
        );
        assert_eq!(
            status(&request(proxy.http_port(), &format!("CONNECT {host}:443"), host).await),
            403
        );
    }
    assert_eq!(*world.internet.looked_up.lock().unwrap(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn a_lookup_that_hangs_counts_as_local() {
    let world = World::new().await;
    world.internet.name("slow.com", &[]);
    let proxy = world.allowing(&["slow.com"]).await;
    let answer = request(proxy.http_port(), "GET http://slow.com/", "slow.com").await;
    assert!(body(&answer).contains(r#""reason":"not_allowed_local""#), "{answer}");
}

/// Limited mode: no method in disguise, no tunnel, no other port.
#[tokio::test]
async fn limited_mode_has_no_way_around() {
    let world = World::new().await;
    let mut config = world.config(allow(&["good.com"]));
    config.mode = Mode::Limited;
    let proxy = world.start(config).await;
    for method in ["POST", "PUT", "PATCH", "DELETE", "TRACE", "get", "GETS", "PROPFIND"] {
        let answer =
            request(proxy.http_port(), &format!("{method} http://good.com/"), "good.com").await;
        assert!(body(&answer).contains("method_not_allowed"), "{answer}");
    }
    for target in ["good.com:443", "good.com:80", "good.com:22"] {
        let answer = request(proxy.http_port(), &format!("CONNECT {target}"), target).await;
        assert_eq!(body(&answer), "MITM required for limited HTTPS.");
    }
    assert_eq!(world.internet.connected(), Vec::<String>::new());
    assert!(
        Notebook::words(&world.notebook.take())
            .iter()
            .any(|(_, source, _)| *source == "mode_guard")
    );
    for method in ["GET", "HEAD", "OPTIONS"] {
        let answer =
            request(proxy.http_port(), &format!("{method} http://good.com/"), "good.com").await;
        assert_eq!(status(&answer), 200);
    }
}
