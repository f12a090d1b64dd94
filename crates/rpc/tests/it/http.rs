//! The HTTP client against a raw TCP server.

use std::time::Duration;

use bytes::Bytes;
use codex_exec_rpc::{DialError, ExchangeError, HttpTarget, Proxies};
use http::{Request, Response};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

type Answer = Result<Response<Incoming>, ExchangeError>;

/// Sends `GET /a?b`; returns the server's socket once the whole request has arrived.
async fn ask() -> (JoinHandle<Answer>, TcpStream, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let authority = listener.local_addr().unwrap().to_string();
    let asking = tokio::spawn(async move {
        let request = Request::get("/a?b").header("host", "h").header("X-Own", "1");
        let target = HttpTarget {
            secure: false,
            authority: &authority,
            connect_timeout: Duration::from_secs(30),
            tls: None,
            proxies: Proxies::none(),
        };
        target.send(request.body(Empty::<Bytes>::new()).unwrap()).await
    });
    let (mut server, _) = listener.accept().await.unwrap();
    let mut asked = Vec::new();
    while !asked.ends_with(b"\r\n\r\n") {
        asked.push(server.read_u8().await.unwrap());
    }
    (asking, server, String::from_utf8(asked).unwrap())
}

#[tokio::test]
async fn request_is_sent_verbatim_and_response_is_complete() {
    let (asking, mut server, asked) = ask().await;
    assert_eq!(asked, "GET /a?b HTTP/1.1\r\nhost: h\r\nx-own: 1\r\n\r\n");
    let answer =
        "HTTP/1.1 302 Found\r\nlocation: http://elsewhere/\r\ncontent-length: 4\r\n\r\nbody";
    server.write_all(answer.as_bytes()).await.unwrap();
    let answer = asking.await.unwrap().unwrap();
    assert_eq!(answer.status(), 302, "no redirect is followed");
    assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "body");
    assert_eq!(server.read(&mut [0]).await.unwrap(), 0, "the connection ends with the body");
}

#[tokio::test]
async fn dropping_the_body_closes_the_connection() {
    let (asking, mut server, _) = ask().await;
    server.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nsome").await.unwrap();
    drop(asking.await.unwrap().unwrap());
    assert!(matches!(server.read(&mut [0]).await, Ok(0) | Err(_)));
}

#[tokio::test]
async fn aborting_the_request_closes_the_connection() {
    let (asking, mut server, _) = ask().await;
    asking.abort();
    assert!(asking.await.unwrap_err().is_cancelled());
    assert!(matches!(server.read(&mut [0]).await, Ok(0) | Err(_)));
}

#[tokio::test]
async fn dial_failure_and_broken_exchange_are_different_errors() {
    let (asking, server, _) = ask().await;
    let authority = server.local_addr().unwrap().to_string();
    drop(server);
    assert!(matches!(asking.await.unwrap(), Err(ExchangeError::Http(_))));
    let connect_timeout = Duration::from_secs(30);
    let target = HttpTarget {
        secure: false,
        authority: &authority,
        connect_timeout,
        tls: None,
        proxies: Proxies::none(),
    };
    let error = target.send(Request::new(Empty::<Bytes>::new())).await.unwrap_err();
    assert!(matches!(error, ExchangeError::Dial(DialError::Tcp { .. })), "{error}");
}

#[tokio::test]
async fn endless_interim_responses_and_headers_end_the_exchange() {
    let interim = "HTTP/1.1 103 Early Hints\r\n\r\n".repeat(400);
    let long = format!("HTTP/1.1 103 Early Hints\r\nlink: {}\r\n\r\n", "x".repeat(50_000));
    let empty = String::new();
    let header = "x-a: b\r\n".repeat(1000);
    let unfinished = "HTTP/1.1 200 OK\r\n".to_owned();
    let cases = [(empty.clone(), interim), (empty, long), (unfinished, header)];
    for (first, endless) in cases {
        let (asking, mut server, _) = ask().await;
        let is_interim = first.is_empty();
        let writing = tokio::spawn(async move {
            let _ = server.write_all(first.as_bytes()).await;
            while server.write_all(endless.as_bytes()).await.is_ok() {}
        });
        let error = asking.await.unwrap().unwrap_err();
        match is_interim {
            true => assert!(matches!(error, ExchangeError::Head), "{error}"),
            // The parser gives up before the limit.
            false => assert!(matches!(error, ExchangeError::Http(_)), "{error}"),
        }
        writing.await.unwrap();
    }
}

#[tokio::test]
async fn interim_responses_are_skipped_and_limit_no_body() {
    let (asking, mut server, _) = ask().await;
    let body = "b".repeat(3 << 20);
    let interim = "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n".repeat(100);
    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
    let sent = format!("{interim}{head}{body}");
    let writing = tokio::spawn(async move {
        server.write_all(sent.as_bytes()).await.unwrap();
        server
    });
    let answer = asking.await.unwrap().unwrap();
    assert_eq!(answer.status(), 200);
    assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), body);
    writing.await.unwrap();
}
