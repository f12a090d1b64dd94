//! Credentials go where they belong: every secret is planted in the environment of every command that dials,
//! and every byte that fake servers receive is searched for all of them.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};

use ring::digest::{SHA256, digest};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::commands::{CommandOutput, codex, output};

/// The secrets, by the variable or file they are in.
const SECRETS: &[(&str, &str)] = &[
    ("CODEX_API_KEY", "sk-secret-of-the-api-key"),
    ("CODEX_ACCESS_TOKEN", "secret.of-the-agent.identity"),
    ("CODEX_EXEC_SERVER_REMOTE_BEARER_TOKEN", "secret-of-the-older-registration"),
    ("CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN", "secret-of-the-harness"),
    ("CODEX_EXEC_SERVER_TOKEN", "secret-of-the-server"),
    ("OPENAI_API_KEY", "sk-secret-of-something-else"),
    ("token file", "secret-of-the-token-file"),
    ("auth.json", "secret-of-the-sign-in"),
    ("refresh token", "secret-of-the-renewal"),
];

/// What came where.
type Received = Arc<Mutex<Vec<(String, Vec<u8>)>>>;

/// Listeners that record what they receive: servers, registries, and a proxy that plays every host.
struct World {
    runtime: tokio::runtime::Runtime,
    home: tempfile::TempDir,
    received: Received,
    proxy: SocketAddr,
}

impl World {
    fn new() -> Self {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(1).enable_all().build().unwrap();
        let home = tempfile::tempdir().unwrap();
        let received = Arc::default();
        let proxy = runtime.block_on(listen(&received, "proxy"));
        let world = Self { runtime, home, received, proxy };
        std::fs::write(world.path("token"), secret("token file")).unwrap();
        let patch = "*** Begin Patch\n*** Add File: a\n+b\n*** End Patch\n";
        std::fs::write(world.path("patch"), patch).unwrap();
        std::fs::create_dir(world.path(".codex")).unwrap();
        let tokens = json!({"id_token": "", "access_token": secret("auth.json"),
            "refresh_token": secret("refresh token"), "account_id": "me"});
        std::fs::write(world.path(".codex/auth.json"), json!({"tokens": tokens}).to_string())
            .unwrap();
        let private = PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(world.path(".codex/auth.json"), private).unwrap();
        world
    }

    fn path(&self, below: &str) -> PathBuf {
        self.home.path().join(below)
    }

    fn server(&self, name: &'static str) -> SocketAddr {
        self.runtime.block_on(listen(&self.received, name))
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = codex();
        command.args(words).env("HOME", self.home.path()).current_dir(self.home.path());
        command.env_remove("XDG_STATE_HOME").env("HTTP_PROXY", format!("http://{}", self.proxy));
        command.env("NO_PROXY", "127.0.0.1");
        for (name, value) in SECRETS.iter().filter(|(name, _)| name.contains('_')) {
            command.env(name, value);
        }
        command
    }

    /// Runs the command; which secret was received where.
    fn sent(&self, command: &mut Command) -> (BTreeSet<(String, &'static str)>, CommandOutput) {
        self.received.lock().unwrap().clear();
        let output = output(command);
        let mut sent = BTreeSet::new();
        for (place, bytes) in &*self.received.lock().unwrap() {
            let text = String::from_utf8_lossy(bytes);
            for (name, value) in SECRETS.iter().filter(|(_, value)| text.contains(value)) {
                assert!(!value.is_empty());
                sent.insert((place.clone(), *name));
            }
        }
        for (_, value) in SECRETS {
            let shown = format!("{}{}", output.out, output.err);
            assert!(!shown.contains(value), "it is printed: {shown}");
        }
        (sent, output)
    }

    #[track_caller]
    fn check(&self, words: &[&str], wanted: &[(&str, &'static str)]) -> CommandOutput {
        self.check_command(&mut self.command(words), wanted)
    }

    #[track_caller]
    fn check_command(
        &self,
        command: &mut Command,
        wanted: &[(&str, &'static str)],
    ) -> CommandOutput {
        let (sent, output) = self.sent(command);
        let wanted = wanted.iter().map(|(place, name)| ((*place).to_owned(), *name)).collect();
        assert_eq!(sent, wanted, "{command:?}\n{output:?}");
        output
    }

    /// Saves a session at this URL, made with this credential.
    fn save(&self, name: &str, mut session: Value, credential: Option<(String, &str)>) {
        let directory = self.path(".local/state/codex/sessions");
        std::fs::create_dir_all(&directory).unwrap();
        std::fs::set_permissions(&directory, PermissionsExt::from_mode(0o700)).unwrap();
        if let Some((origin, secret)) = credential {
            let text = format!("codex saved credential\0{origin}\0{secret}");
            let digest = digest(&SHA256, text.as_bytes());
            let digest: String =
                digest.as_ref().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
            session["credential"] = json!({"source": "test", "digest": digest});
        }
        session["sessionId"] = json!("s");
        session["processId"] = json!("p");
        std::fs::write(directory.join(format!("{name}.json")), session.to_string()).unwrap();
    }
}

fn secret(name: &str) -> &'static str {
    SECRETS.iter().find(|(known, _)| *known == name).unwrap().1
}

/// Records what comes to a listener with this name.
async fn listen(received: &Received, name: &'static str) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let received = received.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(record(stream, received.clone(), name.to_owned()));
        }
    });
    address
}

/// Records one connection, and refuses each request on it. A tunnel is recorded under its target's name.
async fn record(mut stream: TcpStream, received: Received, mut place: String) -> Option<()> {
    loop {
        let mut head = Vec::new();
        while !head.windows(4).any(|end| end == b"\r\n\r\n") {
            let len = stream.read_buf(&mut head).await.ok()?;
            if len == 0 {
                received.lock().unwrap().push((place, head));
                return None;
            }
        }
        received.lock().unwrap().push((place.clone(), head.clone()));
        let text = String::from_utf8_lossy(&head).into_owned();
        if let Some(target) = text.strip_prefix("CONNECT ") {
            place = target.split(' ').next()?.to_owned();
            stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.ok()?;
            continue;
        }
        let refused = b"HTTP/1.1 401 No\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}";
        stream.write_all(refused).await.ok()?;
        stream.shutdown().await.ok()?;
        // The body, if there is one.
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).await.ok()?;
        received.lock().unwrap().push((place, rest));
        return Some(());
    }
}

const KEY: &str = "CODEX_API_KEY";
const HARNESS: &str = "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN";
const SERVER: &str = "CODEX_EXEC_SERVER_TOKEN";

#[test]
fn a_credential_goes_to_the_origin_that_it_is_for_and_nowhere_else() {
    let world = World::new();
    let server = format!("ws://{}", world.server("server"));
    let registry = format!("http://{}", world.server("registry"));
    let clear = "http://evil.example";
    let on = ["--on", &server, "--patience", "0"];
    for words in [
        &["info"][..],
        &["ls"],
        &["cat", "x"],
        &["cp", "token", ":x"],
        &["rm", "x"],
        &["search", "x"],
        &["apply-patch", "patch"],
        &["run", "true"],
        &["run", "--detach", "n", "true"],
    ] {
        let words = [&words[..1], &on, &words[1..]].concat();
        world.check(&words, &[("server", SERVER)]);
        let with_file = [&words[..1], &["--token-file", "token"], &words[1..]].concat();
        world.check(&with_file, &[("server", "token file")]);
    }
    let environments = |registry: &str, more: &[&str], wanted: &[(&str, &'static str)]| {
        for what in [&["list"][..], &["show", "x"], &["remove", "x"], &["list", "--json"]] {
            let words = [&["environments"], what, &["--registry", registry], more].concat();
            world.check(&words, wanted);
        }
    };
    environments(&registry, &[], &[("registry", KEY)]);
    environments(&registry, &["--token-file", "token"], &[("registry", "token file")]);
    environments(clear, &[], &[]);
    environments(clear, &["--token-file", "token"], &[]);
    let allowed = ["--allow-registry-host", "evil.example"];
    environments(clear, &allowed, &[("proxy", KEY)]);
    environments("https://evil.example", &[], &[]);

    let env = |registry: &str, wanted: &[(&str, &'static str)]| {
        let on = ["--on", "env:x", "--patience", "0", "--registry", registry];
        world.check(&[&["ls"][..], &on].concat(), wanted);
    };
    env(&registry, &[("registry", HARNESS)]);
    env(clear, &[]);

    let remote = |registry: &str, more: &[&str], wanted: &[(&str, &'static str)]| {
        let words = [&["exec-server", "--remote", registry], more].concat();
        world.check(&words, wanted);
    };
    remote(&registry, &["--environment-id", "e"], &[("registry", KEY)]);
    remote(clear, &["--environment-id", "e"], &[]);
    let older = "CODEX_EXEC_SERVER_REMOTE_BEARER_TOKEN";
    remote(&registry, &["--executor-id", "e"], &[("registry", older)]);
    remote(clear, &["--executor-id", "e"], &[]);

    // Without a key, the sign-in.
    for (base, wanted) in [(&*registry, &[("registry", "auth.json")][..]), (clear, &[])] {
        let mut command =
            world.command(&["exec-server", "--remote", base, "--environment-id", "e"]);
        world.check_command(command.env_remove(KEY), wanted);
    }
    let login = ["login", "--device-auth", "--client-id", "c", "--issuer"];
    world.check(&[&login[..], &[&registry]].concat(), &[]);
    world.check(&[&login[..], &[clear]].concat(), &[]);
    world.check(&["login", "status"], &[]);
}

#[test]
fn saved_sessions_get_the_credential_that_they_were_made_with() {
    let world = World::new();
    let names = ["own", "other", "open", "old", "registry", "foreign"];
    let [own, other, open, old, registry, foreign] = names.map(|name| world.server(name));
    let http = |address: SocketAddr| format!("http://{address}");
    let websocket = |address: SocketAddr| json!({"url": format!("ws://{address}")});
    let environment = |address: SocketAddr| json!({"url": "env:x", "registry": http(address)});
    world.save("own", websocket(own), Some((http(own), secret(SERVER))));
    world.save("other", websocket(other), Some((http(other), "another")));
    // The same token at another origin is another credential.
    world.save("open", websocket(open), Some((http(own), secret(SERVER))));
    world.save("old", websocket(old), None);
    world.save("registry", environment(registry), Some((http(registry), secret(HARNESS))));
    world.save("foreign", environment(foreign), Some((http(foreign), "another")));
    let own_two = [("own", SERVER), ("registry", HARNESS)];
    world.check(&["ps"], &own_two);
    world.check(&["ps", "--json"], &own_two);
    world.check(&["ps", "--token-file", "token"], &[]);
    for command in ["attach", "logs", "kill", "ps"] {
        for name in names {
            let words = [command, "--patience", "0", name];
            let wanted: Vec<_> = own_two.iter().copied().filter(|(at, _)| *at == name).collect();
            world.check(&words, &wanted);
            // The user names both the session and the token.
            let words = [command, "--patience", "0", "--token-file", "token", name];
            world.check(&words, &[(name, "token file")]);
        }
    }
}

#[test]
fn urls_with_secrets_are_neither_saved_nor_printed() {
    let world = World::new();
    let server = crate::support::Running::start(&[]);
    let address = server.url.strip_prefix("ws://").unwrap();
    let with_user = format!("ws://user:hunter2@{address}");
    let with_query = format!("ws://{address}/?token=hunter2");
    let sessions = world.path(".local/state/codex/sessions");
    for (url, words) in [
        (&with_user, &["info"][..]),
        (&with_user, &["run", "--detach", "a", "--", "true"]),
        (&with_query, &["run", "--detach", "a", "--", "true"]),
    ] {
        let words = [&words[..1], &["--on", url], &words[1..]].concat();
        let failed = output(&mut world.command(&words));
        assert_ne!(failed.code, Some(0), "{failed:?}");
        assert!(!format!("{failed:?}").contains("hunter2"), "{failed:?}");
        let mut by_variable = world.command(&[&words[..1], &words[3..]].concat());
        let failed = output(by_variable.env("CODEX_EXEC_SERVER_URL", url));
        assert!(!format!("{failed:?}").contains("hunter2"), "{failed:?}");
        assert!(!sessions.exists() || std::fs::read_dir(&sessions).unwrap().next().is_none());
    }
    // A file of an older version.
    world.save("old", json!({"url": with_query}), None);
    for words in [&["ps"][..], &["ps", "--json"]] {
        let listed = output(&mut world.command(words));
        assert!(!format!("{listed:?}").contains("hunter2"), "{listed:?}");
    }
}

#[test]
fn a_session_is_saved_with_a_digest_and_never_with_its_token() {
    let world = World::new();
    let file = world.path("server-token");
    std::fs::write(&file, secret("token file")).unwrap();
    let file = file.to_str().unwrap();
    let arguments = ["--ws-auth", "capability-token", "--ws-token-file", file];
    let server = crate::support::Running::start(&arguments);
    let on = ["--on", &server.url, "--token-file", file];
    let detach = [&["run", "--detach", "job"], &on[..], &["--", "sleep", "1000"]].concat();
    let started = output(&mut world.command(&detach));
    assert_eq!(started.code, Some(0), "{started:?}");
    let saved = world.path(".local/state/codex/sessions/job.json");
    let saved = std::fs::read_to_string(saved).unwrap();
    assert!(!saved.contains(secret("token file")), "{saved}");
    let saved: Value = serde_json::from_str(&saved).unwrap();
    assert_eq!(saved["credential"]["source"], "--token-file");
    assert_eq!(saved["credential"]["digest"].as_str().unwrap().len(), 16);
    // The same token by another way is the same credential; another token is not sent.
    let mut listed = world.command(&["ps"]);
    let listed = output(listed.env(SERVER, secret("token file")));
    assert!(listed.out.contains("running"), "{listed:?}");
    let listed = output(&mut world.command(&["ps"]));
    assert!(listed.out.contains("token refused"), "{listed:?}");
}
