//! The managed network: their client uses our server's, and our server decides, asks and reports as theirs
//! does.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::thread;

use serde_json::{Value, json};

use crate::model::{Model, Step, call};
use crate::programs::{Implementation, Program, Server, home};
use crate::real_client::{Session, session, session_with};
use crate::tap::Tap;

const SECRET: &str = "ghp_a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2";

/// A web server on every loopback address.
fn target() -> u16 {
    let listener = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            thread::spawn(move || {
                let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
                while lines.next().is_some_and(|line| line.is_ok_and(|line| !line.is_empty())) {}
                let _ = stream.write_all(
                    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok",
                );
            });
        }
    });
    port
}

/// Their client with these settings, on a server of ours that has two secrets.
fn on_ours(settings: &[&str], steps: Vec<Step>) -> (Vec<String>, String) {
    let server = Server::with(Implementation::Ours, |command| {
        command.env("GH_TOKEN", SECRET).env("MINE", "m-12345678").env("RUST_LOG", "debug");
    });
    let session = session("workspace-write", steps, |command: &mut Command| {
        command.env("CODEX_EXEC_SERVER_URL", &server.url);
        for setting in settings {
            command.args(["-c", setting]);
        }
    });
    (session.tool_outputs, format!("{}{}", session.log, server.program.log()))
}

const NETWORK: [&str; 3] = [
    "features.network_proxy.enabled=true",
    r#"features.network_proxy.domains={"127.0.0.1"="allow"}"#,
    "sandbox_workspace_write.network_access=true",
];

fn exec(cmd: &str, login: bool) -> Step {
    call("exec_command", json!({"cmd": cmd, "yield_time_ms": 30_000, "login": login}))
}

#[test]
#[ignore = "interop/run runs it"]
fn their_client_has_commands_restricted_to_hosts_by_our_server() {
    let port = target();
    let curl = "curl -s -o /dev/null -w '%{http_code} '";
    let script = format!(
        "{curl} http://127.0.0.1:{port}/; {curl} http://other.example/; {curl} --noproxy '*' \
         http://127.0.0.1:{port}/; true"
    );
    let (outputs, log) = on_ours(&NETWORK, vec![exec(&script, true)]);
    assert!(outputs[0].contains("200 403 000"), "{outputs:?} {log}");
}

#[test]
#[ignore = "interop/run runs it"]
fn their_client_has_secrets_masked_by_our_server() {
    let mut settings = NETWORK.to_vec();
    settings.push("features.credential_masking=true");
    let show = "echo <$GH_TOKEN> <$MINE> $CODEX_NETWORK_PROXY_CREDENTIAL_BROKER_ACTIVE; \
                head -n 1 $SSL_CERT_FILE";
    let show = show.replace('<', "'<'").replace('>', "'>'");
    let (outputs, log) = on_ours(&settings, vec![exec(&show, false), exec(&show, true)]);
    assert!(
        outputs[0].contains("<ghp_masked") && !outputs[0].contains(SECRET),
        "{outputs:?} {log}"
    );
    assert!(outputs[0].contains("<m-12345678> 1"), "only known secrets: {outputs:?}");
    assert!(outputs[0].contains("BEGIN CERTIFICATE"), "{outputs:?}");
    assert!(outputs[1].contains(SECRET), "a login shell is not masked: {outputs:?}");
    settings.push(
        r#"features.network_proxy.credentials.mine={env=["MINE"],patterns=["m-[0-9]{8}"],url_prefixes=["https://x.example/"]}"#,
    );
    let (outputs, log) = on_ours(&settings, vec![exec(&show, false)]);
    assert!(outputs[0].contains("<ghp_masked") && outputs[0].contains("<m-"), "{outputs:?} {log}");
    assert!(!outputs[0].contains("m-12345678"), "{outputs:?} {log}");
}

/// Runs the command where `/etc` is this directory.
fn with_etc(command: &mut Command, etc: &Path) {
    let mut inside = Command::new("unshare");
    inside.args(["-rm", "sh", "-c", r#"mount --bind "$0" /etc && exec "$@""#]).arg(etc);
    inside.arg(command.get_program()).args(command.get_args()).stdin(Stdio::null());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => inside.env(name, value),
            None => inside.env_remove(name),
        };
    }
    inside.current_dir(command.get_current_dir().unwrap());
    *command = inside;
}

/// Their client on our server behind a tap, with the requirements of an administrator that has this host
/// reviewed by the scripted model.
fn reviewed(verdict: &'static str, without: Option<&str>) -> (Session, Model, Tap) {
    let port = target();
    let etc = home();
    let copied = Command::new("cp").args(["-a", "/etc/."]).arg(etc.path()).status().unwrap();
    assert!(copied.success() && std::fs::create_dir_all(etc.path().join("codex")).is_ok());
    let requirements = "[experimental_network]\nenabled = true\nreview_domains = [\"127.0.0.1\"]\n\
                        domains = { \"127.0.0.1\" = \"allow\" }\n";
    std::fs::write(etc.path().join("codex/requirements.toml"), requirements).unwrap();
    let server = Server::start(Implementation::Ours);
    let tap = Tap::start(&server.url, without);
    let script =
        format!("curl -s -o /dev/null -w 'status %{{http_code}}' http://127.0.0.1:{port}/");
    let model = Model::reviewing(vec![exec(&script, true)], verdict);
    let session = session_with(&model, "workspace-write", |command| {
        command.env("CODEX_EXEC_SERVER_URL", &tap.url);
        for setting in ["approvals_reviewer=\"auto_review\"", NETWORK[2]] {
            command.args(["-c", setting]);
        }
        with_etc(command, etc.path());
    });
    (session, model, tap)
}

#[test]
#[ignore = "interop/run runs it"]
fn their_client_reviews_a_host_that_our_server_asks_about() {
    for (verdict, decision) in [("allow", "allow"), ("deny", "deny")] {
        let (session, model, tap) = reviewed(verdict, None);
        let start = &tap.messages.of("process/start")[0];
        let launch = &start["networkProxy"];
        assert_eq!(launch["proxy"]["reviewDomains"], json!(["127.0.0.1"]), "{start}");
        assert!(launch["policyDecisionTimeoutMs"].as_u64() > Some(0), "{start}");
        assert!(model.reviews() > 0, "{}", session.log);
        let answers = tap.messages.answers();
        assert_eq!(answers[0]["decision"]["type"], decision, "{answers:?}");
        let output = &session.tool_outputs[0];
        // A denial ends the command, and the model gets the review instead of the output.
        assert_eq!(output.contains("status 200"), verdict == "allow", "{output}");
    }
}

#[test]
#[ignore = "interop/run runs it"]
fn their_client_runs_nothing_if_the_server_lacks_what_an_administrator_requires() {
    for without in ["networkProxyLaunch", "networkProxyReviewDomains"] {
        let (session, _, tap) = reviewed("allow", Some(without));
        assert!(tap.messages.of("process/start").is_empty(), "{without}");
        let output = &session.tool_outputs[0];
        assert!(output.contains("exec-server"), "{without}: {output}");
    }
}

/// The first start of a session with these settings, and the session's log.
fn first_start(settings: &[&str], without: Option<&str>) -> (Value, String) {
    let server = Server::start(Implementation::Ours);
    let tap = Tap::start(&server.url, without);
    let session = session("workspace-write", vec![exec("true", true)], |command| {
        command.env("CODEX_EXEC_SERVER_URL", &tap.url);
        for setting in settings {
            command.args(["-c", setting]);
        }
    });
    let start = tap.messages.of("process/start").first().cloned().unwrap_or_default();
    (start, format!("{}{}", session.log, session.tool_outputs[0]))
}

#[test]
#[ignore = "interop/run runs it"]
fn their_client_sends_what_our_server_announces_for_networks() {
    let (start, log) = first_start(&NETWORK, None);
    let launch = &start["networkProxy"];
    assert_eq!(start["enforceManagedNetwork"], true, "{start} {log}");
    assert!(start["managedNetwork"].is_null(), "{start}");
    assert_eq!(launch["proxy"]["domains"], json!({"127.0.0.1": "allow"}), "{start}");
    assert!(launch.get("policyDecisionTimeoutMs").is_none_or(Value::is_null), "{start}");
    let (start, log) = first_start(&NETWORK, Some("networkProxyLaunch"));
    assert!(start.is_null(), "nothing may run without the network: {start}");
    assert!(log.contains("exec-server"), "{log}");

    let mut settings = NETWORK.to_vec();
    settings.push("features.credential_masking=true");
    let masking = |start: &Value| start["networkProxy"]["proxy"]["credentialMasking"] == true;
    let (start, _) = first_start(&settings, None);
    assert!(masking(&start), "{start}");
    let (start, _) = first_start(&settings, Some("credentialMasking"));
    assert!(start.is_object() && !masking(&start), "{start}");
    settings.push(
        r#"features.network_proxy.credentials.mine={env=["MINE"],patterns=["m-[0-9]{8}"],url_prefixes=["https://x.example/"]}"#,
    );
    let providers =
        |start: &Value| start["networkProxy"]["proxy"]["credentialProviders"]["mine"].is_object();
    let (start, _) = first_start(&settings, None);
    assert!(masking(&start) && providers(&start), "{start}");
    let (start, _) = first_start(&settings, Some("credentialMaskingCustomProviders"));
    assert!(start.is_object() && !masking(&start) && !providers(&start), "{start}");
}

/// A server on stdin and stdout that is asked to start a process and may ask back.
struct Plain {
    _program: Program,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Plain {
    fn start(implementation: Implementation, home: &Path) -> Self {
        let mut command = implementation.program(home);
        command.args(["exec-server", "--listen", "stdio"]);
        let mut program = Program::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()));
        let input = program.child.stdin.take().unwrap();
        let output = BufReader::new(program.child.stdout.take().unwrap());
        let mut plain = Self { _program: program, input, output };
        plain.send(&json!({"id": 1, "method": "initialize", "params": {"clientName": "interop"}}));
        plain.next();
        plain.send(&json!({"method": "initialized"}));
        plain
    }

    fn send(&mut self, message: &Value) {
        writeln!(self.input, "{message}").unwrap();
    }

    fn next(&mut self) -> Value {
        let mut line = String::new();
        assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "it ended");
        serde_json::from_str(&line).unwrap()
    }

    /// Starts a process and answers questions until it closes: its output, the questions and the records.
    fn run(&mut self, params: &Value, answers: &Value) -> Value {
        self.send(&json!({"id": 2, "method": "process/start", "params": params}));
        let (mut output, mut asked, mut records) = (String::new(), Vec::new(), Vec::new());
        loop {
            let message = self.next();
            let params = &message["params"];
            match message["method"].as_str() {
                Some("network/policyRequest") => {
                    asked.push(params["request"].clone());
                    let host = params["request"]["host"].as_str().unwrap();
                    let mut answer = answers[host].clone();
                    answer["id"] = message["id"].clone();
                    self.send(&answer);
                }
                Some("network/policyDecision") => {
                    let mut record = params.clone();
                    let record_members = record.as_object_mut().unwrap();
                    assert!(record_members.remove("timestamp").is_some());
                    record_members.remove("client");
                    records.push(record);
                }
                Some("process/output") => {
                    let chunk = params["chunk"].as_str().unwrap();
                    let bytes = base64_simd::STANDARD.decode_to_vec(chunk).unwrap();
                    output += &String::from_utf8_lossy(&bytes);
                }
                Some("process/closed") => break,
                _ if message["id"] == 2 && message.get("error").is_some() => {
                    return json!({"code": message["error"]["code"], "message": message["error"]["message"]});
                }
                _ => {}
            }
        }
        json!({"output": output, "asked": asked, "records": records})
    }
}

fn agree(params: &Value, answers: &Value) -> Value {
    let [ours, theirs] = [Implementation::Ours, Implementation::Theirs].map(|implementation| {
        let home = home();
        Plain::start(implementation, home.path()).run(params, answers)
    });
    assert_eq!(ours, theirs, "ours, theirs: {params}");
    ours
}

fn start(script: &str, members: &Value, sandbox: &Value, enforce: bool) -> Value {
    let mut proxy = json!({
        "enabled": true, "enableSocks5": true, "enableSocks5Udp": false, "allowUpstreamProxy": false,
        "dangerouslyAllowAllUnixSockets": false, "mode": "full", "allowLocalBinding": false,
    });
    let mut members = members.clone();
    proxy.as_object_mut().unwrap().append(members.as_object_mut().unwrap());
    json!({
        "processId": "p", "argv": ["/bin/sh", "-c", script], "cwd": "file:///",
        "env": {"PATH": "/usr/bin:/bin"}, "tty": false, "sandbox": sandbox,
        "enforceManagedNetwork": enforce, "networkProxy": {"proxy": proxy, "policyDecisionTimeoutMs": 60_000},
    })
}

/// Requests to each host, in each way that the proxies offer.
fn requests(hosts: &[&str], port: u16) -> String {
    let curl =
        "curl -s -o /dev/null --max-time 20 -w '%{http_code} %{http_connect} %{exitcode}\\n'";
    let each = |host: &&str| {
        let url = format!("http://{host}:{port}/");
        format!(
            "{curl} {url}; {curl} -p {url}; {curl} -x \"$ALL_PROXY\" {url}; {curl} -X POST {url};"
        )
    };
    hosts.iter().map(each).collect()
}

#[test]
#[ignore = "interop/run runs it"]
fn our_server_decides_asks_and_reports_as_theirs_does() {
    let port = target();
    let hosts = ["127.0.0.1", "127.0.0.2", "localhost", "127.1", "a.example"];
    let deny = |reason: &str| json!({"result": {"decision": {"type": "deny", "reason": reason}}});
    let answers = json!({
        "127.0.0.1": {"result": {"decision": {"type": "allow"}}},
        "127.0.0.2": deny("my own words"),
        "localhost": {"result": {"decision": {"type": "ask", "reason": "later"}}},
        "a.example": {"error": {"code": -32000, "message": "no"}},
    });
    for members in [
        json!({}),
        json!({"domains": {"127.0.0.1": "allow", "localhost": "deny"}}),
        json!({"domains": {"*": "allow", "127.0.0.2": "deny"}}),
        json!({"domains": {"127.0.0.*": "allow"}, "allowLocalBinding": true}),
        json!({"allowLocalBinding": true}),
        json!({"domains": {"127.0.0.1": "allow", "127.0.0.2": "allow"}, "reviewDomains": ["127.0.0.?"]}),
        json!({"domains": {"127.0.0.1": "allow"}, "reviewDomains": ["127.0.0.1"], "allowLocalBinding": true}),
        json!({"domains": {"127.0.0.1": "allow"}, "mode": "limited"}),
    ] {
        let result =
            agree(&start(&requests(&hosts, port), &members, &Value::Null, false), &answers);
        assert_eq!(
            result["output"].as_str().map(|text| text.lines().count()),
            Some(20),
            "{result}"
        );
    }
}

#[test]
#[ignore = "interop/run runs it"]
fn our_server_refuses_the_configurations_that_theirs_does() {
    for members in [
        json!({"enabled": false}),
        json!({"domains": {"http://x": "allow"}}),
        json!({"domains": {"10.0.0.0/8": "allow"}}),
        json!({"domains": {"*": "deny"}}),
        json!({"reviewDomains": ["a b"]}),
        json!({"unixSockets": {"relative": "allow"}}),
        json!({"mode": "other"}),
    ] {
        let result = agree(&start("echo ran", &members, &Value::Null, false), &Value::Null);
        assert_eq!(result["code"], -32602, "{result}");
    }
}

#[test]
#[ignore = "interop/run runs it"]
fn a_sandbox_on_our_server_reaches_what_one_on_theirs_does() {
    let port = target();
    let root = json!({"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"});
    // Their server wants every member.
    let context = |permissions: Value| {
        json!({"permissions": permissions, "cwd": "file:///", "workspaceRoots": ["file:///"],
            "windowsSandboxLevel": "disabled", "windowsSandboxPrivateDesktop": false,
            "windowsSandboxProxySettingsMode": "preserve", "useLegacyLandlock": false})
    };
    let managed = |network: &str| {
        let file_system = json!({"type": "restricted", "entries": [root]});
        context(json!({"type": "managed", "network": network, "file_system": file_system}))
    };
    let curl = "curl -s -o /dev/null --max-time 20 -w '%{http_code} '";
    let url = format!("http://127.0.0.1:{port}/");
    let script =
        format!("{curl} {url}; {curl} -x \"$ALL_PROXY\" {url}; {curl} --noproxy '*' {url}; true");
    let members = json!({"domains": {"127.0.0.1": "allow"}});
    for (sandbox, enforce) in [
        (managed("enabled"), true),
        (managed("restricted"), true),
        (managed("enabled"), false),
        (managed("restricted"), false),
        (context(json!({"type": "disabled"})), true),
        (context(json!({"type": "external", "network": "enabled"})), true),
        (Value::Null, true),
    ] {
        agree(&start(&script, &members, &sandbox, enforce), &Value::Null);
    }
}
