//! Serves a managed network: every connection and every datagram is sent back, with its place among the
//! sockets of its kind in front.

use std::io::{Read, Write};
use std::net::{TcpListener, UdpSocket};
use std::os::fd::OwnedFd;

use codex_linux_sandbox::NetworkDescriptors;

/// Serves until this process ends.
pub(crate) fn serve(network: NetworkDescriptors) {
    let NetworkDescriptors { listeners, tun, tun_error, dns_udp, dns_tcp } = network;
    if let Some(error) = tun_error {
        eprintln!("no TUN: {error}");
    }
    for (place, listener) in listeners.into_iter().enumerate() {
        std::thread::spawn(move || answer_connections(&listener, &format!("port {place} ")));
    }
    for (place, listener) in dns_tcp.into_iter().enumerate() {
        std::thread::spawn(move || answer_connections(&listener, &format!("tcp {place} ")));
    }
    for (place, socket) in dns_udp.into_iter().enumerate() {
        std::thread::spawn(move || answer_datagrams(&socket, &format!("udp {place} ")));
    }
    if let Some(tun) = tun {
        std::thread::spawn(move || reflect(&tun));
    }
}

fn answer_connections(listener: &TcpListener, word: &str) {
    listener.set_nonblocking(false).expect("a listener");
    for stream in listener.incoming() {
        let (mut stream, word) = (stream.expect("a connection"), word.to_owned());
        std::thread::spawn(move || {
            let mut bytes = [0; 64];
            while let Ok(read @ 1..) = stream.read(&mut bytes) {
                let _ = stream.write_all(&[word.as_bytes(), &bytes[..read]].concat());
            }
        });
    }
}

fn answer_datagrams(socket: &UdpSocket, word: &str) {
    socket.set_nonblocking(false).expect("a socket");
    let mut bytes = [0; 64];
    while let Ok((read, from)) = socket.recv_from(&mut bytes) {
        let _ = socket.send_to(&[word.as_bytes(), &bytes[..read]].concat(), from);
    }
}

/// Sends every UDP packet back to where it came from. Swapping both ends changes no checksum.
fn reflect(tun: &OwnedFd) {
    rustix::io::ioctl_fionbio(tun, false).expect("a descriptor");
    let mut packet = vec![0; 1 << 16];
    loop {
        let Ok(size) = rustix::io::read(tun, &mut packet) else { return };
        let packet = &mut packet[..size];
        let (protocol, addresses, length) = match packet.first().map(|first| first >> 4) {
            Some(4) => (packet[9], 12, 4),
            Some(6) => (packet[6], 8, 16),
            _ => continue,
        };
        if i32::from(protocol) != libc::IPPROTO_UDP {
            continue;
        }
        let ports = addresses + 2 * length;
        for (at, length) in [(addresses, length), (ports, 2)] {
            let (source, destination) = packet[at..at + 2 * length].split_at_mut(length);
            source.swap_with_slice(destination);
        }
        let _ = rustix::io::write(tun, packet);
    }
}
