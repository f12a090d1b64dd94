//! The managed network.

use codex_exec_server_protocol::network::*;
use codex_exec_server_protocol::{encode, notification, parse_params};
use serde_json::value::RawValue;

use crate::golden::{golden, reads_as, refuses};

const SMALLEST: &str = r#"{"enabled":true,"enableSocks5":true,"enableSocks5Udp":false,"allowUpstreamProxy":false,"dangerouslyAllowAllUnixSockets":false,"mode":"full","allowLocalBinding":false}"#;

fn smallest() -> NetworkProxyConfig {
    NetworkProxyConfig {
        match_ports: false,
        enabled: true,
        enable_socks5: true,
        enable_socks5_udp: false,
        allow_upstream_proxy: false,
        dangerously_allow_all_unix_sockets: false,
        mode: NetworkMode::Full,
        domains: None,
        review_domains: Vec::new(),
        unix_sockets: None,
        allow_local_binding: false,
        credential_masking: false,
        credential_providers: Default::default(),
    }
}

#[test]
fn proxies() {
    golden(&smallest(), SMALLEST);
    let nulls = SMALLEST.replace('}', r#","domains":null,"unixSockets":null,"unknown":1}"#);
    reads_as(&nulls, &smallest());
    let provider = CredentialProvider {
        env: vec!["T".into()],
        patterns: vec!["t_[a-z]{8}".into()],
        url_prefixes: vec!["https://a.b/c".into()],
        url_prefix_from_env: Some("U".into()),
        auth: vec![CredentialAuth::Header, CredentialAuth::Basic],
        header: Some("X-Token".into()),
        prefix: Some("t ".into()),
    };
    let full = NetworkProxyConfig {
        mode: NetworkMode::Limited,
        domains: Some(
            [
                ("*.a", DomainPermission::Allow),
                ("b", DomainPermission::Deny),
                ("c", DomainPermission::None),
            ]
            .map(|(pattern, permission)| (pattern.into(), permission))
            .into(),
        ),
        review_domains: vec!["*".into()],
        unix_sockets: Some([("/x".into(), UnixSocketPermission::Allow)].into()),
        credential_masking: true,
        credential_providers: [("p".into(), provider)].into(),
        ..smallest()
    };
    golden(
        &full,
        r#"{"enabled":true,"enableSocks5":true,"enableSocks5Udp":false,"allowUpstreamProxy":false,"dangerouslyAllowAllUnixSockets":false,"mode":"limited","domains":{"*.a":"allow","b":"deny","c":"none"},"reviewDomains":["*"],"unixSockets":{"/x":"allow"},"allowLocalBinding":false,"credentialMasking":true,"credentialProviders":{"p":{"env":["T"],"patterns":["t_[a-z]{8}"],"url_prefixes":["https://a.b/c"],"url_prefix_from_env":"U","auth":["header","basic"],"header":"X-Token","prefix":"t "}}}"#,
    );
}

#[test]
fn launches() {
    let smallest = NetworkProxyLaunch {
        transparent: false,
        proxy: smallest(),
        audit_metadata: NetworkAuditMetadata::default(),
        environment_id: None,
        execution_id: None,
        policy_decision_timeout_ms: None,
    };
    golden(&smallest, &format!(r#"{{"proxy":{SMALLEST},"auditMetadata":{{}}}}"#));
    reads_as(&format!(r#"{{"proxy":{SMALLEST},"unknown":1,"environmentId":null}}"#), &smallest);
    let full = NetworkProxyLaunch {
        audit_metadata: NetworkAuditMetadata {
            conversation_id: Some("c".into()),
            user_email: Some("a@b".into()),
            ..NetworkAuditMetadata::default()
        },
        environment_id: Some("remote".into()),
        execution_id: Some("e".into()),
        policy_decision_timeout_ms: Some(5),
        ..smallest
    };
    golden(
        &full,
        &format!(
            r#"{{"proxy":{SMALLEST},"auditMetadata":{{"conversationId":"c","userEmail":"a@b"}},"environmentId":"remote","executionId":"e","policyDecisionTimeoutMs":5}}"#
        ),
    );
    assert!(!format!("{full:?}").contains("a@b"));
}

/// The text of the error that a client is sent.
fn error(text: &str) -> String {
    let raw = RawValue::from_string(text.into()).unwrap();
    let error = parse_params::<NetworkProxyLaunch>(Some(&raw)).unwrap_err();
    assert_eq!(error.code, -32602);
    error.message
}

#[test]
fn missing_and_unknown_members() {
    assert_eq!(error("{}"), "missing field `proxy`");
    let members = SMALLEST.trim_matches(['{', '}']).split(',').collect::<Vec<_>>();
    for left_out in &members {
        let name = left_out.split('"').nth(1).unwrap();
        let rest: Vec<_> = members.iter().filter(|member| *member != left_out).copied().collect();
        let text = format!(r#"{{"proxy":{{{}}}}}"#, rest.join(","));
        assert_eq!(error(&text), format!("missing field `{name}`"));
    }
    let with =
        |member: &str| format!(r#"{{"proxy":{}}}"#, SMALLEST.replace('}', &format!(",{member}}}")));
    assert_eq!(
        error(&with(r#""domains":{"a":"x"}"#)),
        "unknown variant `x`, expected one of `none`, `allow`, `deny`"
    );
    assert_eq!(
        error(&with(r#""unixSockets":{"/a":"none"}"#)),
        "unknown variant `none`, expected `allow` or `deny`"
    );
    assert_eq!(error(&with(r#""reviewDomains":null"#)), "invalid type: null, expected a sequence");
    assert_eq!(
        error(&with(r#""credentialMasking":null"#)),
        "invalid type: null, expected a boolean"
    );
    assert_eq!(
        error(&with(r#""credentialProviders":{"a":{"bogus":1}}"#)),
        "unknown field `bogus`, expected one of `env`, `patterns`, `url_prefixes`, `url_prefix_from_env`, `auth`, `header`, `prefix`"
    );
    assert_eq!(
        error(&with(r#""credentialProviders":{"a":{"auth":["x"]}}"#)),
        "unknown variant `x`, expected one of `bearer`, `token`, `basic`, `header`"
    );
    let mode = format!(r#"{{"proxy":{}}}"#, SMALLEST.replace("full", "x"));
    assert_eq!(error(&mode), "unknown variant `x`, expected `limited` or `full`");
}

#[test]
fn extensions() {
    golden(
        &NetworkUpdateRulesParams {
            process_id: "p".into(),
            rules: NetworkRules {
                domains: Some([("a.com:443".to_owned(), DomainPermission::Allow)].into()),
                review_domains: vec!["b.com".into()],
                match_ports: true,
            },
        },
        r#"{"processId":"p","rules":{"domains":{"a.com:443":"allow"},"reviewDomains":["b.com"],"matchPorts":true}}"#,
    );
    golden(
        &NetworkUpdateRulesParams { process_id: "p".into(), rules: NetworkRules::default() },
        r#"{"processId":"p","rules":{}}"#,
    );
    // Rules that this server does not know must not be lost in silence.
    refuses::<NetworkRules>(r#"{"mode":"limited"}"#);
    golden(&NetworkUpdateRulesResponse {}, "{}");
    golden(&NetworkInfo { routes: NetworkRoutes::Transparent }, r#"{"routes":"transparent"}"#);
    golden(&NetworkInfo { routes: NetworkRoutes::Proxies }, r#"{"routes":"proxies"}"#);
}

#[test]
fn questions_and_answers() {
    assert_eq!(POLICY_REQUEST, "network/policyRequest");
    golden(
        &NetworkPolicyRequestParams {
            process_id: "p".into(),
            request: NetworkPolicyRequest {
                protocol: NetworkProtocol::HttpsConnect,
                host: "a.b".into(),
                port: 443,
            },
        },
        r#"{"processId":"p","request":{"protocol":"https_connect","host":"a.b","port":443}}"#,
    );
    let params = NetworkPolicyRequestParams {
        process_id: "p".into(),
        request: NetworkPolicyRequest {
            protocol: NetworkProtocol::Http,
            host: "a".into(),
            port: 80,
        },
    };
    let sent = encode::server_request::<PolicyRequest>(&1.into(), &params);
    assert_eq!(
        String::from_utf8(sent).unwrap(),
        r#"{"id":1,"method":"network/policyRequest","params":{"processId":"p","request":{"protocol":"http","host":"a","port":80}}}"#
    );
    let answer = |decision| NetworkPolicyResponse { decision };
    golden(&answer(NetworkPolicyAnswer::Allow), r#"{"decision":{"type":"allow"}}"#);
    let reason = || "not_allowed".to_owned();
    golden(
        &answer(NetworkPolicyAnswer::Deny { reason: reason() }),
        r#"{"decision":{"type":"deny","reason":"not_allowed"}}"#,
    );
    golden(
        &answer(NetworkPolicyAnswer::Ask { reason: reason() }),
        r#"{"decision":{"type":"ask","reason":"not_allowed"}}"#,
    );
    refuses::<NetworkPolicyResponse>(r#"{"decision":{"type":"deny"}}"#);
    refuses::<NetworkPolicyResponse>(r#"{"decision":{"type":"later"}}"#);
    refuses::<NetworkPolicyResponse>(r#"{"decision":"allow"}"#);
}

#[test]
fn records() {
    let record = NetworkPolicyDecisionNotification {
        process_id: "p".into(),
        timestamp: "2026-11-18T00:40:22.739Z".into(),
        scope: NetworkDecisionScope::Domain,
        decision: NetworkDecision::Allow,
        source: NetworkDecisionSource::Decider,
        reason: "not_allowed".into(),
        protocol: NetworkProtocol::Http,
        host: "a.b".into(),
        port: 80,
        method: Some("GET".into()),
        client: Some("127.0.0.1:9".into()),
        policy_override: true,
    };
    let text = r#"{"processId":"p","timestamp":"2026-11-18T00:40:22.739Z","scope":"domain","decision":"allow","source":"decider","reason":"not_allowed","protocol":"http","host":"a.b","port":80,"method":"GET","client":"127.0.0.1:9","policyOverride":true}"#;
    golden(&record, text);
    let sent = encode::notification::<notification::NetworkPolicyDecision>(&record);
    let expected = format!(r#"{{"method":"network/policyDecision","params":{text}}}"#);
    assert_eq!(String::from_utf8(sent).unwrap(), expected);
    let other = NetworkPolicyDecisionNotification {
        scope: NetworkDecisionScope::NonDomain,
        decision: NetworkDecision::Deny,
        source: NetworkDecisionSource::ModeGuard,
        reason: "method_not_allowed".into(),
        protocol: NetworkProtocol::Socks5Udp,
        method: None,
        client: None,
        policy_override: false,
        ..record
    };
    golden(
        &other,
        r#"{"processId":"p","timestamp":"2026-11-18T00:40:22.739Z","scope":"non_domain","decision":"deny","source":"mode_guard","reason":"method_not_allowed","protocol":"socks5_udp","host":"a.b","port":80,"policyOverride":false}"#,
    );
}
