//! Renewals of a sign-in with an issuer that rotates refresh tokens and accepts none twice: cancelled
//! requests, concurrent requests, and an account that changes meanwhile.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use codex_exec_credentials::{AuthFile, SignInKind, SignInSources};
use codex_exec_remote::{HttpClient, Registry};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::yield_now;

use crate::accounts::{NOW, jwt};
use crate::cloud::{Cloud, ENVIRONMENT};

/// The issuer.
#[derive(Clone)]
struct Rotating {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
    /// Answers that may be sent.
    answers: Arc<Semaphore>,
    /// Counts requests for tokens that have come.
    asked: Arc<Semaphore>,
}

#[derive(Default)]
struct State {
    /// The number of the only refresh token that is good.
    valid: u64,
    /// Refresh tokens that were sent and are good no more.
    spent: Vec<String>,
    /// Whether the access tokens it issues have expired already.
    stale: bool,
}

impl Rotating {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let issuer = Self {
            address: listener.local_addr().unwrap(),
            state: Arc::default(),
            answers: Arc::new(Semaphore::new(0)),
            asked: Arc::new(Semaphore::new(0)),
        };
        let serving = issuer.clone();
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                tokio::spawn(serving.clone().response(socket));
            }
        });
        issuer
    }

    async fn response(self, mut socket: TcpStream) {
        let mut request = Vec::new();
        let mut buffer = [0; 4096];
        let whole = |request: &[u8]| {
            let text = String::from_utf8_lossy(request).into_owned();
            let (head, body) = text.split_once("\r\n\r\n")?;
            let length = head.to_lowercase().lines().find_map(|line| {
                line.strip_prefix("content-length:")?.trim().parse::<usize>().ok()
            });
            (body.len() >= length.unwrap_or(0)).then_some(text)
        };
        let text = loop {
            match socket.read(&mut buffer).await {
                Ok(len @ 1..) => request.extend_from_slice(&buffer[..len]),
                _ => return,
            }
            if let Some(text) = whole(&request) {
                break text;
            }
        };
        let (status, body) = match text.split_once("refresh_token=refresh-") {
            None => (404, json!({})),
            Some((_, rest)) => {
                let number: String = rest.chars().take_while(char::is_ascii_digit).collect();
                let response = self.rotate(&number);
                self.asked.add_permits(1);
                // As late as the test wants.
                self.answers.acquire().await.unwrap().forget();
                response
            }
        };
        let body = body.to_string();
        let head = format!("HTTP/1.1 {status} x\r\nContent-Length: {}\r\n\r\n", body.len());
        let _ = socket.write_all((head + &body).as_bytes()).await;
    }

    /// Uses up the token before the response is sent.
    fn rotate(&self, number: &str) -> (u16, serde_json::Value) {
        let mut state = self.state.lock().unwrap();
        if *number != state.valid.to_string() {
            state.spent.push(number.to_owned());
            return (400, json!({"error": "invalid_grant"}));
        }
        state.valid += 1;
        let expires = if state.stale { NOW - 1 } else { NOW + 3600 };
        let access = jwt(&json!({"exp": expires, "jti": state.valid}));
        let refresh = format!("refresh-{}", state.valid);
        (200, json!({"access_token": access, "refresh_token": refresh}))
    }

    /// A home that is signed in with an expired token, as this account.
    fn home(&self, account: &str) -> (tempfile::TempDir, SignInSources, AuthFile) {
        let home = tempfile::tempdir().unwrap();
        let file = AuthFile::in_home(home.path());
        self.sign_in(&file, account, 0);
        let mut sources = SignInSources::default();
        sources.codex_home = Some(home.path().to_owned());
        sources.now = || std::time::UNIX_EPOCH + std::time::Duration::from_secs(NOW);
        (home, sources, file)
    }

    /// Writes the file as a program does that knows no lock.
    fn sign_in(&self, file: &AuthFile, account: &str, refresh: u64) {
        let iss = format!("http://{}/", self.address);
        let tokens = json!({
            "id_token": jwt(&json!({"iss": iss, "aud": ["client-1"], "sub": account})),
            "access_token": jwt(&json!({"exp": NOW - 1, "account": account})),
            "refresh_token": format!("refresh-{refresh}"), "account_id": account,
        });
        let content = json!({"OPENAI_API_KEY": null, "tokens": tokens}).to_string();
        let beside = file.path().with_extension("new");
        std::fs::write(&beside, content).unwrap();
        std::fs::rename(beside, file.path()).unwrap();
    }

    async fn until_asked(&self) {
        self.asked.acquire().await.unwrap().forget();
    }
}

fn registry(cloud: &Cloud, sources: &SignInSources) -> Registry {
    let sign_in = sources.sign_in(SignInKind::Default).unwrap();
    Registry::new(cloud.base(), sign_in, HttpClient::default()).unwrap()
}

fn key() -> codex_exec_relay_core::NoisePublicKey {
    codex_exec_relay_core::NoiseIdentity::generate(&mut *codex_exec_remote::entropy())
        .unwrap()
        .public_key()
}

fn stored(file: &AuthFile) -> codex_exec_credentials::TokenSet {
    file.read().unwrap().unwrap().tokens.unwrap()
}

#[tokio::test]
async fn cancelled_renewal_is_still_stored() {
    let (cloud, issuer) = (Cloud::start().await, Rotating::start().await);
    let (_home, sources, file) = issuer.home("acc-1");
    let (asking, key) = (registry(&cloud, &sources), key());
    tokio::select! {
        _ = asking.register(ENVIRONMENT, &key) => panic!("the issuer has not responded"),
        () = issuer.until_asked() => {}
    }
    drop(asking);
    issuer.answers.add_permits(1);
    // The next to ask waits for the lock, and then finds what was renewed.
    registry(&cloud, &sources).register(ENVIRONMENT, &key).await.unwrap();
    assert_eq!(stored(&file).refresh_token, "refresh-1");
    assert!(issuer.state.lock().unwrap().spent.is_empty());
}

/// Requests of several processes, some cancelled at a random moment, never lose the sign-in.
async fn concurrent_requests(
    cloud: &Cloud,
    key: &codex_exec_relay_core::NoisePublicKey,
    seed: u64,
) {
    let mut random = fastrand::Rng::with_seed(seed);
    let issuer = Rotating::start().await;
    let (_home, sources, file) = issuer.home("acc-1");
    // Answers come, but late: after a random number of turns of the loop.
    let (late, turns) = (issuer.clone(), random.usize(0..40));
    let answering = tokio::spawn(async move {
        loop {
            late.until_asked().await;
            for _ in 0..turns {
                yield_now().await;
            }
            late.answers.add_permits(1);
        }
    });
    for _ in 0..4 {
        issuer.state.lock().unwrap().stale = random.bool();
        let registries: Vec<Registry> =
            (0..random.usize(1..4)).map(|_| registry(cloud, &sources)).collect();
        let asking = registries.iter().map(|registry| {
            let timeout = random.bool().then(|| random.usize(0..120));
            async move {
                let given_up = async {
                    match timeout {
                        None => std::future::pending().await,
                        Some(turns) => {
                            for _ in 0..turns {
                                yield_now().await;
                            }
                        }
                    }
                };
                tokio::select! {
                    biased;
                    done = registry.register(ENVIRONMENT, key) => {
                        done.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
                    }
                    () = given_up => {}
                }
            }
        });
        futures_util::future::join_all(asking).await;
    }
    issuer.state.lock().unwrap().stale = false;
    let last = registry(cloud, &sources).register(ENVIRONMENT, key).await;
    last.unwrap_or_else(|error| panic!("seed {seed}: signed out: {error}"));
    let state = issuer.state.lock().unwrap();
    assert_eq!(stored(&file).refresh_token, format!("refresh-{}", state.valid), "seed {seed}");
    assert!(state.spent.is_empty(), "seed {seed}: {:?}", state.spent);
    answering.abort();
}

#[tokio::test]
async fn cancelled_requests_never_lose_the_sign_in() {
    let (cloud, key) = (Cloud::start().await, key());
    for seed in 0..60 {
        concurrent_requests(&cloud, &key, seed).await;
    }
}

#[tokio::test]
async fn tokens_of_another_account_are_refused() {
    let (cloud, issuer) = (Cloud::start().await, Rotating::start().await);
    for swapped_while_asking in [false, true] {
        issuer.state.lock().unwrap().valid = 0;
        let (_home, sources, file) = issuer.home("acc-1");
        let asking = registry(&cloud, &sources);
        if !swapped_while_asking {
            issuer.sign_in(&file, "acc-2", 7);
        }
        let key = key();
        let register = asking.register(ENVIRONMENT, &key);
        let swap = async {
            if swapped_while_asking {
                issuer.until_asked().await;
                issuer.sign_in(&file, "acc-2", 7);
                issuer.answers.add_permits(1);
            }
        };
        let (response, ()) = tokio::join!(register, swap);
        let error = response.unwrap_err().to_string();
        assert!(error.contains("another account"), "{error}");
        let tokens = stored(&file);
        assert_eq!(tokens.account_id.as_deref(), Some("acc-2"));
        assert_eq!(tokens.refresh_token, "refresh-7");
    }
    assert!(cloud.seen("/register").is_empty());
}

/// The same user signs in again while the old sign-in is renewed.
#[tokio::test]
async fn sign_in_replaced_during_renewal_is_preserved() {
    let (cloud, issuer) = (Cloud::start().await, Rotating::start().await);
    let (_home, sources, file) = issuer.home("acc-1");
    let asking = registry(&cloud, &sources);
    let key = key();
    let swap = async {
        issuer.until_asked().await;
        issuer.sign_in(&file, "acc-1", 7);
        issuer.answers.add_permits(1);
    };
    let (response, ()) = tokio::join!(asking.register(ENVIRONMENT, &key), swap);
    response.unwrap();
    assert_eq!(stored(&file).refresh_token, "refresh-7");
}
