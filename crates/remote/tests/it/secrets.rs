//! Nothing secret is ever printed: a whole session at trace level, searched.

use std::io;
use std::sync::{Arc, Mutex};

use codex_exec_client::ExecCommand;
use codex_exec_credentials::SignInKind;
use codex_exec_relay_core::NoiseIdentity;
use codex_exec_remote::{HttpClient, RegistrationTarget, Registry, RelayConfig, entropy};
use serde_json::json;
use tracing_subscriber::fmt::MakeWriter;

use crate::accounts;
use crate::cloud::{AUTHORIZATION, Cloud, ENVIRONMENT, URL_SECRET};
use crate::ends::{environment, link, registry, serve};
use crate::session::{Remote, client};

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;
    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// The only test of its thread, and everything of it runs there: the subscriber sees it all.
#[tokio::test(flavor = "current_thread")]
async fn trace_logs_contain_no_secret() {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::TRACE)
        .with_ansi(false)
        .with_writer(log.clone())
        .finish();
    let guard = tracing::subscriber::set_default(subscriber);
    let cloud = Cloud::start().await;
    let target = environment(&cloud);
    let mut printed = format!("{target:?} {:?} {:?}", registry(&cloud), link(&cloud));
    let remote = Remote::start(target);
    cloud.upgraded(1).await;
    let session = client(&cloud).await;
    session.run(ExecCommand::shell("echo terminal-secret-42")).await.unwrap();
    cloud.drop_sockets();
    cloud.upgraded(4).await;
    session.run(ExecCommand::shell("echo again")).await.unwrap();
    cloud.script(|script| {
        script.deny = true;
        script.refuse_upgrades = vec![401];
    });
    printed.push_str(&link(&cloud).dial().await.unwrap_err().to_string());
    printed.push_str(&format!("{:?}", link(&cloud).dial().await));
    let mut secrets = Vec::new();
    printed.push_str(&signed_in_otherwise(&mut secrets).await);
    remote.stop().await;
    drop(guard);
    printed.push_str(&String::from_utf8_lossy(&log.0.lock().unwrap()));
    assert!(printed.contains("request to the registry"), "the log is there");
    let fixed = [URL_SECRET, AUTHORIZATION, "sk-test", "sk-harness", "terminal-secret-42"];
    for secret in fixed.iter().copied().chain(secrets.iter().map(String::as_str)) {
        assert!(!printed.contains(secret), "{secret} was printed");
    }
}

/// The sign-ins that hold more than one secret, each through a whole session and a refusal: what they
/// print by themselves, and what must not be printed.
async fn signed_in_otherwise(secrets: &mut Vec<String>) -> String {
    let mut printed = String::new();
    let (auth, issuer) = (Cloud::start().await, Cloud::start().await);
    let (agent, private_key) = accounts::agent(&auth);
    let (_home, tokens, file) = accounts::home(&issuer, accounts::NOW - 1);
    let fresh = accounts::jwt(&json!({"exp": accounts::NOW + 3600, "fresh": 1}));
    let issued = json!({"access_token": fresh, "refresh_token": "refresh-secret-2"}).to_string();
    issuer.script(|script| {
        script.answers.insert("token", (200, issued));
    });
    let stale = file.read().unwrap().unwrap().tokens.unwrap();
    secrets.extend([fresh, stale.access_token, stale.id_token, stale.refresh_token]);
    secrets.extend(["refresh-secret-2".into(), private_key]);
    secrets.push(agent.access_token.clone().unwrap().expose().to_owned());
    let both = [(agent, SignInKind::AgentIdentity, auth), (tokens, SignInKind::Default, issuer)];
    for (sources, kind, service) in both {
        let cloud = Cloud::start().await;
        let sign_in = sources.sign_in(kind).unwrap();
        let target = RegistrationTarget::Environment {
            registry: Registry::new(cloud.base(), sign_in, HttpClient::default()).unwrap(),
            environment_id: ENVIRONMENT.into(),
            identity: NoiseIdentity::generate(&mut *entropy()).unwrap(),
        };
        printed.push_str(&format!("{target:?} {sources:?}"));
        let remote = Remote::start(target.clone());
        cloud.upgraded(1).await;
        client(&cloud).await.run(ExecCommand::shell("true")).await.unwrap();
        remote.stop().await;
        for refusing in [&cloud, &service] {
            refusing.script(|script| {
                script.answers.insert("register", (401, "{}".into()));
                script.answers.insert("token", (400, r#"{"error":"invalid_grant"}"#.into()));
            });
        }
        let refused = serve(target, RelayConfig::default()).ended().await.unwrap_err();
        printed.push_str(&format!("{refused} {refused:?}"));
        for seen in cloud.seen("/register") {
            let sent = seen.headers["authorization"].to_str().unwrap();
            secrets.push(sent.split(' ').nth(1).unwrap().to_owned());
        }
    }
    printed
}
