//! Which credential may go to which origin: the one decision that everything asks before it dials.
//!
//! Invariant: [`may_send`] is pure, and decides by the kind of the credential, the origin, and the hosts that
//! the user allowed; never by what the other side says.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use http::Uri;

/// The scheme, host and port that a request goes to. Contains no secret.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Origin {
    secure: bool,
    /// In lower case, without the brackets of an IPv6 address and the dot at the end of a name.
    host: String,
    port: u16,
    /// A socket that leads to no network: `unix:PATH` or `vsock:CID:PORT`, which is the `host`.
    local: bool,
}

/// Why a URL has no origin for credentials.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OriginError {
    /// It is not a URL with a scheme of http, https, ws or wss.
    #[error("it is not a URL that begins with https://, http://, wss:// or ws://")]
    Scheme,
    /// It has no host.
    #[error("it has no host")]
    Host,
    /// It has a user name or a password, which would be saved and shown.
    #[error("it contains a user name or a password; pass the token in a file instead")]
    User,
}

impl FromStr for Origin {
    type Err = OriginError;

    fn from_str(url: &str) -> Result<Self, Self::Err> {
        if url.starts_with("unix:") || url.starts_with("vsock:") {
            return Ok(Self { secure: false, host: url.to_owned(), port: 0, local: true });
        }
        let uri: Uri = url.trim().parse().map_err(|_| OriginError::Scheme)?;
        let secure = match uri.scheme_str() {
            Some("https" | "wss") => true,
            Some("http" | "ws") => false,
            _ => return Err(OriginError::Scheme),
        };
        let authority = uri.authority().ok_or(OriginError::Host)?;
        if authority.as_str().contains('@') {
            return Err(OriginError::User);
        }
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        let host = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
        if host.is_empty() {
            return Err(OriginError::Host);
        }
        let port = authority.port_u16().unwrap_or(if secure { 443 } else { 80 });
        Ok(Self { secure, host, port, local: false })
    }
}

impl Origin {
    /// The host, in lower case, without the brackets of an IPv6 address.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Whether TLS protects the requests.
    pub fn is_secure(&self) -> bool {
        self.secure
    }

    /// Whether the host is this machine, or a socket leads to it without a network.
    pub fn is_loopback(&self) -> bool {
        self.local
            || self.host == "localhost"
            || self.host.parse().is_ok_and(|ip: IpAddr| ip.to_canonical().is_loopback())
    }

    /// Whether the host is under openai.com or openai.org, over TLS.
    pub fn is_openai(&self) -> bool {
        let under = |domain: &str| {
            self.host
                .strip_suffix(domain)
                .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        };
        self.secure && (under("openai.com") || under("openai.org"))
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.local {
            return f.write_str(&self.host);
        }
        let scheme = if self.secure { "https" } else { "http" };
        match self.host.contains(':') {
            true => write!(f, "{scheme}://[{}]:{}", self.host, self.port),
            false => write!(f, "{scheme}://{}:{}", self.host, self.port),
        }
    }
}

impl fmt::Debug for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// The kind of a credential, which decides where it may go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CredentialKind {
    /// An API key of OpenAI, or a token in its place.
    ApiKey,
    /// The bearer token of a registry.
    RegistryToken,
    /// ChatGPT tokens of a sign-in.
    SignIn,
    /// The signed assertion of an agent.
    AgentIdentity,
    /// A credential from the parent process.
    Executor,
    /// A signature of AWS.
    Signature,
    /// The bearer token of an exec-server, which the user named.
    ServerToken,
}

impl CredentialKind {
    /// Every kind.
    pub const ALL: [Self; 7] = [
        Self::ApiKey,
        Self::RegistryToken,
        Self::SignIn,
        Self::AgentIdentity,
        Self::Executor,
        Self::Signature,
        Self::ServerToken,
    ];
}

/// Whether a credential may go somewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Send it.
    Send,
    /// Send it, and warn the user that everyone on the way can read it.
    SendInClear,
    /// Do not send it, by this rule.
    Refuse(&'static str),
}

/// Decides whether a credential of this kind may go to this origin. The user has allowed `allowed_hosts`
/// whatever the rule.
///
/// Every credential may go to this machine. An API key goes to OpenAI's hosts over TLS, the others go to
/// any host over TLS. The token of a server that the user named goes to it without TLS too, with a warning.
pub fn may_send(kind: CredentialKind, origin: &Origin, allowed_hosts: &[String]) -> Verdict {
    let allowed = allowed_hosts.iter().any(|host| host.eq_ignore_ascii_case(&origin.host));
    if origin.is_loopback() || allowed {
        return Verdict::Send;
    }
    match kind {
        CredentialKind::ApiKey if origin.is_openai() => Verdict::Send,
        CredentialKind::ApiKey => {
            Verdict::Refuse("API keys are sent only to https hosts of OpenAI and to this machine")
        }
        _ if origin.secure => Verdict::Send,
        CredentialKind::ServerToken => Verdict::SendInClear,
        _ => Verdict::Refuse("it would be sent unencrypted"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a random origin is made of, so that the model needs no parser.
    struct Made {
        url: String,
        tls: bool,
        local: bool,
        openai: bool,
        host: &'static str,
    }

    fn made(random: &mut fastrand::Rng) -> Made {
        let hosts = [
            ("127.0.0.1", true, false),
            ("127.8.9.1", true, false),
            ("[::1]", true, false),
            ("localhost", true, false),
            ("[::ffff:127.0.0.1]", true, false),
            ("LocalHost.", true, false),
            ("localhost.evil.example", false, false),
            ("127.0.0.1.evil.example", false, false),
            ("10.0.0.1", false, false),
            ("[2001:db8::1]", false, false),
            ("api.openai.com", false, true),
            ("OPENAI.ORG", false, true),
            ("evilopenai.com", false, false),
            ("openai.com.evil.example", false, false),
            ("own.example", false, false),
        ];
        let (host, local, openai) = hosts[random.usize(..hosts.len())];
        let schemes = [("http", false), ("https", true), ("ws", false), ("wss", true)];
        let (scheme, tls) = schemes[random.usize(..4)];
        let port = ["", ":1", ":443", ":80"][random.usize(..4)];
        let path = ["", "/", "/a?token=b", "/@127.0.0.1"][random.usize(..4)];
        Made { url: format!("{scheme}://{host}{port}{path}"), tls, local, openai, host }
    }

    #[test]
    fn decisions_match_the_model_for_random_origins_and_credentials() {
        let mut random = fastrand::Rng::with_seed(6);
        for _ in 0..20_000 {
            let made = made(&mut random);
            let origin: Origin = made.url.parse().unwrap();
            let kind = CredentialKind::ALL[random.usize(..CredentialKind::ALL.len())];
            let allowed = random.u32(..4) == 0;
            let hosts = match allowed {
                true => {
                    let bare = made.host.trim_matches(['[', ']', '.']);
                    vec!["other.example".to_owned(), bare.to_ascii_uppercase()]
                }
                false => vec!["other.example".to_owned(), "example".to_owned()],
            };
            let may = may_send(kind, &origin, &hosts);
            let should = made.local
                || allowed
                || match kind {
                    CredentialKind::ApiKey => made.tls && made.openai,
                    _ => made.tls,
                };
            match (should, kind) {
                (true, _) => assert_eq!(may, Verdict::Send, "{kind:?} {}", made.url),
                (false, CredentialKind::ServerToken) => assert_eq!(may, Verdict::SendInClear),
                _ => assert!(matches!(may, Verdict::Refuse(_)), "{kind:?} {}", made.url),
            }
        }
    }

    #[test]
    fn a_url_with_a_password_has_no_origin() {
        for (url, error) in [
            ("ws://user:secret@h:1", OriginError::User),
            ("https://127.0.0.1@evil.example", OriginError::User),
            ("ftp://h", OriginError::Scheme),
            ("h", OriginError::Scheme),
            ("/x", OriginError::Scheme),
        ] {
            assert_eq!(url.parse::<Origin>().unwrap_err(), error, "{url}");
        }
        let same = |a: &str, b: &str| a.parse::<Origin>().unwrap() == b.parse::<Origin>().unwrap();
        assert!(same("https://h/x", "wss://H:443") && same("ws://h", "http://h.:80/"));
        for local in ["unix:/run/a.sock", "vsock:3:4500"] {
            let origin: Origin = local.parse().unwrap();
            assert!(origin.is_loopback() && origin.to_string() == local);
        }
        assert!(!same("unix:/a", "unix:/b"));
        assert!(!same("https://h", "http://h") && !same("http://h:1", "http://h:2"));
    }
}
