//! With the network enabled: which sockets can be connected to.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::thread;

use codex_exec_server_protocol::{AccessMode, NetworkPolicy, PermissionProfile};

use super::support::*;

/// The whole disk readable, the workspace writable, and the network.
fn connected() -> PermissionProfile {
    let entries = vec![root(AccessMode::Read), project(AccessMode::Write)];
    managed_with(entries, NetworkPolicy::Enabled)
}

/// A listener that anybody may connect to, as far as its mode says.
fn listen(path: &std::path::Path) -> UnixListener {
    let listener = UnixListener::bind(path).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(path, mode).unwrap();
    listener
}

#[test]
fn socket_files_are_reachable_on_writable_mounts_only() {
    for user in users() {
        let world = World::new(user);
        std::fs::create_dir(world.work.join("sub")).unwrap();
        let listeners = [
            listen(&world.work.join("inside")),
            listen(&world.work.join("sub/deep")),
            listen(&world.outside.join("socket")),
        ];
        std::os::unix::fs::symlink(world.outside.join("socket"), world.work.join("link")).unwrap();
        world.own();
        let out = world.path("outside/socket");
        for (path, works) in [
            (world.path("work/inside").as_str(), true),
            (&world.path("work/sub/../sub/deep"), true),
            ("inside", true),
            ("sub/deep", true),
            ("./sub/../inside", true),
            (&out, false),
            ("../outside/socket", false),
            ("link", false),
            (&world.path("work/link"), false),
            (&format!("/proc/self/root{out}"), false),
            (&format!("/..{out}"), false),
        ] {
            let done = world.attempt(connected(), &["connect-unix", path]);
            assert_eq!(done.code == 0, works, "{user:?} {path}: {done:?}");
            assert!(works || !done.err.contains("done"), "{done:?}");
        }
        drop(listeners);
    }
}

#[test]
fn abstract_sockets_are_not_reachable() {
    for user in users() {
        let world = World::new(user);
        let name = format!("sandbox-test-{}-{user:?}", std::process::id());
        let _listener =
            UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        world.attempt(connected(), &["connect-abstract", &name]).kept_from();
        world.attempt(connected(), &["socket", "1", "2"]).kept_from();
    }
}

#[test]
fn other_connections_succeed() {
    for user in users() {
        let world = World::new(user);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port().to_string();
        let server = thread::spawn(move || {
            for _ in 0..32 {
                let (mut stream, _) = listener.accept().unwrap();
                let mut word = [0; 4];
                stream.read_exact(&mut word).unwrap();
                stream.write_all(&word).unwrap();
            }
        });
        // Sixteen threads at once, twice: blocking, and not.
        world.attempt(connected(), &["echo-inet", &port, "16"]).ok();
        world.attempt(connected(), &["echo-inet", &port, "16", "nonblocking"]).ok();
        server.join().unwrap();
        let refused = world.attempt(connected(), &["echo-inet", "1", "1"]);
        assert_eq!(refused.code, libc::ECONNREFUSED, "{refused:?}");
    }
}

#[test]
fn socket_swapped_during_the_call_is_not_connected() {
    for user in users() {
        let world = World::new(user);
        let listener = listen(&world.outside.join("socket"));
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = tcp.local_addr().unwrap().port().to_string();
        let accepting = thread::spawn(move || {
            // Closes what comes until the word of the test's own.
            loop {
                let (mut stream, _) = tcp.accept().unwrap();
                let mut word = [0; 3];
                if stream.read_exact(&mut word).is_ok() && &word == b"end" {
                    return;
                }
            }
        });
        listener.set_nonblocking(true).unwrap();
        let out = world.path("outside/socket");
        let words = ["swap-connect", &port, &out, "2000"];
        let done = world.attempt(connected(), &words);
        assert!(done.code != REFUSED && done.code != FAILED, "{done:?}");
        let came = listener.accept().map(drop).map_err(|error| error.kind());
        assert_eq!(came, Err(std::io::ErrorKind::WouldBlock), "{user:?}: {done:?}");
        let mut end =
            std::net::TcpStream::connect(("127.0.0.1", port.parse::<u16>().unwrap())).unwrap();
        end.write_all(b"end").unwrap();
        accepting.join().unwrap();
    }
}
