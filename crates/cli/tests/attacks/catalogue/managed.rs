//! Ways out of a managed network: a namespace that leads to the server alone. The test is the server here,
//! and serves two ports inside.

use std::ffi::OsString;
use std::io::Read;
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Stdio};

use codex_linux_sandbox::{
    Command, Config, ManagedNetwork, NetworkDescriptors, Prepared, Request, Sandbox,
};
use serde_json::{Value, json};

use super::front_door::addresses;
use super::{narrow, read_only, wide, world::World};
use crate::program::attacker;
use crate::server::{UNPRIVILEGED, User};
use crate::spawn;
use crate::support::codex;

/// A sandbox whose network the test serves.
struct Managed {
    child: Child,
    network: NetworkDescriptors,
    /// It ends with this.
    _sandbox: Sandbox,
}

impl Managed {
    /// Runs the attacker's steps under these permissions, with these ports.
    fn start(
        user: User,
        permissions: &Value,
        cwd: &Path,
        network: &ManagedNetwork,
        steps: &[String],
    ) -> Self {
        let sandbox = Sandbox::new(Config::new(codex().get_program())).unwrap();
        let context = serde_json::from_value(permissions.clone()).unwrap();
        let mut argv = vec![OsString::from(attacker())];
        argv.extend(steps.iter().map(OsString::from));
        let env = [("PATH".into(), "/usr/bin:/bin".into())];
        let command = Command::Program { argv: &argv, arg0: None, env: &env, cwd };
        let request = Request::new(command).with_network(Some(network));
        let Prepared::Enforced(mut launch) = sandbox.prepare(&context, &request).unwrap() else {
            panic!("a managed network without a sandbox");
        };
        let receiver = launch.network.take().unwrap();
        let mut command = spawn::command(&launch);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        if user == User::Nobody {
            command.uid(UNPRIVILEGED).gid(UNPRIVILEGED);
        }
        let (child, failure, _) = spawn::spawn(command, launch).unwrap();
        assert_eq!(failure, None);
        Self { child, network: receiver.receive().unwrap(), _sandbox: sandbox }
    }

    /// What the attacker said, once it has ended.
    fn end(&mut self) -> String {
        drop(self.child.stdin.take());
        let mut said = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        self.child.wait().unwrap();
        said
    }

    /// The ports, by their place, that a connection waits on.
    fn reached(&self) -> Vec<usize> {
        let accepted = self.network.listeners.iter().map(|listener| listener.accept().is_ok());
        accepted.enumerate().filter(|(_, accepted)| *accepted).map(|(place, _)| place).collect()
    }
}

fn ports(ports: &[u16], transparent: bool) -> ManagedNetwork {
    ManagedNetwork { loopback_ports: ports.to_vec(), transparent }
}

/// Sockets that could leave the namespace, or change it: family, type, protocol.
const SOCKETS: &[(i32, i32, i32)] = &[
    (libc::AF_UNIX, libc::SOCK_STREAM, 0),
    (libc::AF_UNIX, libc::SOCK_DGRAM, 0),
    (libc::AF_UNIX, libc::SOCK_SEQPACKET, 0),
    (libc::AF_NETLINK, libc::SOCK_RAW, 0),
    (libc::AF_NETLINK, libc::SOCK_RAW, 4),
    (libc::AF_NETLINK, libc::SOCK_DGRAM, 12),
    (libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_ICMP),
    (libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_RAW),
    (libc::AF_INET6, libc::SOCK_RAW, libc::IPPROTO_ICMPV6),
    (libc::AF_INET, libc::SOCK_DGRAM, libc::IPPROTO_ICMP),
    (libc::AF_INET6, libc::SOCK_DGRAM, libc::IPPROTO_ICMPV6),
    // SOCK_PACKET, the older form of AF_PACKET.
    (libc::AF_INET, 10, 0x300),
    (libc::AF_INET, libc::SOCK_STREAM, libc::IPPROTO_SCTP),
    (libc::AF_INET, libc::SOCK_STREAM, libc::IPPROTO_MPTCP),
    (libc::AF_PACKET, libc::SOCK_RAW, 0x300),
    (libc::AF_PACKET, libc::SOCK_DGRAM, 0x300),
    (libc::AF_VSOCK, libc::SOCK_STREAM, 0),
    (libc::AF_VSOCK, libc::SOCK_DGRAM, 0),
    (libc::AF_ALG, libc::SOCK_SEQPACKET, 0),
    (libc::AF_XDP, libc::SOCK_RAW, 0),
    (libc::AF_TIPC, libc::SOCK_STREAM, 0),
    (libc::AF_BLUETOOTH, libc::SOCK_RAW, 1),
];

/// Policies that say different things of files and of the network.
fn permissions(world: &World) -> Vec<Value> {
    let mut all: Vec<Value> =
        [narrow(), wide(), wide().networked(), narrow().networked(), read_only()]
            .iter()
            .map(|policy| policy.within(world).wire())
            .collect();
    let mut legacy = wide().within(world).wire();
    legacy["useLegacyLandlock"] = true.into();
    all.push(legacy);
    all.extend([
        json!({"permissions": {"type": "disabled"}}),
        json!({"permissions": {"type": "external", "network": "enabled"}}),
        json!({"permissions": {"type": "managed", "file_system": {"type": "unrestricted"},
                               "network": "enabled"}}),
    ]);
    all
}

#[test]
fn catalogue_a_managed_network_leads_to_its_server_alone() {
    let mut failures = Vec::new();
    for &user in User::all() {
        let server = user.server();
        let mut world = World::new(user);
        world.served_by(&server);
        let cwd = world.path("{W}");
        let host = TcpListener::bind("0.0.0.0:0").unwrap();
        host.set_nonblocking(true).unwrap();
        let port = host.local_addr().unwrap().port();
        let named = UnixListener::bind(world.path("{W}/s")).unwrap();
        std::fs::set_permissions(world.path("{W}/s"), PermissionsExt::from_mode(0o777)).unwrap();
        user.give(&world.path("{W}/s"));
        named.set_nonblocking(true).unwrap();
        let name = format!("attack-managed-{}-{user:?}", std::process::id());
        let hidden = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap());
        let hidden = hidden.unwrap();
        hidden.set_nonblocking(true).unwrap();
        // The targets are there: outside they are reached.
        std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
        host.accept().unwrap();
        std::os::unix::net::UnixStream::connect(world.path("{W}/s")).unwrap();
        named.accept().unwrap();
        let others = wide().within(&world).wire();
        let mut other =
            Managed::start(user, &others, &cwd, &ports(&[4128], false), &["wait".into()]);
        let mut steps = Vec::new();
        for address in addresses() {
            for target in [port, 4128] {
                steps.push(format!("connect-inet {address} {target}"));
            }
            steps.push(world.expand(&format!("front-door {address} {{PORT}} {{OUT}}/pwned")));
        }
        let mut elsewhere = steps.clone();
        elsewhere
            .extend(["connect-inet 192.0.2.1 80".into(), "connect-inet 2001:db8::1 80".into()]);
        let rest = [
            "connect-unix {W}/s".to_owned(),
            format!("connect-unix @{name}"),
            "bind-unix {W}/bound".to_owned(),
            "setns /proc/1/ns/net".to_owned(),
            "setns /proc/self/ns/net".to_owned(),
            format!("unshare {}", libc::CLONE_NEWNET),
            format!("unshare {}", libc::CLONE_NEWUSER | libc::CLONE_NEWNET),
        ];
        let rest = rest.iter().map(|step| world.expand(step)).chain(
            SOCKETS
                .iter()
                .map(|(family, kind, protocol)| format!("socket {family} {kind} {protocol}")),
        );
        elsewhere.extend(rest.clone());
        // Where everything else is routed to the server, an address that is not loopback leads to it and
        // waits for an answer.
        let is_local = |step: &String| {
            ["127.", "0.0.0.0", "::1", ":: ", "::ffff"].iter().any(|local| step.contains(local))
        };
        let mut local: Vec<String> = steps.into_iter().filter(is_local).collect();
        local.extend(rest);
        for permissions in permissions(&world) {
            for (transparent, attacks) in [(false, &elsewhere), (true, &local)] {
                let control = ["connect-inet 127.0.0.1 3128", "socketpair", "bind-inet"];
                // First, because the control leaves descriptors open.
                let mut steps = vec!["descriptors".to_owned()];
                steps.extend(control.map(str::to_owned));
                steps.extend_from_slice(attacks);
                let network = ports(&[3128, 1080], transparent);
                let mut managed = Managed::start(user, &permissions, &cwd, &network, &steps);
                let said = managed.end();
                let what = format!("{user:?} {permissions} transparent {transparent}");
                for (number, step) in steps.iter().enumerate() {
                    let number = number + 1;
                    let ok = said.contains(&format!("\n#{number} ok\n"));
                    let ran = ok || said.contains(&format!("\n#{number} "));
                    if !ran || ok != control.contains(&step.as_str()) {
                        failures
                            .push(format!("{what}: {step}: {}", if ok { "ok" } else { "failed" }));
                    }
                }
                assert!(!said.contains("unknown step"), "{said}");
                // The control's connection, and nothing on the other port.
                if managed.reached() != [0] {
                    failures.push(format!("{what}: reached {:?}", managed.reached()));
                }
            }
        }
        if host.accept().is_ok() || named.accept().is_ok() || hidden.accept().is_ok() {
            failures.push(format!("{user:?}: the host was reached"));
        }
        if !other.reached().is_empty() {
            failures.push(format!("{user:?}: another process's port was reached"));
        }
        if world.path("{OUT}/pwned").exists() {
            failures.push(format!("{user:?}: the server was reached"));
        }
        assert!(other.end().contains("\n#1 ok\n"));
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
