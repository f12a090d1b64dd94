//! A Noise public key in the registry's JSON.
//!
//! Invariant: decoding accepts exactly one key of the one suite; any other member, suite, length or
//! alphabet is refused.

use base64_simd::STANDARD;
use codex_exec_relay_core::NoisePublicKey;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser};

/// [`NoisePublicKey`] in JSON.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoiseKeyJson(pub NoisePublicKey);

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Members {
    suite: String,
    x25519_public_key: String,
    mlkem768_public_key: String,
}

impl Serialize for NoiseKeyJson {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let members = Members {
            suite: self.0.suite().to_owned(),
            x25519_public_key: STANDARD.encode_to_string(self.0.x25519()),
            mlkem768_public_key: STANDARD.encode_to_string(self.0.mlkem768()),
        };
        members.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for NoiseKeyJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let members = Members::deserialize(deserializer)?;
        let decode = |text: &str| {
            STANDARD.decode_to_vec(text).map_err(|_| de::Error::custom("a key that is not base64"))
        };
        let x25519 = decode(&members.x25519_public_key)?;
        let mlkem768 = decode(&members.mlkem768_public_key)?;
        NoisePublicKey::new(&members.suite, &x25519, &mlkem768).map(Self).map_err(de::Error::custom)
    }
}

/// The key as JSON text.
pub fn key_to_json(key: &NoisePublicKey) -> Result<String, serde_json::Error> {
    serde_json::to_string(&NoiseKeyJson(key.clone())).map_err(ser::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entropy::entropy;
    use codex_exec_relay_core::NoiseIdentity;
    use serde_json::{Value, json};

    fn sample() -> (NoisePublicKey, Value) {
        let key = NoiseIdentity::generate(&mut *entropy()).unwrap().public_key();
        let value = serde_json::to_value(NoiseKeyJson(key.clone())).unwrap();
        (key, value)
    }

    #[test]
    fn key_json_round_trips() {
        let (key, value) = sample();
        assert_eq!(value["suite"], "Noise_hybridIK_X25519+MLKEM768_AESGCM_SHA256");
        assert_eq!(serde_json::from_value::<NoiseKeyJson>(value).unwrap().0, key);
    }

    #[test]
    fn malformed_key_json_is_rejected() {
        let (_, good) = sample();
        let with = |name: &str, value: Value| {
            let mut changed = good.clone();
            changed[name] = value;
            changed
        };
        let short = STANDARD.encode_to_string([7; 31]);
        for bad in [
            with("suite", json!("Noise_IK_25519_AESGCM_SHA256")),
            with("x25519_public_key", json!(short)),
            with("x25519_public_key", json!("!!!!")),
            with("mlkem768_public_key", json!(short)),
            with("mlkem768_public_key", json!(STANDARD.encode_to_string([255; 1184]))),
            with("comment", json!("no other member")),
            json!({}),
            json!(null),
        ] {
            serde_json::from_value::<NoiseKeyJson>(bad).unwrap_err();
        }
    }
}
