//! Requests and responses of a registry, as JSON: one set of types for both sides.
//!
//! Invariant: a secret leaves its type only when it is serialized into its message.

use codex_exec_rpc::Secret;
use serde::{Deserialize, Serialize, Serializer};

use super::key::NoiseKeyJson;

/// The only security profile: a Noise channel per stream.
pub const SECURITY_PROFILE: &str = "noise_hybrid_ik_v1";
/// `error.code` for an environment that is registered but not connected.
pub const ENVIRONMENT_OFFLINE: &str = "environment_offline";
/// `error.code` for an environment that the registry does not know.
pub const ENVIRONMENT_NOT_FOUND: &str = "environment_not_found";

/// Body of POST `/cloud/environment/{id}/register`, by an executor.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RegisterRequest {
    /// [`SECURITY_PROFILE`].
    pub security_profile: String,
    /// The key that harnesses pin.
    pub executor_public_key: NoiseKeyJson,
}

/// Response to a [`RegisterRequest`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RegisterResponse {
    /// The environment in the request's path.
    pub environment_id: String,
    /// The websocket that the executor connects to.
    #[serde(serialize_with = "serialize_exposed")]
    pub url: Secret,
    /// [`SECURITY_PROFILE`].
    pub security_profile: String,
    /// The id of this registration, bound into every handshake.
    pub executor_registration_id: String,
}

/// Body of POST `/cloud/environment/{id}/connect`, by a harness.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ConnectRequest {
    /// The key that the harness will use.
    pub harness_public_key: NoiseKeyJson,
}

/// Response to a [`ConnectRequest`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ConnectResponse {
    /// The environment in the request's path.
    pub environment_id: String,
    /// The websocket that the harness connects to.
    #[serde(serialize_with = "serialize_exposed")]
    pub url: Secret,
    /// [`SECURITY_PROFILE`].
    pub security_profile: String,
    /// The id of the executor's registration, bound into the handshake.
    pub executor_registration_id: String,
    /// The executor's key, to be pinned.
    pub executor_public_key: NoiseKeyJson,
    /// What the harness shows to the executor, which sends it to the registry for validation.
    #[serde(serialize_with = "serialize_exposed")]
    pub harness_key_authorization: Secret,
}

/// Body of POST `/cloud/environment/{id}/validate`, by an executor.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ValidateRequest {
    /// The registration that the harness connected to.
    pub executor_registration_id: String,
    /// The key that the harness has used.
    pub harness_public_key: NoiseKeyJson,
    /// The authorization that the harness has shown.
    #[serde(serialize_with = "serialize_exposed")]
    pub harness_key_authorization: Secret,
}

/// Response to a [`ValidateRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ValidateResponse {
    /// Whether the harness may use the environment.
    pub valid: bool,
    /// Who the harness is, from a registry that tells harnesses apart (an extension): only it can resume the
    /// sessions that it opened. All harnesses without one count as one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub principal: Option<String>,
}

/// POST `/cloud/executor/{id}/register` and `/connect`, the older registration without encryption.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ExecutorResponse {
    /// The executor in the request's path.
    pub executor_id: String,
    /// The websocket to connect to.
    #[serde(serialize_with = "serialize_exposed")]
    pub url: Secret,
}

/// GET `/cloud/environment/{id}`: one environment. Times are seconds since 1970.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnvironmentStatus {
    /// Its id.
    pub environment_id: String,
    /// Whether it is connected.
    pub online: bool,
    /// Since when it has been connected; `None` while it is offline.
    pub online_since: Option<u64>,
    /// When it was last connected.
    pub last_seen: u64,
    /// When it registered.
    pub registered: u64,
    /// The id of its registration.
    pub executor_registration_id: String,
    /// Its security profile; `None` in the older revision, which has no encryption.
    pub security_profile: Option<String>,
    /// The id of the token that registered it.
    pub token: String,
    /// Connected harnesses.
    pub harnesses: usize,
    /// Open streams of these harnesses.
    pub streams: usize,
}

/// Response of GET `/cloud/environments`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ListResponse {
    /// The environments that the token covers.
    pub environments: Vec<EnvironmentStatus>,
}

/// The body of every error response.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ErrorResponse {
    /// The error.
    pub error: ErrorDetail,
}

/// An error of a registry. Other registries leave members out.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ErrorDetail {
    /// A code for programs, such as [`ENVIRONMENT_OFFLINE`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// A message for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

fn serialize_exposed<S: Serializer>(secret: &Secret, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(secret.expose())
}

#[cfg(test)]
mod tests {
    use codex_exec_relay_core::NoiseIdentity;
    use serde::de::DeserializeOwned;

    use super::*;
    use crate::entropy::entropy;

    /// Checks that the message serializes to `text` and that `text` round-trips.
    fn golden<T: Serialize + DeserializeOwned + std::fmt::Debug>(message: &T, text: &str) {
        assert_eq!(serde_json::to_string(message).unwrap(), text);
        let read: T = serde_json::from_str(text).unwrap();
        assert_eq!(serde_json::to_string(&read).unwrap(), text);
        assert!(!format!("{read:?}").contains("s3cret"), "{read:?}");
    }

    #[test]
    fn registry_messages_match_the_published_json() {
        let key = NoiseIdentity::generate(&mut *entropy()).unwrap().public_key();
        let key = NoiseKeyJson(key);
        let k = serde_json::to_string(&key).unwrap();
        let text = |s: &str| s.to_owned();
        let url = || Secret::from("wss://s3cret");
        golden(
            &RegisterRequest {
                security_profile: text(SECURITY_PROFILE),
                executor_public_key: key.clone(),
            },
            &format!(r#"{{"security_profile":"noise_hybrid_ik_v1","executor_public_key":{k}}}"#),
        );
        golden(
            &RegisterResponse {
                environment_id: text("e"),
                url: url(),
                security_profile: text(SECURITY_PROFILE),
                executor_registration_id: text("r"),
            },
            r#"{"environment_id":"e","url":"wss://s3cret","security_profile":"noise_hybrid_ik_v1","executor_registration_id":"r"}"#,
        );
        golden(
            &ConnectRequest { harness_public_key: key.clone() },
            &format!(r#"{{"harness_public_key":{k}}}"#),
        );
        golden(
            &ConnectResponse {
                environment_id: text("e"),
                url: url(),
                security_profile: text(SECURITY_PROFILE),
                executor_registration_id: text("r"),
                executor_public_key: key.clone(),
                harness_key_authorization: "s3cret".into(),
            },
            &format!(
                r#"{{"environment_id":"e","url":"wss://s3cret","security_profile":"noise_hybrid_ik_v1","executor_registration_id":"r","executor_public_key":{k},"harness_key_authorization":"s3cret"}}"#
            ),
        );
        golden(
            &ValidateRequest {
                executor_registration_id: text("r"),
                harness_public_key: key,
                harness_key_authorization: "s3cret".into(),
            },
            &format!(
                r#"{{"executor_registration_id":"r","harness_public_key":{k},"harness_key_authorization":"s3cret"}}"#
            ),
        );
        golden(&ValidateResponse { valid: true, principal: None }, r#"{"valid":true}"#);
        golden(
            &ValidateResponse { valid: true, principal: Some("t1".to_owned()) },
            r#"{"valid":true,"principal":"t1"}"#,
        );
        golden(
            &ExecutorResponse { executor_id: text("e"), url: url() },
            r#"{"executor_id":"e","url":"wss://s3cret"}"#,
        );
        golden(&ListResponse { environments: Vec::new() }, r#"{"environments":[]}"#);
        golden(
            &ErrorResponse {
                error: ErrorDetail { code: Some(text("c")), message: Some(text("m")) },
            },
            r#"{"error":{"code":"c","message":"m"}}"#,
        );
        golden(
            &ErrorResponse { error: ErrorDetail { code: None, message: Some(text("m")) } },
            r#"{"error":{"message":"m"}}"#,
        );
    }
}
