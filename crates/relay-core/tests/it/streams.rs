//! Streams between two endpoints that follow the protocol.

use bytes::Bytes;
use codex_exec_relay_core::*;

use crate::util::*;

fn data_frames(frames: &[Bytes]) -> Vec<Data> {
    frames
        .iter()
        .filter_map(|frame| match decode(frame).body {
            Body::Data(data) => Some(data),
            _ => None,
        })
        .collect()
}

#[test]
fn messages_of_every_size_pass_both_ways() {
    let mut pair = Pair::open(&Config::default());
    for len in [1, 4, 61_435, 61_436, 61_437, 122_876, 1 << 20, 5 << 20] {
        let message: Bytes = (0..len).map(|at| at as u8).collect();
        pair.harness.send(message.clone()).unwrap();
        pair.executor.send(&pair.stream, message.clone()).unwrap();
        pair.pass(ms(100));
        assert!(pair.executor_messages() == [message.clone()], "{len} up");
        assert!(pair.harness_messages() == [message], "{len} down");
    }
    let stats = pair.executor.stats(&pair.stream).unwrap();
    assert_eq!((stats.assembling_bytes, stats.queued_bytes, stats.in_flight_bytes), (0, 0, 0));
}

#[test]
fn maximum_message_passes_and_a_longer_one_is_rejected() {
    let config = Config { max_message_len: 100_000, ..Config::default() };
    let mut pair = Pair::open(&config);
    let longest = Bytes::from(vec![1; 100_000]);
    pair.harness.send(longest.clone()).unwrap();
    pair.run();
    assert!(pair.executor_messages() == [longest]);
    let error = SendError::MessageLength { len: 100_001, max: 100_000 };
    assert_eq!(pair.harness.send(vec![1; 100_001].into()), Err(error));
    let error = SendError::MessageLength { len: 0, max: 100_000 };
    assert_eq!(pair.harness.send(Bytes::new()), Err(error));

    // A peer with other limits gets a reset.
    let mut tight = Pair::begin(
        executor(Config { max_message_len: 10, ..Config::default() }),
        harness(2, Config::default()),
    );
    tight.run();
    tight.executor_events.clear();
    tight.harness.send(Bytes::from_static(b"eleven bytes")).unwrap();
    tight.run();
    let cause = ProtocolError::MessageLength { len: 12, max: 10 };
    assert_eq!(
        tight.executor_events,
        [Event::Closed { stream: tight.stream.clone(), cause: cause.into() }]
    );
    assert!(matches!(tight.harness_events.pop(), Some(Event::Reset { .. })));
}

#[test]
fn unfinished_messages_are_bounded_over_all_streams() {
    let config = Config { max_assembling_bytes: 100_000, ..Config::default() };
    let mut pair = Pair::open(&config);
    pair.harness.send(vec![1; 200_000].into()).unwrap();
    pair.run();
    let cause = ProtocolError::AssemblingLimit { max: 100_000 };
    let stream = pair.stream.clone();
    assert_eq!(pair.executor_events, [Event::Closed { stream, cause: cause.into() }]);
}

#[test]
fn full_send_buffer_blocks_until_writable() {
    let mut pair = Pair::open(&Config { send_buffer: 100_000, ..Config::default() });
    let message = Bytes::from(vec![1; 40_000]);
    for _ in 0..3 {
        pair.executor.send(&pair.stream, message.clone()).unwrap();
    }
    assert_eq!(pair.executor.send(&pair.stream, message.clone()), Err(SendError::Blocked));
    assert!(pair.executor.poll_event().is_none());
    // One message gone: 80,000 wait, still above half.
    pair.executor.poll_transmit(t0()).unwrap();
    pair.executor.poll_transmit(t0()).unwrap();
    pair.executor.poll_transmit(t0()).unwrap();
    let writable = Event::Writable { stream: pair.stream.clone() };
    assert_eq!(events_e(&mut pair.executor), [writable]);
    pair.executor.send(&pair.stream, message).unwrap();
    frames_e(&mut pair.executor, t0());
    assert!(pair.executor.poll_event().is_none(), "only a refused sender gets the event");
}

#[test]
fn streams_take_turns() {
    let mut pair = Pair::open(&Config::default());
    let mut other = harness(3, Config::default());
    let second = other.open(t0()).unwrap();
    for frame in frames_h(&mut other, t0()) {
        pair.executor.handle_frame(t0(), frame).unwrap();
    }
    pair.drain_events();
    frames_e(&mut pair.executor, t0());

    pair.executor.send(&pair.stream, vec![1; 10 << 20].into()).unwrap();
    for _ in 0..5 {
        pair.executor.poll_transmit(t0()).unwrap();
    }
    pair.executor.send(&second, Bytes::from_static(b"small")).unwrap();
    let next: Vec<_> = (0..2).map(|_| pair.executor.poll_transmit(t0()).unwrap()).collect();
    let streams: Vec<_> = next.iter().map(|frame| decode(frame).stream_id).collect();
    assert!(streams.contains(&second), "a small message waits for one frame at most");
}

#[test]
fn frames_stay_below_the_limit() {
    let mut pair = Pair::open(&Config::default());
    pair.executor.send(&pair.stream, vec![1; 3 << 20].into()).unwrap();
    for frame in frames_e(&mut pair.executor, t0()) {
        assert!(frame.len() <= 61_440 + 16 + 128, "{}", frame.len());
    }
}

#[test]
fn acks_are_piggybacked_or_sent_alone_and_never_acked() {
    let mut pair = Pair::open(&Config::default());
    pair.harness.send(Bytes::from_static(b"one")).unwrap();
    pair.run();
    // Not at once: something may come to ride on.
    assert_eq!(pair.executor.poll_timeout(), Some(t0() + ms(20)));
    pair.executor.handle_timeout(t0() + ms(20));
    let alone = frames_e(&mut pair.executor, t0() + ms(20));
    assert_eq!(kinds(&alone), [BodyKind::Ack]);
    let ack = decode(&alone[0]);
    assert_eq!((ack.ack, ack.ack_bits), (0, 0));
    pair.harness.handle_frame(t0() + ms(20), alone[0].clone()).unwrap();
    assert!(frames_h(&mut pair.harness, t0() + ms(40)).is_empty());
    assert_eq!(pair.harness.stats().unwrap().in_flight_segments, 0);

    pair.harness.send(Bytes::from_static(b"two")).unwrap();
    for frame in frames_h(&mut pair.harness, t0() + ms(50)) {
        pair.executor.handle_frame(t0() + ms(50), frame).unwrap();
    }
    pair.executor.send(&pair.stream, Bytes::from_static(b"answer")).unwrap();
    let riding = frames_e(&mut pair.executor, t0() + ms(50));
    assert_eq!(kinds(&riding), [BodyKind::Data]);
    assert_eq!(decode(&riding[0]).ack, 1);
    pair.executor.handle_timeout(t0() + ms(100));
    assert!(frames_e(&mut pair.executor, t0() + ms(100)).is_empty());
}

#[test]
fn segment_zero_always_gets_an_explicit_ack() {
    let mut pair = Pair::open(&Config::default());
    pair.harness.send(Bytes::from_static(b"one")).unwrap();
    for frame in frames_h(&mut pair.harness, t0()) {
        pair.executor.handle_frame(t0(), frame).unwrap();
    }
    pair.executor.send(&pair.stream, Bytes::from_static(b"answer")).unwrap();
    assert_eq!(kinds(&frames_e(&mut pair.executor, t0())), [BodyKind::Data]);
    pair.executor.handle_timeout(t0() + ms(20));
    assert_eq!(kinds(&frames_e(&mut pair.executor, t0() + ms(20))), [BodyKind::Ack]);
}

#[test]
fn gap_is_reported_and_retransmitted() {
    let mut pair = Pair::open(&Config::default());
    pair.prove();
    for number in 0..6u8 {
        pair.harness.send(vec![number].into()).unwrap();
    }
    let frames = frames_h(&mut pair.harness, pair.now);
    for frame in [&frames[0], &frames[2], &frames[4]] {
        pair.executor.handle_frame(pair.now, frame.clone()).unwrap();
    }
    let replies = frames_e(&mut pair.executor, pair.now);
    let ack = decode(replies.last().unwrap());
    // 0 was "ping"; 1 arrived, 2 did not, 3 did, 4 did not, 5 did.
    assert_eq!((ack.ack, ack.ack_bits), (1, 0b1010));
    for frame in replies {
        pair.harness.handle_frame(pair.now, frame).unwrap();
    }
    let again = data_frames(&frames_h(&mut pair.harness, pair.now));
    assert_eq!(again.iter().map(|data| data.seq).collect::<Vec<_>>(), [2, 4]);
    let original = data_frames(&frames);
    assert!(again[0] == original[1] && again[1] == original[3], "the same bytes again");
}

#[test]
fn unacked_segments_are_retransmitted_until_the_stream_stalls() {
    let mut pair = Pair::open(&Config::default());
    pair.prove();
    pair.harness.send(Bytes::from_static(b"lost")).unwrap();
    let first = data_frames(&frames_h(&mut pair.harness, pair.now));
    let (start, mut times) = (pair.now, Vec::new());
    let cause = loop {
        let at = pair.harness.poll_timeout().unwrap();
        pair.harness.handle_timeout(at);
        for data in data_frames(&frames_h(&mut pair.harness, at)) {
            assert!(data == first[0]);
            times.push((at - start).as_millis());
        }
        if let Some(Event::Closed { cause, .. }) = pair.harness.poll_event() {
            break cause;
        }
    };
    assert_eq!(times, [500, 1500, 3500, 7500, 15_500, 31_500, 61_500]);
    assert_eq!(cause, CloseCause::Stalled);
}

#[test]
fn a_window_bounds_what_is_in_flight() {
    let config = Config { window_segments: 4, record_len: 100, ..Config::default() };
    let mut pair = Pair::open(&config);
    pair.prove();
    pair.executor.send(&pair.stream, vec![1; 1000].into()).unwrap();
    let frames = frames_e(&mut pair.executor, pair.now);
    assert_eq!(frames.len(), 4);
    for frame in frames {
        pair.harness.handle_frame(pair.now, frame).unwrap();
    }
    pair.pass(ms(1000));
    assert_eq!(pair.harness_messages()[0].len(), 1000);
}

#[test]
fn streams_survive_a_new_socket_of_the_harness() {
    let mut pair = Pair::open(&Config::default());
    pair.prove();
    pair.harness.send(Bytes::from_static(b"lost on the way up")).unwrap();
    pair.executor.send(&pair.stream, Bytes::from_static(b"lost on the way down")).unwrap();
    frames_h(&mut pair.harness, pair.now);
    frames_e(&mut pair.executor, pair.now);
    assert!(pair.harness.can_resume());
    pair.harness.handle_disconnected(pair.now);
    pair.harness.send(Bytes::from_static(b"meanwhile")).unwrap();
    assert!(pair.harness.poll_transmit(pair.now).is_none(), "there is no socket");
    pair.now += ms(100);
    pair.harness.handle_connected(pair.now);

    let frames = frames_h(&mut pair.harness, pair.now);
    let first = decode(&frames[0]);
    assert!(matches!(first.body, Body::Resume { next_seq: 2 }));
    for frame in frames {
        pair.executor.handle_frame(pair.now, frame).unwrap();
    }
    pair.run();
    assert_eq!(pair.executor_messages(), ["lost on the way up", "meanwhile"]);
    assert_eq!(pair.harness_messages(), ["lost on the way down"]);
    pair.pass(ms(100));
    assert!(pair.executor_events.is_empty() && pair.harness_events.is_empty());
}

#[test]
fn streams_survive_a_new_socket_of_the_executor() {
    let mut pair = Pair::open(&Config::default());
    pair.prove();
    pair.executor.handle_disconnected(pair.now);
    pair.harness.send(Bytes::from_static(b"to nobody")).unwrap();
    frames_h(&mut pair.harness, pair.now);
    pair.executor.send(&pair.stream, Bytes::from_static(b"later")).unwrap();
    pair.executor.handle_connected(pair.now);
    pair.run();
    assert_eq!(pair.executor_messages(), ["to nobody"]);
    assert_eq!(pair.harness_messages(), ["later"]);
    assert!(pair.executor_events.is_empty() && pair.harness_events.is_empty());
}

#[test]
fn reconnect_retransmits_possibly_lost_segments_at_once() {
    let mut pair = Pair::open(&Config::default());
    pair.prove();
    pair.harness.send(Bytes::from_static(b"lost")).unwrap();
    let first = data_frames(&frames_h(&mut pair.harness, pair.now));
    pair.harness.handle_disconnected(pair.now);
    pair.harness.handle_connected(pair.now);
    let frames = frames_h(&mut pair.harness, pair.now);
    assert_eq!(kinds(&frames)[..2], [BodyKind::Resume, BodyKind::Data]);
    assert!(data_frames(&frames) == first);
}

#[test]
fn resume_is_answered_with_retransmits_and_no_resume() {
    let mut pair = Pair::open(&Config::default());
    pair.prove();
    pair.executor.send(&pair.stream, Bytes::from_static(b"lost")).unwrap();
    let first = data_frames(&frames_e(&mut pair.executor, pair.now));
    let resume = frame(&pair.stream, Body::Resume { next_seq: 1 });
    pair.executor.handle_frame(pair.now, resume.clone()).unwrap();
    let frames = frames_e(&mut pair.executor, pair.now);
    assert_eq!(kinds(&frames), [BodyKind::Data], "the acknowledgement rides");
    assert!(data_frames(&frames) == first);
    // With nothing in flight the acknowledgement goes alone.
    let ack = Frame::new(pair.stream.clone(), 1, 0, Body::Ack).encode();
    pair.executor.handle_frame(pair.now, ack).unwrap();
    pair.executor.handle_frame(pair.now, resume).unwrap();
    assert_eq!(kinds(&frames_e(&mut pair.executor, pair.now)), [BodyKind::Ack]);
}

#[test]
fn unproven_peer_that_reconnects_must_prove_itself() {
    for proves in [true, false] {
        let mut pair = Pair::open(&Config::default());
        pair.executor.send(&pair.stream, Bytes::from_static(b"perhaps lost")).unwrap();
        frames_e(&mut pair.executor, t0());
        let resume = frame(&pair.stream, Body::Resume { next_seq: 3 });
        pair.executor.handle_frame(t0(), resume).unwrap();
        assert!(frames_e(&mut pair.executor, t0()).is_empty());
        if proves {
            pair.executor.handle_frame(t0(), frame(&pair.stream, Body::Ack)).unwrap();
        }
        // Somebody writes, so that it is not the missing first record that ends it.
        pair.harness.send(Bytes::from_static(b"one")).unwrap();
        for frame in frames_h(&mut pair.harness, t0()) {
            pair.executor.handle_frame(t0(), frame).unwrap();
        }
        for second in 0..200 {
            pair.executor.handle_timeout(t0() + ms(second * 1000));
            let frames = frames_e(&mut pair.executor, t0() + ms(second * 1000));
            assert!(data_frames(&frames).is_empty());
        }
        pair.drain_events();
        pair.executor_messages();
        let stream = pair.stream.clone();
        let stalled = Event::Closed { stream, cause: CloseCause::Stalled };
        assert_eq!(pair.executor_events.contains(&stalled), !proves);
    }
}

#[test]
fn no_ack_is_sent_before_segment_zero() {
    let mut pair = Pair::open(&Config::default());
    for message in [&b"zero"[..], b"one", b"two"] {
        pair.harness.send(Bytes::copy_from_slice(message)).unwrap();
    }
    let frames = frames_h(&mut pair.harness, t0());
    for frame in &frames[1..] {
        pair.executor.handle_frame(t0(), frame.clone()).unwrap();
    }
    pair.executor.handle_timeout(t0() + ms(100));
    assert!(frames_e(&mut pair.executor, t0() + ms(100)).is_empty());
    pair.executor.send(&pair.stream, Bytes::from_static(b"hm")).unwrap();
    let out = decode(&frames_e(&mut pair.executor, t0() + ms(100))[0]);
    assert_eq!((out.ack, out.ack_bits), (0, 0));
    pair.executor.handle_frame(t0() + ms(100), frames[0].clone()).unwrap();
    pair.drain_events();
    assert_eq!(pair.executor_messages(), ["zero", "one", "two"]);
}

#[test]
fn unfilled_gap_ends_the_stream() {
    let config = Config { first_record_timeout: None, ..Config::default() };
    let mut pair = Pair::open(&config);
    pair.harness.send(Bytes::from_static(b"lost")).unwrap();
    pair.harness.send(Bytes::from_static(b"found")).unwrap();
    let frames = frames_h(&mut pair.harness, t0());
    pair.executor.handle_frame(t0(), frames[1].clone()).unwrap();
    pair.pass(ms(130_000));
    let cause = CloseCause::Stalled;
    let stream = pair.stream.clone();
    assert_eq!(pair.executor_events, [Event::Closed { stream, cause }]);
}

#[test]
fn detach_timeout_ends_the_stream() {
    let mut pair = Pair::open(&Config::default());
    pair.prove();
    pair.harness.handle_disconnected(pair.now);
    assert_eq!(pair.harness.poll_timeout(), Some(pair.now + ms(300_000)));
    pair.harness.handle_timeout(pair.now + ms(300_000));
    let cause = CloseCause::DetachTimeout;
    assert_eq!(events_h(&mut pair.harness), [Event::Closed { stream: pair.stream, cause }]);
}

#[test]
fn unanswered_resume_is_repeated_until_the_stream_stalls() {
    let mut pair = Pair::open(&Config::default());
    pair.prove();
    pair.harness.handle_disconnected(pair.now);
    pair.harness.handle_connected(pair.now);
    let mut resumes = 0;
    let cause = loop {
        resumes += kinds(&frames_h(&mut pair.harness, pair.now))
            .iter()
            .filter(|kind| **kind == BodyKind::Resume)
            .count();
        pair.now = pair.harness.poll_timeout().unwrap();
        pair.harness.handle_timeout(pair.now);
        if let Some(Event::Closed { cause, .. }) = pair.harness.poll_event() {
            break cause;
        }
    };
    assert_eq!((resumes, cause), (8, CloseCause::Stalled));
}

#[test]
fn restarted_executor_resets_a_resuming_harness() {
    let mut pair = Pair::open(&Config::default());
    pair.prove();
    pair.executor = executor(Config::default());
    pair.harness.handle_disconnected(pair.now);
    pair.harness.handle_connected(pair.now);
    pair.run();
    assert!(matches!(pair.harness_events[..], [Event::Reset { .. }]));
}

#[test]
fn lost_socket_ends_streams_that_cannot_resume() {
    // Before anything was acknowledged, and during the handshake.
    let mut pair = Pair::open(&Config::default());
    pair.harness.send(Bytes::from_static(b"one")).unwrap();
    frames_h(&mut pair.harness, t0());
    assert!(!pair.harness.can_resume());
    let closed = Event::Closed { stream: pair.stream.clone(), cause: CloseCause::Disconnected };
    pair.harness.handle_disconnected(t0());
    assert_eq!(events_h(&mut pair.harness), std::slice::from_ref(&closed));
    pair.executor.handle_disconnected(t0());
    assert_eq!(events_e(&mut pair.executor), [closed]);

    let mut harness = harness(2, Config::default());
    harness.open(t0()).unwrap();
    harness.handle_disconnected(t0());
    let cause = CloseCause::Disconnected;
    let stream = harness.stream().unwrap().clone();
    assert_eq!(events_h(&mut harness), [Event::Closed { stream, cause }]);
}

#[test]
fn idle_stream_sends_heartbeats() {
    let mut pair = Pair::open(&Config::default());
    pair.prove();
    let quiet_since = pair.now;
    let next = pair.executor.poll_timeout().unwrap();
    assert!(next > quiet_since + ms(29_000) && next <= quiet_since + ms(30_000));
    pair.executor.handle_timeout(next);
    let beat = frames_e(&mut pair.executor, next);
    assert_eq!(kinds(&beat), [BodyKind::Heartbeat]);
    assert_eq!(pair.executor.poll_timeout(), Some(next + ms(30_000)));
    pair.harness.handle_frame(next, beat[0].clone()).unwrap();
    assert!(frames_h(&mut pair.harness, next).is_empty(), "a heartbeat is not answered");
}

#[test]
fn idle_timeout_ends_the_stream() {
    let idle_timeout = Some(ms(70_000));
    let mut pair = Pair::open(&Config { idle_timeout, ..Config::default() });
    pair.prove();
    pair.pass(ms(600_000));
    assert!(pair.harness_events.is_empty(), "heartbeats keep it alive");
    let (mut now, mut harness) = (pair.now, pair.harness);
    while let Some(at) = harness.poll_timeout() {
        now = at;
        harness.handle_timeout(at);
    }
    assert!(now <= pair.now + ms(70_000));
    let cause = CloseCause::Idle;
    assert_eq!(events_h(&mut harness), [Event::Closed { stream: pair.stream, cause }]);
}

#[test]
fn close_sends_queued_messages_first() {
    let mut pair = Pair::open(&Config::default());
    pair.prove();
    let last = Bytes::from(vec![9; 2 << 20]);
    pair.executor.send(&pair.stream, last.clone()).unwrap();
    pair.executor.close(&pair.stream);
    assert_eq!(pair.executor.send(&pair.stream, last.clone()), Err(SendError::NotOpen));
    pair.pass(ms(1000));
    assert!(pair.harness_messages() == [last]);
    let stream = pair.stream.clone();
    let cause = CloseCause::Finished;
    assert_eq!(pair.executor_events, [Event::Closed { stream: stream.clone(), cause }]);
    assert_eq!(pair.harness_events, [Event::Reset { stream, reason: "closed".into() }]);
}

#[test]
fn peer_without_acks_never_blocks_sending() {
    let mut pair = Pair::open(&Config { send_buffer: 8 << 20, ..Config::default() });
    for _ in 0..200 {
        pair.executor.send(&pair.stream, vec![1; 30_000].into()).unwrap();
    }
    let frames = frames_e(&mut pair.executor, t0());
    assert_eq!(frames.len(), 200, "all at once");
    let stats = pair.executor.stats(&pair.stream).unwrap();
    assert!(stats.in_flight_bytes <= 256 * 1024, "{stats:?}");
    for frame in &frames {
        assert!(matches!(decode(frame).body, Body::Data(Data { segment_count: 1, .. })));
    }
}

#[test]
fn clear_mode_segments_only_for_acking_peers() {
    let config = Config { segment_len: 1000, ..Config::default() };
    let mut pair = Pair::open_clear(&config);
    let whole = Bytes::from(vec![7; 200_000]);
    pair.harness.send(whole.clone()).unwrap();
    let frames = frames_h(&mut pair.harness, t0());
    assert!(matches!(decode(&frames[0]).body, Body::Data(Data { segment_count: 1, .. })));
    for frame in frames {
        pair.executor.handle_frame(t0(), frame).unwrap();
    }
    let too_long = pair.executor.send(&pair.stream, vec![7; 300_000].into());
    assert!(matches!(too_long, Err(SendError::MessageLength { .. })));
    pair.executor.send(&pair.stream, Bytes::from_static(b"{}")).unwrap();
    pair.pass(ms(100));
    assert!(pair.executor_messages() == [whole]);
    assert_eq!(pair.harness_messages(), ["{}"]);

    let cut: Bytes = (0..300_000u32).map(|at| at as u8).collect();
    pair.executor.send(&pair.stream, cut.clone()).unwrap();
    let first = decode(&pair.executor.poll_transmit(pair.now).unwrap());
    let Body::Data(data) = first.body else { panic!() };
    assert_eq!((data.segment_index, data.segment_count, data.payload.len()), (0, 300, 1000));
    pair.pass(ms(5000));
    assert!(pair.harness_messages() == [cut]);
}

#[test]
fn clear_mode_accepts_unannounced_streams_and_refuses_handshakes() {
    let mut executor = Executor::new(Config::default(), ExecutorMode::Clear, Box::new(Rng(1)));
    let executor = executor.as_mut().unwrap();
    executor.handle_connected(t0());
    let stream = StreamId::new("older").unwrap();
    executor.handle_frame(t0(), data(&stream, 0, b"{\"id\":1}")).unwrap();
    let message = Bytes::from_static(b"{\"id\":1}");
    assert_eq!(
        events_e(executor),
        [Event::Opened { stream: stream.clone() }, Event::Message { stream, message }]
    );
    let other = StreamId::new("other").unwrap();
    let payload = Bytes::from_static(b"noise");
    executor.handle_frame(t0(), frame(&other, Body::Handshake { payload })).unwrap();
    assert!(executor.poll_event().is_none());
    assert_eq!(kinds(&frames_e(executor, t0())), [BodyKind::Reset]);
}

#[test]
fn inconsistent_clear_segments_end_the_stream() {
    let segment = |seq, segment_index, segment_count| {
        let payload = Bytes::from_static(b"part");
        Body::Data(Data { seq, segment_index, segment_count, payload })
    };
    for wrong in [segment(1, 0, 1), segment(1, 1, 4), segment(1, 0, 3)] {
        let mut pair = Pair::open_clear(&Config::default());
        pair.executor.handle_frame(t0(), frame(&pair.stream, segment(0, 0, 3))).unwrap();
        pair.executor.handle_frame(t0(), frame(&pair.stream, wrong)).unwrap();
        let cause = ProtocolError::Segments { seq: 1 }.into();
        let stream = pair.stream.clone();
        assert_eq!(events_e(&mut pair.executor), [Event::Closed { stream, cause }]);
    }
}
