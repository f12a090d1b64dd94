//! The wire format: golden bytes, round trips, damaged bytes.

use bytes::Bytes;
use codex_exec_relay_core::*;
use proptest::prelude::*;

use crate::util::*;

fn limits() -> FrameLimits {
    FrameLimits::default()
}

fn id(name: &str) -> StreamId {
    StreamId::new(name).unwrap()
}

fn hex(text: &str) -> Bytes {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

#[test]
fn golden_bytes() {
    let data =
        Data { seq: 300, segment_index: 1, segment_count: 2, payload: Bytes::from_static(b"abc") };
    let mut traced = Frame::new(id("s1"), 0, 0, Body::Heartbeat);
    traced.traceparent = Some("tp".into());
    traced.tracestate = Some("ts".into());
    let golden = [
        (
            Frame::new(id("s1"), 7, 5, Body::Data(data)),
            // version 1, "s1", ack 7, bits 5, data {seq 300, 1 of 2, "abc"}
            "0801 12027331 1807 2005 2a0c 08ac02 1001 1802 2203616263",
        ),
        (Frame::new(id("s1"), 0, 0, Body::Ack), "0801 12027331 3200"),
        (Frame::new(id("s1"), 0, 0, Body::Resume { next_seq: 0 }), "0801 12027331 3a00"),
        (Frame::new(id("s1"), 3, 0, Body::Resume { next_seq: 9 }), "0801 12027331 1803 3a02 0809"),
        (
            Frame::new(id("s1"), 0, 0, Body::Reset { reason: "no".into() }),
            "0801 12027331 4204 0a026e6f",
        ),
        (Frame::new(id("s1"), 0, 0, Body::Heartbeat), "0801 12027331 4a00"),
        (
            Frame::new(
                id("s1"),
                0,
                0,
                Body::Handshake { payload: Bytes::from_static(b"\x00\x01") },
            ),
            "0801 12027331 5204 0a020001",
        ),
        (traced, "0801 12027331 4a00 5a027470 62027473"),
    ];
    for (frame, bytes) in golden {
        let bytes = hex(bytes);
        assert_eq!(frame.encode(), bytes, "{frame:?}");
        assert!(Frame::decode(bytes.clone(), &limits()).unwrap() == frame);
        let peeked = peek(&bytes, &limits()).unwrap();
        assert_eq!((peeked.stream_id, peeked.kind), ("s1", frame.body.kind()));
    }
}

#[test]
fn invalid_frames_are_rejected() {
    let cases = [
        ("another version", "0802 12027331 4a00"),
        ("no version", "12027331 4a00"),
        ("no stream id", "0801 4a00"),
        ("empty stream id", "0801 1200 4a00"),
        ("no body", "0801 12027331"),
        ("data without payload", "0801 12027331 2a02 1801"),
        ("segment count 0", "0801 12027331 2a03 220161"),
        ("segment index at the count", "0801 12027331 2a07 1001 1801 220161"),
        ("segment before its message", "0801 12027331 2a07 1001 1802 220161"),
        ("reset without reason", "0801 12027331 4200"),
        ("handshake without payload", "0801 12027331 5200"),
        ("stream id that is not text", "0801 1202ffff 4a00"),
        ("cut short", "0801 1202"),
        ("text", "7b7d"),
        ("empty", ""),
    ];
    for (what, bytes) in cases {
        assert!(Frame::decode(hex(bytes), &limits()).is_err(), "{what}");
    }
    let long = Frame::new(id(&"x".repeat(129)), 0, 0, Body::Heartbeat).encode();
    assert!(matches!(Frame::decode(long.clone(), &limits()), Err(FrameError::StreamId { .. })));
    assert!(matches!(peek(&long, &limits()), Err(FrameError::StreamId { .. })));
    let big = data(&id("s1"), 0, &vec![0; 300 * 1024]);
    assert!(matches!(Frame::decode(big.clone(), &limits()), Err(FrameError::TooLong { .. })));
    assert!(matches!(peek(&big, &limits()), Err(FrameError::TooLong { .. })));
}

#[test]
fn frame_of_exactly_256_kib_is_accepted() {
    let empty = data(&id("s1"), 0, &vec![0; 200 * 1024]).len() - 200 * 1024;
    let most = data(&id("s1"), 0, &vec![0; 256 * 1024 - empty]);
    assert_eq!(most.len(), 256 * 1024);
    assert!(Frame::decode(most, &limits()).is_ok());
}

#[test]
fn unknown_fields_are_skipped() {
    // field 99 as varint, 64-bit, bytes and 32-bit
    // and, as only older writers have them, a group with a group in it
    let more = "9806 05 9906 0000000000000000 9a06 0161 9d06 00000000 9b06 0805 a306 a406 9c06";
    let bytes = hex(&format!("0801 12027331 {more} 4a00"));
    assert_eq!(Frame::decode(bytes.clone(), &limits()).unwrap().body.kind(), BodyKind::Heartbeat);
    assert_eq!(peek(&bytes, &limits()).unwrap().kind, BodyKind::Heartbeat);
}

#[test]
fn the_last_of_several_bodies_counts() {
    let bytes = hex("0801 12027331 3200 4a00");
    let kind = Frame::decode(bytes.clone(), &limits()).unwrap().body.kind();
    assert_eq!(peek(&bytes, &limits()).unwrap().kind, kind);
}

fn any_frame() -> impl Strategy<Value = Frame> {
    let payload = prop::collection::vec(any::<u8>(), 1..300).prop_map(Bytes::from);
    let data = (any::<u32>(), any::<u32>(), any::<u32>(), payload.clone()).prop_map(
        |(seq, index, count, payload)| {
            let segment_index = index % seq.saturating_add(1);
            let segment_count = count.max(segment_index.saturating_add(1));
            let segment_index = segment_index.min(segment_count - 1);
            Body::Data(Data { seq, segment_index, segment_count, payload })
        },
    );
    let body = prop_oneof![
        data,
        Just(Body::Ack),
        any::<u32>().prop_map(|next_seq| Body::Resume { next_seq }),
        ".{1,50}".prop_map(|reason| Body::Reset { reason }),
        Just(Body::Heartbeat),
        payload.prop_map(|payload| Body::Handshake { payload }),
    ];
    let trace = || prop::option::of("[ -~]{0,60}");
    ("[!-~]{1,40}", any::<u32>(), any::<u32>(), body, trace(), trace()).prop_map(
        |(name, ack, ack_bits, body, traceparent, tracestate)| Frame {
            traceparent,
            tracestate,
            ..Frame::new(id(&name), ack, ack_bits, body)
        },
    )
}

proptest! {
    #[test]
    fn round_trip(frame in any_frame()) {
        let bytes = frame.encode();
        prop_assert!(Frame::decode(bytes.clone(), &limits()).unwrap() == frame);
        let peeked = peek(&bytes, &limits()).unwrap();
        prop_assert_eq!(peeked.stream_id, frame.stream_id.as_str());
        prop_assert_eq!(peeked.kind, frame.body.kind());
        let acknowledges = frame.body.kind() == BodyKind::Ack || frame.ack > 0 || frame.ack_bits > 0;
        prop_assert_eq!(peeked.acknowledges, acknowledges);
    }

    #[test]
    fn damaged_bytes_never_panic(
        frame in any_frame(),
        flips in prop::collection::vec((any::<prop::sample::Index>(), 0u8..8), 0..4),
        cut in any::<prop::sample::Index>(),
        whole in any::<bool>(),
    ) {
        let mut bytes = frame.encode().to_vec();
        for (at, bit) in flips {
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
        }
        if !whole {
            bytes.truncate(cut.index(bytes.len() + 1));
        }
        let bytes = Bytes::from(bytes);
        let decoded = Frame::decode(bytes.clone(), &limits());
        let peeked = peek(&bytes, &limits());
        // Whatever decodes, peeks the same.
        if let Ok(frame) = decoded {
            let peeked = peeked.unwrap();
            prop_assert_eq!(peeked.stream_id, frame.stream_id.as_str());
            prop_assert_eq!(peeked.kind, frame.body.kind());
            // And means the same when written again.
            prop_assert!(Frame::decode(frame.encode(), &limits()).unwrap() == frame);
        }
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let bytes = Bytes::from(bytes);
        let _ = Frame::decode(bytes.clone(), &limits());
        let _ = peek(&bytes, &limits());
    }

    #[test]
    fn endpoints_accept_any_bytes_without_panic(
        frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..100), 1..10),
        valid in prop::collection::vec(any_frame(), 1..10),
    ) {
        let mut executor = executor(Config::default());
        let mut harness = Harness::new(Config::default(), HarnessMode::Clear, Box::new(Rng(3))).unwrap();
        harness.handle_connected(t0());
        let stream = harness.open(t0()).unwrap();
        for bytes in frames {
            let _ = executor.handle_frame(t0(), bytes.clone().into());
            let _ = harness.handle_frame(t0(), bytes.into());
        }
        for mut frame in valid {
            executor.handle_frame(t0(), frame.encode()).unwrap();
            frame.stream_id = stream.clone();
            harness.handle_frame(t0(), frame.encode()).unwrap();
            executor.handle_timeout(t0());
            harness.handle_timeout(t0());
        }
    }
}
