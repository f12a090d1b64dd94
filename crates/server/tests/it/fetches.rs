//! `http/request`: HTTP requests from the server's machine.

use std::net::SocketAddr;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::support::*;

/// Variables that no header may use, whether or not they are set.
const REFUSED: [&str; 17] = [
    "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN",
    "OPENAI_FEDERATION_RULE_ID",
    "OPENAI_IDENTITY_TOKEN_FILE",
    "OPENAI_WORKLOAD_IDENTITY_CONTEXT",
    "OPENAI_API_KEY",
    "CODEX_API_KEY",
    "CODEX_ACCESS_TOKEN",
    "CODEX_CONNECTORS_TOKEN",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_CLIENT_SECRET",
    "AZURE_FEDERATED_TOKEN_FILE",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "CODEX_EXEC_SERVER_REMOTE_BEARER_TOKEN",
    "CODEX_EXEC_SERVER_TOKEN",
    "CODEX_RENDEZVOUS_NATS",
];

/// A web server that responds to each request with the result of `answer`, and closes.
async fn web<F>(answer: F) -> SocketAddr
where
    F: Fn(String) -> Vec<u8> + Clone + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (mut socket, _) = listener.accept().await.unwrap();
            let answer = answer.clone();
            tokio::spawn(async move {
                let request = read_request(&mut socket).await;
                let _ = socket.write_all(&answer(request)).await;
                let _ = socket.shutdown().await;
            });
        }
    });
    address
}

/// Reads the head and body of a request.
async fn read_request(socket: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    loop {
        assert_ne!(socket.read_buf(&mut bytes).await.unwrap(), 0, "a whole request");
        let text = String::from_utf8_lossy(&bytes);
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        if body.len() >= length.map_or(0, |length| length.parse().unwrap()) {
            return text.into_owned();
        }
    }
}

fn ok(body: &str) -> Vec<u8> {
    let len = body.len();
    format!("HTTP/1.1 200 OK\r\ncontent-length: {len}\r\nx-a: 1\r\nx-a: 2\r\n\r\n{body}").into()
}

/// Echoes the request; `/moved/CODE` redirects to `/there`.
async fn echo() -> SocketAddr {
    web(|request| {
        let path = request.split(' ').nth(1).unwrap();
        match path.strip_prefix("/moved/").map(|code| code.split('?').next().unwrap()) {
            Some(code) => {
                let head = format!("HTTP/1.1 {code} Moved\r\nlocation: /there\r\n");
                (head + "content-length: 0\r\n\r\n").into()
            }
            None => ok(&request),
        }
    })
    .await
}

fn get(address: SocketAddr, path: &str) -> Value {
    json!({
        "method": "GET", "url": format!("http://{address}{path}"), "headers": [],
        "redirectPolicy": "follow", "requestId": "r", "streamResponse": false,
    })
}

fn with(mut params: Value, more: &Value) -> Value {
    for (name, value) in more.as_object().unwrap() {
        params[name] = value.clone();
    }
    params
}

fn body(answer: &Value) -> String {
    String::from_utf8(unbase64(answer["bodyBase64"].as_str().unwrap())).unwrap()
}

#[tokio::test]
async fn a_request_is_sent_as_given_and_its_response_returned_whole() {
    let (address, server) = (echo().await, server());
    let mut client = Client::ready(&server).await;
    let more = json!({
        "method": "POST", "bodyBase64": base64(b"hello"),
        "headers": [{"name": "X-Q", "value": "a"}, {"name": "X-Q", "value": "b"}],
    });
    let answer = client.call("http/request", with(get(address, "/p?q=1"), &more)).await.unwrap();
    assert_eq!(answer["status"], 200);
    let names = answer["headers"].as_array().unwrap().iter();
    let names: Vec<_> = names.map(|header| header["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["content-length", "x-a", "x-a"]);
    let asked = body(&answer);
    assert!(asked.starts_with("POST /p?q=1 HTTP/1.1\r\n"), "{asked}");
    assert!(asked.contains("x-q: a\r\nx-q: b\r\n"), "{asked}");
    assert!(asked.contains("accept: */*\r\n"), "{asked}");
    assert!(asked.contains(&format!("host: {address}\r\n")), "{asked}");
    assert!(asked.ends_with("\r\n\r\nhello"), "{asked}");
}

#[tokio::test]
async fn redirects_are_followed_or_returned() {
    let (address, server) = (echo().await, server());
    let mut client = Client::ready(&server).await;
    let post = json!({
        "method": "POST", "bodyBase64": base64(b"hi"),
        "headers": [{"name": "authorization", "value": "secret"}],
    });
    for (code, method, rest) in [(301, "GET", ""), (302, "GET", ""), (303, "GET", "")]
        .into_iter()
        .chain([(307, "POST", "hi"), (308, "POST", "hi")])
    {
        let params = with(get(address, &format!("/moved/{code}?token=secret")), &post);
        let asked = body(&client.call("http/request", params).await.unwrap());
        assert!(asked.starts_with(&format!("{method} /there ")), "{code}: {asked}");
        assert!(asked.ends_with(&format!("\r\n\r\n{rest}")), "{code}: {asked}");
        assert!(asked.contains("authorization: secret"), "the same place: {asked}");
        assert!(asked.contains(&format!("referer: http://{address}/moved/{code}\r\n")), "{asked}");
    }
    let stop = with(get(address, "/moved/302"), &json!({"redirectPolicy": "stop"}));
    assert_eq!(client.call("http/request", stop).await.unwrap()["status"], 302);
}

#[tokio::test]
async fn a_redirect_to_another_host_carries_no_credentials() {
    let (there, server) = (echo().await, server());
    let mut client = Client::ready(&server).await;
    let here = web(move |_| {
        let head = format!("HTTP/1.1 307 Moved\r\nlocation: http://{there}/x\r\n");
        (head + "content-length: 0\r\n\r\n").into()
    })
    .await;
    let secret = json!({"headers": [
        {"name": "Authorization", "value": "secret"}, {"name": "Cookie", "value": "secret"},
        {"name": "X-Q", "value": "kept"},
        {"name": "X-Key", "value": "Bearer ", "valueEnvVar": "CARGO_PKG_NAME"},
        {"name": "X-Key", "value": "another of that name"},
    ]});
    let asked = body(&client.call("http/request", with(get(here, "/"), &secret)).await.unwrap());
    assert!(asked.contains("x-q: kept") && !asked.contains("secret"), "{asked}");
    assert!(!asked.contains("x-key") && !asked.contains(env!("CARGO_PKG_NAME")), "{asked}");
    let circle = |_| b"HTTP/1.1 302 Moved\r\nlocation: /\r\ncontent-length: 0\r\n\r\n".to_vec();
    let refused = client.call("http/request", get(web(circle).await, "/")).await.unwrap_err();
    assert_eq!(refused.code, -32603);
    assert!(refused.message.contains("too many redirects"), "{refused:?}");
    let file = |_| b"HTTP/1.1 302 Moved\r\nlocation: file:///etc/passwd\r\n\r\n".to_vec();
    let refused = client.call("http/request", get(web(file).await, "/")).await.unwrap_err();
    assert!(refused.message.contains("got file"), "{refused:?}");
}

#[tokio::test]
async fn bad_requests_are_refused_before_anything_is_sent() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let nowhere: SocketAddr = "127.0.0.1:1".parse().unwrap();
    let header = |name: &str, value: &str| json!({"headers": [{"name": name, "value": value}]});
    let variable =
        |name: &str| json!({"headers": [{"name": "a", "value": "Bearer ", "valueEnvVar": name}]});
    for bad in [
        json!({"method": "B AD"}),
        json!({"url": "ftp://x/y"}),
        json!({"url": "file:///etc/passwd"}),
        json!({"url": "nope"}),
        json!({"url": "http://"}),
        header("a b", "x"),
        header("a", "x\ny"),
        header("a", &"x".repeat(1 << 20)),
        json!({"headers": vec![json!({"name": "a", "value": "x"}); 1001]}),
        json!({"url": format!("http://{}/", "\u{e4}.".repeat(1 << 15))}),
        json!({"requestId": "r".repeat(4097), "streamResponse": true}),
        variable("NO_SUCH_VARIABLE_AT_ALL"),
    ] {
        let refused = client.call("http/request", with(get(nowhere, "/"), &bad)).await;
        assert_eq!(refused.unwrap_err().code, -32602, "{bad}");
    }
    for name in REFUSED.iter().flat_map(|name| [(*name).to_owned(), name.to_lowercase()]) {
        let params = with(get(nowhere, "/"), &variable(&name));
        let refused = client.call("http/request", params).await.unwrap_err();
        assert_eq!(refused.code, -32602, "{refused:?}");
        assert!(refused.message.contains("cannot use"), "whether or not it is set: {refused:?}");
    }
    let mut nameless = get(nowhere, "/");
    nameless.as_object_mut().unwrap().remove("requestId");
    assert_eq!(client.call("http/request", nameless).await.unwrap_err().code, -32602);
    assert_eq!(client.call("http/request", get(nowhere, "/")).await.unwrap_err().code, -32603);
}

#[tokio::test]
async fn a_header_can_use_a_variable_of_the_server() {
    let (address, server) = (echo().await, server());
    let mut client = Client::ready(&server).await;
    // Cargo sets it for tests.
    let expected = env!("CARGO_PKG_NAME");
    let more = json!({"headers": [
        {"name": "x-name", "value": "is ", "valueEnvVar": "CARGO_PKG_NAME"},
    ]});
    let asked = body(&client.call("http/request", with(get(address, "/"), &more)).await.unwrap());
    assert!(asked.contains(&format!("x-name: is {expected}\r\n")), "{asked}");
}

#[tokio::test]
async fn a_streamed_body_follows_its_response_in_notifications() {
    const LEN: usize = 3 << 20;
    let server = server();
    let mut client = Client::ready(&server).await;
    let address = web(|_| ok(&"x".repeat(LEN))).await;
    let stream = with(get(address, "/"), &json!({"streamResponse": true}));
    for round in 0..2 {
        let answer = client.call("http/request", stream.clone()).await.unwrap();
        assert_eq!((&answer["status"], body(&answer)), (&json!(200), String::new()));
        let (mut len, mut seq) = (0, 0);
        loop {
            let notice = client.notification().await;
            assert_eq!(notice["method"], "http/request/bodyDelta");
            let params = &notice["params"];
            seq += 1;
            assert_eq!((&params["requestId"], &params["seq"]), (&json!("r"), &json!(seq)));
            assert_eq!(params["error"], Value::Null);
            let delta = unbase64(params["deltaBase64"].as_str().unwrap());
            assert!(delta.len() <= 1 << 20 && delta.iter().all(|&byte| byte == b'x'));
            len += delta.len();
            if params["done"] == true {
                break;
            }
        }
        assert_eq!(len, LEN, "round {round}: the id can be used again");
    }
}

#[tokio::test]
async fn a_truncated_body_is_an_error() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let address = web(|_| b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nabc".to_vec()).await;
    let refused = client.call("http/request", get(address, "/")).await.unwrap_err();
    assert_eq!(refused.code, -32603);
    let stream = with(get(address, "/"), &json!({"streamResponse": true}));
    client.call("http/request", stream).await.unwrap();
    assert_eq!(client.notification().await["params"]["deltaBase64"], base64(b"abc"));
    let last = client.notification().await;
    assert_eq!((&last["params"]["done"], &last["params"]["seq"]), (&json!(true), &json!(2)));
    assert!(last["params"]["error"].is_string(), "{last}");
}

#[tokio::test]
async fn a_silent_server_times_out_and_its_id_is_in_use_meanwhile() {
    let server = server();
    let mut client = Client::ready(&server).await;
    // The kernel accepts the connection, but no response comes.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = silent.local_addr().unwrap();
    let stream = with(get(address, "/"), &json!({"streamResponse": true}));
    let first =
        client.send_request("http/request", with(stream.clone(), &json!({"timeoutMs": 300}))).await;
    let second = client.call("http/request", stream).await.unwrap_err();
    assert_eq!(second.code, -32602, "{second:?}");
    let refused = client.response(first).await.unwrap_err();
    assert_eq!(refused.code, -32603);
    assert!(refused.message.contains("in time"), "{refused:?}");
}

#[tokio::test]
async fn requests_just_within_the_limits_are_sent() {
    let (address, server) = (echo().await, server());
    let mut client = Client::ready(&server).await;
    let path = format!("/{}", "p".repeat((64 << 10) - format!("http://{address}/").len() - 100));
    let header = |name: String, len: usize| json!({"name": name, "value": "x".repeat(len)});
    let headers: Vec<_> = (0..1000).map(|n| header(format!("x-{n:03}"), 100)).collect();
    for more in [
        json!({"url": format!("http://{address}{path}")}),
        json!({"headers": headers}),
        json!({"headers": [header("a".into(), (1 << 20) - 1)]}),
    ] {
        let answer = client.call("http/request", with(get(address, "/"), &more)).await.unwrap();
        assert_eq!(answer["status"], 200);
    }
    let streamed = json!({"requestId": "r".repeat(4096), "streamResponse": true});
    client.call("http/request", with(get(address, "/"), &streamed)).await.unwrap();
    while client.notification().await["params"]["done"] != true {}
}

/// The target sends interim responses for as long as it can; other clients, on the same thread, are
/// served meanwhile, and the exchange ends.
#[tokio::test]
async fn a_target_that_never_comes_to_its_response_is_cut_off() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let target = std::thread::spawn({
        let listener = listener.into_std().unwrap();
        listener.set_nonblocking(false).unwrap();
        move || {
            use std::io::{Read, Write};
            let interim = "HTTP/1.1 103 E\r\n\r\n".repeat(10_000);
            for _ in 0..2 {
                let (mut socket, _) = listener.accept().unwrap();
                let _ = socket.read(&mut [0; 1024]).unwrap();
                while socket.write_all(interim.as_bytes()).is_ok() {}
            }
        }
    });
    let server = server();
    let mut client = Client::ready(&server).await;
    let mut other = Client::ready(&server).await;
    for stream in [false, true] {
        let params = with(get(address, "/"), &json!({"streamResponse": stream}));
        let request = client.send_request("http/request", params).await;
        other.call("environment/status", json!({})).await.unwrap();
        let refused = client.response(request).await.unwrap_err();
        assert_eq!(refused.code, -32603);
        assert!(refused.message.contains("interim responses"), "{refused:?}");
    }
    target.join().unwrap();
}

#[tokio::test]
async fn requests_to_a_silent_target_are_bounded_in_number() {
    let mut config = codex_exec_serving::ServerConfig::default();
    config.http_requests_per_connection = 2;
    config.http_requests = 3;
    let server = codex_exec_serving::Server::new(config).unwrap();
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let request = with(get(silent.local_addr().unwrap(), "/"), &json!({"timeoutMs": 600_000}));
    let (mut one, mut two) = (Client::ready(&server).await, Client::ready(&server).await);
    // Two of the first connection run, and its others wait.
    let mut held = Vec::new();
    for _ in 0..5 {
        one.send_request("http/request", request.clone()).await;
    }
    for _ in 0..2 {
        held.push(silent.accept().await.unwrap());
    }
    // One more of the second, and then the server has no room.
    let running = two.send_request("http/request", request.clone()).await;
    held.push(silent.accept().await.unwrap());
    let refused = two.call("http/request", request).await.unwrap_err();
    assert_eq!(refused.code, -32603, "{refused:?}");
    // The end of one makes room.
    let address = echo().await;
    let (mut socket, _) = held.pop().unwrap();
    socket.write_all(&ok("")).await.unwrap();
    drop(socket);
    two.response(running).await.unwrap();
    two.call("http/request", get(address, "/x")).await.unwrap();
}
