//! Kinds of secrets: the well-known ones, and those that a client describes.

use std::collections::BTreeMap;

use http::header::HeaderName;
use regex::Regex;

use super::url_prefix::{InvalidPrefix, UrlPrefix};
use super::{header_name, standin};

/// A kind of secret, as a client describes it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CredentialProvider {
    /// The variables that hold the secret: plain names.
    pub env: Vec<String>,
    /// Regular expressions, one of which matches the whole secret.
    pub patterns: Vec<String>,
    /// Where the secret is put back: `https` URLs without query. `https://*.x/` is every subdomain of x.
    pub url_prefixes: Vec<String>,
    /// A variable that holds another such URL.
    pub url_prefix_from_env: Option<String>,
    /// How the secret is sent: `bearer`, `token`, `basic`; bearer if empty. `header` needs
    /// [`header`](Self::header).
    pub auth: Vec<String>,
    /// The header that carries the secret.
    pub header: Option<String>,
    /// The text before the secret in that header.
    pub prefix: Option<String>,
}

/// How a secret is sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Auth {
    /// `Authorization: Bearer …`
    Bearer,
    /// `Authorization: token …`
    Token,
    /// Either half of `Authorization: Basic …`
    Basic,
    /// A header of its own.
    Header {
        /// Its name.
        name: HeaderName,
        /// The text before the secret.
        prefix: String,
    },
}

/// Why a provider is ignored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProviderError {
    /// No variable, or an invalid name.
    #[error("`env` needs plain names of variables")]
    Env,
    /// No pattern, or one that is no regular expression or too large.
    #[error("`patterns` needs valid regular expressions")]
    Patterns,
    /// No URL, or one that cannot be bound to.
    #[error("invalid url prefix {0:?}: expected https://HOST[:PORT][/PATH]")]
    Prefix(String),
    /// Neither `url_prefixes` nor a variable that holds one.
    #[error("no url prefix: set `url_prefixes` or `url_prefix_from_env`")]
    NoPrefix,
    /// A header without `auth: header`, or the reverse, or a header that may carry no secret.
    #[error("`header` needs the auth \"header\" and the name of a header, and the reverse")]
    Header,
    /// An unknown word in `auth`.
    #[error("unknown auth {0:?}")]
    Auth(String),
}

/// A kind of secret, checked.
pub(super) struct Provider {
    pub env: Vec<String>,
    pub prefixes: Vec<UrlPrefix>,
    pub auth: Vec<Auth>,
    form: Form,
}

/// What the secret looks like, and its stand-in with it.
enum Form {
    /// Any value; stand-ins begin like the value does.
    Prefixed(&'static [standin::Prefix]),
    Patterns(Vec<(Regex, String)>),
}

const MAX_REGEX_BYTES: usize = 1 << 20;

const GITHUB: &[standin::Prefix] = &[
    // The last is for values that begin otherwise.
    standin::Prefix { text: "github_pat_", usual: 93 },
    standin::Prefix { text: "gho_", usual: 40 },
    standin::Prefix { text: "ghu_", usual: 40 },
    standin::Prefix { text: "ghs_", usual: 40 },
    standin::Prefix { text: "ghr_", usual: 40 },
    standin::Prefix { text: "ghp_", usual: 40 },
];
const OPENAI: &[standin::Prefix] = &[
    standin::Prefix { text: "sk-proj-", usual: 56 },
    standin::Prefix { text: "sk-svcacct-", usual: 56 },
    standin::Prefix { text: "sk-", usual: 51 },
];

/// The well-known secrets, with the hosts that the environment names. One that it names no usable host for is
/// masked as well, and put back nowhere.
pub(super) fn built_in(env: &BTreeMap<String, String>) -> Vec<Provider> {
    let provider = |names: &[&str], urls: &[String], form| Provider {
        env: names.iter().map(|name| (*name).to_owned()).collect(),
        prefixes: urls.iter().filter_map(|url| UrlPrefix::parse(url).ok()).collect(),
        auth: vec![Auth::Bearer, Auth::Token, Auth::Basic],
        form: Form::Prefixed(form),
    };
    let github = ["api.github.com", "github.com", "uploads.github.com", "*.ghe.com"]
        .map(|host| format!("https://{host}/"));
    let enterprise = env.get("GH_HOST").map(|host| format!("https://{host}/"));
    let mut openai = vec!["https://api.openai.com/".to_owned()];
    let base = env.get("OPENAI_BASE_URL").and_then(|url| UrlPrefix::parse(url).ok());
    openai.extend(base.map(|prefix| prefix.origin()));
    [
        provider(&["GH_TOKEN", "GITHUB_TOKEN"], &github, GITHUB),
        provider(
            &["GH_ENTERPRISE_TOKEN", "GITHUB_ENTERPRISE_TOKEN"],
            enterprise.as_slice(),
            GITHUB,
        ),
        provider(&["OPENAI_API_KEY"], &openai, OPENAI),
    ]
    .into()
}

impl Provider {
    pub(super) fn custom(
        given: &CredentialProvider,
        env: &BTreeMap<String, String>,
    ) -> Result<Self, ProviderError> {
        let is_name = |name: &String| {
            !name.is_empty()
                && !name.starts_with(|c: char| c.is_ascii_digit())
                && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
        };
        if given.env.is_empty() || !given.env.iter().all(is_name) {
            return Err(ProviderError::Env);
        }
        let patterns = given.patterns.iter().map(|pattern| {
            let whole = format!("^(?:{pattern})$");
            let regex = regex::RegexBuilder::new(&whole).size_limit(MAX_REGEX_BYTES).build();
            regex.map(|regex| (regex, pattern.clone())).map_err(|_| ProviderError::Patterns)
        });
        let patterns: Vec<_> = patterns.collect::<Result<_, _>>()?;
        if patterns.is_empty() {
            return Err(ProviderError::Patterns);
        }
        let from_env = given.url_prefix_from_env.as_ref().and_then(|name| env.get(name));
        let urls = given.url_prefixes.iter().chain(from_env);
        let prefixes: Vec<_> = urls
            .map(|url| {
                UrlPrefix::parse(url).map_err(|InvalidPrefix| ProviderError::Prefix(url.clone()))
            })
            .collect::<Result<_, _>>()?;
        if prefixes.is_empty() {
            return Err(ProviderError::NoPrefix);
        }
        Ok(Self {
            env: given.env.clone(),
            prefixes,
            auth: auth(given)?,
            form: Form::Patterns(patterns),
        })
    }

    /// Whether a variable's value is a secret of this kind.
    pub(super) fn matches(&self, value: &str) -> bool {
        match &self.form {
            Form::Prefixed(_) => !value.is_empty(),
            Form::Patterns(patterns) => patterns.iter().any(|(regex, _)| regex.is_match(value)),
        }
    }

    /// A new stand-in for a secret; `None` if the patterns leave no other value.
    pub(super) fn standin(&self, secret: &str) -> Option<String> {
        match &self.form {
            Form::Prefixed(prefixes) => standin::prefixed(secret, prefixes),
            Form::Patterns(patterns) => {
                let (regex, pattern) = patterns.iter().find(|(regex, _)| regex.is_match(secret))?;
                standin::matching(regex, pattern, secret)
            }
        }
    }
}

fn auth(given: &CredentialProvider) -> Result<Vec<Auth>, ProviderError> {
    let mut list = Vec::new();
    for word in &given.auth {
        list.push(match word.as_str() {
            "bearer" => Auth::Bearer,
            "token" => Auth::Token,
            "basic" => Auth::Basic,
            "header" => {
                let name = given.header.as_deref().and_then(header_name);
                let name = name.ok_or(ProviderError::Header)?;
                Auth::Header { name, prefix: given.prefix.clone().unwrap_or_default() }
            }
            word => return Err(ProviderError::Auth(word.to_owned())),
        });
    }
    let has_header = list.iter().any(|auth| matches!(auth, Auth::Header { .. }));
    if !has_header && (given.header.is_some() || given.prefix.is_some()) {
        return Err(ProviderError::Header);
    }
    if list.is_empty() {
        list.push(Auth::Bearer);
    }
    Ok(list)
}
