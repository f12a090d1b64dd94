//! Attacks through the server itself, and on its credentials.

use std::net::{IpAddr, TcpListener, UdpSocket};
use std::process::Command;

use super::{Access, attempt, judge_in, narrow, runtime, wide, world::World};
use crate::program::attacker;
use crate::server::{self, User};
use crate::support::codex;

/// Addresses of this machine that a server could be reached at.
pub(super) fn addresses() -> Vec<String> {
    let mut all: Vec<String> =
        ["127.0.0.1", "127.0.0.2", "0.0.0.0", "::1", "::", "::ffff:127.0.0.1"]
            .map(str::to_owned)
            .to_vec();
    // Nothing is sent: a datagram socket that is connected knows its own address.
    for (from, to) in [("0.0.0.0:0", "192.0.2.99:9"), ("[::]:0", "[2001:db8::1]:9")] {
        let own = UdpSocket::bind(from).and_then(|socket| {
            socket.connect(to)?;
            socket.local_addr()
        });
        if let Ok(own) = own
            && !matches!(own.ip(), IpAddr::V6(ip) if ip.is_loopback())
        {
            all.push(own.ip().to_string());
        }
    }
    all
}

#[test]
fn catalogue_no_sandbox_reaches_its_own_server() {
    let addresses = addresses();
    let mut failures = Vec::new();
    for &user in User::all() {
        for listen in ["ws://127.0.0.1:0", "ws://0.0.0.0:0", "ws://[::1]:0", "ws://[::]:0"] {
            let server = user.server_of(codex(), &["--listen", listen, "--insecure-open"]);
            let mut world = World::new(user);
            world.served_by(&server);
            let other = TcpListener::bind("127.0.0.1:0").unwrap();
            let reachable =
                format!("connect-inet 127.0.0.1 {}", other.local_addr().unwrap().port());
            let steps: Vec<String> = addresses
                .iter()
                .map(|address| format!("front-door {address} {{PORT}} {{OUT}}/pwned"))
                .collect();
            // The attack is real: outside a sandbox it succeeds.
            let file = world.path("{OUT}/pwned");
            let address = if listen.contains('[') { "::1" } else { "127.0.0.1" };
            let step = world.expand(&format!("front-door {address} {{PORT}} {{OUT}}/pwned"));
            let done = Command::new(attacker()).arg(step).output().unwrap();
            assert!(file.exists(), "{listen}: {}", String::from_utf8_lossy(&done.stdout));
            std::fs::remove_file(&file).unwrap();
            let steps: Vec<&str> = steps.iter().map(String::as_str).collect();
            // The attacker uses the server's own URL; the test's client uses loopback.
            let mut server = server;
            server.url = server.url.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]");
            for policy in [wide().networked(), narrow().networked()] {
                let made = attempt(&format!("{user:?} {listen}"), policy)
                    .control(&[&reachable, "write {W}/control fine"])
                    .run(&steps);
                let judged = runtime().block_on(judge_in(&world, &made, &server));
                failures.extend(judged.map(|failure| format!("{}: {failure}", made.name)));
                let _ = std::fs::remove_file(&file);
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn catalogue_no_sandbox_reads_what_the_server_signs_in_with() {
    let mut failures = Vec::new();
    for &user in User::all() {
        for place in ["{B}/home", "{W}/home", "{RO}/home"] {
            let mut world = World::new(user);
            let home = world.path(place);
            std::fs::create_dir(&home).unwrap();
            user.give(&home);
            let token = "tokenz0123456789abcdefq";
            for (name, text) in [
                ("auth.json", "{\"OPENAI_API_KEY\":\"apikeyzq\"}"),
                ("token", token),
                ("other", "fine"),
            ] {
                std::fs::write(home.join(name), text).unwrap();
                user.give(&home.join(name));
            }
            let mut command = codex();
            command.env("CODEX_HOME", &home);
            let token_file = home.join("token");
            let arguments =
                ["--ws-auth", "capability-token", "--ws-token-file", token_file.to_str().unwrap()];
            let server = user.server_of(command, &arguments);
            world.served_by(&server);
            let steps = ["auth.json", "token"].map(|name| {
                [
                    format!("read {place}/{name}"),
                    format!("reopen-read {place}/{name}"),
                    format!("copy {place}/{name} {{W}}/taken-{name}"),
                    format!("read {{W}}/taken-{name}"),
                    format!("link {place}/{name} {{W}}/linked-{name}"),
                    format!("read {{W}}/linked-{name}"),
                    format!("symlink {place}/{name} {{W}}/symlink-{name}"),
                    format!("read {{W}}/symlink-{name}"),
                    format!("rename {place} {{W}}/moved"),
                    format!("read {{W}}/moved/{name}"),
                    format!("read /proc/self/root{place}/{name}"),
                    format!("read /..{place}/{name}"),
                ]
            });
            let before: Vec<Vec<u8>> =
                ["auth.json", "token"].map(|name| std::fs::read(home.join(name)).unwrap()).to_vec();
            for policy in
                [wide(), narrow().with(place, Access::Write), wide().with(place, Access::Read)]
            {
                let policy = policy.within(&world);
                let failed = runtime().block_on(async {
                    let mut client = server.uninitialized_client_with(Some(token)).await;
                    client.handshake(serde_json::json!({"clientName": "test"})).await;
                    let control = world.expand(&format!("read {place}/other"));
                    let wire = policy.wire();
                    let said = server::run(&mut client, &[control], &wire, &policy.cwd, None).await;
                    assert!(said.said.contains("fine"), "{}", said.said);
                    let mut all = String::new();
                    for step in steps.as_flattened() {
                        let step = [world.expand(step)];
                        for way in [super::Way::Process, super::Way::Files] {
                            all.push_str(&super::send(&mut client, way, &policy, &step).await.0);
                        }
                    }
                    all.contains(token) || all.contains("apikeyzq")
                });
                if failed {
                    failures.push(format!("{user:?}: {place} under {:?} was read", policy.entries));
                }
                // The new location must not leak either.
                let now: Vec<Vec<u8>> = ["auth.json", "token"]
                    .map(|name| std::fs::read(home.join(name)).unwrap_or_default())
                    .to_vec();
                if now != before {
                    failures
                        .push(format!("{user:?}: {place} under {:?} was changed", policy.entries));
                    break;
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
