//! Sign-in against services that check what they are sent.

use std::time::Duration;

use base64_simd::{STANDARD, URL_SAFE_NO_PAD};
use codex_exec_credentials::{SignInKind, SignInSources, rfc3339};
use codex_exec_remote::{HttpClient, Registry};
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};
use serde_json::{Value, json};

use crate::accounts::{NOW, SEED, agent, home, jwt, now};
use crate::cloud::{Cloud, ENVIRONMENT};

fn key() -> codex_exec_relay_core::NoisePublicKey {
    codex_exec_relay_core::NoiseIdentity::generate(&mut *codex_exec_remote::entropy())
        .unwrap()
        .public_key()
}

fn registry(cloud: &Cloud, sources: &SignInSources, kind: SignInKind) -> Registry {
    Registry::new(cloud.base(), sources.sign_in(kind).unwrap(), HttpClient::default()).unwrap()
}

#[tokio::test]
async fn agent_registers_one_task_and_signs_every_request() {
    let (cloud, auth) = (Cloud::start().await, Cloud::start().await);
    let public = Ed25519KeyPair::from_seed_unchecked(&SEED).unwrap();
    let public = UnparsedPublicKey::new(&ED25519, public.public_key().as_ref().to_vec());
    let (sources, _) = agent(&auth);
    let registry = registry(&cloud, &sources, SignInKind::AgentIdentity);
    for _ in 0..2 {
        registry.register(ENVIRONMENT, &key()).await.unwrap();
    }
    let tasks = auth.seen("/task/register");
    assert_eq!(tasks.len(), 1);
    assert_eq!(tasks[0].path, "/v1/agent/agent-7/task/register");
    let stamp = rfc3339(now());
    assert_eq!(tasks[0].body["timestamp"], stamp);
    let signature = STANDARD.decode_to_vec(tasks[0].body["signature"].as_str().unwrap()).unwrap();
    public.verify(format!("agent-7:{stamp}").as_bytes(), &signature).unwrap();

    for seen in cloud.seen("/register") {
        assert_eq!(seen.headers["chatgpt-account-id"], "acc-7");
        let header = seen.headers["authorization"].to_str().unwrap();
        let assertion = header.strip_prefix("AgentAssertion ").unwrap();
        let text = URL_SAFE_NO_PAD.decode_to_vec(assertion).unwrap();
        let read: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(read["task_id"], "task-1");
        assert_eq!(read["timestamp"], stamp);
        let signature = STANDARD.decode_to_vec(read["signature"].as_str().unwrap()).unwrap();
        public.verify(format!("agent-7:task-1:{stamp}").as_bytes(), &signature).unwrap();
        let expected = format!(
            r#"{{"agent_runtime_id":"agent-7","signature":"{}","task_id":"task-1","timestamp":"{stamp}"}}"#,
            read["signature"].as_str().unwrap()
        );
        assert_eq!(String::from_utf8(text).unwrap(), expected, "the members are sorted");
    }
}

#[tokio::test]
async fn valid_tokens_are_used_without_renewal() {
    let (cloud, issuer) = (Cloud::start().await, Cloud::start().await);
    let (_home, sources, file) = home(&issuer, NOW + 3600);
    registry(&cloud, &sources, SignInKind::Default).register(ENVIRONMENT, &key()).await.unwrap();
    let seen = &cloud.seen("/register")[0];
    let token = file.read().unwrap().unwrap().tokens.unwrap().access_token;
    assert_eq!(seen.headers["authorization"], format!("Bearer {token}"));
    assert_eq!(seen.headers["chatgpt-account-id"], "acc-1");
    assert!(issuer.seen("token").is_empty());
}

#[tokio::test]
async fn expired_tokens_are_renewed_once_across_processes() {
    let (cloud, issuer) = (Cloud::start().await, Cloud::start().await);
    let fresh = jwt(&json!({"exp": NOW + 3600}));
    let issued = json!({"access_token": fresh, "refresh_token": "refresh-2"}).to_string();
    issuer.script(|script| {
        script.answers.insert("token", (200, issued));
    });
    let (_home, sources, file) = home(&issuer, NOW - 1);
    // Each has read the old tokens before any has renewed them.
    let registries: Vec<Registry> =
        (0..4).map(|_| registry(&cloud, &sources, SignInKind::Default)).collect();
    let asking = registries.iter().map(|registry| async {
        registry.register(ENVIRONMENT, &key()).await.unwrap();
    });
    futures_util::future::join_all(asking).await;
    assert_eq!(issuer.seen("/oauth/token").len(), 1);
    for seen in cloud.seen("/register") {
        assert_eq!(seen.headers["authorization"], format!("Bearer {fresh}"));
    }
    let content = file.read().unwrap().unwrap();
    assert_eq!(content.tokens.unwrap().refresh_token, "refresh-2");
    assert_eq!(content.last_refresh.unwrap(), rfc3339(now()));
    assert_eq!(content.rest["kept"], 1);
}

#[tokio::test]
async fn failed_renewal_error_says_what_to_do() {
    let (cloud, issuer) = (Cloud::start().await, Cloud::start().await);
    issuer.script(|script| {
        script.answers.insert("token", (400, json!({"error": "invalid_grant"}).to_string()));
    });
    let (_home, sources, _file) = home(&issuer, NOW - 1);
    let registry = registry(&cloud, &sources, SignInKind::Default);
    let error = registry.register(ENVIRONMENT, &key()).await.unwrap_err();
    assert!(error.to_string().contains("invalid_grant"), "{error}");
    assert!(error.to_string().contains("run codex login"), "{error}");
    assert!(cloud.seen("/register").is_empty());
}

/// One request as a browser makes it; gives the status line.
async fn browse(url: &str) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let rest = url.strip_prefix("http://localhost:").unwrap();
    let (port, path) = rest.split_once('/').unwrap();
    let address = ("127.0.0.1", port.parse().unwrap());
    let mut socket = tokio::net::TcpStream::connect(address).await.unwrap();
    socket.write_all(format!("GET /{path} HTTP/1.1\r\n\r\n").as_bytes()).await.unwrap();
    let mut response = String::new();
    socket.read_to_string(&mut response).await.unwrap();
    response.lines().next().unwrap().to_owned()
}

fn field(url: &str, name: &str) -> String {
    let query = url.split_once('?').unwrap().1;
    let pair = query.split('&').find(|pair| pair.starts_with(&format!("{name}="))).unwrap();
    pair.split_once('=').unwrap().1.replace("%3A", ":").replace("%2F", "/")
}

#[tokio::test]
async fn browser_callback_requires_the_matching_state() {
    use ring::digest::{SHA256, digest};
    let issuer_cloud = Cloud::start().await;
    let issued = json!({"access_token": "at", "refresh_token": "rt",
        "id_token": jwt(&json!({"account_id": "acc-9"}))});
    issuer_cloud.script(|script| {
        script.answers.insert("token", (200, issued.to_string()));
    });
    let home = tempfile::tempdir().unwrap();
    let mut sources = SignInSources::default();
    sources.codex_home = Some(home.path().to_owned());
    sources.now = now;
    let http = HttpClient::default();
    let base = Some(issuer_cloud.base().to_string());
    let issuer =
        codex_exec_credentials::login_issuer(&sources, base, Some("client-2".into()), &http).await;
    let login = codex_exec_credentials::BrowserLogin::start(issuer.unwrap(), 0).await.unwrap();
    let url = login.url();
    let (callback, state) = (field(&url, "redirect_uri"), field(&url, "state"));
    let challenge = field(&url, "code_challenge");
    let browsing = async {
        assert!(browse(&format!("{callback}?code=evil&state=other")).await.contains("404"));
        assert!(browse(&format!("{callback}?code=the%2Dcode&state={state}")).await.contains("200"));
    };
    let (tokens, ()) = tokio::join!(login.finish(Duration::from_secs(30), &http), browsing);
    codex_exec_credentials::login_with_tokens(&sources, &tokens.unwrap()).unwrap();
    let sent = issuer_cloud.forms();
    let form = sent.last().unwrap();
    assert!(form.contains("code=the-code") && form.contains("client_id=client-2"), "{form}");
    let verifier = form.split('&').find_map(|pair| pair.strip_prefix("code_verifier=")).unwrap();
    assert_eq!(URL_SAFE_NO_PAD.encode_to_string(digest(&SHA256, verifier.as_bytes())), challenge);

    let kept = sources.auth_file().unwrap().read().unwrap().unwrap().tokens.unwrap();
    assert_eq!((&*kept.access_token, kept.account_id.as_deref()), ("at", Some("acc-9")));
    assert!(codex_exec_credentials::logout(&sources).unwrap());
    assert!(!codex_exec_credentials::logout(&sources).unwrap());
}

#[tokio::test(start_paused = true)]
async fn device_login_polls_at_the_requested_interval() {
    let issuer_cloud = Cloud::start().await;
    let authorization = json!({"device_code": "dc", "user_code": "ABCD", "interval": 5,
        "verification_uri": "https://issuer.example/device", "expires_in": 60});
    issuer_cloud.script(|script| {
        script.answers.insert("code", (200, authorization.to_string()));
        let pending = json!({"error": "authorization_pending"}).to_string();
        script.answers.insert("token", (400, pending));
    });
    let (sources, http) = (SignInSources::default(), HttpClient::default());
    let base = Some(issuer_cloud.base().to_string());
    let issuer =
        codex_exec_credentials::login_issuer(&sources, base, Some("c".into()), &http).await;
    let login = codex_exec_credentials::DeviceLogin::start(issuer.unwrap(), &http).await.unwrap();
    assert_eq!(login.user_code(), "ABCD");
    let error = login.finish(&http).await.unwrap_err();
    assert!(error.to_string().contains("within 60 s"), "{error}");
    let asked = issuer_cloud.seen("/oauth/token").len();
    assert!((9..=12).contains(&asked), "{asked} questions in a minute");
}

#[tokio::test]
async fn silent_connections_do_not_delay_the_browser() {
    let issuer_cloud = Cloud::start().await;
    issuer_cloud.script(|script| {
        script.answers.insert("token", (200, json!({"access_token": "at"}).to_string()));
    });
    let (sources, http) = (SignInSources::default(), HttpClient::default());
    let base = Some(issuer_cloud.base().to_string());
    let issuer =
        codex_exec_credentials::login_issuer(&sources, base, Some("c".into()), &http).await;
    let login = codex_exec_credentials::BrowserLogin::start(issuer.unwrap(), 0).await.unwrap();
    let url = login.url();
    let (callback, state) = (field(&url, "redirect_uri"), field(&url, "state"));
    let port: u16 = callback.split([':', '/']).nth(4).unwrap().parse().unwrap();
    let browsing = async {
        // More than may wait at once; none of them ever sends anything.
        let mut silent = Vec::new();
        for _ in 0..100 {
            silent.push(tokio::net::TcpStream::connect(("127.0.0.1", port)).await.unwrap());
        }
        let status = browse(&format!("{callback}?code=x&state={state}")).await;
        assert!(status.contains("200"), "{status}");
    };
    // Waiting for each of them in turn would take 1,000 s.
    let (tokens, ()) = tokio::join!(login.finish(Duration::from_secs(60), &http), browsing);
    tokens.unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_expiry_without_bounds_is_bounded() {
    let issuer_cloud = Cloud::start().await;
    let authorization = json!({"device_code": "dc", "user_code": "ABCD", "interval": u64::MAX,
        "verification_uri": "https://issuer.example/device", "expires_in": u64::MAX});
    issuer_cloud.script(|script| {
        script.answers.insert("code", (200, authorization.to_string()));
        script.answers.insert("token", (400, json!({"error": "slow_down"}).to_string()));
    });
    let (sources, http) = (SignInSources::default(), HttpClient::default());
    let base = Some(issuer_cloud.base().to_string());
    let issuer =
        codex_exec_credentials::login_issuer(&sources, base, Some("c".into()), &http).await;
    let login = codex_exec_credentials::DeviceLogin::start(issuer.unwrap(), &http).await.unwrap();
    let error = login.finish(&http).await.unwrap_err();
    assert!(error.to_string().contains("within 1800 s"), "{error}");
}
