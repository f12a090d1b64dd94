//! Agent identity: a key in a token, a task registered with it, and an assertion per request.
//!
//! Invariant: the private key leaves this module only as signatures; it also decrypts the sealed box in
//! which a task id may arrive.

use std::fmt;
use std::time::{Duration, SystemTime};

use base64_simd::{STANDARD, URL_SAFE_NO_PAD};
use codex_exec_remote::{BaseUrl, HttpClient, Payload, Secret};
use crypto_box::SecretKey;
use http::{HeaderMap, Method};
use ring::signature::Ed25519KeyPair;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha512};
use tokio::sync::Mutex;
use zeroize::{Zeroize, Zeroizing};

use crate::jwt::claims;
use crate::sign_in::SignInError;
use crate::timestamp::rfc3339;

/// The audience that the token must name, if it names any.
const AUDIENCE: &str = "codex-app-server";
/// Bytes of an Ed25519 seed.
const SEED_LEN: usize = 32;

/// An agent's key and the task it acts in.
pub struct AgentIdentity {
    runtime_id: String,
    account_id: Option<String>,
    key: Ed25519KeyPair,
    seed: Zeroizing<[u8; SEED_LEN]>,
    auth_api: BaseUrl,
    task: Mutex<Option<String>>,
    now: fn() -> SystemTime,
}

#[derive(Serialize)]
struct RegisterBody {
    timestamp: String,
    signature: String,
}

#[derive(Deserialize)]
struct RegisterResponse {
    #[serde(alias = "taskId")]
    task_id: Option<String>,
    #[serde(alias = "encryptedTaskId")]
    encrypted_task_id: Option<String>,
}

/// The members are in alphabetical order.
#[derive(Serialize)]
struct Assertion<'a> {
    agent_runtime_id: &'a str,
    signature: String,
    task_id: &'a str,
    timestamp: String,
}

impl AgentIdentity {
    /// Reads the identity from the token. Tasks are registered at `auth_api`.
    pub fn new(
        token: &Secret,
        auth_api: BaseUrl,
        now: fn() -> SystemTime,
    ) -> Result<Self, SignInError> {
        let bad = SignInError::AgentToken;
        let claims = claims(token).ok_or_else(|| bad("it is not a JSON Web Token"))?;
        if claims.expires_by(now(), Duration::ZERO) {
            return Err(bad("it has expired"));
        }
        let audiences = claims.audiences();
        if !audiences.is_empty() && !audiences.contains(&AUDIENCE) {
            return Err(bad("it is for another audience"));
        }
        let account_id = claims.account().map(ToOwned::to_owned);
        let runtime_id = claims.agent_runtime_id.filter(|id| !id.is_empty());
        let runtime_id = runtime_id.ok_or_else(|| bad("it has no agent_runtime_id"))?;
        let key = claims.agent_private_key.ok_or_else(|| bad("it has no agent_private_key"))?;
        let pkcs8 = STANDARD.decode_to_vec(key.expose().trim());
        let pkcs8 = Zeroizing::new(pkcs8.map_err(|_| bad("its key is not base64"))?);
        let seed = seed_of(&pkcs8).ok_or_else(|| bad("its key is not a PKCS#8 Ed25519 key"))?;
        let key = Ed25519KeyPair::from_seed_unchecked(&*seed)
            .map_err(|_| bad("its key is not an Ed25519 key"))?;
        if !auth_api.is_private() {
            return Err(SignInError::AgentTask(format!("{auth_api} is neither https nor local")));
        }
        Ok(Self { runtime_id, account_id, key, seed, auth_api, task: Mutex::new(None), now })
    }

    pub(crate) fn account_id(&self) -> Option<&str> {
        self.account_id.as_deref()
    }

    /// The value of one request's `Authorization` header, without its scheme.
    pub(crate) async fn assertion(&self, http: &HttpClient) -> Result<Secret, SignInError> {
        let mut task = self.task.lock().await;
        let task_id = match &*task {
            Some(task_id) => task_id.clone(),
            None => task.insert(self.register_task(http).await?).clone(),
        };
        drop(task);
        let timestamp = rfc3339((self.now)());
        let signed = format!("{}:{task_id}:{timestamp}", self.runtime_id);
        let assertion = Assertion {
            agent_runtime_id: &self.runtime_id,
            signature: self.sign(&signed),
            task_id: &task_id,
            timestamp,
        };
        let json = serde_json::to_vec(&assertion)
            .map_err(|error| SignInError::AgentTask(error.to_string()))?;
        Ok(URL_SAFE_NO_PAD.encode_to_string(json).into())
    }

    /// Forgets the task after a 401, since it may have ended. Returns whether there was one.
    pub(crate) async fn forget_task(&self) -> bool {
        self.task.lock().await.take().is_some()
    }

    async fn register_task(&self, http: &HttpClient) -> Result<String, SignInError> {
        let timestamp = rfc3339((self.now)());
        let signature = self.sign(&format!("{}:{timestamp}", self.runtime_id));
        let body = serde_json::to_vec(&RegisterBody { timestamp, signature })
            .map_err(|error| SignInError::AgentTask(error.to_string()))?;
        let url = self.auth_api.join(&["v1", "agent", &self.runtime_id, "task", "register"]);
        let response = http.send(Method::POST, &url, HeaderMap::new(), Payload::Json(body)).await?;
        let status = response.status.as_u16();
        if !response.status.is_success() {
            return Err(SignInError::AgentTask(format!("HTTP {status}")));
        }
        let registered = response.json::<RegisterResponse>();
        let registered = registered
            .ok_or_else(|| SignInError::AgentTask("the response cannot be parsed".into()))?;
        let task_id = match (registered.task_id, registered.encrypted_task_id) {
            (Some(task_id), _) => Some(task_id),
            (None, Some(sealed)) => self.unseal(&sealed),
            (None, None) => None,
        };
        task_id.filter(|id| !id.is_empty()).ok_or_else(|| {
            SignInError::AgentTask("the response has no task id that can be decrypted".into())
        })
    }

    fn sign(&self, text: &str) -> String {
        STANDARD.encode_to_string(self.key.sign(text.as_bytes()))
    }

    /// Opens a libsodium sealed box to the X25519 key that belongs to the Ed25519 seed.
    fn unseal(&self, sealed: &str) -> Option<String> {
        let sealed = STANDARD.decode_to_vec(sealed.trim()).ok()?;
        let mut hash = Sha512::digest(self.seed.as_slice());
        let mut scalar = Zeroizing::new([0; SEED_LEN]);
        scalar.copy_from_slice(&hash[..SEED_LEN]);
        hash.as_mut_slice().zeroize();
        scalar[0] &= 248;
        scalar[31] = scalar[31] & 127 | 64;
        let opened = SecretKey::from(*scalar).unseal(&sealed).ok()?;
        String::from_utf8(opened).ok()
    }
}

impl fmt::Debug for AgentIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AgentIdentity").field("auth_api", &self.auth_api).finish_non_exhaustive()
    }
}

/// The seed inside a PKCS#8 document (RFC 8410), of either version.
fn seed_of(pkcs8: &[u8]) -> Option<Zeroizing<[u8; SEED_LEN]>> {
    let (body, _) = element(pkcs8, 0x30)?;
    let (_version, rest) = element(body, 0x02)?;
    let (algorithm, rest) = element(rest, 0x30)?;
    // id-Ed25519, 1.3.101.112, without parameters.
    if algorithm != [0x06, 0x03, 0x2b, 0x65, 0x70] {
        return None;
    }
    let (key, _) = element(rest, 0x04)?;
    let (seed, _) = element(key, 0x04)?;
    Some(Zeroizing::new(seed.try_into().ok()?))
}

/// The content of a DER element with this tag, shorter than 128 bytes, and the bytes after it.
fn element(bytes: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (&[found, len], rest) = bytes.split_first_chunk()?;
    (found == tag && len < 128).then_some(())?;
    rest.split_at_checked(len.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ring::rand::SystemRandom;

    fn token(claims: &serde_json::Value) -> Secret {
        format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode_to_string(claims.to_string())).into()
    }

    fn identity(seed: [u8; 32]) -> AgentIdentity {
        let mut der = vec![0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];
        der.extend(seed);
        let claims = serde_json::json!({
            "agent_runtime_id": "agent-1", "account_id": "acc",
            "agent_private_key": STANDARD.encode_to_string(der), "aud": "codex-app-server",
        });
        let base = "http://127.0.0.1:1".parse().unwrap();
        AgentIdentity::new(&token(&claims), base, SystemTime::now).unwrap()
    }

    #[test]
    fn seed_is_read_from_both_pkcs8_versions() {
        let v2 = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
        let key = Ed25519KeyPair::from_pkcs8(v2.as_ref()).unwrap();
        let seed = seed_of(v2.as_ref()).unwrap();
        let again = Ed25519KeyPair::from_seed_unchecked(&*seed).unwrap();
        assert_eq!(key.sign(b"x").as_ref(), again.sign(b"x").as_ref());
        for damaged in 0..v2.as_ref().len().min(48) {
            let _ = seed_of(&v2.as_ref()[..damaged]);
        }
        assert!(seed_of(b"\x30\x02\x02\x00").is_none());
    }

    #[test]
    fn sealed_task_id_is_decrypted_with_the_derived_key() {
        // The RFC 8032 test key 1; its public key as a Montgomery point is what libsodium's
        // crypto_sign_ed25519_sk_to_curve25519 and crypto_scalarmult_base give.
        let seed = [0x2a; 32];
        let identity = identity(seed);
        let mut scalar = [0; 32];
        scalar.copy_from_slice(&Sha512::digest(seed)[..32]);
        let public = SecretKey::from(scalar).public_key();
        let sealed = public.seal(&mut Rng, b"task-9").unwrap();
        assert_eq!(identity.unseal(&STANDARD.encode_to_string(&sealed)).unwrap(), "task-9");
        assert!(identity.unseal(&STANDARD.encode_to_string(&sealed[1..])).is_none());
        assert!(identity.unseal("").is_none());
    }

    struct Rng;
    impl crypto_box::aead::rand_core::RngCore for Rng {
        fn next_u32(&mut self) -> u32 {
            7
        }
        fn next_u64(&mut self) -> u64 {
            7
        }
        fn fill_bytes(&mut self, dest: &mut [u8]) {
            getrandom::fill(dest).unwrap();
        }
        fn try_fill_bytes(
            &mut self,
            dest: &mut [u8],
        ) -> Result<(), crypto_box::aead::rand_core::Error> {
            self.fill_bytes(dest);
            Ok(())
        }
    }
    impl crypto_box::aead::rand_core::CryptoRng for Rng {}

    #[test]
    fn invalid_agent_tokens_are_rejected() {
        for claims in [
            serde_json::json!({}),
            serde_json::json!({"agent_runtime_id": "a", "agent_private_key": "!!"}),
            serde_json::json!({"agent_runtime_id": "a", "agent_private_key": "AAAA"}),
            serde_json::json!({"agent_runtime_id": "a", "exp": 5}),
            serde_json::json!({"agent_runtime_id": "a", "aud": "other"}),
        ] {
            let base = "http://127.0.0.1:1".parse().unwrap();
            AgentIdentity::new(&token(&claims), base, SystemTime::now).unwrap_err();
        }
    }
}
