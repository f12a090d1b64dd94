//! Secrets in a process's environment, replaced by stand-ins, and put back in the requests that they
//! belong to.
//!
//! Invariant: a real value leaves this module only in a header of a request to a URL that it is bound
//! to. `Debug` shows none.

mod provider;
mod standin;
mod url_prefix;

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use http::HeaderMap;
use http::header::{AUTHORIZATION, HeaderName, HeaderValue};
use zeroize::Zeroizing;

pub use provider::{Auth, CredentialProvider, ProviderError};

use crate::host::Host;
use provider::Provider;
use url_prefix::UrlPrefix;

const BROKER_ACTIVE: &str = "CODEX_NETWORK_PROXY_CREDENTIAL_BROKER_ACTIVE";
const BROKERED: &str = "CODEX_NETWORK_PROXY_BROKERED_CREDENTIALS";

/// Values whose stand-ins are remembered; beyond that, all are forgotten.
const MOST_KNOWN: usize = 16_384;

/// Gives out stand-ins. One per server, so that a value keeps its stand-in. Keeps no secret: it knows
/// them again by a keyed hash.
pub struct Masker {
    key: ring::hmac::Key,
    known: parking_lot::Mutex<HashMap<Vec<u8>, String>>,
}

impl Masker {
    /// Fails if the system gives no randomness.
    pub fn new() -> Result<Self, ring::error::Unspecified> {
        let key =
            ring::hmac::Key::generate(ring::hmac::HMAC_SHA256, &ring::rand::SystemRandom::new())?;
        Ok(Self { key, known: parking_lot::Mutex::default() })
    }
}

impl fmt::Debug for Masker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Masker").finish_non_exhaustive()
    }
}

/// What [`Masker::mask`] did.
#[derive(Debug, Default)]
pub struct Masking {
    /// What the proxy puts back.
    pub bindings: Bindings,
    /// Providers that break a rule, by name: their secrets stay as they are.
    pub ignored: Vec<(String, ProviderError)>,
}

impl Masker {
    /// Replaces the secrets in an environment, and adds the variables that tell about it.
    pub fn mask(
        &self,
        env: &mut BTreeMap<String, String>,
        custom: &BTreeMap<String, CredentialProvider>,
    ) -> Masking {
        let mut providers = provider::built_in(env);
        let mut ignored = Vec::new();
        for (name, given) in custom {
            match Provider::custom(given, env) {
                Ok(provider) => providers.push(provider),
                Err(error) => ignored.push((name.clone(), error)),
            }
        }
        let mut bindings: Vec<Binding> = Vec::new();
        let mut names = BTreeMap::new();
        for provider in &providers {
            for variable in &provider.env {
                let Some(secret) = env.get(variable).filter(|value| provider.matches(value)) else {
                    continue;
                };
                // A variable that two providers name belongs to the first.
                if names.contains_key(variable) {
                    continue;
                }
                let Some(standin) = self.standin(variable, secret, provider) else { continue };
                names.insert(variable.clone(), standin.clone());
                bindings.push(Binding {
                    standin,
                    secret: Zeroizing::new(secret.clone()),
                    prefixes: provider.prefixes.clone(),
                    auth: provider.auth.clone(),
                });
            }
        }
        for (variable, value) in env.iter_mut() {
            if let Some(standin) = names.get(variable) {
                *value = standin.clone();
                names.insert(format!("@alias:{variable}"), standin.clone());
                continue;
            }
            // The longest first: one secret may be part of another.
            let mut by_length: Vec<_> = bindings.iter().collect();
            by_length.sort_by_key(|binding| std::cmp::Reverse(binding.secret.len()));
            for binding in by_length {
                if value.contains(binding.secret.as_str()) {
                    *value = value.replace(binding.secret.as_str(), &binding.standin);
                    names.entry(format!("@alias:{variable}")).or_insert(binding.standin.clone());
                }
            }
        }
        let names: Vec<(&String, &String)> = names.iter().collect();
        env.insert(BROKER_ACTIVE.into(), "1".into());
        env.insert(BROKERED.into(), serde_json::to_string(&names).unwrap_or_default());
        Masking { bindings: Bindings { list: bindings }, ignored }
    }

    fn standin(&self, variable: &str, secret: &str, provider: &Provider) -> Option<String> {
        let mut hash = ring::hmac::Context::with_key(&self.key);
        hash.update(variable.as_bytes());
        hash.update(b"\0");
        hash.update(secret.as_bytes());
        let hash = hash.sign().as_ref().to_vec();
        let mut known = self.known.lock();
        if let Some(standin) = known.get(&hash) {
            return Some(standin.clone());
        }
        let standin = provider.standin(secret)?;
        if known.len() >= MOST_KNOWN {
            known.clear();
        }
        known.insert(hash, standin.clone());
        Some(standin)
    }
}

/// A secret, its stand-in, and where it may go.
#[derive(Clone)]
struct Binding {
    standin: String,
    secret: Zeroizing<String>,
    prefixes: Vec<UrlPrefix>,
    auth: Vec<Auth>,
}

/// The secrets of one process.
#[derive(Clone, Default)]
pub struct Bindings {
    list: Vec<Binding>,
}

impl fmt::Debug for Bindings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.list.iter().map(|binding| &binding.standin)).finish()
    }
}

impl Bindings {
    /// Whether a request over TLS to this host and port may carry a secret.
    pub fn concern(&self, host: &Host, port: u16) -> bool {
        let prefixes = self.list.iter().flat_map(|binding| &binding.prefixes);
        prefixes.into_iter().any(|prefix| prefix.is_at(host, port))
    }

    /// Puts secrets into the headers of a request over TLS to this URL.
    pub fn apply(&self, host: &Host, port: u16, path: &str, headers: &mut HeaderMap) {
        for binding in &self.list {
            if binding.prefixes.iter().any(|prefix| prefix.covers(host, port, path)) {
                for auth in &binding.auth {
                    binding.apply(auth, headers);
                }
            }
        }
    }
}

impl Binding {
    fn apply(&self, auth: &Auth, headers: &mut HeaderMap) {
        let name = match auth {
            Auth::Header { name, .. } => name.clone(),
            _ => AUTHORIZATION,
        };
        let http::header::Entry::Occupied(mut entry) = headers.entry(name) else { return };
        for value in entry.iter_mut() {
            let replaced = value.to_str().ok().and_then(|text| self.replaced(auth, text));
            // A secret that no header can carry stays where it is.
            if let Some(Ok(mut real)) = replaced.map(|text| HeaderValue::try_from(text.as_str())) {
                real.set_sensitive(true);
                *value = real;
            }
        }
    }

    /// The header's value with the secret in place of the stand-in; `None` if it is another value.
    fn replaced(&self, auth: &Auth, text: &str) -> Option<Zeroizing<String>> {
        let scheme = match auth {
            Auth::Header { prefix, .. } => {
                let given = text.strip_prefix(prefix.as_str())?;
                let real = || Zeroizing::new(format!("{prefix}{}", self.secret.as_str()));
                return (given == self.standin).then(real);
            }
            Auth::Bearer => "bearer",
            Auth::Token => "token",
            Auth::Basic => "basic",
        };
        let (given, credentials) = text.split_once(' ')?;
        if !given.eq_ignore_ascii_case(scheme) {
            return None;
        }
        let credentials = credentials.trim_start_matches(' ');
        if *auth != Auth::Basic {
            let real = || Zeroizing::new(format!("{given} {}", self.secret.as_str()));
            return (credentials == self.standin).then(real);
        }
        let plain = base64_simd::STANDARD.decode_to_vec(credentials).ok()?;
        let plain = Zeroizing::new(String::from_utf8(plain).ok()?);
        let (user, password) = plain.split_once(':')?;
        if user != self.standin && password != self.standin {
            return None;
        }
        let real = |half| if half == self.standin { self.secret.as_str() } else { half };
        let plain = Zeroizing::new(format!("{}:{}", real(user), real(password)));
        let encoded = Zeroizing::new(base64_simd::STANDARD.encode_to_string(plain.as_bytes()));
        Some(Zeroizing::new(format!("{given} {}", encoded.as_str())))
    }
}

/// The name of a header, if it is one that may carry a secret.
fn header_name(name: &str) -> Option<HeaderName> {
    let name: HeaderName = name.parse().ok()?;
    // What frames or routes a request is no place for a secret.
    let refused = ["host", "content-length", "transfer-encoding", "connection", "upgrade", "te"];
    (!refused.contains(&name.as_str())).then_some(name)
}

#[cfg(test)]
mod tests;
