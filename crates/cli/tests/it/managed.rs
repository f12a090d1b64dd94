//! The managed network in the kernel's hands: what a process reaches with each sandbox, and the flags of
//! the command line. Real programs behind real proxies.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;

use serde_json::{Value, json};

use crate::commands::output;
use crate::skipped::skipped;
use crate::support::{Client, Running, codex, start};
use crate::terminal::Terminal;
use crate::tls::Authority;

/// A web server, or a proxy that answers by itself, on a free port of 127.0.0.1.
pub(crate) struct Target {
    pub port: u16,
    /// The heads of the requests.
    heads: Arc<Mutex<Vec<String>>>,
}

impl Target {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let heads: Arc<Mutex<Vec<String>>> = Arc::default();
        let heard = heads.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                answer(stream.unwrap(), &heard);
            }
        });
        Self { port, heads }
    }

    fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// The first lines of the requests.
    fn requests(&self) -> Vec<String> {
        let heads = self.heads.lock().unwrap();
        heads.iter().map(|head| head.lines().next().unwrap_or_default().to_owned()).collect()
    }

    /// The path and the `Authorization` header of each request since the last call.
    fn authorizations(&self) -> Vec<(String, String)> {
        let header = |line: &str| {
            let (name, value) = line.split_once(':')?;
            name.eq_ignore_ascii_case("authorization").then(|| value.trim().to_owned())
        };
        let heads = std::mem::take(&mut *self.heads.lock().unwrap());
        let parts = |head: &String| {
            let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
            (path, head.lines().find_map(header).unwrap_or_default())
        };
        heads.iter().map(parts).collect()
    }
}

fn answer(mut stream: TcpStream, heard: &Mutex<Vec<String>>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let lines = reader.by_ref().lines().map_while(Result::ok);
    let lines: Vec<_> = lines.take_while(|line| !line.is_empty()).collect();
    if !lines.is_empty() {
        heard.lock().unwrap().push(lines.join("\n"));
        let _ = stream
            .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok");
    }
}

/// Prints the status of a request through the proxy and of one without it; 000 if there is no answer.
fn both_ways(port: u16) -> String {
    let curl = "curl -s -o /dev/null --max-time 30 -w '%{http_code} '";
    let url = format!("http://127.0.0.1:{port}/");
    format!("{curl} {url}; {curl} --noproxy '*' {url}; true")
}

fn network(domains: &Value) -> Value {
    json!({"proxy": {
        "enabled": true, "enableSocks5": true, "enableSocks5Udp": true, "allowUpstreamProxy": true,
        "dangerouslyAllowAllUnixSockets": false, "mode": "full", "allowLocalBinding": false,
        "domains": domains,
    }})
}

fn managed(network: &str, file_system: &Value) -> Value {
    json!({"permissions": {"type": "managed", "network": network, "file_system": file_system}})
}

fn readable() -> Value {
    let root = json!({"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"});
    json!({"type": "restricted", "entries": [root]})
}

async fn run(client: &mut Client, params: Value) -> (Value, String) {
    let id = params["processId"].as_str().unwrap().to_owned();
    let answer = client.call("process/start", params).await;
    assert!(answer["result"].is_object(), "{answer}");
    (answer["result"].clone(), client.closed_quietly(&id).await)
}

#[tokio::test]
async fn what_a_process_reaches_depends_on_its_sandbox() {
    let target = Target::start();
    let server = Running::start(&[]);
    let mut client = server.client().await;
    let mut legacy = managed("restricted", &readable());
    legacy["useLegacyLandlock"] = json!(true);
    let unrestricted = json!({"type": "unrestricted"});
    let only_proxy = ("200 000 ", "linuxSeccomp");
    let disabled = json!({"permissions": {"type": "disabled"}});
    let external = json!({"permissions": {"type": "external", "network": "enabled"}});
    for (name, sandbox, enforce, (expected, kind)) in [
        ("enabled", managed("enabled", &readable()), true, only_proxy),
        ("restricted", managed("restricted", &readable()), true, only_proxy),
        ("advice", managed("enabled", &readable()), false, ("200 200 ", "linuxSeccomp")),
        ("nothing", managed("restricted", &readable()), false, ("000 000 ", "linuxSeccomp")),
        ("disabled", disabled.clone(), true, only_proxy),
        ("external", external, true, only_proxy),
        ("unrestricted", managed("enabled", &unrestricted), true, only_proxy),
        ("legacy", legacy, true, only_proxy),
        ("none", Value::Null, true, ("200 200 ", "none")),
        ("free", disabled, false, ("200 200 ", "none")),
    ] {
        let mut params = start(name, &both_ways(target.port));
        params["sandbox"] = sandbox;
        params["enforceManagedNetwork"] = json!(enforce);
        params["networkProxy"] = network(&json!({"127.0.0.1": "allow"}));
        let (answer, output) = run(&mut client, params).await;
        assert_eq!((output.as_str(), &answer["sandboxType"]), (expected, &json!(kind)), "{name}");
    }
}

#[tokio::test]
async fn proxies_of_the_client_are_bridged_and_nothing_else_is() {
    let (proxy, other) = (Target::start(), Target::start());
    let server = Running::start(&[]);
    let mut client = server.client().await;
    let mut params = start("p", &both_ways(other.port));
    params["env"]["http_proxy"] = format!("http://127.0.0.1:{}", proxy.port).into();
    params["sandbox"] = managed("enabled", &readable());
    params["enforceManagedNetwork"] = json!(true);
    // The list opens nothing by itself.
    params["managedNetwork"] = json!({"loopbackPorts": [other.port, proxy.port]});
    let (_, output) = run(&mut client, params.clone()).await;
    assert_eq!(output, "200 000 ");
    assert_eq!(proxy.requests(), [format!("GET http://127.0.0.1:{}/ HTTP/1.1", other.port)]);
    assert_eq!(other.requests(), Vec::<String>::new());
    // A proxy that the list lacks is not bridged.
    params["processId"] = json!("q");
    params["managedNetwork"] = json!({"loopbackPorts": [other.port]});
    let refused = client.call("process/start", params.clone()).await;
    assert_eq!(refused["error"]["code"], -32602, "{refused}");
    params["managedNetwork"] = json!({"loopbackPorts": [], "allowLocalBinding": true});
    assert_eq!(run(&mut client, params.clone()).await.1, "200 000 ");
    assert_eq!((proxy.requests().len(), other.requests().len()), (2, 0));
    // Nothing to enforce with.
    for url in ["", "http://192.0.2.1:1", "socks5://[::1]:1"] {
        params["processId"] = json!("r");
        params["env"]["http_proxy"] = url.into();
        let refused = client.call("process/start", params.clone()).await;
        assert_eq!(refused["error"]["code"], -32602, "{refused}");
    }
}

#[tokio::test]
async fn programs_without_variables_are_served_where_there_is_a_tun_device() {
    let server = Running::start(&[]);
    let mut client = server.client().await;
    let mut params =
        start("p", "curl -s --noproxy '*' --max-time 30 http://denied.example/; echo $?");
    params["sandbox"] = managed("restricted", &readable());
    params["enforceManagedNetwork"] = json!(true);
    params["networkProxy"] = network(&json!({"denied.example": "deny"}));
    params["networkProxy"]["transparent"] = json!(true);
    let answer = client.call("process/start", params.clone()).await;
    let tun = Path::new("/dev/net/tun").exists();
    let routes = answer["result"]["network"]["routes"].as_str().unwrap().to_owned();
    assert!(tun || routes == "proxies", "{answer}");
    let output = client.closed_quietly("p").await;
    // Neither a lookup nor a connection succeeds.
    assert!(["6\n", "7\n", "56\n"].contains(&&*output), "{output}");
    // Without the extension, the response is as it always was.
    params["processId"] = json!("q");
    params["networkProxy"]["transparent"] = json!(false);
    let (answer, output) = run(&mut client, params).await;
    assert_eq!((answer.get("network"), output.as_str()), (None, "6\n"));
}

#[tokio::test]
async fn certificates_are_readable_in_any_sandbox() {
    let home = tempfile::tempdir_in("/var/tmp").unwrap();
    let server = Running::start_with(codex().arg("exec-server").env("CODEX_HOME", home.path()));
    let mut client = server.client().await;
    let special = |kind: &str| json!({"path": {"type": "special", "value": {"kind": kind}}, "access": "read"});
    let minimal = json!({"type": "restricted", "entries": [special("minimal")]});
    for (id, readable) in [("masked", true), ("plain", false)] {
        let mut params = start(id, "head -n 1 $SSL_CERT_FILE 2>&1; ls $HOME 2>&1");
        params["env"]["HOME"] = home.path().to_str().unwrap().into();
        params["sandbox"] = managed("restricted", &minimal);
        params["enforceManagedNetwork"] = json!(true);
        params["networkProxy"] = network(&json!({}));
        params["networkProxy"]["proxy"]["credentialMasking"] = json!(readable);
        if !readable {
            params["env"]["SSL_CERT_FILE"] = home.path().join("proxy").to_str().unwrap().into();
        }
        let (_, output) = run(&mut client, params).await;
        assert_eq!(output.contains("BEGIN CERTIFICATE"), readable, "{output}");
    }
}

/// A name that only the server can look up; the policy of a sandbox hides the file from its programs.
const ORIGIN: &str = "origin.test";

/// A server that looks [`ORIGIN`] up as this machine, and trusts this authority.
fn server_with_origin(home: &Path, authority: &Authority) -> Running {
    let hosts = home.join("hosts");
    std::fs::write(&hosts, format!("127.0.0.1 localhost {ORIGIN}\n")).unwrap();
    let mut command = Command::new("unshare");
    if !rustix::process::geteuid().is_root() {
        command.arg("--map-root-user");
    }
    let script = r#"mount --bind "$0" /etc/hosts && exec "$@" exec-server"#;
    command.args(["--mount", "sh", "-c", script]).arg(hosts).arg(codex().get_program());
    command.env("CODEX_HOME", home).env("SSL_CERT_FILE", authority.file());
    Running::start_with(&mut command)
}

/// Whole: a program, the sandbox's network, the server's proxies, TLS on both sides, and an origin. The real
/// secret arrives where it belongs, and nowhere else.
#[tokio::test]
async fn masked_secrets_arrive_over_tls_at_their_own_host_by_every_way() {
    let (secret, authority) = ("m-12345678", Authority::new());
    let (bound, other, plain) = (Target::start(), Target::start(), Target::start());
    let bound_port = authority.front(ORIGIN, bound.address()).await;
    let other_port = authority.front(ORIGIN, other.address()).await;
    let home = tempfile::tempdir_in("/var/tmp").unwrap();
    let server = server_with_origin(home.path(), &authority);
    let mut client = server.client().await;
    let no_hosts = json!({"path": {"type": "path", "path": "file:///etc/hosts"}, "access": "deny"});
    let mut files = readable();
    files["entries"].as_array_mut().unwrap().push(no_hosts);
    for way in ["unconfined", "proxies", "transparent"] {
        let direct = if way == "transparent" { "--noproxy '*'" } else { "" };
        let curl = format!(
            "curl -s -o /dev/null --max-time 30 {direct} -w '%{{http_code}} ' -H \"Authorization: Bearer $MINE\""
        );
        let script = format!(
            "{curl} https://{ORIGIN}:{bound_port}/in/x; {curl} https://{ORIGIN}:{bound_port}/out; \
             {curl} https://{ORIGIN}:{other_port}/in/y; {curl} http://{ORIGIN}:{}/in/z; \
             {curl} https://denied.test/; echo $MINE",
            plain.port
        );
        let mut params = start(way, &script);
        params["env"]["MINE"] = secret.into();
        params["networkProxy"] = network(&json!({ORIGIN: "allow"}));
        let proxy = &mut params["networkProxy"]["proxy"];
        // The origin is on this machine.
        proxy["allowLocalBinding"] = json!(true);
        proxy["credentialMasking"] = json!(true);
        proxy["credentialProviders"] = json!({"mine": {"env": ["MINE"], "patterns": ["m-[0-9]{8}"],
            "url_prefixes": [format!("https://{ORIGIN}:{bound_port}/in/")]}});
        if way != "unconfined" {
            params["sandbox"] = managed("restricted", &files);
            params["enforceManagedNetwork"] = json!(true);
            params["networkProxy"]["transparent"] = json!(way == "transparent");
        }
        let (answer, output) = run(&mut client, params).await;
        if way == "transparent" && answer["network"]["routes"] != "transparent" {
            skipped("there is no TUN device");
            continue;
        }
        let (statuses, shown) = output.trim_end().rsplit_once(' ').unwrap();
        assert_eq!(statuses, "200 200 200 200 000", "{way}: {output}");
        assert!(shown.starts_with("m-") && shown != secret, "{way}: {output}");
        let standin = format!("Bearer {shown}");
        let real = ("/in/x".to_owned(), format!("Bearer {secret}"));
        assert_eq!(bound.authorizations(), [real, ("/out".to_owned(), standin.clone())], "{way}");
        assert_eq!(other.authorizations(), [("/in/y".to_owned(), standin.clone())], "{way}");
        assert_eq!(plain.authorizations(), [("/in/z".to_owned(), standin)], "{way}");
    }
}

/// A server trusts the system's authorities and those of two variables. An origin of another one gets neither the
/// secret nor the stand-in. Programs are told to trust the same ones.
#[tokio::test]
async fn masked_secrets_are_sent_only_to_origins_that_the_server_trusts() {
    let authorities = [Authority::new(), Authority::new(), Authority::new()];
    let target = Target::start();
    let mut certificates = Vec::new();
    for named in [true, false] {
        let home = tempfile::tempdir_in("/var/tmp").unwrap();
        let mut command = codex();
        command.arg("exec-server").env("CODEX_HOME", home.path());
        for (name, authority) in ["SSL_CERT_FILE", "CODEX_CA_CERTIFICATE"].iter().zip(&authorities)
        {
            match named {
                true => command.env(name, authority.file()),
                false => command.env_remove(name),
            };
        }
        let server = Running::start_with(&mut command);
        let mut client = server.client().await;
        for (index, authority) in authorities.iter().enumerate() {
            let port = authority.front("localhost", target.address()).await;
            let script = format!(
                "curl -s -k -o /dev/null -w '%{{http_code}} ' -H \"Authorization: Bearer $MINE\" \
                 https://localhost:{port}/; grep -c BEGIN $SSL_CERT_FILE"
            );
            let mut params = start(&format!("p{index}"), &script);
            params["env"]["MINE"] = "m-12345678".into();
            params["networkProxy"] = network(&json!({"localhost": "allow"}));
            params["networkProxy"]["proxy"]["credentialMasking"] = json!(true);
            params["networkProxy"]["proxy"]["credentialProviders"] = json!({"mine": {"env": ["MINE"],
                "patterns": ["m-[0-9]{8}"], "url_prefixes": [format!("https://localhost:{port}/")]}});
            let output = run(&mut client, params).await.1;
            let trusted = named && index < 2;
            let (status, count) = output.trim_end().split_once(' ').unwrap();
            assert_eq!(status, if trusted { "200" } else { "502" }, "{named} {index}: {output}");
            let real = ("/".to_owned(), "Bearer m-12345678".to_owned());
            let expected = if trusted { vec![real] } else { vec![] };
            assert_eq!(target.authorizations(), expected, "{named} {index}");
            certificates.push(count.parse::<usize>().unwrap());
        }
    }
    assert_eq!(certificates[0], certificates[3] + 2, "none of the system's is left out");
}

#[tokio::test]
async fn private_addresses_go_upstream_only_if_the_server_says_so() {
    let upstream = Target::start();
    let url = format!("http://127.0.0.1:{}", upstream.port);
    let local = Target::start();
    for by_flag in [true, false] {
        let mut command = codex();
        command.arg("exec-server").env("HTTP_PROXY", &url);
        match by_flag {
            true => command.arg("--proxy-private-ips-via-upstream"),
            false => command.env("CODEX_EXEC_SERVER_PROXY_PRIVATE_IPS_VIA_UPSTREAM", "true"),
        };
        let server = Running::start_with(&mut command);
        let mut client = server.client().await;
        let script = format!(
            "curl -s -o /dev/null http://10.1.2.3/x; curl -s http://127.0.0.1:{}/",
            local.port
        );
        let mut params = start("p", &script);
        params["networkProxy"] = network(&json!({"10.1.2.3": "allow", "127.0.0.1": "allow"}));
        let (_, output) = run(&mut client, params).await;
        assert_eq!(output, "ok");
        assert_eq!(upstream.requests().last().unwrap(), "GET http://10.1.2.3/x HTTP/1.1");
    }
    assert_eq!((upstream.requests().len(), local.requests().len()), (2, 2));
}

/// `codex run` and `codex sandbox` with these flags, on this script.
fn both_commands(flags: &[&str], script: &str) -> [crate::commands::CommandOutput; 2] {
    ["run", "sandbox"].map(|command| {
        let mut codex = codex();
        codex.arg(command).args(flags).args(["--", "sh", "-c", script]);
        output(codex.current_dir("/"))
    })
}

#[test]
fn allowed_hosts_are_reached_and_others_are_reported() {
    let (good, bad) = (Target::start(), Target::start());
    let script = format!("{}; {}", both_ways(good.port), both_ways(bad.port));
    let allowed = format!("127.0.0.1:{}", good.port);
    for result in both_commands(&["--allow-host", &allowed], &script) {
        assert_eq!((result.code, result.out.as_str()), (Some(0), "200 000 403 000 "), "{result:?}");
        let report = format!("refused a connection to 127.0.0.1:{}: ", bad.port);
        assert_eq!(result.err.matches(&report).count(), 1, "{result:?}");
        assert!(!result.err.contains(&allowed), "{result:?}");
    }
    assert_eq!((good.requests().len(), bad.requests().len()), (2, 0));
    // Denying wins, with or without a port.
    for denied in ["127.0.0.1", &allowed] {
        let flags = ["--allow-host", &allowed, "--deny-host", denied];
        for result in both_commands(&flags, &both_ways(good.port)) {
            assert_eq!(result.out, "403 000 ", "{result:?}");
            assert!(result.err.contains("denied by a rule"), "{result:?}");
        }
    }
    assert_eq!(good.requests().len(), 2);
}

#[test]
fn host_rules_come_from_a_policy_file_too() {
    let target = Target::start();
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let file = directory.path().join("policy.json");
    let policy = json!({"type": "read-only", "hosts": {"allow": ["127.0.0.1"]}});
    std::fs::write(&file, policy.to_string()).unwrap();
    let script = format!("{}; echo x > made", both_ways(target.port));
    for (command, flag) in [("run", "--sandbox"), ("sandbox", "--profile")] {
        let mut codex = codex();
        codex.args([command, flag]).arg(&file).args(["--", "sh", "-c", &script]);
        let result = output(codex.current_dir(directory.path()));
        assert_eq!(result.out, "200 000 ", "{result:?}");
        assert!(!directory.path().join("made").exists(), "the rest of the policy holds");
    }
    std::fs::write(&file, r#"{"type":"read-only","hosts":{"alow":[]}}"#).unwrap();
    let mut codex = codex();
    codex.args(["sandbox", "--profile"]).arg(&file).args(["--", "true"]);
    output(&mut codex).failed(125, "invalid host rules");
}

#[test]
fn host_flags_that_cannot_be_carried_out_run_nothing() {
    for (command, flags, words) in [
        ("run", &["--allow-host", "http://x"][..], "unsupported domain pattern syntax"),
        ("sandbox", &["--allow-host", "http://x"], "unsupported domain pattern syntax"),
        ("sandbox", &["--allow-host", "a:x"], "invalid port"),
        ("sandbox", &["--allow-host", "a", "--network"], "--network allows every host"),
        ("sandbox", &["--ask-host"], "use codex run --ask-host"),
    ] {
        let mut codex = codex();
        codex.arg(command).args(flags).args(["--", "echo", "ran"]);
        let result = output(&mut codex);
        result.failed(125, words);
        assert_eq!(result.out, "", "{result:?}");
    }
}

/// Names that lead nowhere: an allowed one is refused as local after all.
#[test]
fn a_person_is_asked_once_about_each_host() {
    let curl = "curl -s -o /dev/null -w '%{http_code} '";
    let script =
        format!("{curl} http://a.invalid/; {curl} http://a.invalid/; {curl} http://b.invalid/");
    let mut codex = codex();
    codex.args(["run", "--ask-host", "--", "sh", "-c", &script]).current_dir("/");
    let mut terminal = Terminal::start(&codex);
    terminal.shows("may the command connect to a.invalid:80? [y/N]");
    terminal.type_in("n\n");
    terminal.shows("may the command connect to b.invalid:80? [y/N]");
    terminal.type_in("y\n");
    terminal.shows("refused a connection to a.invalid:80 2 times: you refused it");
    terminal.shows("refused a connection to b.invalid:80: it is, or leads to, a local");
    assert_eq!(terminal.ends().code(), Some(0));
}

/// A test has no terminal of its own, so there is nobody to ask.
#[test]
fn without_a_terminal_undecided_hosts_are_refused() {
    let mut codex = codex();
    let script = "curl -s -o /dev/null -w '%{http_code}' http://other.example/";
    codex.args(["run", "--ask-host", "--", "setsid", "sh", "-c", script]);
    let mut detached = std::process::Command::new("setsid");
    detached.arg("-w").arg(codex.get_program()).args(codex.get_args()).current_dir("/");
    let result = output(&mut detached);
    assert_eq!(result.out, "403", "{result:?}");
    assert!(result.err.contains("refused a connection to other.example:80"), "{result:?}");
}
