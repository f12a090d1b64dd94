//! Unix sockets of the host, with and without a name in the file system.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use rustix::net::netlink::SocketAddrNetlink;

use super::{Access, attempt, judge_in, narrow, runtime, wide, world::World};
use crate::server::User;

fn listen(world: &World, path: &str) -> UnixListener {
    let path = world.path(path);
    let listener = UnixListener::bind(&path).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o777)).unwrap();
    listener.set_nonblocking(true).unwrap();
    listener
}

#[test]
fn catalogue_with_a_network_only_sockets_in_writable_places_are_reached() {
    let mut failures = Vec::new();
    for &user in User::all() {
        let server = user.server();
        for policy in [
            wide().networked(),
            narrow().networked().with("{RO}", Access::Read),
            wide().networked().with("{OUT}", Access::Deny),
        ] {
            let mut world = World::new(user);
            world.served_by(&server);
            let outside = [
                ("{RO}/s", listen(&world, "{RO}/s")),
                ("{OUT}/s", listen(&world, "{OUT}/s")),
                ("{W}/den/s", listen(&world, "{W}/den/s")),
                ("{W}/.git/s", listen(&world, "{W}/.git/s")),
            ];
            let inside = listen(&world, "{W}/s");
            let name = format!("attack-{}", std::process::id());
            let address = SocketAddr::from_abstract_name(&name).unwrap();
            let without_name = UnixListener::bind_addr(&address).unwrap();
            without_name.set_nonblocking(true).unwrap();
            let made = attempt(&format!("{user:?} {:?}", policy.entries), policy.clone())
                .control(&["connect-unix {W}/s", "socketpair"])
                .run(&[
                    "connect-unix {RO}/s",
                    "connect-unix {OUT}/s",
                    "connect-unix {W}/den/s",
                    "connect-unix {W}/.git/s",
                    "connect-unix /proc/self/root{RO}/s",
                    "connect-unix /..{RO}/s",
                    "symlink {RO}/s {W}/l",
                    "connect-unix {W}/l",
                    "link {RO}/s {W}/h",
                    "connect-unix {W}/h",
                    "rename {RO}/s {W}/m",
                    "connect-unix {W}/m",
                    &format!("connect-unix @{name}"),
                ]);
            let judged = runtime().block_on(judge_in(&world, &made, &server));
            failures.extend(judged.map(|failure| format!("{}: {failure}", made.name)));
            // The attacker has exited, so a connection would be in the listener's queue.
            for (path, listener) in &outside {
                if listener.accept().is_ok() {
                    failures.push(format!("{}: {path} was reached", made.name));
                }
            }
            if without_name.accept().is_ok() {
                failures.push(format!("{}: an abstract socket was reached", made.name));
            }
            assert!(inside.accept().is_ok(), "{}: a socket in the workspace", made.name);
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Netlink protocols besides the routing table: messages between processes, the sockets of the host, audit, its
/// processes (the connector), its devices, and generic ones.
const NETLINK: &[&str] = &[
    "socket 16 3 2",
    "socket 16 3 4",
    "socket 16 3 9",
    "socket 16 3 11",
    "socket 16 2 15",
    "socket 16 3 16",
];

#[test]
fn catalogue_with_a_network_netlink_reaches_the_routing_table_only() {
    let mut failures = Vec::new();
    for &user in User::all() {
        let server = user.server();
        let mut world = World::new(user);
        world.served_by(&server);
        // A process of the host that listens for messages of others.
        let host = rustix::net::socket(
            rustix::net::AddressFamily::NETLINK,
            rustix::net::SocketType::RAW,
            None,
        )
        .unwrap();
        rustix::net::bind(&host, &SocketAddrNetlink::new(0, 0)).unwrap();
        let port = SocketAddrNetlink::try_from(rustix::net::getsockname(&host).unwrap()).unwrap();
        let to_host = format!("connect-netlink {} 0", port.pid());
        let mut steps = NETLINK.to_vec();
        steps.extend([to_host.as_str(), "connect-netlink 0 1", "connect-netlink 0 2"]);
        let made = attempt(&format!("{user:?} netlink"), wide().networked())
            .control(&["socket 16 3 0", "connect-netlink 0 0"])
            .run(&steps)
            .fails();
        let judged = runtime().block_on(judge_in(&world, &made, &server));
        failures.extend(judged.map(|failure| format!("{}: {failure}", made.name)));
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
