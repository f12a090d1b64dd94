//! Proxies behind the proxy.

use codex_exec_network::{UpstreamProxies, UpstreamProxy};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;

use crate::socks::{ask, named};
use crate::world::{World, allow, body, origin, read_head, request, status};

/// A proxy that answers CONNECT with `status` and then speaks as an origin would; returns what it was
/// asked.
async fn connect_proxy(
    status: &'static str,
) -> (std::net::SocketAddr, tokio::sync::mpsc::Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, receiver) = tokio::sync::mpsc::channel(8);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let head = read_head(&mut stream).await.unwrap();
            sender.send(head).await.unwrap();
            let answer = format!("HTTP/1.1 {status}\r\nx: y\r\n\r\nhello from the tunnel");
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
    });
    (address, receiver)
}

#[tokio::test]
async fn public_targets_go_upstream_and_others_do_not() {
    let world = World::new().await;
    world.internet.name("inside.com", &["10.0.0.1"]);
    let http = origin().await;
    let (https, mut asked) = connect_proxy("200 Connected").await;
    let mut config = world.config(allow(&["good.com", "10.0.0.1", "localhost", "8.8.8.8"]));
    config.upstream = Some(UpstreamProxies {
        http: UpstreamProxy::parse(&format!("http://user:secret@{http}")),
        https: UpstreamProxy::parse(&format!("http://user:secret@{https}")),
        private_addresses: false,
    });
    let proxy = world.start(config.clone()).await;
    let port = proxy.http_port();
    let answer = request(port, "GET http://good.com/x?y", "good.com").await;
    assert_eq!(
        body(&answer),
        "GET http://good.com/x?y HTTP/1.1|Host: good.com|proxy-authorization: Basic dXNlcjpzZWNyZXQ=||"
    );
    let answer = request(port, "CONNECT good.com:443", "good.com:443").await;
    assert_eq!((status(&answer), body(&answer)), (200, "hello from the tunnel"));
    assert_eq!(
        asked.recv().await.unwrap(),
        "CONNECT good.com:443 HTTP/1.1\r\nHost: good.com:443\r\nProxy-Authorization: Basic dXNlcjpzZWNyZXQ=\r\n\r\n"
    );
    // Direct: what is not public, and SOCKS5.
    for (line, host) in [
        ("GET http://10.0.0.1/", "10.0.0.1".to_owned()),
        ("GET /", format!("localhost:{}", world.origin.port())),
    ] {
        let answer = request(port, line, &host).await;
        assert!(body(&answer).starts_with("GET / HTTP/1.1|Host: "), "{answer}");
    }
    assert_eq!(ask(&proxy, &named(1, "good.com", 443)).await.0, 0);
    let direct = [
        "10.0.0.1:80".to_owned(),
        format!("127.0.0.1:{}", world.origin.port()),
        "93.184.216.34:443".into(),
    ];
    let connected = world.internet.connected();
    assert_eq!(connected, [vec![http.to_string(), https.to_string()], direct.to_vec()].concat());
    // With the option, private networks go there, too; loopback does not.
    config.upstream.as_mut().unwrap().private_addresses = true;
    let proxy = world.start(config).await;
    let answer = request(proxy.http_port(), "GET http://10.0.0.1/", "10.0.0.1").await;
    assert!(body(&answer).starts_with("GET http://10.0.0.1/ "), "{answer}");
    let localhost = format!("localhost:{}", world.origin.port());
    let answer = request(proxy.http_port(), "GET /", &localhost).await;
    assert!(body(&answer).starts_with("GET / "), "{answer}");
}

/// The rules come first: an upstream proxy is no way around them.
#[tokio::test]
async fn refused_targets_do_not_reach_the_upstream_proxy() {
    let world = World::new().await;
    world.internet.name("inside.com", &["10.0.0.1"]);
    let mut config = world.config(allow(&["inside.com"]));
    let proxy_url = UpstreamProxy::parse(&format!("http://{}", world.origin));
    config.upstream = Some(UpstreamProxies {
        http: proxy_url.clone(),
        https: proxy_url,
        private_addresses: true,
    });
    let proxy = world.start(config).await;
    for host in ["inside.com", "new.com", "unknown.com", "10.0.0.1", "127.0.0.1"] {
        assert_eq!(
            status(&request(proxy.http_port(), &format!("GET http://{host}/"), host).await),
            403
        );
        assert_eq!(
            status(&request(proxy.http_port(), &format!("CONNECT {host}:1"), host).await),
            403
        );
    }
    assert_eq!(world.internet.connected(), Vec::<String>::new());
}

#[tokio::test]
async fn a_refusal_of_the_upstream_proxy_closes_the_tunnel() {
    let world = World::new().await;
    let (https, _asked) = connect_proxy("403 Forbidden").await;
    let mut config = world.config(allow(&["good.com"]));
    config.upstream = Some(UpstreamProxies {
        http: None,
        https: UpstreamProxy::parse(&format!("http://{https}")),
        private_addresses: false,
    });
    let proxy = world.start(config).await;
    let answer = request(proxy.http_port(), "CONNECT good.com:443", "good.com").await;
    assert_eq!((status(&answer), body(&answer)), (200, ""));
    // Without a proxy for plain HTTP, that goes directly.
    assert_eq!(status(&request(proxy.http_port(), "GET http://good.com/", "good.com").await), 200);
    assert_eq!(world.internet.connected(), [https.to_string(), "93.184.216.34:80".into()]);
}
