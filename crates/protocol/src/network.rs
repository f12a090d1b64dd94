//! The managed network of a process: the proxy that `process/start` asks for, the server's questions to
//! the client about hosts, and its records of what was decided.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::methods::ServerCall;
use crate::process::ProcessId;

/// The request that the server sends to the client about a host that the rules leave undecided. Its ids
/// are counted by the server, from 1.
pub const POLICY_REQUEST: &str = "network/policyRequest";

/// [`POLICY_REQUEST`], for both sides.
#[derive(Debug, Clone, Copy)]
pub struct PolicyRequest;

impl ServerCall for PolicyRequest {
    const NAME: &'static str = POLICY_REQUEST;
    type Params = NetworkPolicyRequestParams;
    type Response = NetworkPolicyResponse;
}

/// The member `managedNetwork` of `process/start`: a client has a proxy of its own on this machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct ManagedNetwork {
    /// Its ports. If there are any, the proxy variables may name no others; the list opens none by itself.
    pub loopback_ports: Vec<u16>,
    /// Without effect on Linux.
    pub allow_local_binding: bool,
}

/// The member `networkProxy` of `process/start`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct NetworkProxyLaunch {
    /// The proxy to start.
    pub proxy: NetworkProxyConfig,
    /// Who asks, for the log only.
    #[serde(default)]
    pub audit_metadata: NetworkAuditMetadata,
    /// For the log only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub environment_id: Option<String>,
    /// For the log only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub execution_id: Option<String>,
    /// **extension** `networkTransparent`: if the network is enforced, serve programs that ignore the proxy
    /// variables, too, where the machine can.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub transparent: bool,
    /// How long the client has to answer [`POLICY_REQUEST`], in milliseconds and without the 5 s that
    /// the server adds; not 0. Absent: undecided hosts are refused without a question.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy_decision_timeout_ms: Option<u64>,
}

/// **extension**: how a process with a managed network reaches its proxies, in the response to
/// `process/start`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct NetworkInfo {
    /// What leads to them.
    pub routes: NetworkRoutes,
}

/// What leads a process to its proxies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum NetworkRoutes {
    /// Its variables.
    Proxies,
    /// Every route of its network, for programs that ignore the variables.
    Transparent,
}

/// **extension**: the rules of a proxy that can be replaced while it runs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NetworkRules {
    /// What to do with the hosts of a pattern.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domains: Option<BTreeMap<String, DomainPermission>>,
    /// Patterns of hosts that the client is asked about even if they are allowed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub review_domains: Vec<String>,
    /// A port in a pattern counts, instead of being ignored.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub match_ports: bool,
}

/// Params of `network/updateRules` (extension).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct NetworkUpdateRulesParams {
    /// The process with the proxy.
    pub process_id: ProcessId,
    /// The rules that replace the present ones.
    pub rules: NetworkRules,
}

/// Result of `network/updateRules` (extension).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct NetworkUpdateRulesResponse {}

/// A proxy for one process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct NetworkProxyConfig {
    /// Has to be true.
    pub enabled: bool,
    /// Start a SOCKS5 proxy beside the HTTP proxy.
    #[serde(rename = "enableSocks5")]
    pub enable_socks5: bool,
    /// Offer SOCKS5 UDP ASSOCIATE.
    #[serde(rename = "enableSocks5Udp")]
    pub enable_socks5_udp: bool,
    /// Send requests to public hosts through the server's own proxy, if it has one.
    pub allow_upstream_proxy: bool,
    /// Without effect on Linux.
    pub dangerously_allow_all_unix_sockets: bool,
    /// Which requests pass.
    pub mode: NetworkMode,
    /// What to do with the hosts of a pattern.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domains: Option<BTreeMap<String, DomainPermission>>,
    /// Patterns of hosts that the client is asked about even if they are allowed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub review_domains: Vec<String>,
    /// Without effect on Linux; an allowed path has to be absolute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unix_sockets: Option<BTreeMap<String, UnixSocketPermission>>,
    /// Connect to loopback and private addresses like to any other.
    pub allow_local_binding: bool,
    /// Replace secrets in the process's environment by stand-ins.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub credential_masking: bool,
    /// Secrets beyond the well-known ones, by a name for the log.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub credential_providers: BTreeMap<String, CredentialProvider>,
    /// **extension** `networkPortRules`: a port in a pattern counts, instead of being ignored.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub match_ports: bool,
}

/// Which requests pass once the host is allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum NetworkMode {
    /// GET, HEAD and OPTIONS.
    Limited,
    /// Everything.
    Full,
}

/// What to do with the hosts of a pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum DomainPermission {
    /// As if the pattern were absent.
    None,
    /// Let them through.
    Allow,
    /// Refuse them, whatever another pattern says.
    Deny,
}

/// What to do with a Unix socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum UnixSocketPermission {
    /// Let requests through.
    Allow,
    /// Refuse them.
    Deny,
}

/// A kind of secret, and where it may be sent. The one type of the protocol with `snake_case` members.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct CredentialProvider {
    /// The variables that hold the secret.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Regular expressions, one of which the whole secret matches.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub patterns: Vec<String>,
    /// Where the secret is put back: scheme, host, port and the beginning of the path.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub url_prefixes: Vec<String>,
    /// A variable that holds another such prefix.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url_prefix_from_env: Option<String>,
    /// How the secret is sent; bearer if empty.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub auth: Vec<CredentialAuth>,
    /// The header of [`CredentialAuth::Header`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub header: Option<String>,
    /// The text before the secret in that header.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix: Option<String>,
}

/// How a secret is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum CredentialAuth {
    /// `Authorization: Bearer …`
    Bearer,
    /// `Authorization: token …`
    Token,
    /// Either half of `Authorization: Basic …`
    Basic,
    /// A header of its own.
    Header,
}

/// Who asks for a proxy. `Debug` hides it: it names a person.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct NetworkAuditMetadata {
    /// The conversation that the process belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub conversation_id: Option<String>,
    /// The version of the client.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub app_version: Option<String>,
    /// The user's account.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_account_id: Option<String>,
    /// How the user is signed in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auth_mode: Option<String>,
    /// The program that uses the client.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub originator: Option<String>,
    /// The user's address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_email: Option<String>,
    /// The terminal of the client.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub terminal_type: Option<String>,
    /// The model that asked for the process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// A short name of the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slug: Option<String>,
}

impl fmt::Debug for NetworkAuditMetadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NetworkAuditMetadata").finish_non_exhaustive()
    }
}

/// How a request reached the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum NetworkProtocol {
    /// A request in plain HTTP.
    Http,
    /// CONNECT.
    HttpsConnect,
    /// SOCKS5 CONNECT.
    Socks5Tcp,
    /// A datagram through SOCKS5.
    Socks5Udp,
}

/// Params of [`POLICY_REQUEST`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct NetworkPolicyRequestParams {
    /// The process whose request it is.
    pub process_id: ProcessId,
    /// What the rules leave undecided.
    pub request: NetworkPolicyRequest,
}

/// A request that the rules leave undecided.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct NetworkPolicyRequest {
    /// How it came.
    pub protocol: NetworkProtocol,
    /// A name or an address, in lower case, without brackets.
    pub host: String,
    /// The port it is to go to.
    pub port: u16,
}

/// Result of [`POLICY_REQUEST`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct NetworkPolicyResponse {
    /// What the client decided, for this one request.
    pub decision: NetworkPolicyAnswer,
}

/// What the client decided about a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum NetworkPolicyAnswer {
    /// Let it through.
    Allow,
    /// Refuse it.
    Deny {
        /// At most 1,024 bytes, without control characters.
        reason: String,
    },
    /// Refuse it, since a person has to be asked first.
    Ask {
        /// At most 1,024 bytes, without control characters.
        reason: String,
    },
}

/// Params of the notification `network/policyDecision`: one record per judged request, and a second one
/// if it was refused for another reason than its host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct NetworkPolicyDecisionNotification {
    /// The process whose request it was.
    pub process_id: ProcessId,
    /// RFC 3339, in UTC with milliseconds.
    pub timestamp: String,
    /// Whether the record is about the host.
    pub scope: NetworkDecisionScope,
    /// What was decided.
    pub decision: NetworkDecision,
    /// Who decided.
    pub source: NetworkDecisionSource,
    /// A word of the protocol, or the client's own.
    pub reason: String,
    /// How the request came.
    pub protocol: NetworkProtocol,
    /// In lower case, without brackets; `unix-socket` for a Unix socket.
    pub host: String,
    /// 0 for a Unix socket.
    pub port: u16,
    /// The HTTP method; absent for SOCKS5.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    /// The address of the process's socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// The client allowed what the rules did not.
    pub policy_override: bool,
}

/// What a record is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum NetworkDecisionScope {
    /// The host.
    Domain,
    /// Something else about the request.
    NonDomain,
}

/// What was decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum NetworkDecision {
    /// The request passed.
    Allow,
    /// The request was refused.
    Deny,
    /// The request was refused since a person has to be asked first.
    Ask,
}

/// Who decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum NetworkDecisionSource {
    /// The rules.
    BaselinePolicy,
    /// The client.
    Decider,
    /// The mode.
    ModeGuard,
    /// What the proxy can do.
    ProxyState,
}

crate::encode::by_serde! {
    NetworkPolicyRequestParams, NetworkPolicyResponse, NetworkPolicyDecisionNotification,
    NetworkUpdateRulesParams, NetworkUpdateRulesResponse,
}
