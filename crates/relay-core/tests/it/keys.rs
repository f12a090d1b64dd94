//! Public keys, identities and what they print.

use bytes::Bytes;
use codex_exec_relay_core::*;

use crate::util::*;

#[test]
fn key_requires_the_suite_and_exact_lengths() {
    let key = identity(0).public_key();
    assert_eq!(key.suite(), "Noise_hybridIK_X25519+MLKEM768_AESGCM_SHA256");
    let (x, m) = (key.x25519(), key.mlkem768());
    assert_eq!((x.len(), m.len()), (32, 1184));
    assert_eq!(NoisePublicKey::new(SUITE, x, m), Ok(key.clone()));

    let other = "Noise_hybridIK_25519+MLKEM768_AESGCM_SHA256";
    assert_eq!(NoisePublicKey::new(other, x, m), Err(KeyError::Suite));
    assert_eq!(NoisePublicKey::new("", x, m), Err(KeyError::Suite));
    assert_eq!(NoisePublicKey::new(SUITE, &x[1..], m), Err(KeyError::X25519Length(31)));
    assert_eq!(NoisePublicKey::new(SUITE, &[0; 33], m), Err(KeyError::X25519Length(33)));
    assert_eq!(NoisePublicKey::new(SUITE, x, &m[1..]), Err(KeyError::Mlkem768Length(1183)));
    assert_eq!(NoisePublicKey::new(SUITE, x, &[]), Err(KeyError::Mlkem768Length(0)));

    let mut high = m.to_vec();
    high[0] = 0x01;
    high[1] = (high[1] & 0xf0) | 0x0d; // 0xd01 is 3329, the modulus itself
    assert_eq!(NoisePublicKey::new(SUITE, x, &high), Err(KeyError::Mlkem768Range));
}

#[test]
fn identities_follow_from_the_random_source() {
    let make = |seed| NoiseIdentity::generate(&mut Rng(seed)).unwrap().public_key();
    assert_eq!(make(1), make(1));
    assert_ne!(make(1), make(2));
    let mut broken = |_: &mut [u8]| Err(EntropyError);
    assert!(NoiseIdentity::generate(&mut broken).is_err());
    let mut harness = Harness::new(Config::default(), harness_mode(), Box::new(broken)).unwrap();
    assert_eq!(harness.open(t0()), Err(OpenError::Entropy(EntropyError)));
}

#[test]
fn stream_ids_are_uuids() {
    let id = StreamId::generate(&mut Rng(1)).unwrap();
    let text = id.as_str();
    assert_eq!(text.len(), 36);
    assert_eq!(&text[14..15], "4");
    assert!("89ab".contains(&text[19..20]));
    assert_eq!(text.matches('-').count(), 4);
    assert!(StreamId::new("").is_none());
}

#[test]
fn debug_shows_no_secret() {
    let mut pair = Pair::begin(executor(Config::default()), harness(2, Config::default()));
    let opening = frames_h(&mut pair.harness, t0());
    for frame in &opening {
        pair.executor.handle_frame(t0(), frame.clone()).unwrap();
    }
    let request = pair.executor.poll_event().unwrap();
    let message =
        Event::Message { stream: pair.stream.clone(), message: Bytes::from_static(b"let me in") };
    let identity_shown = format!("{:?}", identity(0));
    let shown = format!(
        "{:?} {:?} {request:?} {message:?} {:?} {:?} {identity_shown}",
        pair.executor,
        pair.harness,
        decode(&opening[1]),
        Authorization::new("let me in".into()),
    );
    assert!(!shown.contains("let me in"), "{shown}");
    assert!(identity_shown.len() < 80, "{identity_shown}");
    assert!(shown.len() < 2000, "{shown}");
}

#[test]
fn invalid_configurations_are_rejected() {
    let check = |config: Config| config.validate().is_err();
    assert!(!check(Config::default()));
    assert!(check(Config { record_len: 65_535, ..Config::default() }));
    assert!(check(Config { record_len: 0, ..Config::default() }));
    assert!(check(Config { window_segments: 65, ..Config::default() }));
    assert!(check(Config { window_bytes: 2 << 20, ..Config::default() }));
    assert!(
        Executor::new(
            Config { ack_every: 0, ..Config::default() },
            ExecutorMode::Clear,
            Box::new(Rng(1))
        )
        .is_err()
    );
}
