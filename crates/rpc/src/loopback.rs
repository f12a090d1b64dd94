//! Sockets between two programs of one machine.

use std::net::SocketAddr;
use std::os::fd::AsFd;

use socket2::SockRef;

/// Selects a congestion control without pacing for a socket on a loopback address. BBR, where it is the
/// default, paces by timers and an estimate of the network, which only adds delay on loopback. Call this
/// before the socket connects or listens: a socket that has paced once keeps pacing. Accepted sockets
/// inherit the setting.
pub fn disable_pacing_on_loopback(socket: &impl AsFd, address: SocketAddr) {
    if !address.ip().is_loopback() {
        return;
    }
    // Reno is in every kernel and needs no privilege.
    if let Err(error) = SockRef::from(socket).set_tcp_congestion(b"reno") {
        tracing::debug!(%error, %address, "cannot disable pacing");
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener, TcpStream};

    use super::*;

    fn congestion(socket: &impl AsFd) -> Vec<u8> {
        let name = SockRef::from(socket).tcp_congestion().unwrap();
        name.into_iter().take_while(|byte| *byte != 0).collect()
    }

    #[test]
    fn loopback_listener_accepts_sockets_without_pacing() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        disable_pacing_on_loopback(&listener, address);
        let _client = TcpStream::connect(address).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        assert_eq!(congestion(&accepted), b"reno");
    }

    #[test]
    fn network_listener_keeps_the_default_congestion_control() {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        let before = congestion(&listener);
        disable_pacing_on_loopback(&listener, listener.local_addr().unwrap());
        assert_eq!(congestion(&listener), before);
    }
}
