//! The managed network: a namespace that leads to the server alone.

use std::io::ErrorKind;
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use codex_exec_server_protocol::{
    AccessMode, FileSystemPolicy, NetworkPolicy, PermissionProfile, SpecialPath,
};

use super::support::*;
use crate::skipped::skipped;

const PORTS: Managed<'static> = Managed { ports: "3128,1080,80,", transparent: false };
const TRANSPARENT: Managed<'static> = Managed { ports: "3128,", transparent: true };

/// Every kind of policy, as none of them matters to the network.
fn policies() -> Vec<PermissionProfile> {
    let entries = || vec![root(AccessMode::Read), project(AccessMode::Write)];
    let unrestricted = |network| PermissionProfile::Managed {
        file_system: FileSystemPolicy::Unrestricted,
        network,
    };
    vec![
        managed_with(entries(), NetworkPolicy::Restricted),
        managed_with(entries(), NetworkPolicy::Enabled),
        managed_with(vec![root(AccessMode::Write)], NetworkPolicy::Enabled),
        minimal(),
        unrestricted(NetworkPolicy::Restricted),
        unrestricted(NetworkPolicy::Enabled),
        PermissionProfile::External { network: NetworkPolicy::Enabled },
        PermissionProfile::Disabled,
    ]
}

#[test]
fn the_server_accepts_on_each_port() {
    for user in users() {
        let world = World::new(user);
        for policy in policies() {
            for (port, answer) in
                [(3128, "port 0 word"), (1080, "port 1 word"), (80, "port 2 word")]
            {
                let address = format!("127.0.0.1:{port}");
                world.attempt_managed(policy.clone(), &PORTS, &["ask-tcp", &address, answer]).ok();
            }
        }
    }
}

#[test]
fn nothing_else_is_reached() {
    for user in users() {
        let world = World::new(user);
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        tcp.set_nonblocking(true).unwrap();
        let here = tcp.local_addr().unwrap();
        let name = format!("managed-test-{}-{user:?}", std::process::id());
        let hidden =
            UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        hidden.set_nonblocking(true).unwrap();
        let file = world.work.join("socket");
        let named = UnixListener::bind(&file).unwrap();
        named.set_nonblocking(true).unwrap();
        world.own();
        for policy in policies() {
            for (words, errno) in [
                (vec!["ask-tcp", &*here.to_string(), ""], libc::ECONNREFUSED),
                (vec!["ask-tcp", &format!("0.0.0.0:{}", here.port()), ""], libc::ECONNREFUSED),
                (vec!["ask-tcp", "192.0.2.1:80", ""], libc::ENETUNREACH),
                (vec!["ask-udp", "192.0.2.1:53", ""], libc::ENETUNREACH),
                (vec!["ask-tcp", "[2001:db8::1]:80", ""], libc::ENETUNREACH),
                (vec!["connect-unix", file.to_str().unwrap()], libc::EPERM),
                (vec!["connect-abstract", &name], libc::EPERM),
                (vec!["bind-unix", &world.path("work/new")], libc::EPERM),
            ] {
                let done = world.attempt_managed(policy.clone(), &PORTS, &words);
                assert_eq!(done.code, errno, "{user:?} {policy:?} {words:?}: {done:?}");
            }
        }
        let would_block = Some(ErrorKind::WouldBlock);
        assert_eq!(tcp.accept().map(drop).map_err(|error| error.kind()).err(), would_block);
        assert_eq!(hidden.accept().map(drop).map_err(|error| error.kind()).err(), would_block);
        assert_eq!(named.accept().map(drop).map_err(|error| error.kind()).err(), would_block);
    }
}

#[test]
fn a_program_may_use_its_own_loopback() {
    for user in users() {
        let world = World::new(user);
        for policy in policies() {
            world.attempt_managed(policy.clone(), &PORTS, &["serve-itself"]).ok();
            world.attempt_managed(policy, &PORTS, &["socketpair", "1"]).ok();
        }
    }
}

/// The port belongs to the server: a program cannot take it over.
#[test]
fn a_served_port_is_taken() {
    for user in users() {
        let world = World::new(user);
        let python = "import socket, sys\n\
                      for address in ('127.0.0.1', '0.0.0.0'):\n\
                      \x20 for option in (0, socket.SO_REUSEADDR, socket.SO_REUSEPORT):\n\
                      \x20   s = socket.socket()\n\
                      \x20   if option: s.setsockopt(socket.SOL_SOCKET, option, 1)\n\
                      \x20   try: s.bind((address, 3128)); s.listen(); sys.exit('taken')\n\
                      \x20   except OSError as e: assert e.errno == 98, e\n";
        let policy = managed_with(vec![root(AccessMode::Read)], NetworkPolicy::Restricted);
        world.run_managed(policy, &PORTS, ["/usr/bin/python3", "-c", python]).ok();
    }
}

#[test]
fn two_sandboxes_with_the_same_port_do_not_share_it() {
    for user in users() {
        let world = World::new(user);
        let policy = managed_with(vec![root(AccessMode::Read)], NetworkPolicy::Restricted);
        let waits = ["sh", "-c", "echo ready; read word"];
        let mut first = world.server(&world.context(policy.clone()), &world.work, waits);
        PORTS.dress(&mut first).stdin(std::process::Stdio::piped());
        let mut first = first.spawn().unwrap();
        let mut ready = [0; 6];
        std::io::Read::read_exact(first.stdout.as_mut().unwrap(), &mut ready).unwrap();
        // While that one runs, with the server listening on 3128 inside.
        let other = Managed { ports: "1080,", transparent: false };
        let done =
            world.attempt_managed(policy.clone(), &other, &["ask-tcp", "127.0.0.1:3128", ""]);
        assert_eq!(done.code, libc::ECONNREFUSED, "{user:?}: {done:?}");
        world.attempt_managed(policy, &PORTS, &["ask-tcp", "127.0.0.1:3128", "port 0 word"]).ok();
        drop(first.stdin.take());
        first.wait().unwrap();
    }
}

#[test]
fn the_target_gets_no_descriptor_of_it() {
    for user in users() {
        let world = World::new(user);
        for network in [PORTS, TRANSPARENT] {
            world.attempt_managed(workspace(), &network, &["open-descriptors"]).kept_from();
            let done = world.run_managed(workspace(), &network, ["ls", "-l", "/proc/self/fd"]);
            assert!(!done.ok().out.contains("socket:"), "{user:?}: {done:?}");
            assert!(!done.out.contains("tun"), "{user:?}: {done:?}");
        }
    }
}

/// Whether this user may open the TUN device.
fn has_tun(user: User) -> bool {
    let Ok(about) = std::fs::metadata("/dev/net/tun") else { return false };
    let mode = std::os::unix::fs::PermissionsExt::mode(&about.permissions());
    mode & 0o006 == 0o006 || user == User::Own && rustix::process::geteuid().is_root()
}

#[test]
fn every_address_leads_to_a_transparent_network() {
    for user in users() {
        let world = World::new(user);
        let entries =
            vec![special(SpecialPath::Root, AccessMode::Read), project(AccessMode::Write)];
        let policy = managed_with(entries, NetworkPolicy::Enabled);
        let ask = |words: &[&str]| world.attempt_managed(policy.clone(), &TRANSPARENT, words);
        // With a TUN device or without: the ports, and the nameserver on loopback.
        let done = ask(&["ask-tcp", "127.0.0.1:3128", "port 0 word"]);
        assert_eq!(done.ok().err.contains("no TUN"), !has_tun(user), "{user:?}: {done:?}");
        ask(&["ask-udp", "127.0.0.1:53", "udp 0 word"]).ok();
        ask(&["ask-tcp", "127.0.0.1:53", "tcp 0 word"]).ok();
        ask(&["serve-itself"]).ok();
        if !has_tun(user) {
            if user == User::Own {
                skipped("there is no /dev/net/tun, or this user may not open it");
            }
            assert_eq!(ask(&["ask-udp", "192.0.2.1:7", ""]).code, libc::ENETUNREACH);
            continue;
        }
        for address in ["192.0.2.1:7", "8.8.8.8:53", "198.18.0.9:7", "[2001:db8::1]:7"] {
            ask(&["ask-udp", address, "word"]).ok();
        }
        // What the server does not answer is not answered by anything else.
        let routes = world.run_managed(policy.clone(), &TRANSPARENT, ["cat", "/proc/net/dev"]);
        let names: Vec<&str> = routes.ok().out.lines().skip(2).collect();
        assert!(names.len() == 2, "{user:?}: {names:?}");
        let mtu = "/sys/class/net/tun0/mtu";
        assert!(!std::path::Path::new(mtu).exists(), "the interface is not the host's");
    }
}

#[test]
fn the_target_cannot_change_the_namespace() {
    // SIOCSIFFLAGS, SIOCSIFADDR, SIOCADDRT, TUNSETIFF: refused by the filter, or by the kernel.
    let script = "import fcntl, socket, struct, sys\n\
                  s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n\
                  for name in (b'lo', b'tun0'):\n\
                  \x20 for code in (0x8914, 0x8916, 0x890b, 0x8922):\n\
                  \x20   try: fcntl.ioctl(s, code, struct.pack('16sh22x', name, 0)); sys.exit(hex(code))\n\
                  \x20   except OSError as e: assert e.errno in (1, 13, 19, 22, 99), (hex(code), e)\n\
                  try:\n\
                  \x20 t = open('/dev/net/tun', 'r+b', buffering=0)\n\
                  \x20 for name in (b'tun0', b'tun1'):\n\
                  \x20   try: fcntl.ioctl(t, 0x400454ca, struct.pack('16sh22x', name, 0x1001)); sys.exit('tun')\n\
                  \x20   except OSError as e: assert e.errno in (1, 16, 22), e\n\
                  except OSError as e: assert e.errno in (2, 13), e\n";
    for user in users() {
        let world = World::new(user);
        for policy in [workspace(), PermissionProfile::Disabled] {
            for network in [PORTS, TRANSPARENT] {
                world
                    .run_managed(policy.clone(), &network, ["/usr/bin/python3", "-c", script])
                    .ok();
                // And the network still works.
                let words = ["ask-tcp", "127.0.0.1:3128", "port 0 word"];
                world.attempt_managed(policy.clone(), &network, &words).ok();
            }
        }
    }
}

/// Without namespaces there is no network to manage; nothing runs.
#[test]
fn a_managed_network_needs_namespaces() {
    for user in users() {
        let world = World::new(user);
        for policy in [managed(vec![root(AccessMode::Read)]), PermissionProfile::Disabled] {
            let mut server = world.server(&world.context(policy), &world.work, ["true"]);
            PORTS.dress(&mut server).env("TEST_LANDLOCK_ONLY", "1");
            let done = finish(&mut server);
            assert_eq!(done.code, REFUSED, "{user:?}: {done:?}");
            assert!(done.err.contains("managed network"), "{user:?}: {done:?}");
        }
    }
}

#[test]
fn a_program_that_cannot_be_executed_is_an_error() {
    for user in users() {
        let world = World::new(user);
        let done = world.run_managed(workspace(), &PORTS, ["/nonexistent"]);
        assert_eq!(done.code, FAILED, "{user:?}: {done:?}");
        assert!(done.err.contains("starting the program"), "{user:?}: {done:?}");
    }
}
