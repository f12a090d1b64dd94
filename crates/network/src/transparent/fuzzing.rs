//! The nameserver, for the fuzz targets: a query in, an answer out, and a second reader of answers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::names::{Names, SYNTHETIC_V4, SYNTHETIC_V6};
use crate::rules::Rules;

/// Answers with an empty table of names.
pub(crate) fn dns_answer(query: &[u8], rules: &Rules) -> Option<Vec<u8>> {
    super::dns::answer(query, &Names::new(16, Vec::new()), rules)
}

/// Whether an address stands for a name.
pub(crate) fn is_synthetic(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => {
            let host_bits = 32 - u32::from(SYNTHETIC_V4.1);
            u32::from(v4) >> host_bits == u32::from(SYNTHETIC_V4.0) >> host_bits
        }
        IpAddr::V6(v6) => {
            let host_bits = 128 - u32::from(SYNTHETIC_V6.1);
            u128::from(v6) >> host_bits == u128::from(SYNTHETIC_V6.0) >> host_bits
        }
    }
}

/// The addresses in an answer, read as RFC 1035 says and to its last byte.
pub(crate) fn dns_records(answer: &[u8]) -> Option<Vec<IpAddr>> {
    let count = |at: usize| Some(u16::from_be_bytes([*answer.get(at)?, *answer.get(at + 1)?]));
    let (questions, answers, authorities, more) = (count(4)?, count(6)?, count(8)?, count(10)?);
    let mut at = 12;
    for _ in 0..questions {
        at = skip_name(answer, at)? + 4;
    }
    let mut addresses = Vec::new();
    for number in 0..answers + authorities + more {
        at = skip_name(answer, at)?;
        let (kind, length) = (count(at)?, usize::from(count(at + 8)?));
        let data = answer.get(at + 10..at + 10 + length)?;
        at += 10 + length;
        match (kind, number < answers) {
            (1, true) => addresses.push(Ipv4Addr::from(*data.first_chunk::<4>()?).into()),
            (28, true) => addresses.push(Ipv6Addr::from(*data.first_chunk::<16>()?).into()),
            (41, false) => {}
            _ => return None,
        }
    }
    (at == answer.len()).then_some(addresses)
}

fn skip_name(message: &[u8], mut at: usize) -> Option<usize> {
    loop {
        match *message.get(at)? {
            0 => return Some(at + 1),
            length @ 1..=63 => at += 1 + usize::from(length),
            0xc0.. => return Some(at + 2),
            _ => return None,
        }
    }
}
