//! The Noise channel against the library itself, driven by hand as the contract words it: what is
//! bound into the handshake, what its messages carry, and which record has which nonce.

use bytes::Bytes;
use clatter::bytearray::ByteArray;
use clatter::crypto::cipher::AesGcm;
use clatter::crypto::dh::X25519;
use clatter::crypto::hash::Sha256;
use clatter::crypto::kem::rust_crypto_ml_kem::MlKem768;
use clatter::handshakepattern::noise_hybrid_ik;
use clatter::rand_core::{CryptoRng, Error, RngCore};
use clatter::traits::{Dh, Handshaker, Kem};
use clatter::{HybridHandshakeCore, HybridHandshakeParams};
use codex_exec_relay_core::*;

use crate::util::{self, *};

#[derive(Clone)]
struct TestRng(util::Rng);

impl Default for TestRng {
    fn default() -> Self {
        Self(util::Rng(77))
    }
}

impl RngCore for TestRng {
    fn next_u32(&mut self) -> u32 {
        self.0.next() as u32
    }
    fn next_u64(&mut self) -> u64 {
        self.0.next()
    }
    fn fill_bytes(&mut self, dest: &mut [u8]) {
        self.0.fill(dest).unwrap();
    }
    fn try_fill_bytes(&mut self, dest: &mut [u8]) -> Result<(), Error> {
        self.fill_bytes(dest);
        Ok(())
    }
}

impl CryptoRng for TestRng {}

type Stock = HybridHandshakeCore<X25519, MlKem768, MlKem768, AesGcm, Sha256, TestRng>;

fn prologue(stream: &str) -> Vec<u8> {
    let mut out = Vec::new();
    for part in ["codex-exec-server-relay-noise/v1", ENVIRONMENT, REGISTRATION, stream] {
        out.extend((part.len() as u64).to_be_bytes());
        out.extend(part.as_bytes());
    }
    out
}

/// A harness made of the library alone.
fn stock_harness(executor: &NoisePublicKey, stream: &str) -> Stock {
    let mut rng = TestRng::default();
    let prologue = prologue(stream);
    let params = HybridHandshakeParams::<X25519, MlKem768, MlKem768>::new(noise_hybrid_ik(), true)
        .with_prologue(&prologue)
        .with_s(X25519::genkey_rng(&mut rng).unwrap())
        .with_s_kem(MlKem768::genkey_rng(&mut rng).unwrap())
        .with_rs(*executor.x25519())
        .with_rs_kem(ByteArray::from_slice(executor.mlkem768()));
    Stock::new(params).unwrap()
}

fn write(handshake: &mut Stock, payload: &[u8]) -> Bytes {
    let mut buffer = vec![0; 16 * 1024];
    let len = handshake.write_message(payload, &mut buffer).unwrap();
    buffer.truncate(len);
    buffer.into()
}

fn handshake_payload(frames: &[Bytes]) -> Bytes {
    frames
        .iter()
        .find_map(|frame| match decode(frame).body {
            Body::Handshake { payload } => Some(payload),
            _ => None,
        })
        .unwrap()
}

fn data_of(frames: &[Bytes]) -> Vec<Data> {
    frames
        .iter()
        .filter_map(|frame| match decode(frame).body {
            Body::Data(data) => Some(data),
            _ => None,
        })
        .collect()
}

#[test]
fn stock_harness_without_acks_is_served() {
    let mut executor = executor(Config::default());
    let stream = StreamId::new("9a3c4a1e-0d0f-4c5e-9d53-3f8a4c6c7b10").unwrap();
    let mut handshake = stock_harness(&identity(0).public_key(), stream.as_str());
    let first = write(&mut handshake, b"stock authorization");

    executor.handle_frame(t0(), frame(&stream, Body::Resume { next_seq: 0 })).unwrap();
    executor.handle_frame(t0(), frame(&stream, Body::Handshake { payload: first })).unwrap();
    let Some(Event::AuthorizeRequest { generation, authorization, .. }) = executor.poll_event()
    else {
        panic!("no request");
    };
    assert_eq!(authorization.expose(), "stock authorization");
    executor.authorize(t0(), &stream, generation, Verdict::Allowed).unwrap();
    let answer = handshake_payload(&frames_e(&mut executor, t0()));
    let mut payload = [0; 64];
    assert_eq!(handshake.read_message(&answer, &mut payload).unwrap(), 0);
    let mut transport = handshake.finalize().unwrap();

    // Up: two messages in one record, a third cut in two records in the middle of its length.
    let mut plain = Vec::new();
    for message in [&b"{\"a\":1}"[..], b"{\"b\":2}", b"{\"c\":3}"] {
        plain.extend((message.len() as u32).to_be_bytes());
        plain.extend(message);
    }
    let (one, two) = plain.split_at(24);
    for (seq, part) in [one, two].into_iter().enumerate() {
        let record = transport.send_vec(part).unwrap();
        executor.handle_frame(t0(), data(&stream, seq as u32, &record)).unwrap();
    }
    let got: Vec<Event> = events_e(&mut executor);
    let expected: Vec<Event> = std::iter::once(Event::Opened { stream: stream.clone() })
        .chain(
            ["{\"a\":1}", "{\"b\":2}", "{\"c\":3}"]
                .map(|message| Event::Message { stream: stream.clone(), message: message.into() }),
        )
        .collect();
    assert_eq!(got, expected);

    // Down: 150,000 bytes in records of at most 60 KiB, numbered from 0, never cut by the relay.
    let message = Bytes::from(vec![b'x'; 150_000]);
    executor.send(&stream, message.clone()).unwrap();
    let sent = data_of(&frames_e(&mut executor, t0()));
    let mut plain = Vec::new();
    for (number, data) in sent.iter().enumerate() {
        assert_eq!((data.seq, data.segment_index, data.segment_count), (number as u32, 0, 1));
        assert!(data.payload.len() <= 60 * 1024 + 16);
        plain.extend(transport.receive_vec(&data.payload).unwrap());
    }
    assert_eq!(sent.len(), 3);
    assert_eq!(plain[..4], 150_000u32.to_be_bytes());
    assert_eq!(plain[4..], message);

    // It never acknowledged: nothing is sent again, nothing waits, the socket's end is the end.
    for second in 1..300 {
        executor.handle_timeout(t0() + ms(second * 1000));
        let frames = frames_e(&mut executor, t0() + ms(second * 1000));
        assert!(data_of(&frames).is_empty());
    }
    executor.handle_disconnected(t0() + ms(301_000));
    let cause = CloseCause::Disconnected;
    assert_eq!(events_e(&mut executor), [Event::Closed { stream, cause }]);
}

#[test]
fn a_stock_executor_serves_our_harness() {
    // The executor's static keys, known here in full.
    let mut rng = TestRng::default();
    let dh = X25519::genkey_rng(&mut rng).unwrap();
    let kem = MlKem768::genkey_rng(&mut rng).unwrap();
    let key = NoisePublicKey::new(SUITE, &dh.public, kem.public.as_slice()).unwrap();
    let mode = harness_mode_with(key, ENVIRONMENT, REGISTRATION, "let me in");
    let mut harness = harness_as(5, Config::default(), mode);
    let stream = harness.open(t0()).unwrap();
    let opening = frames_h(&mut harness, t0());
    assert_eq!(kinds(&opening), [BodyKind::Resume, BodyKind::Handshake]);
    assert!(matches!(decode(&opening[0]).body, Body::Resume { next_seq: 0 }));

    let prologue = prologue(stream.as_str());
    let params = HybridHandshakeParams::<X25519, MlKem768, MlKem768>::new(noise_hybrid_ik(), false)
        .with_prologue(&prologue)
        .with_s(dh)
        .with_s_kem(kem);
    let mut handshake = Stock::new(params).unwrap();
    let mut payload = vec![0; 4096];
    let len = handshake.read_message(&handshake_payload(&opening), &mut payload).unwrap();
    assert_eq!(payload[..len], *b"let me in");
    let remote = handshake.get_remote_static().unwrap();
    assert_eq!(remote.dh(), identity(1).public_key().x25519());

    let answer = write(&mut handshake, &[]);
    harness.handle_frame(t0(), frame(&stream, Body::Handshake { payload: answer })).unwrap();
    let mut transport = handshake.finalize().unwrap();
    harness.send(Bytes::from_static(b"hello")).unwrap();
    let sent = data_of(&frames_h(&mut harness, t0()));
    assert_eq!(transport.receive_vec(&sent[0].payload).unwrap(), b"\0\0\0\x05hello");
    let record = transport.send_vec(b"\0\0\0\x02ok").unwrap();
    harness.handle_frame(t0(), data(&stream, 0, &record)).unwrap();
    let message = Bytes::from_static(b"ok");
    assert_eq!(
        events_h(&mut harness),
        [Event::Opened { stream: stream.clone() }, Event::Message { stream, message }]
    );
}

#[test]
fn unusable_keys_and_payloads_fail_the_handshake() {
    let stream = StreamId::new("s").unwrap();
    let attempt = |spoil: &dyn Fn(&mut [u8]), payload: &[u8]| {
        let mut executor = executor(Config::default());
        let mut handshake = stock_harness(&identity(0).public_key(), "s");
        let mut first = write(&mut handshake, payload).to_vec();
        spoil(&mut first);
        let body = Body::Handshake { payload: first.into() };
        executor.handle_frame(t0(), frame(&stream, body)).unwrap();
        match executor.poll_event() {
            Some(Event::HandshakeFailed { error, .. }) => Some(error),
            _ => None,
        }
    };
    assert_eq!(attempt(&|_| {}, b"fine"), None);
    // The ephemeral ML-KEM key, spoilt before anything authenticates it.
    let kem_at = 1088 + 32;
    let spoilt = attempt(&|first| first[kem_at..kem_at + 3].fill(0xff), b"fine");
    assert_eq!(spoilt, Some(HandshakeError::Rejected));
    let bad = HandshakeError::Authorization { max: 4096 };
    assert_eq!(attempt(&|_| {}, b""), Some(bad));
    assert_eq!(attempt(&|_| {}, b"\xff\xfe"), Some(bad));
    assert!(matches!(attempt(&|_| {}, &[b'a'; 4097]), Some(HandshakeError::Length(_))));
    assert_eq!(attempt(&|_| {}, &[b'a'; 4096]), None);
}

/// Keys that the handshake authenticates but that are no keys.
#[test]
fn harness_with_noncanonical_key_is_rejected() {
    let stream = StreamId::new("s").unwrap();
    let mut rng = TestRng::default();
    let good = MlKem768::genkey_rng(&mut rng).unwrap();
    let mut bad = good.clone();
    bad.public.as_mut()[..1152].fill(0xff);
    for (fixed, ephemeral) in [(&bad, &good), (&good, &bad)] {
        let prologue = prologue("s");
        let executor_key = identity(0).public_key();
        let params =
            HybridHandshakeParams::<X25519, MlKem768, MlKem768>::new(noise_hybrid_ik(), true)
                .with_prologue(&prologue)
                .with_s(X25519::genkey_rng(&mut rng).unwrap())
                .with_s_kem(fixed.clone())
                .with_e_kem(ephemeral.clone())
                .with_rs(*executor_key.x25519())
                .with_rs_kem(ByteArray::from_slice(executor_key.mlkem768()));
        let mut handshake = Stock::new(params).unwrap();
        let payload = write(&mut handshake, b"fine");
        let mut executor = executor(Config::default());
        executor.handle_frame(t0(), frame(&stream, Body::Handshake { payload })).unwrap();
        let error = HandshakeError::PeerKey(KeyError::Mlkem768Range);
        let stream = stream.clone();
        assert_eq!(executor.poll_event(), Some(Event::HandshakeFailed { stream, error }));
    }
}
