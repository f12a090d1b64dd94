//! Accounts to sign in with, and the time that they are used at.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64_simd::{STANDARD, URL_SAFE_NO_PAD};
use codex_exec_credentials::{AuthFile, SignInSources};
use serde_json::{Value, json};

use crate::cloud::Cloud;

/// The time in these tests.
pub(crate) const NOW: u64 = 1_800_000_000;

pub(crate) fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(NOW)
}

pub(crate) fn jwt(claims: &Value) -> String {
    let part = |value: &Value| URL_SAFE_NO_PAD.encode_to_string(value.to_string());
    format!("{}.{}.c2ln", part(&json!({"alg": "RS256"})), part(claims))
}

/// The seed of the agent's key.
pub(crate) const SEED: [u8; 32] = [9; 32];

/// An agent's identity, which registers its task with this service; and its private key.
pub(crate) fn agent(auth: &Cloud) -> (SignInSources, String) {
    let mut der = vec![0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];
    der.extend(SEED);
    let private_key = STANDARD.encode_to_string(&der);
    let claims = json!({"agent_runtime_id": "agent-7", "account_id": "acc-7", "exp": NOW + 60,
        "agent_private_key": private_key, "aud": ["codex-app-server"]});
    auth.script(|script| {
        script.answers.insert("register", (200, json!({"taskId": "task-1"}).to_string()));
    });
    let mut sources = SignInSources::default();
    sources.access_token = Some(jwt(&claims).into());
    sources.auth_api = Some(auth.base().to_string());
    sources.now = now;
    (sources, private_key)
}

/// A home whose `auth.json` has tokens of this issuer, the access token until `expires`.
pub(crate) fn home(issuer: &Cloud, expires: u64) -> (tempfile::TempDir, SignInSources, AuthFile) {
    let home = tempfile::tempdir().unwrap();
    let iss = issuer.base().to_string();
    let tokens = json!({
        "id_token": jwt(&json!({"iss": iss, "aud": ["client-1"]})),
        "access_token": jwt(&json!({"exp": expires})),
        "refresh_token": "refresh-1", "account_id": "acc-1",
    });
    let content = json!({"OPENAI_API_KEY": null, "tokens": tokens, "kept": 1});
    let file = AuthFile::in_home(home.path());
    std::fs::write(file.path(), content.to_string()).unwrap();
    let mut sources = SignInSources::default();
    sources.codex_home = Some(home.path().to_owned());
    sources.now = now;
    (home, sources, file)
}
