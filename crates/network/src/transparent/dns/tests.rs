//! Queries, sound, random and hostile.

use super::*;
use crate::rules::List;

fn query(name: &str, kind: u16) -> Vec<u8> {
    let mut message = vec![0xab, 0xcd, 0x01, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.').filter(|label| !label.is_empty()) {
        message.push(u8::try_from(label.len()).unwrap());
        message.extend(label.as_bytes());
    }
    message.push(0);
    message.extend(kind.to_be_bytes());
    message.extend(INTERNET.to_be_bytes());
    message
}

fn rules() -> Rules {
    let mut rules = Rules::default();
    rules.add(List::Deny, "**.bad.com").unwrap();
    rules
}

/// The code, the flags that are always set, and the data of the only record.
fn ask(names: &Names, message: &[u8]) -> (u8, Vec<u8>) {
    let answer = answer(message, names, &rules()).unwrap();
    assert_eq!(answer[..2], message[..2], "the id");
    assert_eq!(answer[2] & 0x81, 0x80 | message[2] & 1, "a response");
    let count = u16::from_be_bytes([answer[6], answer[7]]);
    let question = message.len() - HEADER;
    let data = match count {
        0 => Vec::new(),
        _ => {
            assert_eq!(answer[HEADER..HEADER + question], message[HEADER..], "the question");
            answer[HEADER + question + 12..].to_vec()
        }
    };
    (answer[3] & 0xf, data)
}

#[test]
fn names_have_one_address_of_each_family() {
    let names = Names::new(16, Vec::new());
    let (code, v4) = ask(&names, &query("Good.COM", A));
    assert_eq!((code, v4.as_slice()), (NO_ERROR, &[198, 18, 1, 0][..]));
    assert_eq!(ask(&names, &query("good.com", A)).1, v4);
    let (code, v6) = ask(&names, &query("good.com", AAAA));
    assert_eq!((code, v6.len()), (NO_ERROR, 16));
    assert_eq!(v6[..2], [0xfd, 0x63]);
    assert_ne!(ask(&names, &query("other.com", A)).1, v4);
    assert_eq!(ask(&names, &query("localhost", A)).1, [127, 0, 0, 1]);
}

#[test]
fn everything_else_has_an_empty_answer_or_an_error() {
    let names = Names::new(16, Vec::new());
    // TXT, MX, HTTPS, SVCB, PTR, ANY.
    for kind in [16, 15, 65, 64, 12, 255] {
        assert_eq!(ask(&names, &query("good.com", kind)), (NO_ERROR, vec![]), "{kind}");
    }
    assert_eq!(names.addresses(&Host::parse("first.com").unwrap()).unwrap().v4.octets()[3], 0);
    for name in ["bad.com", "x.Bad.com", "a b.com", "10.0.0.1", "2130706433", "", "é.com"] {
        for kind in [A, AAAA, 65] {
            assert_eq!(ask(&names, &query(name, kind)), (NO_SUCH_NAME, vec![]), "{name} {kind}");
        }
    }
    let mut inverse = query("good.com", A);
    inverse[2] = 0x08;
    assert_eq!(ask(&names, &inverse).0, NOT_IMPLEMENTED);
    let mut chaos = query("good.com", A);
    *chaos.last_mut().unwrap() = 3;
    assert_eq!(ask(&names, &chaos).0, REFUSED);
    let mut response = query("good.com", A);
    response[2] |= 0x80;
    assert_eq!(answer(&response, &names, &rules()), None);
    assert_eq!(answer(&[0; 11], &names, &rules()), None);
    let mut two = query("good.com", A);
    two[5] = 2;
    assert_eq!(ask(&names, &two).0, FORMAT_ERROR);
    // A name that is a pointer to itself.
    let mut pointer = query("", A);
    pointer.splice(12..13, [0xc0, 12]);
    assert_eq!(ask(&names, &pointer).0, FORMAT_ERROR);
}

#[test]
fn a_label_with_a_dot_is_no_name() {
    let names = Names::new(16, Vec::new());
    let mut message = query("goodxcom", A);
    message[HEADER + 5] = b'.';
    assert_eq!(ask(&names, &message).0, NO_SUCH_NAME);
}

#[test]
fn extended_queries_get_extended_answers() {
    let names = Names::new(16, Vec::new());
    let mut message = query("good.com", A);
    message[11] = 1;
    message.extend([0, 0, 41, 0x10, 0, 0, 0, 0, 0, 0, 0]);
    let answer = answer(&message, &names, &rules()).unwrap();
    assert_eq!(answer[11], 1);
    assert!(answer.ends_with(&[0, 0, 41, 0x04, 0xd0, 0, 0, 0, 0, 0, 0]));
}

/// Else a resolver with `ndots:5` would take `good.com.cluster.local` for an answer to `good.com`.
#[test]
fn names_with_a_search_domain_exist_only_if_a_pattern_is_about_them() {
    let names = Names::new(16, vec![Host::parse("cluster.local").unwrap()]);
    let mut rules = Rules::default();
    for pattern in ["*", "db.cluster.local"] {
        rules.add(List::Allow, pattern).unwrap();
    }
    for (name, code) in [
        ("good.com", NO_ERROR),
        ("good.com.cluster.local", NO_SUCH_NAME),
        ("db.cluster.local", NO_ERROR),
        ("cluster.local", NO_ERROR),
        ("xcluster.local", NO_ERROR),
    ] {
        let answer = answer(&query(name, A), &names, &rules).unwrap();
        assert_eq!(answer[3] & 0xf, code, "{name}");
    }
}

#[test]
fn names_with_connections_are_not_pushed_out() {
    let names = std::sync::Arc::new(Names::new(1, Vec::new()));
    let (_, data) = ask(&names, &query("one.com", A));
    let address = Ipv4Addr::new(data[0], data[1], data[2], data[3]);
    let pinned = names.target(address.into());
    assert_eq!(ask(&names, &query("two.com", A)), (SERVER_FAILURE, vec![]));
    drop(pinned);
    assert_eq!(ask(&names, &query("two.com", A)).0, NO_ERROR);
}

/// Random bytes and damaged queries: an answer within 512 bytes or none, and a bounded table.
#[test]
fn hostile_queries_are_answered_briefly() {
    let seed = fastrand::u64(..);
    let mut dice = fastrand::Rng::with_seed(seed);
    let names = Names::new(32, Vec::new());
    let rules = rules();
    for round in 0..100_000 {
        let mut message = match round % 3 {
            0 => (0..dice.usize(..600)).map(|_| dice.u8(..)).collect(),
            1 => query(&format!("{}.example", dice.u16(..)), *dice.choice(&[A, AAAA, 65]).unwrap()),
            _ => {
                let mut message = query("", A);
                message.truncate(HEADER);
                for _ in 0..dice.usize(..8) {
                    let length = dice.u8(..=70);
                    message.push(length);
                    message.extend((0..length).map(|_| dice.u8(..)));
                }
                message.extend([0, 0, 1, 0, 1]);
                message
            }
        };
        if round % 2 == 0 && !message.is_empty() {
            let at = dice.usize(..message.len());
            message[at] = dice.u8(..);
            message.truncate(dice.usize(..=message.len()));
        }
        if let Some(answer) = answer(&message, &names, &rules) {
            assert!(answer.len() <= 512, "seed {seed}, round {round}: {message:?}");
            assert_eq!(answer[2] & 0x80, 0x80);
        }
    }
}
