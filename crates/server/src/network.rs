//! The managed network of a process, between the protocol's words and those of the network crate: the
//! only place that knows both.

use std::time::Duration;

use codex_exec_network::decide::{Mode, Outcome, Protocol, Scope, Source};
use codex_exec_network::rules::{List, PatternError, Rules};
use codex_exec_network::{
    Config, CredentialProvider as Provider, Question, Record, Reply, UpstreamProxies,
};
use codex_exec_server_protocol::network::{
    CredentialAuth, CredentialProvider, DomainPermission, NetworkDecision, NetworkDecisionScope,
    NetworkDecisionSource, NetworkMode, NetworkPolicyAnswer, NetworkPolicyDecisionNotification,
    NetworkPolicyRequest, NetworkPolicyRequestParams, NetworkProtocol, NetworkProxyLaunch,
    NetworkRules, UnixSocketPermission,
};
use codex_exec_server_protocol::process::ProcessId;
use codex_exec_server_protocol::{ErrorKind, RpcError};

/// Why a proxy cannot be configured. The messages are those of the protocol.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NetworkConfigError {
    #[error("network policy decision callback timeout must be nonzero")]
    NoTimeToAnswer,
    #[error(
        "invalid network proxy config: executor-local network proxy launch requires an enabled proxy"
    )]
    Disabled,
    #[error("invalid network proxy config: {0}")]
    Pattern(#[from] PatternError),
    #[error(
        "invalid network proxy config: invalid network.allow_unix_sockets[{index}]: expected a \
         NUL-free absolute path for Linux, got {path:?}"
    )]
    UnixSocket { index: usize, path: String },
}

impl From<NetworkConfigError> for RpcError {
    fn from(error: NetworkConfigError) -> Self {
        Self::invalid_params(ErrorKind::InvalidParams, error.to_string())
    }
}

/// The configuration that a client asks for. `upstream`: the server's own proxies.
pub(crate) fn proxy_config(
    launch: &NetworkProxyLaunch,
    upstream: &UpstreamProxies,
) -> Result<Config, NetworkConfigError> {
    if launch.policy_decision_timeout_ms == Some(0) {
        return Err(NetworkConfigError::NoTimeToAnswer);
    }
    let proxy = &launch.proxy;
    if !proxy.enabled {
        return Err(NetworkConfigError::Disabled);
    }
    let rules = NetworkRules {
        domains: proxy.domains.clone(),
        review_domains: proxy.review_domains.clone(),
        match_ports: proxy.match_ports,
    };
    let rules = host_rules(&rules, proxy.allow_local_binding)?;
    let sockets = proxy.unix_sockets.iter().flatten();
    let allowed = sockets.filter(|(_, permission)| **permission == UnixSocketPermission::Allow);
    for (index, (path, _)) in allowed.enumerate() {
        if !path.starts_with('/') || path.contains('\0') {
            return Err(NetworkConfigError::UnixSocket { index, path: path.clone() });
        }
    }
    let mut config = Config::new(rules);
    config.mode = match proxy.mode {
        NetworkMode::Limited => Mode::Limited,
        NetworkMode::Full => Mode::Full,
    };
    config.socks5 = proxy.enable_socks5;
    config.socks5_udp = proxy.enable_socks5_udp;
    // Also where there is no TUN device: what a rule means does not hang on it.
    config.check_tunnels = launch.transparent;
    config.ask_timeout = launch.policy_decision_timeout_ms.map(Duration::from_millis);
    config.upstream = proxy.allow_upstream_proxy.then(|| upstream.clone());
    Ok(config)
}

/// The rules that a client asks for.
pub(crate) fn host_rules(
    given: &NetworkRules,
    allow_local_binding: bool,
) -> Result<Rules, NetworkConfigError> {
    let mut rules = match given.match_ports {
        true => Rules::matching_ports(),
        false => Rules::default(),
    };
    for (pattern, permission) in given.domains.iter().flatten() {
        match permission {
            DomainPermission::Allow => rules.add(List::Allow, pattern)?,
            DomainPermission::Deny => rules.add(List::Deny, pattern)?,
            DomainPermission::None => {}
        }
    }
    for pattern in &given.review_domains {
        rules.add(List::Review, pattern)?;
    }
    rules.allow_local_binding = allow_local_binding;
    Ok(rules)
}

/// A kind of secret, as the client described it.
pub(crate) fn credential_provider(given: &CredentialProvider) -> Provider {
    let auth = given.auth.iter().map(|auth| match auth {
        CredentialAuth::Bearer => "bearer",
        CredentialAuth::Token => "token",
        CredentialAuth::Basic => "basic",
        CredentialAuth::Header => "header",
    });
    Provider {
        env: given.env.clone(),
        patterns: given.patterns.clone(),
        url_prefixes: given.url_prefixes.clone(),
        url_prefix_from_env: given.url_prefix_from_env.clone(),
        auth: auth.map(str::to_owned).collect(),
        header: given.header.clone(),
        prefix: given.prefix.clone(),
    }
}

/// The question to the client that controls the process.
pub(crate) fn policy_request(
    process_id: ProcessId,
    question: &Question,
) -> NetworkPolicyRequestParams {
    let request = NetworkPolicyRequest {
        protocol: protocol(question.protocol),
        host: question.host.as_str().to_owned(),
        port: question.port,
    };
    NetworkPolicyRequestParams { process_id, request }
}

/// The client's answer.
pub(crate) fn policy_reply(answer: NetworkPolicyAnswer) -> Reply {
    match answer {
        NetworkPolicyAnswer::Allow => Reply::Allow,
        NetworkPolicyAnswer::Deny { reason } => Reply::Deny { reason },
        NetworkPolicyAnswer::Ask { reason } => Reply::Ask { reason },
    }
}

/// The notification about a record of the audit.
pub(crate) fn policy_decision(
    process_id: ProcessId,
    record: Record,
) -> NetworkPolicyDecisionNotification {
    NetworkPolicyDecisionNotification {
        process_id,
        timestamp: record.timestamp_rfc3339(),
        scope: match record.scope {
            Scope::Domain => NetworkDecisionScope::Domain,
            Scope::NonDomain => NetworkDecisionScope::NonDomain,
        },
        decision: match record.decision {
            Outcome::Allow => NetworkDecision::Allow,
            Outcome::Deny => NetworkDecision::Deny,
            Outcome::Ask => NetworkDecision::Ask,
        },
        source: match record.source {
            Source::BaselinePolicy => NetworkDecisionSource::BaselinePolicy,
            Source::Decider => NetworkDecisionSource::Decider,
            Source::ModeGuard => NetworkDecisionSource::ModeGuard,
            Source::ProxyState => NetworkDecisionSource::ProxyState,
        },
        reason: record.reason,
        protocol: protocol(record.protocol),
        host: record.host,
        port: record.port,
        method: record.method,
        client: record.client,
        policy_override: record.policy_override,
    }
}

fn protocol(protocol: Protocol) -> NetworkProtocol {
    match protocol {
        Protocol::Http => NetworkProtocol::Http,
        Protocol::HttpsConnect => NetworkProtocol::HttpsConnect,
        Protocol::Socks5Tcp => NetworkProtocol::Socks5Tcp,
        Protocol::Socks5Udp => NetworkProtocol::Socks5Udp,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails may panic")]
mod tests {
    use std::time::UNIX_EPOCH;

    use codex_exec_network::UpstreamProxy;
    use codex_exec_network::host::Host;
    use codex_exec_network::rules::Listing;

    use super::*;

    const PROXY: &str = r#""enabled":true,"enableSocks5":true,"enableSocks5Udp":false,"allowUpstreamProxy":false,"dangerouslyAllowAllUnixSockets":true,"mode":"full","allowLocalBinding":false"#;

    /// A launch whose proxy has these members, too, and which has these beside its proxy.
    fn launch(members: &str, beside: &str) -> NetworkProxyLaunch {
        let text = format!(r#"{{"proxy":{{{PROXY}{members}}}{beside}}}"#);
        serde_json::from_str(&text).unwrap()
    }

    fn error(launch: &NetworkProxyLaunch) -> String {
        let error = proxy_config(launch, &UpstreamProxies::default()).unwrap_err();
        let error = RpcError::from(error);
        assert_eq!(error.code, -32602);
        error.message
    }

    #[test]
    fn configurations_that_are_refused() {
        let prefix = "invalid network proxy config: ";
        for (members, expected) in [
            (r#","domains":{"http://x":"allow"}"#, "unsupported domain pattern syntax: http://x".into()),
            (r#","domains":{"10.0.0.0/8":"deny"}"#, "unsupported domain pattern syntax: 10.0.0.0/8".into()),
            (r#","reviewDomains":["a b"]"#, "unsupported domain pattern syntax: a b".into()),
            (
                r#","domains":{"*":"deny"}"#,
                "invalid value for network.denied_domains: * (allowed exact hosts or scoped wildcards like \
                 *.example.com or **.example.com)"
                    .into(),
            ),
            (
                r#","unixSockets":{"/a":"allow","b":"deny","c":"allow"}"#,
                r#"invalid network.allow_unix_sockets[1]: expected a NUL-free absolute path for Linux, got "c""#
                    .to_owned(),
            ),
            (
                r#","unixSockets":{"/a\u0000b":"allow"}"#,
                r#"invalid network.allow_unix_sockets[0]: expected a NUL-free absolute path for Linux, got "/a\0b""#
                    .to_owned(),
            ),
        ] {
            assert_eq!(error(&launch(members, "")), format!("{prefix}{expected}"));
        }
        let mut disabled = launch("", "");
        disabled.proxy.enabled = false;
        assert_eq!(
            error(&disabled),
            format!("{prefix}executor-local network proxy launch requires an enabled proxy")
        );
        assert_eq!(
            error(&launch("", r#","policyDecisionTimeoutMs":0"#)),
            "network policy decision callback timeout must be nonzero"
        );
    }

    #[test]
    fn configurations_carry_what_the_client_said() {
        let upstream =
            UpstreamProxies { http: UpstreamProxy::parse("http://a:1"), ..Default::default() };
        let members =
            r#","domains":{"a.com":"allow","b.com":"deny","*":"none"},"reviewDomains":["c.com"]"#;
        let config = proxy_config(&launch(members, ""), &upstream).unwrap();
        let listing = |name: &str| config.rules.look_up(&Host::parse(name).unwrap(), 80);
        assert_eq!(listing("a.com"), Listing::Allowed);
        assert_eq!(listing("b.com"), Listing::Denied);
        assert_eq!(listing("c.com"), Listing::Undecided);
        assert_eq!(listing("localhost"), Listing::Local);
        let ports = launch(r#","domains":{"a.com:443":"allow"},"matchPorts":true"#, "");
        let ports = proxy_config(&ports, &upstream).unwrap();
        let host = Host::parse("a.com").unwrap();
        assert_eq!(ports.rules.look_up(&host, 443), Listing::Allowed);
        assert_eq!(ports.rules.look_up(&host, 80), Listing::Undecided);
        assert_eq!((config.mode, config.socks5, config.socks5_udp), (Mode::Full, true, false));
        assert_eq!((config.ask_timeout, config.upstream), (None, None));
        let mut other = launch("", r#","policyDecisionTimeoutMs":1500"#);
        other.proxy.mode = NetworkMode::Limited;
        other.proxy.enable_socks5 = false;
        other.proxy.enable_socks5_udp = true;
        other.proxy.allow_upstream_proxy = true;
        other.proxy.allow_local_binding = true;
        let config = proxy_config(&other, &upstream).unwrap();
        assert_eq!((config.mode, config.socks5, config.socks5_udp), (Mode::Limited, false, true));
        assert_eq!(config.ask_timeout, Some(Duration::from_millis(1500)));
        assert_eq!(config.upstream, Some(upstream));
        assert!(config.rules.allow_local_binding);
    }

    /// The words of both crates are the same, for every variant.
    #[test]
    fn words_are_those_of_the_network() {
        let record = Record {
            timestamp: UNIX_EPOCH,
            scope: Scope::Domain,
            decision: Outcome::Allow,
            source: Source::Decider,
            reason: "allow".into(),
            protocol: Protocol::Http,
            host: "a.com".into(),
            port: 80,
            method: Some("GET".into()),
            client: None,
            policy_override: true,
        };
        let word = |value: serde_json::Value| value.as_str().unwrap().to_owned();
        let sent = |record: &Record| {
            serde_json::to_value(policy_decision("p".into(), record.clone())).unwrap()
        };
        for scope in [Scope::Domain, Scope::NonDomain] {
            let json = sent(&Record { scope, ..record.clone() });
            assert_eq!(word(json["scope"].clone()), scope.as_str());
        }
        for decision in [Outcome::Allow, Outcome::Deny, Outcome::Ask] {
            let json = sent(&Record { decision, ..record.clone() });
            assert_eq!(word(json["decision"].clone()), decision.as_str());
        }
        for source in
            [Source::BaselinePolicy, Source::Decider, Source::ModeGuard, Source::ProxyState]
        {
            let json = sent(&Record { source, ..record.clone() });
            assert_eq!(word(json["source"].clone()), source.as_str());
        }
        for protocol in
            [Protocol::Http, Protocol::HttpsConnect, Protocol::Socks5Tcp, Protocol::Socks5Udp]
        {
            let json = sent(&Record { protocol, ..record.clone() });
            assert_eq!(word(json["protocol"].clone()), protocol.as_str());
            let question = Question { protocol, host: Host::parse("A.com").unwrap(), port: 1 };
            let asked = serde_json::to_value(policy_request("p".into(), &question)).unwrap();
            assert_eq!(word(asked["request"]["protocol"].clone()), protocol.as_str());
            assert_eq!(asked["request"]["host"], "a.com");
        }
        assert_eq!(sent(&record)["timestamp"], "1970-01-01T00:00:00.000Z");
        let deny = NetworkPolicyAnswer::Deny { reason: "r".into() };
        assert_eq!(policy_reply(deny), Reply::Deny { reason: "r".into() });
        let ask = NetworkPolicyAnswer::Ask { reason: "r".into() };
        assert_eq!(policy_reply(ask), Reply::Ask { reason: "r".into() });
        assert_eq!(policy_reply(NetworkPolicyAnswer::Allow), Reply::Allow);
    }
}
