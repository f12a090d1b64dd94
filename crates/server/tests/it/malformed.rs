//! Invalid messages get an error with id -1, and affect nothing else.

use serde_json::json;

use crate::support::*;

/// A websocket client with a process that waits for input.
async fn busy() -> (codex_exec_serving::Server, Client) {
    let server = server();
    let mut client = Client::websocket(listen(&server).await).await;
    client.handshake(json!({"clientName": "test"})).await.unwrap();
    client.start(start("cat", &["cat"]).piped()).await.unwrap();
    (server, client)
}

/// The process still runs, and published nothing unexpected.
async fn still_works(client: &mut Client) {
    assert_eq!(client.write("cat", "still here").await, "accepted");
    client.close_stdin("cat").await;
    let all = client.until_closed("cat").await;
    assert_eq!(all.text(), "still here");
}

async fn refused_with_minus_one(client: &mut Client, text: &str) -> String {
    client.send(text).await;
    let refused = client.response(-1).await.unwrap_err();
    assert_eq!(refused.code, -32600, "{refused:?}");
    refused.message
}

#[tokio::test]
async fn invalid_messages_are_refused_and_the_connection_stays_open() {
    let (_server, mut client) = busy().await;
    for text in [
        "hello",
        "",
        " ",
        "[1,2]",
        "[]",
        "1",
        "null",
        "\"text\"",
        "{",
        "{}",
        "{\"id\":7}",
        "{\"id\":1.5,\"method\":\"environment/status\"}",
        "{\"id\":null,\"method\":\"environment/status\"}",
        "{\"id\":true,\"method\":\"environment/status\"}",
        "{\"id\":[1],\"method\":\"environment/status\"}",
        "{\"id\":9223372036854775808,\"method\":\"environment/status\"}",
        "{\"id\":1,\"method\":5}",
        "{\"id\":1,\"method\":null}",
        "{\"result\":1}",
        "{\"id\":1,\"error\":{\"code\":1}}",
        "{\"id\":1,\"error\":\"text\"}",
        "{\"id\":5,\"id\":6,\"method\":\"environment/status\"}",
        "{\"id\":5,\"method\":\"environment/status\",\"params\":{\"a\":1,\"a\":2}}",
        "{\"id\":5,\"method\":\"environment/status\"} {}",
        "{\"id\":5,\"method\":\"environment/status\"}x",
        "\u{feff}{\"id\":5,\"method\":\"environment/status\"}",
        "{\"id\":5,\"method\":\"\\ud800\"}",
    ] {
        refused_with_minus_one(&mut client, text).await;
    }
    still_works(&mut client).await;
}

#[tokio::test]
async fn messages_that_are_not_utf8_are_refused() {
    let (_server, mut client) = busy().await;
    client.send_binary(b"{\"id\":1,\"method\":\"\xff\"}".to_vec()).await;
    assert_eq!(client.response(-1).await.unwrap_err().code, -32600);
    client.send_binary(vec![0; 1000]).await;
    assert_eq!(client.response(-1).await.unwrap_err().code, -32600);
    still_works(&mut client).await;
}

#[tokio::test]
async fn a_notification_other_than_initialized_is_refused() {
    let (_server, mut client) = busy().await;
    for method in ["nope", "process/output", "initialize", "environment/status", ""] {
        let text = json!({"method": method, "params": {}}).to_string();
        refused_with_minus_one(&mut client, &text).await;
    }
    still_works(&mut client).await;
}

#[tokio::test]
async fn responses_without_a_request_are_ignored() {
    let (_server, mut client) = busy().await;
    client.send(r#"{"id":99,"result":{}}"#).await;
    client.send(r#"{"id":99,"error":{"code":1,"message":"no"}}"#).await;
    client.nothing_more().await;
    still_works(&mut client).await;
}

#[tokio::test]
async fn a_message_of_65_mib_is_refused() {
    let (_server, mut client) = busy().await;
    let long =
        format!(r#"{{"id":5,"method":"environment/status","x":"{}"}}"#, "x".repeat(65 << 20));
    let message = refused_with_minus_one(&mut client, &long).await;
    assert_eq!(message, format!("message of {} bytes is over the limit of 67108864", long.len()));
    still_works(&mut client).await;
}

#[tokio::test]
async fn a_message_of_64_mib_is_taken() {
    let (_server, mut client) = busy().await;
    let around = r#"{"id":5,"method":"environment/status","x":""}"#.len();
    let fill = "x".repeat((64 << 20) - around);
    client.send(format!(r#"{{"id":5,"method":"environment/status","x":"{fill}"}}"#)).await;
    assert_eq!(client.response(5).await.unwrap(), json!({"status": "ready"}));
    still_works(&mut client).await;
}

#[tokio::test]
async fn too_many_values_are_refused() {
    let (_server, mut client) = busy().await;
    let message = |values: usize| {
        let list = vec!["1"; values].join(",");
        format!(r#"{{"id":5,"method":"environment/status","params":[{list}]}}"#)
    };
    let said = refused_with_minus_one(&mut client, &message(300_000)).await;
    assert!(said.contains("more than 262144 JSON values"), "{said}");
    // The message, its id, method and params are values too.
    client.send(message(262_144 - 4)).await;
    assert_eq!(client.response(5).await.unwrap(), json!({"status": "ready"}));
    refused_with_minus_one(&mut client, &message(262_144 - 3)).await;
    still_works(&mut client).await;
}

#[tokio::test]
async fn deep_nesting_is_refused() {
    let (_server, mut client) = busy().await;
    let deep = "[".repeat(10_000);
    refused_with_minus_one(&mut client, &deep).await;
    let closed = format!("{deep}{}", "]".repeat(10_000));
    refused_with_minus_one(&mut client, &closed).await;
    let inside = format!(r#"{{"id":5,"method":"environment/status","params":{closed}}}"#);
    refused_with_minus_one(&mut client, &inside).await;
    let objects = format!("{}1{}", "{\"a\":".repeat(10_000), "}".repeat(10_000));
    refused_with_minus_one(&mut client, &objects).await;
    still_works(&mut client).await;
}

#[tokio::test]
async fn a_message_far_over_the_limit_ends_its_connection_only() {
    let server = server_with(|config| {
        config.connection.message_bytes = 10_000;
        config.connection.oversize_slack = 1000;
    });
    let address = listen(&server).await;
    let mut client = Client::websocket(address).await;
    let session = client.handshake(json!({"clientName": "test"})).await.unwrap();
    client.start(start("cat", &["cat"]).piped()).await.unwrap();
    client.send("x".repeat(20_000)).await;
    assert_eq!(client.text().await, None);
    let mut client = Client::websocket(address).await;
    let resume = json!({"clientName": "test", "resumeSessionId": session});
    client.handshake(resume).await.unwrap();
    still_works(&mut client).await;
}
