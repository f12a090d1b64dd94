//! Hosts in normal form: the only form that rules, lookups and connections see.
//!
//! Invariant: two spellings of one target have one normal form. Every spelling of an IPv4 address that
//! a resolver would take (`2130706433`, `0x7f.1`, `0177.0.0.1`) becomes the address itself, so no
//! spelling passes a rule that the address would not pass.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Maximum length of a host in bytes, as in DNS.
pub const MAX_HOST_BYTES: usize = 253;

/// A host in normal form: lower case, without port, brackets, trailing dots or blanks around it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Host {
    text: String,
    kind: HostKind,
}

/// What a [`Host`] names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HostKind {
    /// A name to look up.
    Name,
    /// `localhost`: never looked up, always the loopback addresses.
    Localhost,
    /// An address.
    Address(IpAddr),
    /// An IPv6 address of one interface (`fe80::1%2`).
    Zoned(Ipv6Addr),
}

/// Text that is not a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a valid host name or IP address")]
pub struct InvalidHost;

impl Host {
    /// Brings `text` into normal form. A port after the host is accepted and ignored.
    pub fn parse(text: &str) -> Result<Self, InvalidHost> {
        let text = text.trim_matches([' ', '\t']);
        let host = match text.strip_prefix('[') {
            Some(bracketed) => {
                let (inside, after) = bracketed.split_once(']').ok_or(InvalidHost)?;
                if !(after.is_empty() || after.starts_with(':')) || !inside.contains(':') {
                    return Err(InvalidHost);
                }
                inside
            }
            None => without_port(text),
        };
        let host = host.to_ascii_lowercase();
        if host.contains(':') {
            return Self::parse_v6(&host);
        }
        let name = host.trim_end_matches('.');
        if name.is_empty() || name.len() > MAX_HOST_BYTES {
            return Err(InvalidHost);
        }
        if let Some(address) = parse_v4(name)? {
            return Ok(address.into());
        }
        let is_label = |label: &str| {
            !label.is_empty()
                && label.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'))
        };
        if !name.split('.').all(is_label) {
            return Err(InvalidHost);
        }
        let kind = if name == "localhost" { HostKind::Localhost } else { HostKind::Name };
        Ok(Self { text: name.to_owned(), kind })
    }

    fn parse_v6(text: &str) -> Result<Self, InvalidHost> {
        let (address, zone) = match text.split_once('%') {
            // In a URL the percent sign itself is escaped.
            Some((address, zone)) => (address, Some(zone.strip_prefix("25").unwrap_or(zone))),
            None => (text, None),
        };
        let address: Ipv6Addr = address.parse().map_err(|_| InvalidHost)?;
        match zone {
            None => Ok(address.into()),
            Some(zone)
                if !zone.is_empty()
                    && zone.len() <= 32
                    && zone.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b)) =>
            {
                Ok(Self { text: format!("{address}%{zone}"), kind: HostKind::Zoned(address) })
            }
            Some(_) => Err(InvalidHost),
        }
    }

    /// The normal form, without brackets.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// What the host names.
    pub fn kind(&self) -> HostKind {
        self.kind
    }

    /// The host and port as in a URL: IPv6 addresses in brackets.
    pub fn authority(&self, port: u16) -> String {
        match self.kind {
            HostKind::Address(IpAddr::V6(_)) | HostKind::Zoned(_) => {
                format!("[{}]:{port}", self.text)
            }
            _ => format!("{}:{port}", self.text),
        }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl<A: Into<IpAddr>> From<A> for Host {
    fn from(address: A) -> Self {
        let address = address.into();
        Self { text: address.to_string(), kind: HostKind::Address(address) }
    }
}

/// Removes what follows the only colon; text with several is an IPv6 address.
pub(crate) fn without_port(text: &str) -> &str {
    match text.split_once(':') {
        Some((host, port)) if !port.contains(':') => host,
        _ => text,
    }
}

/// Reads the forms of IPv4 addresses that `inet_aton` takes. `None`: a name. A name whose last label is
/// a number is neither and refused, because resolvers disagree about it.
fn parse_v4(name: &str) -> Result<Option<Ipv4Addr>, InvalidHost> {
    let last = name.rsplit('.').next().unwrap_or_default();
    let is_number = !last.is_empty()
        && (last.bytes().all(|b| b.is_ascii_digit())
            || last
                .strip_prefix("0x")
                .is_some_and(|hex| hex.bytes().all(|b| b.is_ascii_hexdigit())));
    if !is_number {
        return Ok(None);
    }
    let parts: Vec<u64> = name.split('.').map(number).collect::<Option<_>>().ok_or(InvalidHost)?;
    let (last, first) = parts.split_last().ok_or(InvalidHost)?;
    if first.len() > 3 || first.iter().any(|part| *part > 255) {
        return Err(InvalidHost);
    }
    let width = 4 - u32::try_from(first.len()).map_err(|_| InvalidHost)?;
    if *last >= 256u64.pow(width) {
        return Err(InvalidHost);
    }
    let upper = first.iter().fold(0u64, |sum, part| (sum << 8) | part);
    let address = (upper << (8 * width)) | last;
    u32::try_from(address).map(|bits| Some(bits.into())).map_err(|_| InvalidHost)
}

/// A number in decimal, octal (leading 0) or hexadecimal (leading 0x; alone it is zero).
fn number(text: &str) -> Option<u64> {
    if let Some(hex) = text.strip_prefix("0x") {
        return if hex.is_empty() { Some(0) } else { parse_digits(hex, 16) };
    }
    match text.strip_prefix('0') {
        Some(octal) if !octal.is_empty() => parse_digits(octal, 8),
        _ => parse_digits(text, 10),
    }
}

fn parse_digits(digits: &str, radix: u32) -> Option<u64> {
    // `from_str_radix` takes a sign.
    digits.bytes().all(|b| b.is_ascii_alphanumeric()).then_some(())?;
    u64::from_str_radix(digits, radix).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normal(text: &str) -> Option<String> {
        Host::parse(text).ok().map(|host| host.text)
    }

    #[test]
    fn spellings_of_one_target_have_one_form() {
        let loopback = [
            "127.0.0.1",
            "127.0.0.1:80",
            "127.0.0.1.",
            "127.1",
            "127.0.1",
            "2130706433",
            "0x7f000001",
            "0X7F.1",
            "0177.0.0.1",
            "0x7f.0.0.0x1",
            "017700000001",
            " 127.0.0.1 ",
            "127.0.0.1.:80",
            "00177.0.0.01",
        ];
        for text in loopback {
            assert_eq!(normal(text).as_deref(), Some("127.0.0.1"), "{text}");
        }
        for text in
            ["Example.COM", "example.com.", "example.com..", "example.com:443", "example.com.:1"]
        {
            assert_eq!(normal(text).as_deref(), Some("example.com"), "{text}");
        }
        for text in ["[::1]", "::1", "[::1]:80", "[0:0::1]", "0:0:0:0:0:0:0:1"] {
            assert_eq!(normal(text).as_deref(), Some("::1"), "{text}");
        }
        assert_eq!(normal("[::FFFF:127.0.0.1]").as_deref(), Some("::ffff:127.0.0.1"));
        assert_eq!(normal("[::127.0.0.1]").as_deref(), Some("::7f00:1"));
        assert_eq!(normal("[fe80::1%25eth0]").as_deref(), Some("fe80::1%eth0"));
        assert_eq!(normal("fe80::1%eth0").as_deref(), Some("fe80::1%eth0"));
        assert_eq!(normal("0").as_deref(), Some("0.0.0.0"));
        assert_eq!(normal("0x").as_deref(), Some("0.0.0.0"));
    }

    #[test]
    fn text_that_is_no_host_is_refused() {
        let long = format!("{}.com", "a".repeat(MAX_HOST_BYTES));
        for text in [
            "",
            " ",
            ".",
            "..",
            "a..b",
            ".a",
            "a b",
            "a\tb",
            "a\0b",
            "a\nb",
            "user@host",
            "a/b",
            "a%b",
            "[::1",
            "::1]",
            "[::1]x",
            "[a]",
            "[127.0.0.1]",
            "[]",
            "a?b",
            "*",
            "é.com",
            "256.0.0.1",
            "1.2.3.4.5",
            "1.2.3.256",
            "4294967296",
            "0x100000000",
            "08",
            "a.1",
            "a.0x1",
            "1..1",
            "-1.1x.2",
            "+1",
            "0x+1",
            "::1%",
            "::1%a b",
            "fe80::1%a%b",
            "a:b:c",
            "1.2.3.0x",
            &long,
        ] {
            let expected = if text == "1.2.3.0x" { Some("1.2.3.0".to_owned()) } else { None };
            assert_eq!(normal(text), expected, "{text:?}");
        }
    }

    #[test]
    fn authority_brackets_ipv6() {
        let authority = |text| Host::parse(text).unwrap().authority(8);
        assert_eq!(authority("::1"), "[::1]:8");
        assert_eq!(authority("1.2.3.4"), "1.2.3.4:8");
        assert_eq!(authority("A.b"), "a.b:8");
        assert_eq!(authority("fe80::1%2"), "[fe80::1%2]:8");
    }
}
