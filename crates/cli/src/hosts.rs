//! `--allow-host`, `--deny-host` and `--ask-host`: which hosts a command may connect to, the questions
//! about others on the terminal, and the report of what was refused.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::Arc;

use anyhow::{Context, bail};
use clap::Args;
use codex_exec_network::decide::Outcome;
use codex_exec_network::rules::{List, Rules};
use codex_exec_network::{Config, Namespace, Observer, Proxy, Record, UpstreamProxies};
use codex_exec_server::ExecServerClient;
use codex_exec_server::client::{ExecCommand, PermissionProfile, SandboxContext};
use codex_exec_server::protocol::network::{
    DomainPermission, NetworkDecision, NetworkMode, NetworkPolicyAnswer,
    NetworkPolicyDecisionNotification, NetworkProxyConfig, NetworkProxyLaunch,
};
use codex_exec_server::protocol::{NetworkPolicy, notification};
use codex_linux_sandbox::{Failure, Launch, NetworkDescriptors};
use futures_util::StreamExt;
use parking_lot::Mutex;
use serde::Deserialize;
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;

use crate::confirm::Terminal;
use crate::exit::print_stderr;
use crate::style;

/// How long the proxy waits for an answer on the terminal, in milliseconds.
const ANSWER_TIME_MS: u64 = 10 * 60 * 1000;

/// Refused hosts that are remembered for the report; more are counted.
const MAX_REPORTED: usize = 256;

/// The flags.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct HostArgs {
    /// Allow connections to this host and refuse those to hosts that are not allowed: a name, an
    /// address, *.DOMAIN (its subdomains) or **.DOMAIN (and itself), with :PORT for that port alone;
    /// can be repeated
    #[arg(long, help_heading = "Network", value_name = "HOST")]
    allow_host: Vec<String>,

    /// Refuse connections to this host, even if --allow-host allows it; can be repeated
    #[arg(long, help_heading = "Network", value_name = "HOST")]
    deny_host: Vec<String>,

    /// Ask on the terminal about each host that is neither allowed nor denied; without a terminal it
    /// is refused
    #[arg(long, help_heading = "Network")]
    ask_host: bool,
}

/// Which hosts a command may connect to: the member `hosts` of a policy file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct HostRules {
    pub allow: Vec<String>,
    pub deny: Vec<String>,
    /// Ask about the others.
    pub ask: bool,
}

/// The member of a policy file.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PolicyFile {
    hosts: Option<HostRules>,
}

impl HostArgs {
    /// Whether a flag is given.
    pub(crate) fn is_given(&self) -> bool {
        self.ask_host || !self.allow_host.is_empty() || !self.deny_host.is_empty()
    }

    /// The rules of the flags together with those of a policy file; `None` if there are none.
    pub(crate) fn rules(&self, file: Option<HostRules>) -> Option<HostRules> {
        let given = self.is_given() || file.is_some();
        let mut rules = file.unwrap_or_default();
        rules.allow.extend(self.allow_host.iter().cloned());
        rules.deny.extend(self.deny_host.iter().cloned());
        rules.ask |= self.ask_host;
        given.then_some(rules)
    }
}

impl HostRules {
    /// The rules in the text of a policy file, if it has some.
    pub(crate) fn in_policy(file: &str, text: &[u8]) -> anyhow::Result<Option<Self>> {
        let parsed: PolicyFile = serde_json::from_slice(text).with_context(|| {
            format!(
                "{file} has invalid host rules; an example: \
                 {{\"type\":\"read-only\",\"hosts\":{{\"allow\":[\"*.crates.io:443\"]}}}}"
            )
        })?;
        Ok(parsed.hosts)
    }

    /// Whether a rule is about one port.
    fn has_ports(&self) -> bool {
        self.allow.iter().chain(&self.deny).any(|pattern| has_port(pattern))
    }

    /// The proxy for a command on a server.
    fn launch(&self) -> NetworkProxyLaunch {
        let list = |patterns: &[String], permission| {
            patterns.iter().map(move |pattern| (pattern.clone(), permission)).collect::<Vec<_>>()
        };
        let mut domains: BTreeMap<_, _> =
            list(&self.allow, DomainPermission::Allow).into_iter().collect();
        // To deny wins over to allow.
        domains.extend(list(&self.deny, DomainPermission::Deny));
        NetworkProxyLaunch {
            proxy: NetworkProxyConfig {
                enabled: true,
                enable_socks5: true,
                enable_socks5_udp: false,
                allow_upstream_proxy: true,
                dangerously_allow_all_unix_sockets: false,
                mode: NetworkMode::Full,
                domains: Some(domains),
                review_domains: Vec::new(),
                unix_sockets: None,
                allow_local_binding: false,
                credential_masking: false,
                credential_providers: BTreeMap::new(),
                match_ports: self.has_ports(),
            },
            audit_metadata: Default::default(),
            environment_id: None,
            execution_id: None,
            transparent: true,
            policy_decision_timeout_ms: self.ask.then_some(ANSWER_TIME_MS),
        }
    }

    /// The proxy for a command on this server, if it can have one.
    pub(crate) fn launch_on(
        &self,
        client: &ExecServerClient,
    ) -> anyhow::Result<NetworkProxyLaunch> {
        let capabilities = client.capabilities();
        if !capabilities.network_proxy_launch {
            bail!(
                "this server cannot restrict a command to some hosts; run it without --allow-host"
            );
        }
        if self.has_ports() && !capabilities.network_port_rules {
            bail!("this server ignores the ports of host rules; leave out :PORT");
        }
        Ok(self.launch())
    }

    /// Puts the command behind a proxy with these rules and leaves it no other way out. Without a
    /// sandbox of its own, it is confined in nothing but its network.
    pub(crate) fn apply(
        &self,
        client: &ExecServerClient,
        command: ExecCommand,
        sandbox: Option<SandboxContext>,
    ) -> anyhow::Result<ExecCommand> {
        let launch = self.launch_on(client)?;
        let sandbox = sandbox.unwrap_or_else(network_alone);
        Ok(command.sandbox(sandbox).network_proxy(launch).enforce_network())
    }
}

/// The proxies of a command on this machine: they run in this process, and end with the command.
impl HostRules {
    fn config(&self) -> anyhow::Result<Config> {
        let mut rules = Rules::matching_ports();
        for (list, patterns) in [(List::Allow, &self.allow), (List::Deny, &self.deny)] {
            for pattern in patterns {
                rules.add(list, pattern).with_context(|| format!("invalid host `{pattern}`"))?;
            }
        }
        let mut config = Config::new(rules);
        config.listen = false;
        config.socks5_udp = false;
        config.check_tunnels = true;
        config.upstream = Some(UpstreamProxies::from_env(|name| std::env::var(name).ok()));
        Ok(config)
    }

    /// Runs a command whose network leads to proxies with these rules, and prints what they refused.
    pub(crate) fn serve_in_foreground(
        &self,
        launch: Launch,
    ) -> anyhow::Result<io::Result<Result<i32, Failure>>> {
        let config = self.config()?;
        let refusals = Arc::new(Refusals::default());
        let observer = refusals.clone();
        let mut serving = None;
        // Threads that begin in there do not receive the signals that are meant for the command.
        let ran = launch.serve_in_foreground(|network| {
            serving = match serve(config, observer, network) {
                Ok(serving) => Some(serving),
                // The command runs on, without a network.
                Err(error) => {
                    print_stderr(format_args!("cannot start the network proxy: {error}"));
                    None
                }
            };
        });
        if let Some((runtime, proxy)) = serving {
            drop(proxy);
            runtime.shutdown_background();
        }
        refusals.print();
        Ok(ran)
    }
}

fn serve(
    config: Config,
    observer: Arc<Refusals>,
    network: NetworkDescriptors,
) -> io::Result<(Runtime, Proxy)> {
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let proxy = runtime.block_on(async {
        let proxy = Proxy::start(config, None, observer).await?;
        let mut listeners = network.listeners.into_iter().map(TcpListener::from_std);
        let handle = proxy.handle();
        listeners.next().transpose()?.into_iter().for_each(|http| handle.listen_http(http));
        listeners.next().transpose()?.into_iter().for_each(|socks| handle.listen_socks5(socks));
        // Without a TUN device, programs have to follow the proxy variables.
        if let Some(tun) = network.tun {
            let (dns_udp, dns_tcp) = (network.dns_udp, network.dns_tcp);
            handle.serve_namespace(Namespace { tun, dns_udp, dns_tcp })?;
        }
        io::Result::Ok(proxy)
    })?;
    Ok((runtime, proxy))
}

impl Observer for Refusals {
    fn observe(&self, record: Record) {
        if record.decision != Outcome::Allow {
            self.add(&record.host, record.port, &record.reason);
        }
    }
}

/// A sandbox that restricts the network alone.
pub(crate) fn network_alone() -> SandboxContext {
    SandboxContext::new(PermissionProfile::External { network: NetworkPolicy::Restricted })
}

/// Whether a pattern ends in a port. An IPv6 address without brackets has none.
fn has_port(pattern: &str) -> bool {
    match pattern.rsplit_once(']') {
        Some((_, rest)) => rest.starts_with(':'),
        None => pattern.matches(':').count() == 1,
    }
}

/// The questions about hosts, one at a time. An answer holds for the host and port until the command ends.
#[derive(Debug, Default)]
pub(crate) struct Questions {
    answers: tokio::sync::Mutex<HashMap<(String, u16), bool>>,
}

impl Questions {
    /// Asks whether the command may connect. Anything but yes refuses, and so does a missing terminal.
    pub(crate) async fn may_connect(&self, host: &str, port: u16) -> bool {
        let mut answers = self.answers.lock().await;
        if let Some(answer) = answers.get(&(host.to_owned(), port)) {
            return *answer;
        }
        let shown = style::printable(host);
        let question = format!("codex: may the command connect to {shown}:{port}? [y/N] ");
        let is_allowed = match Terminal::open() {
            Ok(terminal) => terminal.ask(question).await,
            Err(_) => false,
        };
        answers.insert((host.to_owned(), port), is_allowed);
        is_allowed
    }
}

/// What was refused, for the report at the end.
#[derive(Debug, Default)]
pub(crate) struct Refusals {
    by_host: Mutex<BTreeMap<(String, u16), Refused>>,
}

#[derive(Debug)]
struct Refused {
    reason: String,
    times: u64,
}

impl Refusals {
    pub(crate) fn add(&self, host: &str, port: u16, reason: &str) {
        let mut by_host = self.by_host.lock();
        let is_full = by_host.len() >= MAX_REPORTED;
        match by_host.get_mut(&(host.to_owned(), port)) {
            Some(refused) => refused.times += 1,
            None if is_full => {}
            None => {
                let refused = Refused { reason: reason.to_owned(), times: 1 };
                by_host.insert((host.to_owned(), port), refused);
            }
        }
    }

    /// A line for each host and port.
    fn lines(&self) -> Vec<String> {
        let line = |((host, port), refused): (&(String, u16), &Refused)| {
            let times = match refused.times {
                1 => String::new(),
                times => format!(" {times} times"),
            };
            let host = style::printable(host);
            let host = if host.contains(':') { format!("[{host}]") } else { host };
            let why = explain(&refused.reason, &host, *port);
            format!("refused a connection to {host}:{port}{times}: {why}")
        };
        self.by_host.lock().iter().map(line).collect()
    }

    /// Prints the report to stderr.
    pub(crate) fn print(&self) {
        for line in self.lines() {
            print_stderr(format_args!("{line}"));
        }
    }
}

fn explain(reason: &str, host: &str, port: u16) -> String {
    match reason {
        "not_allowed" => format!("not allowed; add --allow-host {host}:{port}"),
        "not_allowed_local" => {
            "it is, or leads to, a local or private address, which has to be allowed by itself"
                .to_owned()
        }
        "denied" => "denied by a rule".to_owned(),
        "refused_by_user" => "you refused it".to_owned(),
        "unix_socket_unsupported" => "the proxy does not connect to Unix sockets".to_owned(),
        other => style::printable(other),
    }
}

/// Answers a server's questions on the terminal and collects what it refuses.
#[derive(Debug)]
pub(crate) struct Watched {
    refusals: Arc<Refusals>,
    task: JoinHandle<()>,
}

impl Watched {
    /// Call it before the command starts.
    pub(crate) fn start(client: &ExecServerClient, rules: &HostRules) -> Self {
        if rules.ask {
            let questions = Arc::new(Questions::default());
            client.on_policy_request(move |asked| {
                let questions = questions.clone();
                async move {
                    match questions.may_connect(&asked.request.host, asked.request.port).await {
                        true => NetworkPolicyAnswer::Allow,
                        false => NetworkPolicyAnswer::Deny { reason: "refused_by_user".to_owned() },
                    }
                }
            });
        }
        let refusals = Arc::new(Refusals::default());
        let mut records = client.subscribe::<notification::NetworkPolicyDecision>();
        let noted = refusals.clone();
        let task = tokio::spawn(async move {
            while let Some(record) = records.next().await {
                if let Ok(NetworkPolicyDecisionNotification {
                    decision, host, port, reason, ..
                }) = record
                    && decision != NetworkDecision::Allow
                {
                    noted.add(&host, port, &reason);
                }
            }
        });
        Self { refusals, task }
    }

    /// Prints what was refused. Call it once the client is closed.
    pub(crate) async fn report(self) {
        let _ = self.task.await;
        self.refusals.print();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_recognized() {
        for with in ["a.com:443", "*.a.com:1", "[::1]:80", "1.2.3.4:5"] {
            assert!(has_port(with), "{with}");
        }
        for without in ["a.com", "::1", "[::1]", "fe80::1", "*", "1.2.3.4"] {
            assert!(!has_port(without), "{without}");
        }
    }

    #[test]
    fn flags_and_a_file_add_up() {
        let flags = HostArgs { allow_host: vec!["a".into()], ..HostArgs::default() };
        let text = br#"{"type":"read-only","hosts":{"allow":["b:1"],"deny":["c"],"ask":true}}"#;
        let file = HostRules::in_policy("p.json", text).unwrap();
        let rules = flags.rules(file).unwrap();
        assert_eq!(
            (rules.allow.clone(), rules.deny.clone(), rules.ask),
            (vec!["b:1".into(), "a".into()], vec!["c".into()], true)
        );
        let launch = rules.launch();
        assert!(launch.proxy.match_ports && launch.policy_decision_timeout_ms.is_some());
        assert_eq!(launch.proxy.domains.unwrap()["c"], DomainPermission::Deny);
        assert_eq!(HostArgs::default().rules(None), None);
        let none = HostRules::in_policy("p.json", b"{\"type\":\"read-only\"}").unwrap();
        assert_eq!(none, None);
        HostRules::in_policy("p.json", br#"{"hosts":{"alow":[]}}"#).unwrap_err();
        let both =
            HostArgs { allow_host: vec!["a".into()], deny_host: vec!["a".into()], ask_host: false };
        let domains = both.rules(None).unwrap().launch().proxy.domains.unwrap();
        assert_eq!(domains["a"], DomainPermission::Deny);
    }

    #[test]
    fn refusals_are_reported_once_per_host_and_port() {
        let refusals = Refusals::default();
        refusals.add("a.com", 443, "not_allowed");
        refusals.add("a.com", 443, "not_allowed");
        refusals.add("::1", 80, "not_allowed_local");
        refusals.add("b\u{1b}[31m", 80, "my\u{7}words");
        let lines = refusals.lines();
        assert_eq!(lines.len(), 3);
        assert!(lines[0].starts_with("refused a connection to [::1]:80: it is, or leads to,"));
        let expected =
            "refused a connection to a.com:443 2 times: not allowed; add --allow-host a.com:443";
        assert_eq!(lines[1], expected);
        assert!(!lines[2].contains('\u{1b}') && !lines[2].contains('\u{7}'), "{lines:?}");
        for port in 0..1000 {
            refusals.add("c.com", port, "denied");
        }
        assert_eq!(refusals.lines().len(), MAX_REPORTED);
    }
}
