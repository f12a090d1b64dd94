//! A model of a server with its ring, a network that loses, repeats and reorders, and a consumer.

use std::collections::VecDeque;

use codex_exec_server_protocol::process::ProcessOutputChunk;
use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone, PartialEq)]
enum Told {
    Output(Vec<u8>),
    Lost(u64, Option<u64>),
    Exited(i32),
    Closed,
    Failed,
}

fn take_all(track: &mut Track) -> Vec<Told> {
    std::iter::from_fn(|| track.delivery.pop())
        .map(|event| match event {
            ProcessEvent::Output { bytes, .. } => Told::Output(bytes.to_vec()),
            ProcessEvent::Lost(Lost::Output { chunks, bytes, .. }) => Told::Lost(chunks, bytes),
            ProcessEvent::Lost(other) => panic!("{other}"),
            ProcessEvent::Exited(status) => Told::Exited(status.code),
            ProcessEvent::Closed => Told::Closed,
            ProcessEvent::Failed(_) => Told::Failed,
        })
        .collect()
}

fn track() -> Track {
    Track::new("p".into(), 1 << 20, 0, false)
}

fn exit(code: i32) -> ExitStatus {
    ExitStatus { code, sandbox_denied: false }
}

fn out(track: &mut Track, seq: u64, text: &str) -> Taken {
    track.output(Some(seq), OutputStream::Stdout, Bytes::copy_from_slice(text.as_bytes()))
}

fn answer(chunks: &[(u64, &str)], next_seq: u64) -> ReadResponse {
    ReadResponse {
        chunks: chunks
            .iter()
            .map(|&(seq, text)| ProcessOutputChunk {
                seq,
                stream: OutputStream::Stdout,
                chunk: text.as_bytes().into(),
            })
            .collect(),
        next_seq,
        ..ReadResponse::default()
    }
}

fn said(text: &str) -> Told {
    Told::Output(text.as_bytes().to_vec())
}

#[test]
fn out_of_order_and_repeated_events_come_in_order_once() {
    let mut track = track();
    track.closed(Some(4));
    track.exited(Some(2), exit(3));
    out(&mut track, 3, "late");
    assert_eq!(take_all(&mut track), []);
    assert_eq!(track.exit(), Some(exit(3)), "known before its turn");
    assert_eq!(track.need(), Need::Soon);
    out(&mut track, 1, "a");
    out(&mut track, 1, "a");
    out(&mut track, 3, "late");
    assert_eq!(take_all(&mut track), [said("a"), Told::Exited(3), said("late"), Told::Closed]);
    assert_eq!(track.need(), Need::Nothing);
}

#[test]
fn a_close_without_number_is_confirmed_by_a_read() {
    let mut track = track();
    track.closed(None);
    track.exited(Some(2), exit(0));
    assert_eq!(track.need(), Need::Now);
    let chunks = answer(&[(1, "a")], 2);
    track.read(0, ReadResponse { exited: true, exit_code: Some(0), closed: true, ..chunks });
    assert_eq!(track.need(), Need::Now);
    let nothing = answer(&[], 3);
    track.read(2, ReadResponse { exited: true, exit_code: Some(0), closed: true, ..nothing });
    assert_eq!(take_all(&mut track), [said("a"), Told::Exited(0), Told::Closed]);
}

#[test]
fn events_without_any_number_come_as_they_arrive() {
    let mut track = track();
    let mut say = |text: &'static str| {
        track.output(None, OutputStream::Pty, Bytes::from_static(text.as_bytes()))
    };
    say("a");
    say("b");
    track.exited(None, exit(1));
    track.closed(None);
    assert_eq!(take_all(&mut track), [said("a"), said("b"), Told::Exited(1)]);
    track.gone();
    assert_eq!(take_all(&mut track), [Told::Closed]);
}

#[test]
fn what_the_server_dropped_is_told_in_its_place() {
    let mut track = track();
    out(&mut track, 1, "a");
    track.reconnected();
    let mut cut = answer(&[(5, "e"), (6, "f")], 7);
    cut.dropped_bytes = 300;
    track.read(1, cut);
    track.read(6, answer(&[], 7));
    assert_eq!(take_all(&mut track), [said("a"), Told::Lost(3, Some(300)), said("e"), said("f")]);
    assert_eq!(track.need(), Need::Nothing);
}

#[test]
fn an_exit_that_only_a_read_told_is_found_in_its_place() {
    let mut track = track();
    track.reconnected();
    let exited = |read| ReadResponse { exited: true, exit_code: Some(9), ..read };
    track.read(0, exited(answer(&[(1, "a"), (3, "b")], 4)));
    track.read(3, exited(answer(&[], 4)));
    assert_eq!(take_all(&mut track), [said("a"), Told::Exited(9), said("b")]);
    track.exited(Some(2), exit(9));
    track.closed(Some(4));
    assert_eq!(take_all(&mut track), [Told::Closed]);
}

#[test]
fn a_hole_that_was_not_the_exit_is_told_when_that_is_known() {
    let mut track = track();
    track.reconnected();
    let exited = |read| ReadResponse { exited: true, exit_code: Some(9), closed: true, ..read };
    track.read(0, exited(answer(&[(2, "b")], 3)));
    track.read(2, exited(answer(&[], 5)));
    assert_eq!(
        take_all(&mut track),
        [Told::Exited(9), said("b"), Told::Lost(1, None), Told::Closed]
    );
}

#[test]
fn a_forgotten_process_fails_unless_its_close_is_known() {
    let mut lost = track();
    lost.reconnected();
    lost.gone();
    assert_eq!(take_all(&mut lost), [Told::Failed]);

    let mut gap = track();
    out(&mut gap, 3, "c");
    gap.exited(Some(4), exit(0));
    gap.closed(Some(5));
    gap.gone();
    assert_eq!(take_all(&mut gap), [Told::Lost(2, None), said("c"), Told::Exited(0), Told::Closed]);
}

#[test]
fn a_full_window_drops_notifications_and_reads_them_later() {
    let mut track = Track::new("p".into(), 1000, 0, false);
    assert_eq!(out(&mut track, 1, &"x".repeat(800)), Taken::Yes);
    assert_eq!(out(&mut track, 2, &"y".repeat(800)), Taken::Later);
    assert_eq!(out(&mut track, 3, "z"), Taken::Yes, "there is room for a small one");
    assert_eq!(track.need(), Need::Nothing, "not before the consumer has caught up");
    assert_eq!(take_all(&mut track).len(), 1);
    assert_eq!(track.need(), Need::Now);
    track.read(1, answer(&[(2, "yy")], 3));
    assert_eq!(take_all(&mut track), [said("yy"), said("z")]);
    assert_eq!(track.need(), Need::Nothing);
}

#[test]
fn an_exit_is_learned_after_a_reconnect_though_nobody_takes_output() {
    let mut track = Track::new("p".into(), 1000, 0, false);
    out(&mut track, 1, &"x".repeat(900));
    track.reconnected();
    assert_eq!((track.need(), track.read_size()), (Need::Now, 1));
    let read = answer(&[(2, "y")], 3);
    track.read(1, ReadResponse { exited: true, exit_code: Some(7), ..read });
    assert_eq!(track.exit(), Some(exit(7)));
    assert_eq!(track.need(), Need::Nothing);
}

/// What the server does with one process, and what the network does with what it says.
#[derive(Debug, Clone, Copy)]
enum Step {
    Publish,
    /// Delivers a notification that is under way, not always the oldest.
    Deliver(usize),
    Repeat(usize),
    Disconnect,
    Consume(usize),
    Read,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => Just(Step::Publish),
        5 => (0usize..4).prop_map(Step::Deliver),
        1 => (0usize..4).prop_map(Step::Repeat),
        1 => Just(Step::Disconnect),
        3 => (1usize..4).prop_map(Step::Consume),
        3 => Just(Step::Read),
    ];
    proptest::collection::vec(step, 0..200)
}

#[derive(Debug, Clone)]
enum Said {
    Output(Vec<u8>),
    Exited,
    Closed,
}

struct Server {
    script: Vec<Said>,
    published: usize,
    numbered_close: bool,
}

impl Server {
    fn read(&self, after: u64, max: u64) -> ReadResponse {
        let published = &self.script[..self.published];
        let mut chunks = Vec::new();
        let mut bytes = 0;
        for (at, said) in published.iter().enumerate() {
            let seq = at as u64 + 1;
            if let Said::Output(text) = said
                && seq > after
            {
                if !chunks.is_empty() && bytes + text.len() as u64 > max {
                    break;
                }
                bytes += text.len() as u64;
                let chunk = text.clone().into();
                chunks.push(ProcessOutputChunk { seq, stream: OutputStream::Stdout, chunk });
            }
        }
        let exited = published.iter().any(|said| matches!(said, Said::Exited));
        let closed = published.iter().any(|said| matches!(said, Said::Closed));
        let uncounted = u64::from(closed && !self.numbered_close);
        let next_seq = chunks.last().map_or(self.published as u64 + 1 - uncounted, |c| c.seq + 1);
        ReadResponse {
            chunks,
            next_seq,
            exited,
            exit_code: exited.then_some(5),
            closed,
            ..ReadResponse::default()
        }
    }

    fn notify(&self, track: &mut Track, at: usize) {
        let seq = Some(at as u64 + 1);
        match &self.script[at] {
            Said::Output(text) => {
                track.output(seq, OutputStream::Stdout, Bytes::from(text.clone()));
            }
            Said::Exited => track.exited(seq, exit(5)),
            Said::Closed => track.closed(seq.filter(|_| self.numbered_close)),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]
    #[test]
    fn nothing_is_lost_repeated_or_out_of_order(
        before in 0usize..30,
        after in 0usize..5,
        numbered_close: bool,
        window in 100usize..2000,
        steps in steps(),
    ) {
        let text = |n: usize| Said::Output(format!("<{n}>").repeat(n % 7 + 1).into_bytes());
        let mut script: Vec<Said> = (0..before).map(text).collect();
        script.push(Said::Exited);
        script.extend((before..before + after).map(text));
        script.push(Said::Closed);
        let want: Vec<Told> = script.iter().map(|said| match said {
            Said::Output(text) => Told::Output(text.clone()),
            Said::Exited => Told::Exited(5),
            Said::Closed => Told::Closed,
        }).collect();

        let mut server = Server { script, published: 0, numbered_close };
        let mut track = Track::new("p".into(), window, 0, false);
        let mut network = VecDeque::new();
        let mut got = Vec::new();
        let consume = |track: &mut Track, got: &mut Vec<Told>, n: usize| {
            for _ in 0..n {
                let Some(event) = track.delivery.pop() else { break };
                got.push(match event {
                    ProcessEvent::Output { bytes, .. } => Told::Output(bytes.to_vec()),
                    ProcessEvent::Lost(_) => Told::Lost(0, None),
                    ProcessEvent::Exited(status) => Told::Exited(status.code),
                    ProcessEvent::Closed => Told::Closed,
                    ProcessEvent::Failed(_) => Told::Failed,
                });
            }
        };
        let read = |track: &mut Track, server: &Server| {
            let (after, max) = (track.delivered(), track.read_size());
            track.read(after, server.read(after, max));
        };
        for step in steps {
            match step {
                Step::Publish if server.published < server.script.len() => {
                    network.push_back(server.published);
                    server.published += 1;
                }
                Step::Publish => {}
                Step::Deliver(at) => {
                    if let Some(which) = network.remove(at.min(network.len().saturating_sub(1))) {
                        server.notify(&mut track, which);
                    }
                }
                Step::Repeat(at) => {
                    if let Some(&which) = network.get(at) {
                        server.notify(&mut track, which);
                    }
                }
                Step::Disconnect => {
                    network.clear();
                    track.reconnected();
                }
                Step::Consume(n) => consume(&mut track, &mut got, n),
                Step::Read => {
                    if track.need() != Need::Nothing {
                        read(&mut track, &server);
                    }
                }
            }
        }
        while server.published < server.script.len() {
            network.push_back(server.published);
            server.published += 1;
        }
        for which in network {
            server.notify(&mut track, which);
        }
        for _ in 0..1000 {
            consume(&mut track, &mut got, usize::MAX);
            if track.end().is_some() {
                break;
            }
            prop_assert_ne!(track.need(), Need::Nothing, "stuck");
            read(&mut track, &server);
        }
        prop_assert_eq!(got, want);
    }
}
