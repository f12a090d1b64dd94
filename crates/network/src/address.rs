//! Which addresses are public. Everything else is refused unless it is allowed by its own name or
//! local connections are allowed at all.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Whether the address can belong to a host on the public Internet.
///
/// An IPv6 address that carries an IPv4 address (mapped, compatible, NAT64, 6to4) is as public as that.
pub fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => match embedded_v4(address) {
            Some(inside) => is_public_v4(inside),
            None => is_public_v6(address),
        },
    }
}

/// Whether the address is in one of the private ranges of RFC 1918.
pub fn is_rfc1918(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_private(),
        IpAddr::V6(address) => address.to_ipv4_mapped().is_some_and(|inside| inside.is_private()),
    }
}

/// The IPv4 address that a packet to this IPv6 address may end at.
pub(crate) fn embedded_v4(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let from_bits = |high: u16, low: u16| Ipv4Addr::from((u32::from(high) << 16) | u32::from(low));
    match address.segments() {
        // `::` and `::1` are addresses of their own.
        [0, 0, 0, 0, 0, 0, 0, 0 | 1] => None,
        [0, 0, 0, 0, 0, 0 | 0xffff, high, low] => Some(from_bits(high, low)),
        // NAT64 (RFC 6052, RFC 8215) and 6to4 (RFC 3056).
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => Some(from_bits(high, low)),
        [0x64, 0xff9b, 1, _, _, _, high, low] => Some(from_bits(high, low)),
        [0x2002, high, low, ..] => Some(from_bits(high, low)),
        _ => None,
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    !matches!(
        address.octets(),
        [0 | 10 | 127, ..]
            | [100, 64..=127, ..]
            | [169, 254, ..]
            | [172, 16..=31, ..]
            | [192, 168, ..]
            | [192, 0, 0 | 2, _]
            | [198, 18 | 19, ..]
            | [198, 51, 100, _]
            | [203, 0, 113, _]
            | [224..=255, ..]
    )
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let first = address.segments()[0];
    let unique_local = first & 0xfe00 == 0xfc00;
    // Link-local, and the site-local range that was withdrawn but may still be routed inside.
    let link_or_site_local = first & 0xff80 == 0xfe80;
    !(address.is_unspecified()
        || address.is_loopback()
        || address.is_multicast()
        || unique_local
        || link_or_site_local)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_end_where_they_should() {
        // Each range by its first and last address, and the neighbours outside.
        let ranges = [
            ("0.0.0.0", "0.255.255.255"),
            ("10.0.0.0", "10.255.255.255"),
            ("100.64.0.0", "100.127.255.255"),
            ("127.0.0.0", "127.255.255.255"),
            ("169.254.0.0", "169.254.255.255"),
            ("172.16.0.0", "172.31.255.255"),
            ("192.0.0.0", "192.0.0.255"),
            ("192.0.2.0", "192.0.2.255"),
            ("192.168.0.0", "192.168.255.255"),
            ("198.18.0.0", "198.19.255.255"),
            ("198.51.100.0", "198.51.100.255"),
            ("203.0.113.0", "203.0.113.255"),
            ("224.0.0.0", "255.255.255.255"),
        ];
        let public = |bits: u32| is_public(Ipv4Addr::from(bits).into());
        for (first, last) in ranges {
            let [first, last] =
                [first, last].map(|text| u32::from(text.parse::<Ipv4Addr>().unwrap()));
            for bits in [first, last, first + (last - first) / 2] {
                assert!(!public(bits), "{}", Ipv4Addr::from(bits));
                for prefix in ["::", "::ffff:", "64:ff9b::", "64:ff9b:1::"] {
                    let carried: Ipv6Addr =
                        format!("{prefix}{}", Ipv4Addr::from(bits)).parse().unwrap();
                    assert!(!is_public(carried.into()), "{carried}");
                }
            }
            assert!(first == 0 || public(first - 1), "before {}", Ipv4Addr::from(first));
            assert!(last == u32::MAX || public(last + 1), "after {}", Ipv4Addr::from(last));
        }
    }

    #[test]
    fn ipv6_ranges() {
        for text in [
            "::",
            "::1",
            "fc00::",
            "fdff:ffff::1",
            "fe80::1",
            "febf::1",
            "fec0::1",
            "ff02::1",
            "::ffff:10.0.0.1",
            "::10.0.0.1",
            "::ffff:0:0",
            "64:ff9b::a00:1",
            "2002:a00:1::1",
            "2002:7f00:1::",
        ] {
            assert!(!is_public(text.parse().unwrap()), "{text}");
        }
        for text in
            ["2606:4700::1111", "fe00::1", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1"]
        {
            assert!(is_public(text.parse().unwrap()), "{text}");
        }
    }

    #[test]
    fn rfc1918_is_less_than_not_public() {
        for text in ["10.0.0.1", "172.31.0.1", "192.168.1.1", "::ffff:10.0.0.1"] {
            assert!(is_rfc1918(text.parse().unwrap()), "{text}");
        }
        for text in ["127.0.0.1", "169.254.1.1", "192.0.2.1", "8.8.8.8", "fc00::1"] {
            assert!(!is_rfc1918(text.parse().unwrap()), "{text}");
        }
    }
}
