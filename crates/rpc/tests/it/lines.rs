//! Lines over byte streams.

use codex_exec_rpc::{Connection, ConnectionConfig, TransportError};
use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

fn connection(
    config: &ConnectionConfig,
) -> (Connection, tokio::io::DuplexStream, tokio::io::DuplexStream) {
    let (input, to_it) = duplex(64);
    let (output, from_it) = duplex(64);
    (Connection::lines(input, output, config), to_it, from_it)
}

#[tokio::test]
async fn blank_lines_are_skipped_and_an_unterminated_last_line_counts() {
    let (mut connection, mut to_it, mut from_it) = connection(&ConnectionConfig::default());
    let writer = tokio::spawn(async move {
        to_it.write_all(b"{\"a\":1}\r\n\n  \n{\"b\":2}\n{\"c\"").await.unwrap();
        to_it.write_all(b":3}").await.unwrap();
    });
    assert_eq!(connection.next().await.unwrap().unwrap(), "{\"a\":1}\r");
    assert_eq!(connection.next().await.unwrap().unwrap(), "{\"b\":2}");
    assert_eq!(connection.next().await.unwrap().unwrap(), "{\"c\":3}");
    assert!(connection.next().await.is_none());
    writer.await.unwrap();
    connection.outbound().send("x").await.unwrap();
    connection.outbound().send("y").await.unwrap();
    drop(connection);
    let mut text = String::new();
    from_it.read_to_string(&mut text).await.unwrap();
    assert_eq!(text, "x\ny\n");
}

#[tokio::test]
async fn a_line_over_the_limit_ends_the_connection() {
    let config = ConnectionConfig { message_bytes: 100, ..ConnectionConfig::default() };
    for end in ["\n", ""] {
        let (mut connection, mut to_it, _from_it) = connection(&config);
        let line = format!("{}{end}", "x".repeat(101));
        tokio::spawn(async move { to_it.write_all(line.as_bytes()).await });
        let error = connection.next().await.unwrap().unwrap_err();
        assert!(matches!(error, TransportError::TooLongToSkip { limit: 100 }), "{error}");
        assert!(connection.next().await.is_none());
    }
}
