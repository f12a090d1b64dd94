//! Every way a peer, or a relay, may break the protocol, and what it costs: the stream, no more.

use bytes::Bytes;
use codex_exec_relay_core::*;

use crate::util::*;

/// The frames with which a harness opens, not yet given to anyone.
fn opening(harness: &mut Harness) -> (StreamId, Bytes) {
    let stream = harness.open(t0()).unwrap();
    let frames = frames_h(harness, t0());
    (stream, frames[1].clone())
}

fn closed_by(events: &[Event]) -> Option<CloseCause> {
    events.iter().find_map(|event| match event {
        Event::Closed { cause, .. } => Some(*cause),
        _ => None,
    })
}

fn is_reset(frame: &Bytes, stream: &StreamId) -> bool {
    let frame = decode(frame);
    frame.stream_id == *stream
        && frame.body == Body::Reset { reason: "noise_relay_protocol_error".into() }
}

/// A pair and a second, innocent harness on the same executor, which must stay well.
struct Bystander {
    pair: Pair,
    other: Harness,
    other_stream: StreamId,
}

impl Bystander {
    fn new() -> Self {
        let mut pair = Pair::open(&Config::default());
        let mut other = harness(3, Config::default());
        let other_stream = other.open(t0()).unwrap();
        for frame in frames_h(&mut other, t0()) {
            pair.executor.handle_frame(t0(), frame).unwrap();
        }
        pair.drain_events();
        for frame in frames_e(&mut pair.executor, t0()) {
            other.handle_frame(t0(), frame).unwrap();
        }
        pair.executor_events.clear();
        Self { pair, other, other_stream }
    }

    fn assert_well(mut self) {
        self.pair.executor_events.clear();
        self.other.send(Bytes::from_static(b"still here")).unwrap();
        for frame in frames_h(&mut self.other, self.pair.now) {
            self.pair.executor.handle_frame(self.pair.now, frame).unwrap();
        }
        self.pair.drain_events();
        assert_eq!(self.pair.executor_messages(), ["still here"]);
        assert!(self.pair.executor.stats(&self.other_stream).unwrap().open);
    }
}

#[test]
fn handshake_fails_for_another_environments_key_or_id() {
    let wrong = [
        harness_mode_with(identity(2).public_key(), ENVIRONMENT, REGISTRATION, "let me in"),
        harness_mode_with(identity(0).public_key(), "env_2", REGISTRATION, "let me in"),
        harness_mode_with(identity(0).public_key(), ENVIRONMENT, "reg_2", "let me in"),
    ];
    for (seed, mode) in wrong.into_iter().enumerate() {
        let harness = harness_as(20 + seed as u64, Config::default(), mode);
        let mut pair = Pair::begin(executor(Config::default()), harness);
        pair.run();
        let stream = pair.stream.clone();
        let error = HandshakeError::Rejected;
        assert_eq!(pair.executor_events, [Event::HandshakeFailed { stream, error }]);
        assert!(matches!(pair.harness_events[..], [Event::Reset { .. }]));
        assert_eq!(pair.executor.stream_count(), 0);
    }
}

#[test]
fn a_handshake_moved_to_another_stream_fails() {
    let mut executor = executor(Config::default());
    let (_, first) = opening(&mut harness(2, Config::default()));
    let mut moved = decode(&first);
    moved.stream_id = StreamId::new("another").unwrap();
    executor.handle_frame(t0(), moved.encode()).unwrap();
    assert!(matches!(executor.poll_event(), Some(Event::HandshakeFailed { .. })));
}

#[test]
fn replayed_handshake_opens_no_stream() {
    let mut pair = Pair::begin(executor(Config::default()), harness(2, Config::default()));
    let first = frames_h(&mut pair.harness, t0());
    for frame in &first {
        pair.executor.handle_frame(t0(), frame.clone()).unwrap();
    }
    pair.run();
    pair.executor_events.clear();
    // While the stream lives: a repetition, without effect.
    pair.executor.handle_frame(t0(), first[1].clone()).unwrap();
    assert!(frames_e(&mut pair.executor, t0()).is_empty());
    pair.prove();
    // After its end: refused, without asking anybody.
    pair.executor.reset(&pair.stream, "done");
    frames_e(&mut pair.executor, t0());
    for frame in &first {
        pair.executor.handle_frame(t0(), frame.clone()).unwrap();
        assert!(pair.executor.poll_event().is_none());
        let answer = frames_e(&mut pair.executor, t0());
        assert!(answer.len() == 1 && is_reset(&answer[0], &pair.stream));
    }
    assert_eq!(pair.executor.stream_count(), 0);
}

#[test]
fn late_replay_is_dropped_after_the_first_record_timeout() {
    let config = Config { remembered_streams: 0, ..Config::default() };
    let mut executor = executor(config);
    let (stream, first) = opening(&mut harness(2, Config::default()));
    executor.handle_frame(t0(), first).unwrap();
    let Some(Event::AuthorizeRequest { generation, .. }) = executor.poll_event() else { panic!() };
    executor.authorize(t0(), &stream, generation, Verdict::Allowed).unwrap();
    assert_eq!(executor.poll_event(), Some(Event::Opened { stream: stream.clone() }));
    executor.handle_timeout(t0() + ms(59_999));
    assert_eq!(executor.stream_count(), 1);
    executor.handle_timeout(t0() + ms(60_000));
    assert_eq!(closed_by(&events_e(&mut executor)), Some(CloseCause::FirstRecordTimeout));
}

#[test]
fn duplicated_and_reordered_records_arrive_once_in_order() {
    let mut pair = Pair::open(&Config::default());
    for number in 0..20u8 {
        pair.harness.send(Bytes::from(vec![number; 3])).unwrap();
    }
    let mut frames = frames_h(&mut pair.harness, t0());
    assert_eq!(frames.len(), 20);
    frames.reverse();
    for frame in frames.iter().chain(&frames) {
        pair.executor.handle_frame(t0(), frame.clone()).unwrap();
    }
    pair.drain_events();
    let expected: Vec<_> = (0..20u8).map(|number| Bytes::from(vec![number; 3])).collect();
    assert_eq!(pair.executor_messages(), expected);
    assert!(pair.executor_events.is_empty());
}

#[test]
fn a_record_replayed_under_another_number_ends_the_stream_only() {
    let mut by = Bystander::new();
    by.pair.harness.send(Bytes::from_static(b"once")).unwrap();
    let record = frames_h(&mut by.pair.harness, t0()).remove(0);
    by.pair.executor.handle_frame(t0(), record.clone()).unwrap();
    let mut again = decode(&record);
    let Body::Data(data) = &mut again.body else { panic!() };
    data.seq = 1;
    by.pair.executor.handle_frame(t0(), again.encode()).unwrap();
    let events = events_e(&mut by.pair.executor);
    let error = ProtocolError::Record(RecordError { seq: 1 });
    assert_eq!(closed_by(&events), Some(CloseCause::Protocol(error)));
    assert!(is_reset(&frames_e(&mut by.pair.executor, t0())[0], &by.pair.stream));
    by.assert_well();
}

#[test]
fn tampered_ciphertext_ends_the_stream_only() {
    for at in [0, 10, 30] {
        let mut by = Bystander::new();
        by.pair.harness.send(Bytes::from_static(b"a secret message")).unwrap();
        let mut frame = decode(&frames_h(&mut by.pair.harness, t0())[0]);
        let Body::Data(data) = &mut frame.body else { panic!() };
        let mut payload = data.payload.to_vec();
        payload[at] ^= 1;
        data.payload = payload.into();
        by.pair.executor.handle_frame(t0(), frame.encode()).unwrap();
        let events = events_e(&mut by.pair.executor);
        assert!(matches!(closed_by(&events), Some(CloseCause::Protocol(ProtocolError::Record(_)))));
        by.assert_well();
    }
}

#[test]
fn records_of_impossible_length_end_the_stream() {
    for len in [1, 15, 65_536, 200_000] {
        let mut pair = Pair::open(&Config::default());
        pair.executor.handle_frame(t0(), data(&pair.stream, 0, &vec![7; len])).unwrap();
        assert!(closed_by(&events_e(&mut pair.executor)).is_some(), "{len}");
    }
}

#[test]
fn data_before_the_handshake_is_refused_everywhere() {
    let unknown = StreamId::new("unknown").unwrap();
    let mut executor = executor(Config::default());
    executor.handle_frame(t0(), data(&unknown, 0, b"early")).unwrap();
    assert!(is_reset(&frames_e(&mut executor, t0())[0], &unknown));
    assert!(executor.poll_event().is_none());

    // While the verdict is awaited.
    let mut harness = harness(2, Config::default());
    let (stream, first) = opening(&mut harness);
    executor.handle_frame(t0(), first).unwrap();
    executor.poll_event().unwrap();
    executor.handle_frame(t0(), data(&stream, 0, b"early")).unwrap();
    let early = CloseCause::Protocol(ProtocolError::DataBeforeHandshake);
    assert_eq!(closed_by(&events_e(&mut executor)), Some(early));

    // At a harness whose handshake is not answered.
    harness.handle_frame(t0(), data(&stream, 0, b"early")).unwrap();
    assert_eq!(closed_by(&events_h(&mut harness)), Some(early));
    assert!(is_reset(&frames_h(&mut harness, t0())[0], &stream));
}

#[test]
fn a_second_handshake_ends_the_stream_and_a_repeated_one_does_not() {
    let second = |stream: &StreamId| {
        frame(stream, Body::Handshake { payload: Bytes::from_static(b"another") })
    };
    let mut pair = Pair::begin(executor(Config::default()), harness(2, Config::default()));
    let to_executor = frames_h(&mut pair.harness, t0());
    for frame in to_executor.iter().chain(&to_executor) {
        pair.executor.handle_frame(t0(), frame.clone()).unwrap();
    }
    pair.drain_events();
    let to_harness = frames_e(&mut pair.executor, t0());
    assert_eq!(kinds(&to_harness), [BodyKind::Handshake]);
    for frame in to_harness.iter().chain(&to_harness) {
        pair.harness.handle_frame(t0(), frame.clone()).unwrap();
    }
    pair.drain_events();
    assert_eq!(pair.harness_events, [Event::Opened { stream: pair.stream.clone() }]);
    pair.executor_events.clear();
    pair.prove();

    let cause = CloseCause::Protocol(ProtocolError::SecondHandshake);
    pair.executor.handle_frame(pair.now, second(&pair.stream)).unwrap();
    assert_eq!(closed_by(&events_e(&mut pair.executor)), Some(cause));
    pair.harness.handle_frame(pair.now, second(&pair.stream)).unwrap();
    assert_eq!(closed_by(&events_h(&mut pair.harness)), Some(cause));

    // And while the verdict is awaited.
    let mut executor = executor(Config::default());
    let (stream, first) = opening(&mut harness(9, Config::default()));
    executor.handle_frame(t0(), first).unwrap();
    executor.poll_event().unwrap();
    executor.handle_frame(t0(), second(&stream)).unwrap();
    assert_eq!(closed_by(&events_e(&mut executor)), Some(cause));
}

#[test]
fn stream_129_is_refused_until_another_stream_ends() {
    let mut executor = executor(Config::default());
    let mut streams = Vec::new();
    let mut open = |executor: &mut Executor, seed: u64| {
        let (stream, first) = opening(&mut harness(seed, Config::default()));
        executor.handle_frame(t0(), first).unwrap();
        let opened = match executor.poll_event() {
            Some(Event::AuthorizeRequest { stream, generation, .. }) => {
                executor.authorize(t0(), &stream, generation, Verdict::Allowed).unwrap();
                executor.poll_event();
                frames_e(executor, t0());
                true
            }
            None => false,
            other => panic!("{other:?}"),
        };
        streams.push(stream.clone());
        (opened, stream)
    };
    for seed in 0..128 {
        assert!(open(&mut executor, 100 + seed).0);
    }
    assert_eq!(executor.stream_count(), 128);
    let (opened, stream) = open(&mut executor, 300);
    assert!(!opened);
    assert!(is_reset(&frames_e(&mut executor, t0())[0], &stream));
    executor.reset(&streams[0], "done");
    let mut pair = Pair::begin(executor, harness(301, Config::default()));
    pair.run();
    assert!(matches!(pair.harness_events[..], [Event::Opened { .. }]));
    assert_eq!(pair.executor.stream_count(), 128);
}

#[test]
fn stream_id_cannot_be_reused() {
    let mut pair = Pair::open(&Config::default());
    pair.prove();
    pair.harness.reset("done");
    pair.run();
    assert!(matches!(&pair.executor_events[..], [Event::Reset { reason, .. }] if reason == "done"));
    for body in [
        Body::Resume { next_seq: 0 },
        Body::Resume { next_seq: 5 },
        Body::Handshake { payload: Bytes::from_static(b"again") },
        Body::Heartbeat,
    ] {
        pair.executor.handle_frame(t0(), frame(&pair.stream, body)).unwrap();
        assert!(is_reset(&frames_e(&mut pair.executor, t0())[0], &pair.stream));
    }
    // Neither an acknowledgement nor a reset gets a reply, or two endpoints would never stop.
    for body in [Body::Ack, Body::Reset { reason: "x".into() }] {
        pair.executor.handle_frame(t0(), frame(&pair.stream, body)).unwrap();
        assert!(frames_e(&mut pair.executor, t0()).is_empty());
    }
    assert!(events_e(&mut pair.executor).is_empty());
    assert_eq!(pair.harness.open(t0()), Err(OpenError::AlreadyOpened));
}

#[test]
fn invalid_frame_is_dropped_without_side_effects() {
    let mut by = Bystander::new();
    let big = data(&by.pair.stream, 0, &vec![0; 300 * 1024]);
    let executor = &mut by.pair.executor;
    assert!(matches!(executor.handle_frame(t0(), big.clone()), Err(FrameError::TooLong { .. })));
    assert!(executor.handle_frame(t0(), Bytes::from_static(b"{\"id\":1}")).is_err());
    assert!(executor.handle_frame(t0(), Bytes::new()).is_err());
    assert!(events_e(executor).is_empty() && frames_e(executor, t0()).is_empty());
    assert!(by.pair.harness.handle_frame(t0(), big).is_err());
    by.pair.prove();
    by.assert_well();
}

#[test]
fn eight_failed_handshakes_close_the_socket_once() {
    let mut executor = executor(Config::default());
    let fail = |executor: &mut Executor, number: u32| {
        let stream = StreamId::new(&format!("s{number}")).unwrap();
        let payload = Bytes::from(vec![0; 4000]);
        executor.handle_frame(t0(), frame(&stream, Body::Handshake { payload })).unwrap();
        events_e(executor)
    };
    for number in 0..7 {
        assert!(matches!(fail(&mut executor, number)[..], [Event::HandshakeFailed { .. }]));
    }
    assert!(matches!(
        fail(&mut executor, 7)[..],
        [Event::HandshakeFailed { .. }, Event::PhysicalClose]
    ));
    // Until the socket is closed, nothing more is taken from it.
    assert!(fail(&mut executor, 8).is_empty());
    let (_, first) = opening(&mut harness(2, Config::default()));
    executor.handle_frame(t0(), first.clone()).unwrap();
    assert!(executor.poll_event().is_none());
    // A new socket starts over.
    executor.handle_disconnected(t0());
    executor.handle_connected(t0());
    executor.handle_frame(t0(), first).unwrap();
    assert!(matches!(executor.poll_event(), Some(Event::AuthorizeRequest { .. })));
}

#[test]
fn each_verdict_opens_or_closes_the_stream() {
    let begin = |seed| {
        let mut executor = executor(Config::default());
        let (stream, first) = opening(&mut harness(seed, Config::default()));
        executor.handle_frame(t0(), first).unwrap();
        let Some(Event::AuthorizeRequest { generation, .. }) = executor.poll_event() else {
            panic!()
        };
        (executor, stream, generation)
    };
    // No verdict in time.
    let (mut executor, stream, generation) = begin(2);
    assert_eq!(executor.poll_timeout(), Some(t0() + ms(10_000)));
    executor.handle_timeout(t0() + ms(10_000));
    let late = CloseCause::AuthorizationTimeout;
    assert_eq!(closed_by(&events_e(&mut executor)), Some(late));
    let verdict = Verdict::Allowed;
    let allowed = executor.authorize(t0(), &stream, generation, verdict);
    assert_eq!(allowed, Err(StaleVerdict));

    // Denied, or no registry to ask.
    for (verdict, cause) in
        [(Verdict::Denied, CloseCause::Denied), (Verdict::Unavailable, CloseCause::Unavailable)]
    {
        let (mut executor, stream, generation) = begin(3);
        executor.authorize(t0(), &stream, generation, verdict).unwrap();
        assert_eq!(closed_by(&events_e(&mut executor)), Some(cause));
        assert!(is_reset(&frames_e(&mut executor, t0())[0], &stream));
        assert_eq!(executor.stream_count(), 0);
    }

    // For another life of the stream, or twice.
    let (mut executor, stream, generation) = begin(4);
    let (_, _, other) = {
        let (stream, first) = opening(&mut harness(5, Config::default()));
        executor.handle_frame(t0(), first).unwrap();
        let Some(Event::AuthorizeRequest { generation, .. }) = executor.poll_event() else {
            panic!()
        };
        ((), stream, generation)
    };
    assert_eq!(executor.authorize(t0(), &stream, other, Verdict::Allowed), Err(StaleVerdict));
    executor.authorize(t0(), &stream, generation, Verdict::Allowed).unwrap();
    assert_eq!(executor.authorize(t0(), &stream, generation, Verdict::Denied), Err(StaleVerdict));
}

#[test]
fn eight_denials_close_the_socket_but_unavailable_verdicts_do_not() {
    for (verdict, closes) in [(Verdict::Denied, true), (Verdict::Unavailable, false)] {
        let mut executor = executor(Config::default());
        for seed in 0..8 {
            let (stream, first) = opening(&mut harness(400 + seed, Config::default()));
            executor.handle_frame(t0(), first).unwrap();
            let Some(Event::AuthorizeRequest { generation, .. }) = executor.poll_event() else {
                panic!()
            };
            executor.authorize(t0(), &stream, generation, verdict).unwrap();
            let closed = events_e(&mut executor).contains(&Event::PhysicalClose);
            assert_eq!(closed, closes && seed == 7);
        }
    }
}

#[test]
fn at_most_32_handshakes_await_a_verdict() {
    let mut executor = executor(Config::default());
    for seed in 0..33 {
        let (stream, first) = opening(&mut harness(500 + seed, Config::default()));
        executor.handle_frame(t0(), first).unwrap();
        let asked = executor.poll_event().is_some();
        assert_eq!(asked, seed < 32);
        assert_eq!(frames_e(&mut executor, t0()).iter().any(|f| is_reset(f, &stream)), !asked);
    }
}

#[test]
fn unanswered_handshake_times_out() {
    let mut harness = harness(2, Config::default());
    harness.open(t0()).unwrap();
    frames_h(&mut harness, t0());
    harness.handle_timeout(t0() + ms(30_000));
    assert_eq!(closed_by(&events_h(&mut harness)), Some(CloseCause::HandshakeTimeout));
    assert!(harness.poll_timeout().is_none());
}

#[test]
fn overlong_authorization_is_not_sent() {
    for (len, fine) in [(0, false), (1, true), (4096, true), (4097, false)] {
        let mode = harness_mode_with(
            identity(0).public_key(),
            ENVIRONMENT,
            REGISTRATION,
            &"x".repeat(len),
        );
        let mut harness = harness_as(2, Config::default(), mode);
        assert_eq!(harness.open(t0()).is_ok(), fine, "{len}");
    }
}

#[test]
fn ack_of_an_unsent_segment_ends_the_stream() {
    for (ack, ack_bits) in [(5, 0), (0, 0b1000), (u32::MAX, u32::MAX)] {
        let mut pair = Pair::open(&Config::default());
        pair.prove();
        let lie = Frame::new(pair.stream.clone(), ack, ack_bits, Body::Heartbeat).encode();
        pair.executor.handle_frame(pair.now, lie).unwrap();
        let cause = closed_by(&events_e(&mut pair.executor));
        let Some(CloseCause::Protocol(ProtocolError::AckOfUnsent { .. })) = cause else {
            panic!("{cause:?}");
        };
    }
}

#[test]
fn clock_jump_ends_no_stream() {
    let mut pair = Pair::open(&Config::default());
    pair.prove();
    // Something is in flight and lost when the machine sleeps for a day.
    pair.harness.send(Bytes::from_static(b"before")).unwrap();
    frames_h(&mut pair.harness, pair.now);
    pair.now += ms(24 * 3600 * 1000);
    pair.executor.handle_timeout(pair.now);
    pair.harness.handle_timeout(pair.now);
    // One heartbeat, not a day's worth.
    let beats = frames_e(&mut pair.executor, pair.now);
    assert_eq!(kinds(&beats), [BodyKind::Heartbeat]);
    pair.pass(ms(2000));
    assert_eq!(pair.executor_messages(), ["before"]);

    // And a clock that goes back is not believed.
    let later = pair.now;
    pair.harness.handle_timeout(later);
    pair.executor.handle_timeout(later);
    pair.now -= ms(3_000_000);
    pair.harness.send(Bytes::from_static(b"back")).unwrap();
    pair.run();
    assert_eq!(pair.executor_messages(), ["back"]);
    assert!(pair.harness.poll_timeout().unwrap() >= later);
    pair.now = later;
    pair.pass(ms(1000));
    assert_eq!(pair.harness.stats().unwrap().in_flight_segments, 0);
    assert!(pair.executor_events.is_empty() && pair.harness_events.is_empty());
}

#[test]
fn floods_get_bounded_replies() {
    let mut executor = executor(Config::default());
    for number in 0..10_000 {
        let stream = StreamId::new(&format!("s{number}")).unwrap();
        executor.handle_frame(t0(), data(&stream, 3, b"x")).unwrap();
    }
    assert_eq!(frames_e(&mut executor, t0()).len(), 256);
    assert_eq!(executor.stream_count(), 0);
}
