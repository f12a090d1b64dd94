//! The decision core against the model: random rules, random requests, every spelling of a host.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use codex_exec_network::address::is_public;
use codex_exec_network::decide::{
    Answer, Decision, Destination, Mode, Protocol, Reason, Step, Subject,
};
use codex_exec_network::host::Host;
use codex_exec_network::rules::{List, Rules};
use proptest::prelude::*;
use proptest::sample::select;

use crate::model::{self, Model, Request};

pub(crate) const NAMES: &[&str] = &[
    "a.com",
    "x.a.com",
    "x.y.a.com",
    "b.org",
    "fa.com",
    "foo.b.org",
    "xn--e1a.org",
    "a-b_c.net",
    "localhost",
    "sub.localhost",
    "com",
    "localhost.a.com",
];
const PATTERNS: &[&str] = &[
    "a.com",
    "*.a.com",
    "**.a.com",
    "f*.org",
    "*.org",
    "b.org",
    "localhost",
    "**.localhost",
    "127.0.0.1",
    "10.1.2.3",
    "8.8.4.4",
    "*.4.4",
    "::1",
    "::ffff:10.1.2.3",
    "2606:4700::1",
    "*.*",
    "?.com",
    "1*",
    "*::f*",
    "com",
    "**.com",
    "*a*",
];
const ADDRESSES: &[&str] = &[
    "127.0.0.1",
    "10.1.2.3",
    "8.8.4.4",
    "1.2.4.4",
    "169.254.169.254",
    "::1",
    "::ffff:10.1.2.3",
    "::ffff:8.8.4.4",
    "::10.1.2.3",
    "2606:4700::1",
    "fd00::1",
    "64:ff9b::a01:203",
    "2002:808:404::1",
    "0.0.0.0",
];

/// A host in normal form, and one of its spellings.
fn host() -> impl Strategy<Value = (String, Option<IpAddr>, String)> {
    let name = (select(NAMES), any::<u64>()).prop_map(|(name, seed)| {
        let mut spelling: String = name
            .chars()
            .enumerate()
            .map(|(i, c)| if seed >> (i % 60) & 1 == 1 { c.to_ascii_uppercase() } else { c })
            .collect();
        spelling.push_str(["", ".", "..", ":80", ".:1"][(seed >> 60) as usize % 5]);
        (name.to_owned(), None, spelling)
    });
    let literal = (select(ADDRESSES), any::<u8>()).prop_map(|(text, spelling)| {
        let address: IpAddr = text.parse().unwrap();
        (address.to_string(), Some(address), spell(address, spelling))
    });
    let random = (any::<u32>(), any::<u8>()).prop_map(|(bits, spelling)| {
        let address = IpAddr::from(Ipv4Addr::from(bits));
        (address.to_string(), Some(address), spell(address, spelling))
    });
    prop_oneof![3 => name, 2 => literal, 1 => random]
}

fn spell(address: IpAddr, how: u8) -> String {
    match address {
        IpAddr::V6(address) => match how % 4 {
            0 => format!("[{address}]"),
            1 => format!("[{address}]:8080"),
            2 => address.to_string().to_uppercase(),
            _ => address.segments().map(|part| format!("{part:04X}")).join(":"),
        },
        IpAddr::V4(address) => {
            let [a, b, c, d] = address.octets();
            let bits = u32::from(address);
            match how % 8 {
                0 => address.to_string(),
                1 => format!("{address}:80"),
                2 => bits.to_string(),
                3 => format!("0x{bits:X}"),
                4 => format!("0{bits:o}"),
                5 => format!("{a}.{}", bits & 0xff_ffff),
                6 => format!("0x{a:x}.0{b:o}.{}", u32::from(c) << 8 | u32::from(d)),
                _ => format!("{a}.{b}.0{c:o}.0x{d:X}."),
            }
        }
    }
}

fn patterns() -> impl Strategy<Value = Vec<String>> {
    proptest::collection::vec(select(PATTERNS).prop_map(str::to_owned), 0..4)
}

fn model() -> impl Strategy<Value = Model> {
    (patterns(), patterns(), patterns(), any::<[bool; 5]>()).prop_map(
        |(mut allow, deny, review, [all, local, limited, can_ask, reviews])| {
            if all {
                allow.push("*".into());
            }
            let review = if reviews { review } else { Vec::new() };
            Model {
                allow,
                deny: deny.into_iter().take(2).collect(),
                review,
                local,
                limited,
                can_ask,
            }
        },
    )
}

fn address() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        4 => select(ADDRESSES).prop_map(|text| text.parse().unwrap()),
        2 => any::<u32>().prop_map(|bits| IpAddr::from(Ipv4Addr::from(bits))),
        1 => any::<u128>().prop_map(|bits| IpAddr::from(Ipv6Addr::from(bits))),
        1 => any::<u32>().prop_map(|bits| IpAddr::from(Ipv6Addr::from(u128::from(bits) | 0xffff_0000_0000))),
    ]
}

fn request() -> impl Strategy<Value = (Request, String)> {
    let protocol = select(&["http", "https_connect", "socks5_tcp", "socks5_udp"][..]);
    let method = select(&["GET", "HEAD", "OPTIONS", "POST", "get", "DELETE"][..]);
    let answer = select(&[("allow", ""), ("deny", "denied"), ("deny", "no"), ("ask", "later")][..]);
    let lookup = proptest::option::weighted(0.8, proptest::collection::vec(address(), 0..4));
    let port = select(&[80u16, 443, 8080][..]);
    (protocol, host(), port, method, answer, lookup).prop_map(
        |(protocol, (host, address, spelling), port, method, answer, lookup)| {
            let method = (protocol == "http").then_some(method);
            (Request { protocol, host, address, port, method, answer, lookup }, spelling)
        },
    )
}

pub(crate) fn rules(model: &Model) -> Rules {
    let mut rules = Rules::default();
    for (list, patterns) in
        [(List::Allow, &model.allow), (List::Deny, &model.deny), (List::Review, &model.review)]
    {
        for pattern in patterns {
            rules.add(list, pattern).unwrap();
        }
    }
    rules.allow_local_binding = model.local;
    rules
}

fn protocol(word: &str) -> Protocol {
    [Protocol::Http, Protocol::HttpsConnect, Protocol::Socks5Tcp, Protocol::Socks5Udp]
        .into_iter()
        .find(|protocol| protocol.as_str() == word)
        .unwrap()
}

/// Runs the core to its end, as the shell does.
fn decide(
    model: &Model,
    request: &Request,
    spelling: &str,
) -> (model::Expected, Option<Destination>) {
    let rules = rules(model);
    let host = Host::parse(spelling).unwrap();
    assert_eq!(host.as_str(), request.host, "{spelling}");
    let mode = if model.limited { Mode::Limited } else { Mode::Full };
    let subject = Subject {
        protocol: protocol(request.protocol),
        host: &host,
        port: request.port,
        method: request.method,
        opened: false,
    };
    let (mut decision, mut step) = Decision::start(&rules, mode, model.can_ask, subject);
    let mut asked = 0;
    let destination = loop {
        step = match step {
            Step::Ask => {
                asked += 1;
                decision.on_answer(match request.answer {
                    ("allow", _) => Answer::Allow,
                    ("deny", words) => Answer::Deny(Reason::from_words(words)),
                    (_, words) => Answer::Ask(Reason::from_words(words)),
                })
            }
            Step::LookUp => decision.on_lookup(request.lookup.clone()),
            Step::Passed(destination) => break Some(destination),
            Step::Refused(_) => break None,
        };
    };
    assert!(asked <= 1);
    let findings = decision.into_findings();
    let last = findings.last().unwrap();
    assert_eq!(last.outcome.as_str() == "allow", destination.is_some());
    let reason = last.reason.as_ref().map_or("allow", Reason::as_str).to_owned();
    ((last.outcome.as_str(), reason, last.source.as_str()), destination)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    #[test]
    fn verdicts_are_those_of_the_model(model in model(), (request, spelling) in request()) {
        let (found, destination) = decide(&model, &request, &spelling);
        prop_assert_eq!(&found, &model.judge(&request));
        // Whatever passed without local binding leads to public addresses, or to its own name.
        if let Some(Destination::Pinned(addresses)) = destination {
            let own = model.allow.contains(&request.host);
            prop_assert!(model.local || own || addresses.iter().all(|a| model::public(*a)));
        } else if destination.is_some() {
            prop_assert!(model.local);
        }
    }

    #[test]
    fn public_addresses_are_those_of_the_model(address in address()) {
        prop_assert_eq!(is_public(address), model::public(address));
    }

    #[test]
    fn any_text_parses_or_is_refused(text in ".{0,60}") {
        if let Ok(host) = Host::parse(&text) {
            // A normal form is its own normal form, and safe to print into a header.
            prop_assert_eq!(&Host::parse(host.as_str()).unwrap(), &host);
            prop_assert!(host.as_str().bytes().all(|b| b.is_ascii_graphic() && !b"/@?#[]".contains(&b)));
        }
        for list in [List::Allow, List::Deny, List::Review] {
            let _ = Rules::default().add(list, &text);
        }
    }
}

/// `(host, reason)` under `*`, and with everything local refused.
#[test]
fn attacks_on_private_addresses_are_refused() {
    let everything = Model { allow: vec!["*".into()], ..Model::default() };
    for spelling in [
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0177.1",
        "0",
        "0.0.0.0",
        "localhost",
        "LOCALHOST.",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[::127.0.0.1]",
        "[0:0:0:0:0:ffff:7f00:1]",
        "169.254.169.254",
        "2852039166",
        "0xa9fea9fe",
        "10.0.0.1",
        "10.1",
        "172.31.255.255",
        "192.168.1.1",
        "100.64.0.1",
        "[fe80::1]",
        "[fe80::1%25eth0]",
        "[2001:4860:4860::8888%251]",
        "[fd00::1]",
        "224.0.0.1",
        "255.255.255.255",
        "[64:ff9b::10.0.0.1]",
        "[2002:a00:1::]",
    ] {
        let host = Host::parse(spelling).unwrap();
        let rules = rules(&everything);
        for protocol in
            [Protocol::Http, Protocol::HttpsConnect, Protocol::Socks5Tcp, Protocol::Socks5Udp]
        {
            let subject =
                Subject { protocol, host: &host, port: 80, method: Some("GET"), opened: false };
            let (_, step) = Decision::start(&rules, Mode::Full, true, subject);
            let Step::Refused(refusal) = step else { panic!("{spelling}: {step:?}") };
            assert_eq!(refusal.reason, Reason::NotAllowedLocal, "{spelling}");
        }
    }
}

#[test]
fn a_deny_rule_holds_for_every_spelling_of_its_address() {
    let mut rules = Rules::default();
    rules.add(List::Allow, "*").unwrap();
    rules.add(List::Deny, "0x08080808:53").unwrap();
    for spelling in [
        "8.8.8.8",
        "134744072",
        "8.8.2056",
        "[::ffff:8.8.8.8]",
        "[64:ff9b::8.8.8.8]",
        "010.010.010.010",
    ] {
        let host = Host::parse(spelling).unwrap();
        let subject = Subject {
            protocol: Protocol::Http,
            host: &host,
            port: 80,
            method: Some("GET"),
            opened: false,
        };
        let (_, step) = Decision::start(&rules, Mode::Full, false, subject);
        assert!(
            matches!(&step, Step::Refused(r) if r.reason == Reason::Denied),
            "{spelling}: {step:?}"
        );
    }
}

#[test]
fn a_name_that_leads_anywhere_local_is_refused_as_a_whole() {
    let mut rules = Rules::default();
    rules.add(List::Allow, "rebind.com").unwrap();
    let host = Host::parse("rebind.com").unwrap();
    let subject = Subject {
        protocol: Protocol::Http,
        host: &host,
        port: 80,
        method: Some("GET"),
        opened: false,
    };
    let addresses = |texts: &[&str]| Some(texts.iter().map(|text| text.parse().unwrap()).collect());
    for (found, passes) in [
        (addresses(&["8.8.8.8", "8.8.4.4"]), true),
        (addresses(&["8.8.8.8", "127.0.0.1"]), false),
        (addresses(&["::ffff:10.0.0.1"]), false),
        (addresses(&[]), false),
        (None, false),
    ] {
        let (mut decision, step) = Decision::start(&rules, Mode::Full, false, subject);
        assert_eq!(step, Step::LookUp);
        let step = decision.on_lookup(found.clone());
        match step {
            Step::Passed(destination) => {
                assert!(passes);
                assert_eq!(destination, Destination::Pinned(found.unwrap()));
            }
            _ => assert!(!passes, "{step:?}"),
        }
    }
}
