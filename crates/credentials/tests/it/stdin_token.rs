//! A ChatGPT access token on stdin: which are valid, which account they are sent with, and where to.

use base64_simd::URL_SAFE_NO_PAD;
use codex_exec_credentials::{ChatGptAccessToken, StdinTokenError};
use codex_exec_remote::{BaseUrl, Credential, HttpClient};
use serde_json::{Value, json};

fn token(account: &Value) -> String {
    let payload = json!({"https://api.openai.com/auth": account}).to_string();
    format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode_to_string(payload))
}

fn read(line: &str, account_id: Option<&str>) -> Result<ChatGptAccessToken, StdinTokenError> {
    ChatGptAccessToken::read(&mut line.as_bytes(), account_id)
}

/// The account that a token is sent with, by the rules: its own, which the given one may not contradict.
fn expected(own: Option<&str>, given: Option<&str>) -> Result<String, &'static str> {
    let id = match (own, given) {
        (Some(own), Some(given)) if own != given => return Err("OtherAccount"),
        (Some(id), _) | (_, Some(id)) => id,
        (None, None) => return Err("NoAccount"),
    };
    let valid = !id.is_empty() && id.bytes().all(|byte| (0x21..0x7f).contains(&byte));
    if valid { Ok(id.to_owned()) } else { Err("AccountId") }
}

#[tokio::test]
async fn every_pair_of_accounts_is_accepted_or_refused_by_the_rules() {
    let ids = [None, Some("a"), Some("b"), Some(""), Some("a b"), Some("é"), Some("a\n")];
    for own in ids {
        for given in ids {
            let account = own.map_or(json!({}), |id| json!({"chatgpt_account_id": id}));
            let token = token(&account);
            let result = match read(&format!("{token}\n"), given) {
                Ok(credential) => {
                    let headers = credential.headers(&HttpClient::default()).await.unwrap();
                    assert!(headers["authorization"].is_sensitive());
                    assert_eq!(headers["authorization"], format!("Bearer {token}"));
                    assert!(!format!("{credential:?}").contains(&token), "{credential:?}");
                    Ok(headers["chatgpt-account-id"].to_str().unwrap().to_owned())
                }
                Err(error) => Err(format!("{error:?}")),
            };
            assert_eq!(result, expected(own, given).map_err(str::to_owned), "{own:?} {given:?}");
        }
    }
}

#[test]
fn malformed_tokens_are_refused_without_showing_them() {
    let jwt = |payload: &str| format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode_to_string(payload));
    let long = jwt(&json!({"p": "x".repeat(50 << 10)}).to_string());
    for (line, kind) in [
        (String::new(), "Line"),
        (token(&json!({})), "Line"),
        (format!("{long}\n"), "Line"),
        ("\n".to_owned(), "Characters"),
        (format!(" {}\n", token(&json!({}))), "Characters"),
        ("at-k3y\n".to_owned(), "NotJwt"),
        (format!("{}\n", jwt("k3y")), "NotJwt"),
        (format!("{}\n", token(&json!({"chatgpt_account_id": 7}))), "NotJwt"),
    ] {
        let error = read(&line, Some("a")).unwrap_err();
        assert!(format!("{error:?}").starts_with(kind), "{kind}: {error:?}");
        let shown = error.to_string();
        assert!(!shown.contains("k3y") && !shown.contains("e30"), "{shown}");
    }
    read(&format!("{}\r\nmore", token(&json!({}))), Some("a")).unwrap();
}

#[test]
fn a_chatgpt_token_is_sent_over_https_only() {
    let credential = read(&format!("{}\n", token(&json!({}))), Some("a")).unwrap();
    let check = |url: &str| credential.check_target(&url.parse::<BaseUrl>().unwrap());
    check("https://registry.example").unwrap();
    for url in ["http://127.0.0.1:1", "http://localhost", "http://registry.example"] {
        assert!(!check(url).unwrap_err().is_transient(), "{url}");
    }
}
