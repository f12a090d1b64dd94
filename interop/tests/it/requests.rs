//! Random requests get the same answers from both servers: headers from variables, policies that hide what a
//! process needs, proxies of the client, and requests that are served one at a time.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::thread;

use serde_json::{Value, json};

use crate::environment::{Plain, Random, seeds};
use crate::programs::{Implementation, home};

const BOTH: [Implementation; 2] = [Implementation::Ours, Implementation::Theirs];

/// A web server that keeps the headers of requests by their path.
struct Web {
    port: u16,
    heads: Arc<Mutex<BTreeMap<String, Vec<String>>>>,
}

impl Web {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let heads: Arc<Mutex<BTreeMap<String, Vec<String>>>> = Arc::default();
        let heard = heads.clone();
        thread::spawn(move || {
            for stream in listener.incoming().map(Result::unwrap) {
                let heard = heard.clone();
                thread::spawn(move || {
                    let mut lines = BufReader::new(&stream).lines().map_while(Result::ok);
                    let Some(first) = lines.next() else { return };
                    let head: Vec<_> = lines.take_while(|line| !line.is_empty()).collect();
                    let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
                    heard.lock().unwrap().insert(path, head);
                    let _ = (&stream).write_all(
                        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok",
                    );
                });
            }
        });
        Self { port, heads }
    }

    /// The headers of the test in a request, by lower-case name.
    fn head(&self, path: &str) -> Option<Vec<String>> {
        let mut head = self.heads.lock().unwrap().remove(path)?;
        head.retain(|line| line.to_ascii_lowercase().starts_with("x-"));
        let mut head: Vec<_> = head
            .iter()
            .map(|line| line.split_once(':').unwrap())
            .map(|(name, value)| format!("{}: {}", name.to_ascii_lowercase(), value.trim()))
            .collect();
        head.sort();
        Some(head)
    }
}

/// Names of secrets that the contract refuses.
const SECRETS: [&str; 14] = [
    "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN",
    "OPENAI_FEDERATION_RULE_ID",
    "OPENAI_IDENTITY_TOKEN_FILE",
    "OPENAI_WORKLOAD_IDENTITY_CONTEXT",
    "OPENAI_API_KEY",
    "CODEX_API_KEY",
    "CODEX_ACCESS_TOKEN",
    "CODEX_CONNECTORS_TOKEN",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_CLIENT_SECRET",
    "AZURE_FEDERATED_TOKEN_FILE",
    "GOOGLE_APPLICATION_CREDENTIALS",
];

/// A name that is a secret's, is like one, or is nothing like one.
fn name(random: &mut Random) -> String {
    let secret = random.one(&SECRETS);
    match random.below(9) {
        0 | 1 => secret.to_owned(),
        2 => secret.to_ascii_lowercase(),
        3 => {
            let flip = |c: char| if random.below(2) == 0 { c.to_ascii_lowercase() } else { c };
            secret.chars().map(flip).collect()
        }
        4 => format!("{secret}{}", random.one(&["_", "S", "_FILE", "2"])),
        5 => format!("{}{secret}", random.one(&["_", "MY_", "X"])),
        6 => secret[..secret.len() - 1 - random.below(4)].to_owned(),
        7 => secret.replacen('_', "", 1),
        _ => random
            .one(&["NODE_REPL_AUTH_TOKEN", "AWS_REGION", "MY_TOKEN", "EMPTY", "UNSET", "GH_TOKEN"])
            .to_owned(),
    }
}

#[test]
#[ignore = "interop/run runs it"]
fn headers_from_variables_are_sent_and_refused_alike() {
    let (web, machine) = (Web::start(), home());
    for seed in seeds(6) {
        let mut random = Random(seed);
        let cases: Vec<(String, Value)> = (0..40)
            .map(|case| {
                let variable = name(&mut random);
                let mut header = json!({"name": random.one(&["X-One", "x-two", "X-Three"]),
                    "value": random.one(&["", "Bearer ", "a", " b "])});
                if random.below(8) > 0 {
                    header["valueEnvVar"] = json!(variable);
                }
                let url = format!("http://127.0.0.1:{}/{seed}/{case}", web.port);
                let params = json!({"method": random.one(&["GET", "POST", "HEAD"]), "url": url,
                    "headers": [header], "requestId": format!("r{case}"),
                    "redirectPolicy": random.one(&["follow", "stop"]), "streamResponse": false});
                (variable, params)
            })
            .collect();
        let outcomes = BOTH.map(|implementation| {
            let mut server = Plain::with(implementation, machine.path(), |command| {
                for (index, (variable, _)) in cases.iter().enumerate() {
                    if variable != "UNSET" {
                        command.env(variable, format!("value-{index}"));
                    }
                }
                command.env("EMPTY", "").env_remove("UNSET");
            });
            let outcome = |(index, (_, params)): (usize, &(String, Value))| {
                let answer = server.call("http/request", params);
                let answer = match answer.get("code") {
                    Some(code) => code.clone(),
                    None => answer["status"].clone(),
                };
                (answer, web.head(&format!("/{seed}/{index}")))
            };
            cases.iter().enumerate().map(outcome).collect::<Vec<_>>()
        });
        let [ours, theirs] = &outcomes;
        for (index, (_, params)) in cases.iter().enumerate() {
            assert_eq!(ours[index], theirs[index], "ours, theirs: seed {seed}: {params}");
        }
        assert!(ours.iter().any(|(code, _)| *code == -32602), "seed {seed} refuses nothing");
        assert!(ours.iter().any(|(code, _)| *code == 200), "seed {seed} sends nothing");
    }
}

/// A policy with these entries besides a special one to read.
fn policy(special: &str, access: &str, uris: &[String], cwd: &str) -> Value {
    let mut entries =
        vec![json!({"path": {"type": "special", "value": {"kind": special}}, "access": "read"})];
    entries.extend(
        uris.iter().map(|uri| json!({"path": {"type": "path", "path": uri}, "access": access})),
    );
    json!({
        "permissions": {"type": "managed", "network": "restricted",
            "file_system": {"type": "restricted", "entries": entries}},
        "cwd": cwd, "workspaceRoots": [cwd], "windowsSandboxLevel": "disabled",
        "windowsSandboxPrivateDesktop": false, "useLegacyLandlock": false,
    })
}

/// The exit code of a process and whether it was denied; or the code of an error.
fn ending(server: &mut Plain, params: &Value) -> Value {
    let started = server.call("process/start", params);
    if started.get("code").is_some() {
        return started;
    }
    loop {
        let read = json!({"processId": params["processId"], "waitMs": 1000});
        let answer = server.call("process/read", &read);
        if answer["closed"] == true {
            return json!([answer["exitCode"], answer["sandboxDenied"]]);
        }
    }
}

#[test]
#[ignore = "interop/run runs it"]
fn hidden_directories_and_programs_end_processes_alike() {
    let machine = home();
    let places = ["a", "a/b", "a/b/c", "d", "d/e"];
    for name in places {
        std::fs::create_dir_all(machine.path().join(name)).unwrap();
        std::fs::copy("/bin/true", machine.path().join(name).join("program")).unwrap();
    }
    let uri = |name: &str| format!("file://{}", machine.path().join(name).display());
    let mut servers = BOTH.map(|implementation| Plain::start(implementation, machine.path()));
    let mut seen = std::collections::BTreeSet::new();
    for seed in seeds(40) {
        let mut random = Random(seed);
        let (cwd, program) = (random.one(&places), random.one(&places));
        let named: Vec<_> = (0..1 + random.below(2)).map(|_| random.one(&places)).collect();
        let (special, access) = [("root", "deny"), ("minimal", "read")][random.below(2)];
        let below =
            |name: &str, place: &str| name == place || name.starts_with(&format!("{place}/"));
        let hidden = match access {
            "deny" => named.iter().any(|name| below(cwd, name)),
            // The way to a readable place can be entered.
            _ => !named.iter().any(|name| below(cwd, name) || below(name, cwd)),
        };
        let uris: Vec<_> = named.into_iter().map(uri).collect();
        let sandbox = policy(special, access, &uris, &uri(cwd));
        let params = json!({
            "processId": format!("p{seed}"), "cwd": uri(cwd), "env": {}, "tty": false,
            "argv": [machine.path().join(program).join("program")], "sandbox": sandbox,
        });
        let [ours, theirs] = servers.each_mut().map(|server| ending(server, &params));
        // Theirs runs a command in `/` if its directory is hidden: a relative path would mean another file.
        let expected = if hidden { json!([101, true]) } else { theirs };
        assert_eq!(ours, expected, "ours, theirs: seed {seed}: {params}");
        seen.insert((hidden, ours.to_string()));
    }
    assert_eq!(seen.len(), 3, "some were denied and some were not: {seen:?}");
}

/// Their server starts a process that ends at once where ours refuses the request; nothing runs on either.
#[test]
#[ignore = "interop/run runs it"]
fn proxies_of_the_client_are_accepted_and_refused_alike() {
    let machine = home();
    let mut servers = BOTH.map(|implementation| Plain::start(implementation, machine.path()));
    let mut seen = [0, 0];
    for seed in seeds(30) {
        let mut random = Random(seed);
        let ports = [3101, 3102, 3103];
        let mut env = json!({"PATH": "/usr/bin:/bin"});
        for _ in 0..random.below(4) {
            let variable =
                random.one(&["HTTP_PROXY", "https_proxy", "ALL_PROXY", "PIP_PROXY", "FOO_PROXY"]);
            let scheme = random.one(&["http", "socks5h"]);
            let host = random.one(&["127.0.0.1", "127.0.0.1", "localhost", "192.0.2.1"]);
            env[variable] = json!(format!("{scheme}://{host}:{}", ports[random.below(3)]));
        }
        let listed: Vec<_> = ports.into_iter().filter(|_| random.below(2) == 0).collect();
        let managed = match random.below(5) {
            0 => Value::Null,
            local => json!({"loopbackPorts": listed, "allowLocalBinding": local % 2 == 0}),
        };
        let params = json!({
            "processId": format!("p{seed}"), "argv": ["/bin/true"], "cwd": "file:///", "env": env,
            "tty": false, "sandbox": policy("root", "read", &[], "file:///"), "enforceManagedNetwork": true,
            "managedNetwork": managed,
        });
        let [ours, theirs] = servers.each_mut().map(|server| ending(server, &params));
        let runs = match ours.get("code") {
            Some(code) => {
                assert_eq!(*code, -32602, "seed {seed}: {params}");
                0
            }
            None => 1,
        };
        let expected = [json!([101, true]), json!([0, false])][runs].clone();
        assert_eq!(theirs, expected, "ours: {ours}: seed {seed}: {params}");
        seen[runs] += 1;
    }
    assert!(seen.iter().all(|count| *count > 3), "{seen:?}");
}

#[test]
#[ignore = "interop/run runs it"]
fn requests_one_at_a_time_are_answered_in_order_by_both() {
    for seed in seeds(5) {
        let answers = BOTH.map(|implementation| {
            let machine = home();
            std::fs::write(machine.path().join("file"), "x".repeat(3_000_000)).unwrap();
            let uri = |name: &str| format!("file://{}", machine.path().join(name).display());
            let mut random = Random(seed);
            let requests: Vec<_> = (0..30)
                .map(|_| match random.below(6) {
                    0 => ("fs/readFile", json!({"path": uri("file")})),
                    1 => ("fs/writeFile", json!({"path": uri("new"), "dataBase64": "eA=="})),
                    2 => ("fs/remove", json!({"path": uri("new"), "force": false})),
                    3 => ("fs/readFile", json!({"path": uri("new")})),
                    4 => ("environment/status", json!({})),
                    _ => ("fs/nothing", json!({})),
                })
                .collect();
            let mut server = Plain::with(implementation, machine.path(), |command| {
                command.args(["--concurrent-requests", "1"]);
            });
            server.pipeline(&requests)
        });
        let [ours, theirs] = &answers;
        assert!(ours == theirs, "seed {seed}");
        let order: Vec<_> = ours.iter().map(|(place, _)| *place).collect();
        assert!(order.is_sorted(), "seed {seed}: {order:?}");
    }
}
