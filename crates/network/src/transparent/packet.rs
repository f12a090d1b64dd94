//! IP packets: read as far as the stack routes by them, and the replies that belong to no connection.
//!
//! Invariant: whatever the bytes, reading ends in a packet or in nothing; a reply is no longer than 1,280
//! bytes, and none is made to an error message, a reset or an address that is not one host's.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

pub(super) const TCP: u8 = 6;
pub(super) const UDP: u8 = 17;
pub(super) const ICMP: u8 = 1;
pub(super) const ICMP_V6: u8 = 58;

const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const ACK: u8 = 0x10;

const V6_HEADER: usize = 40;
/// What every link passes (RFC 8200); for IPv4 within what hosts have to take (RFC 1812).
const MAX_ERROR: usize = 1280;
const MAX_ERROR_V4: usize = 576;

/// A packet whose header is sound. Fragments and extension headers are not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Packet<'a> {
    pub source: IpAddr,
    pub destination: IpAddr,
    pub protocol: u8,
    pub payload: &'a [u8],
    /// Header and payload.
    pub bytes: &'a [u8],
}

impl<'a> Packet<'a> {
    pub(super) fn parse(bytes: &'a [u8]) -> Option<Self> {
        let packet = match bytes.first()? >> 4 {
            4 => Self::parse_v4(bytes)?,
            6 => Self::parse_v6(bytes)?,
            _ => return None,
        };
        (is_unicast(packet.source) && is_unicast(packet.destination)).then_some(packet)
    }

    fn parse_v4(bytes: &'a [u8]) -> Option<Self> {
        let header: &[u8; 20] = bytes.first_chunk()?;
        let header_length = usize::from(header[0] & 0xf) * 4;
        let total = usize::from(u16::from_be_bytes([header[2], header[3]]));
        let bytes = bytes.get(..total)?;
        let payload = bytes.get(header_length..).filter(|_| header_length >= header.len())?;
        // Another fragment follows, or this one is not the first.
        if u16::from_be_bytes([header[6], header[7]]) & 0x3fff != 0 {
            return None;
        }
        let address =
            |at: usize| Ipv4Addr::new(header[at], header[at + 1], header[at + 2], header[at + 3]);
        Some(Self {
            source: address(12).into(),
            destination: address(16).into(),
            protocol: header[9],
            payload,
            bytes,
        })
    }

    fn parse_v6(bytes: &'a [u8]) -> Option<Self> {
        let header: &[u8; V6_HEADER] = bytes.first_chunk()?;
        let length = usize::from(u16::from_be_bytes([header[4], header[5]]));
        let bytes = bytes.get(..V6_HEADER + length)?;
        let address = |at: usize| {
            let octets = header[at..].first_chunk::<16>().copied().unwrap_or_default();
            Ipv6Addr::from(octets)
        };
        Some(Self {
            source: address(8).into(),
            destination: address(24).into(),
            protocol: header[6],
            payload: &bytes[V6_HEADER..],
            bytes,
        })
    }
}

fn is_unicast(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => !(v4.is_unspecified() || v4.is_broadcast() || v4.is_multicast()),
        IpAddr::V6(v6) => !(v6.is_unspecified() || v6.is_multicast()),
    }
}

/// Both ends of a connection as its packets name them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Flow {
    pub source: SocketAddr,
    pub destination: SocketAddr,
}

/// The header of a TCP segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Segment {
    pub flow: Flow,
    sequence: u32,
    acknowledgement: u32,
    flags: u8,
    /// In sequence numbers: bytes, SYN and FIN.
    length: u32,
}

impl Segment {
    pub(super) fn parse(packet: &Packet<'_>) -> Option<Self> {
        let header: &[u8; 20] = packet.payload.first_chunk()?;
        let header_length = usize::from(header[12] >> 4) * 4;
        let data = packet.payload.get(header_length..).filter(|_| header_length >= header.len())?;
        let flow = flow(packet, header)?;
        let flags = header[13];
        let word = |at: usize| {
            u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
        };
        let controls = u32::from(flags & SYN != 0) + u32::from(flags & FIN != 0);
        let length = u32::try_from(data.len()).ok()? + controls;
        Some(Self { flow, sequence: word(4), acknowledgement: word(8), flags, length })
    }

    /// Whether the segment asks for a connection.
    pub(super) fn opens(&self) -> bool {
        self.flags & (SYN | ACK | RST | FIN) == SYN
    }

    /// The reset that answers this segment (RFC 9293, 3.10.7.1). `None`: it is a reset itself.
    pub(super) fn reset(&self) -> Option<Vec<u8>> {
        if self.flags & RST != 0 {
            return None;
        }
        let (sequence, acknowledgement, flags) = match self.flags & ACK != 0 {
            true => (self.acknowledgement, 0, RST),
            false => (0, self.sequence.wrapping_add(self.length), RST | ACK),
        };
        let mut segment = [0; 20];
        segment[..2].copy_from_slice(&self.flow.destination.port().to_be_bytes());
        segment[2..4].copy_from_slice(&self.flow.source.port().to_be_bytes());
        segment[4..8].copy_from_slice(&sequence.to_be_bytes());
        segment[8..12].copy_from_slice(&acknowledgement.to_be_bytes());
        segment[12] = 5 << 4;
        segment[13] = flags;
        Some(packet(self.flow.destination.ip(), self.flow.source.ip(), TCP, Some(16), &mut segment))
    }
}

/// A UDP datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Datagram<'a> {
    pub flow: Flow,
    pub payload: &'a [u8],
}

impl<'a> Datagram<'a> {
    pub(super) fn parse(packet: &Packet<'a>) -> Option<Self> {
        let header: &[u8; 8] = packet.payload.first_chunk()?;
        let length = usize::from(u16::from_be_bytes([header[4], header[5]]));
        let payload = packet.payload.get(header.len()..length)?;
        Some(Self { flow: flow(packet, header)?, payload })
    }

    /// A datagram back.
    pub(super) fn reply(&self, payload: &[u8]) -> Option<Vec<u8>> {
        let length = u16::try_from(payload.len() + 8).ok()?;
        let mut datagram = Vec::with_capacity(length.into());
        datagram.extend(self.flow.destination.port().to_be_bytes());
        datagram.extend(self.flow.source.port().to_be_bytes());
        datagram.extend(length.to_be_bytes());
        datagram.extend([0; 2]);
        datagram.extend(payload);
        Some(packet(self.flow.destination.ip(), self.flow.source.ip(), UDP, Some(6), &mut datagram))
    }
}

/// The ports, which every transport has first. Port 0 is nobody's.
fn flow(packet: &Packet<'_>, header: &[u8]) -> Option<Flow> {
    let [a, b, c, d] = *header.first_chunk()?;
    let (source, destination) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
    (source != 0 && destination != 0).then_some(Flow {
        source: SocketAddr::new(packet.source, source),
        destination: SocketAddr::new(packet.destination, destination),
    })
}

/// Why a destination is unreachable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unreachable {
    /// `ENETUNREACH` for the program.
    Network,
    /// `EHOSTUNREACH`.
    Host,
    /// `ECONNREFUSED`.
    Port,
}

/// The error message that answers a packet. `None`: it may be an error message itself.
pub(super) fn unreachable(packet_in: &Packet<'_>, why: Unreachable) -> Option<Vec<u8>> {
    let is_request = match packet_in.protocol {
        ICMP => packet_in.payload.first() == Some(&8),
        ICMP_V6 => packet_in.payload.first() == Some(&128),
        _ => true,
    };
    if !is_request {
        return None;
    }
    let (protocol, kind, code, max) = match packet_in.source {
        IpAddr::V4(_) => {
            let code = match why {
                Unreachable::Network => 0,
                Unreachable::Host => 1,
                Unreachable::Port => 3,
            };
            (ICMP, 3, code, MAX_ERROR_V4 - 20 - 8)
        }
        IpAddr::V6(_) => {
            let code = match why {
                Unreachable::Network => 0,
                Unreachable::Host => 3,
                Unreachable::Port => 4,
            };
            (ICMP_V6, 1, code, MAX_ERROR - V6_HEADER - 8)
        }
    };
    let mut message = vec![kind, code, 0, 0, 0, 0, 0, 0];
    message.extend(&packet_in.bytes[..packet_in.bytes.len().min(max)]);
    Some(packet(packet_in.destination, packet_in.source, protocol, Some(2), &mut message))
}

/// A packet around a payload whose checksum is at `checksum_at`.
fn packet(
    source: IpAddr,
    destination: IpAddr,
    protocol: u8,
    checksum_at: Option<usize>,
    payload: &mut [u8],
) -> Vec<u8> {
    let length = payload.len() as u16;
    let mut pseudo = Vec::with_capacity(40);
    let header = match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let mut header = vec![0x45, 0];
            header.extend((length + 20).to_be_bytes());
            // Do not fragment; 64 hops.
            header.extend([0, 0, 0x40, 0, 64, protocol, 0, 0]);
            header.extend(source.octets());
            header.extend(destination.octets());
            let sum = checksum(&[&header]);
            header[10..12].copy_from_slice(&sum.to_be_bytes());
            if protocol != ICMP {
                pseudo.extend(&header[12..20]);
                pseudo.extend([0, protocol]);
                pseudo.extend(length.to_be_bytes());
            }
            header
        }
        (source, destination) => {
            let octets = |address| match address {
                IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
                IpAddr::V6(v6) => v6.octets(),
            };
            let mut header = vec![0x60, 0, 0, 0];
            header.extend(length.to_be_bytes());
            header.extend([protocol, 64]);
            header.extend(octets(source));
            header.extend(octets(destination));
            pseudo.extend(&header[8..V6_HEADER]);
            pseudo.extend(u32::from(length).to_be_bytes());
            pseudo.extend([0, 0, 0, protocol]);
            header
        }
    };
    if let Some(at) = checksum_at {
        let sum = match checksum(&[&pseudo, payload]) {
            // In UDP zero means that there is none.
            0 if protocol == UDP => 0xffff,
            sum => sum,
        };
        payload[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    }
    [header.as_slice(), payload].concat()
}

/// The checksum of the Internet protocols over parts of even length, the last one of any.
pub(super) fn checksum(parts: &[&[u8]]) -> u16 {
    let mut sum = 0u64;
    for part in parts {
        for word in part.chunks(2) {
            sum += u64::from(u16::from_be_bytes([word[0], word.get(1).copied().unwrap_or(0)]));
        }
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoints(v6: bool) -> (IpAddr, IpAddr) {
        match v6 {
            false => ("198.18.0.1".parse().unwrap(), "93.184.216.34".parse().unwrap()),
            true => ("fd00::1".parse().unwrap(), "2606:4700::1111".parse().unwrap()),
        }
    }

    /// A segment of `data` bytes with these flags.
    fn segment(v6: bool, flags: u8, data: usize) -> Vec<u8> {
        let (source, destination) = endpoints(v6);
        let mut payload = vec![0; 20 + data];
        payload[..4].copy_from_slice(&[0x30, 0x39, 0x01, 0xbb]);
        payload[4..8].copy_from_slice(&0xffff_fffe_u32.to_be_bytes());
        payload[8..12].copy_from_slice(&77u32.to_be_bytes());
        payload[12] = 5 << 4;
        payload[13] = flags;
        packet(source, destination, TCP, Some(16), &mut payload)
    }

    fn transport_checksum(bytes: &[u8]) -> u16 {
        let packet = Packet::parse(bytes).unwrap();
        let length = u32::try_from(packet.payload.len()).unwrap().to_be_bytes();
        let octets = |address| match address {
            IpAddr::V4(v4) => v4.octets().to_vec(),
            IpAddr::V6(v6) => v6.octets().to_vec(),
        };
        let (source, destination) = (octets(packet.source), octets(packet.destination));
        let tail = [0, 0, 0, packet.protocol];
        match packet.protocol {
            ICMP => checksum(&[packet.payload]),
            _ => checksum(&[&source, &destination, &length, &tail, packet.payload]),
        }
    }

    #[test]
    fn resets_answer_what_they_reset() {
        for v6 in [false, true] {
            let syn = segment(v6, SYN, 0);
            let parsed = Segment::parse(&Packet::parse(&syn).unwrap()).unwrap();
            assert!(parsed.opens());
            let reset = parsed.reset().unwrap();
            let packet = Packet::parse(&reset).unwrap();
            assert_eq!((packet.destination, packet.source), endpoints(v6));
            let answer = Segment::parse(&packet).unwrap();
            assert_eq!((answer.flags, answer.acknowledgement), (RST | ACK, 0xffff_ffff));
            assert_eq!(transport_checksum(&reset), 0);
            assert_eq!(answer.reset(), None);
            let data = segment(v6, ACK, 9);
            let data = Segment::parse(&Packet::parse(&data).unwrap()).unwrap();
            let reset = data.reset().unwrap();
            let answer = Segment::parse(&Packet::parse(&reset).unwrap()).unwrap();
            assert_eq!((answer.flags, answer.sequence), (RST, 77));
            assert!(!data.opens());
        }
    }

    #[test]
    fn errors_answer_requests_only_and_are_short() {
        for v6 in [false, true] {
            let long = segment(v6, SYN, 9000);
            let long = Packet::parse(&long).unwrap();
            let error = unreachable(&long, Unreachable::Host).unwrap();
            assert!(error.len() <= if v6 { MAX_ERROR } else { MAX_ERROR_V4 });
            assert_eq!(transport_checksum(&error), 0);
            let error = Packet::parse(&error).unwrap();
            assert_eq!(unreachable(&error, Unreachable::Host), None);
            assert_eq!(&error.payload[8..28], &long.bytes[..20]);
        }
    }

    /// Random and damaged bytes are read without a panic, and what is read lies within them.
    #[test]
    fn damaged_packets_are_dropped() {
        let mut dice = fastrand::Rng::with_seed(7);
        let sound: Vec<_> = [false, true]
            .iter()
            .flat_map(|v6| [segment(*v6, SYN, 3), segment(*v6, ACK, 0)])
            .collect();
        for round in 0..200_000 {
            let mut bytes = match round % 3 {
                0 => (0..dice.usize(..120)).map(|_| dice.u8(..)).collect(),
                _ => sound[dice.usize(..sound.len())].clone(),
            };
            for _ in 0..dice.usize(..4) {
                if !bytes.is_empty() {
                    let at = dice.usize(..bytes.len());
                    bytes[at] = dice.u8(..);
                }
            }
            bytes.truncate(dice.usize(..=bytes.len()));
            let Some(packet) = Packet::parse(&bytes) else { continue };
            assert!(packet.bytes.len() <= bytes.len());
            if let Some(reset) = Segment::parse(&packet).and_then(|segment| segment.reset()) {
                assert!(Packet::parse(&reset).is_some());
            }
            if let Some(datagram) = Datagram::parse(&packet) {
                assert!(datagram.reply(&[0; 512]).is_some());
            }
            unreachable(&packet, Unreachable::Port);
        }
    }
}
