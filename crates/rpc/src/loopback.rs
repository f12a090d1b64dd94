//! Sockets between two programs of one machine.

use std::net::SocketAddr;
use std::os::fd::AsFd;

use socket2::SockRef;

/// Takes the pacing away from a socket of this address if it is one of this machine's own, so that
/// its timers do not hold up what only memory carries: BBR, where it is the default, sends by a clock
/// and an estimate of the network, and here is no network. To be said before the socket connects or
/// listens: one that paced once goes on with it. What is accepted inherits it.
pub fn disable_pacing_on_loopback(socket: &impl AsFd, address: SocketAddr) {
    if !address.ip().is_loopback() {
        return;
    }
    // Every kernel has it, for every user.
    if let Err(error) = SockRef::from(socket).set_tcp_congestion(b"reno") {
        tracing::debug!(%error, %address, "pacing");
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
