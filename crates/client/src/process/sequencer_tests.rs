//! A model of a server with its retained output, a network that loses, repeats and reorders, and a
//! consumer.

use std::collections::VecDeque;

use codex_exec_server_protocol::process::ProcessOutputChunk;
use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone, PartialEq)]
enum Delivered {
    Output(Vec<u8>),
    Lost(u64, Option<u64>),
    Exited(i32),
    Closed,
    Failed,
}

fn take_all(sequencer: &mut EventSequencer) -> Vec<Delivered> {
    std::iter::from_fn(|| sequencer.delivery.pop())
        .map(|event| match event {
            ProcessEvent::Output { bytes, .. } => Delivered::Output(bytes.to_vec()),
            ProcessEvent::Lost(Lost::Output { chunks, bytes, .. }) => {
                Delivered::Lost(chunks, bytes)
            }
            ProcessEvent::Lost(other) => panic!("{other}"),
            ProcessEvent::Exited(status) => Delivered::Exited(status.code),
            ProcessEvent::Closed => Delivered::Closed,
            ProcessEvent::Failed(_) => Delivered::Failed,
        })
        .collect()
}

fn sequencer() -> EventSequencer {
    EventSequencer::new("p".into(), 1 << 20, 0, false)
}

fn exit(code: i32) -> ExitStatus {
    ExitStatus::of_code(code)
}

fn out(sequencer: &mut EventSequencer, seq: u64, text: &str) -> Intake {
    sequencer.output(Some(seq), OutputStream::Stdout, Bytes::copy_from_slice(text.as_bytes()))
}

fn response(chunks: &[(u64, &str)], next_seq: u64) -> ReadResponse {
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

fn output(text: &str) -> Delivered {
    Delivered::Output(text.as_bytes().to_vec())
}

#[test]
fn out_of_order_and_repeated_events_are_delivered_in_order_once() {
    let mut sequencer = sequencer();
    sequencer.closed(Some(4));
    sequencer.exited(Some(2), exit(3));
    out(&mut sequencer, 3, "late");
    assert_eq!(take_all(&mut sequencer), []);
    assert_eq!(sequencer.exit(), Some(exit(3)), "known before its turn");
    assert_eq!(sequencer.need(), Need::Soon);
    out(&mut sequencer, 1, "a");
    out(&mut sequencer, 1, "a");
    out(&mut sequencer, 3, "late");
    assert_eq!(
        take_all(&mut sequencer),
        [output("a"), Delivered::Exited(3), output("late"), Delivered::Closed]
    );
    assert_eq!(sequencer.need(), Need::Nothing);
}

#[test]
fn a_close_without_number_is_confirmed_by_a_read() {
    let mut sequencer = sequencer();
    sequencer.closed(None);
    sequencer.exited(Some(2), exit(0));
    assert_eq!(sequencer.need(), Need::Now);
    let chunks = response(&[(1, "a")], 2);
    sequencer.read(0, ReadResponse { exited: true, exit_code: Some(0), closed: true, ..chunks });
    assert_eq!(sequencer.need(), Need::Now);
    let nothing = response(&[], 3);
    sequencer.read(2, ReadResponse { exited: true, exit_code: Some(0), closed: true, ..nothing });
    assert_eq!(take_all(&mut sequencer), [output("a"), Delivered::Exited(0), Delivered::Closed]);
}

#[test]
fn unnumbered_events_are_delivered_as_they_arrive() {
    let mut sequencer = sequencer();
    let mut say = |text: &'static str| {
        sequencer.output(None, OutputStream::Pty, Bytes::from_static(text.as_bytes()))
    };
    say("a");
    say("b");
    sequencer.exited(None, exit(1));
    sequencer.closed(None);
    assert_eq!(take_all(&mut sequencer), [output("a"), output("b"), Delivered::Exited(1)]);
    sequencer.gone();
    assert_eq!(take_all(&mut sequencer), [Delivered::Closed]);
}

#[test]
fn dropped_output_is_reported_at_its_position() {
    let mut sequencer = sequencer();
    out(&mut sequencer, 1, "a");
    sequencer.reconnected();
    let mut cut = response(&[(5, "e"), (6, "f")], 7);
    cut.dropped_bytes = 300;
    sequencer.read(1, cut);
    sequencer.read(6, response(&[], 7));
    assert_eq!(
        take_all(&mut sequencer),
        [output("a"), Delivered::Lost(3, Some(300)), output("e"), output("f")]
    );
    assert_eq!(sequencer.need(), Need::Nothing);
}

#[test]
fn an_exit_known_only_from_a_read_is_delivered_at_its_position() {
    let mut sequencer = sequencer();
    sequencer.reconnected();
    let exited = |read| ReadResponse { exited: true, exit_code: Some(9), ..read };
    sequencer.read(0, exited(response(&[(1, "a"), (3, "b")], 4)));
    sequencer.read(3, exited(response(&[], 4)));
    assert_eq!(take_all(&mut sequencer), [output("a"), Delivered::Exited(9), output("b")]);
    sequencer.exited(Some(2), exit(9));
    sequencer.closed(Some(4));
    assert_eq!(take_all(&mut sequencer), [Delivered::Closed]);
}

#[test]
fn a_gap_that_was_not_the_exit_is_reported_once_that_is_known() {
    let mut sequencer = sequencer();
    sequencer.reconnected();
    let exited = |read| ReadResponse { exited: true, exit_code: Some(9), closed: true, ..read };
    sequencer.read(0, exited(response(&[(2, "b")], 3)));
    sequencer.read(2, exited(response(&[], 5)));
    assert_eq!(
        take_all(&mut sequencer),
        [Delivered::Exited(9), output("b"), Delivered::Lost(1, None), Delivered::Closed]
    );
}

#[test]
fn a_forgotten_process_fails_unless_its_close_is_known() {
    let mut lost = sequencer();
    lost.reconnected();
    lost.gone();
    assert_eq!(take_all(&mut lost), [Delivered::Failed]);

    let mut gap = sequencer();
    out(&mut gap, 3, "c");
    gap.exited(Some(4), exit(0));
    gap.closed(Some(5));
    gap.gone();
    assert_eq!(
        take_all(&mut gap),
        [Delivered::Lost(2, None), output("c"), Delivered::Exited(0), Delivered::Closed]
    );
}

#[test]
fn output_beyond_the_window_is_dropped_and_read_later() {
    let mut sequencer = EventSequencer::new("p".into(), 1000, 0, false);
    assert_eq!(out(&mut sequencer, 1, &"x".repeat(800)), Intake::Accepted);
    assert_eq!(out(&mut sequencer, 2, &"y".repeat(800)), Intake::ReadLater);
    assert_eq!(out(&mut sequencer, 3, "z"), Intake::Accepted, "there is room for a small one");
    assert_eq!(sequencer.need(), Need::Nothing, "not before the consumer has caught up");
    assert_eq!(take_all(&mut sequencer).len(), 1);
    assert_eq!(sequencer.need(), Need::Now);
    sequencer.read(1, response(&[(2, "yy")], 3));
    assert_eq!(take_all(&mut sequencer), [output("yy"), output("z")]);
    assert_eq!(sequencer.need(), Need::Nothing);
}

#[test]
fn an_exit_is_learned_after_a_reconnect_without_a_consumer() {
    let mut sequencer = EventSequencer::new("p".into(), 1000, 0, false);
    out(&mut sequencer, 1, &"x".repeat(900));
    sequencer.reconnected();
    assert_eq!((sequencer.need(), sequencer.read_size()), (Need::Now, 1));
    let read = response(&[(2, "y")], 3);
    sequencer.read(1, ReadResponse { exited: true, exit_code: Some(7), ..read });
    assert_eq!(sequencer.exit(), Some(exit(7)));
    assert_eq!(sequencer.need(), Need::Nothing);
}

/// Steps of the server and of the network.
#[derive(Debug, Clone, Copy)]
enum Step {
    Publish,
    /// Delivers a notification, not always the oldest.
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
enum Published {
    Output(Vec<u8>),
    Exited,
    Closed,
}

struct Server {
    script: Vec<Published>,
    published: usize,
    numbered_close: bool,
}

impl Server {
    fn read(&self, after: u64, max: u64) -> ReadResponse {
        let published = &self.script[..self.published];
        let mut chunks = Vec::new();
        let mut bytes = 0;
        for (at, published) in published.iter().enumerate() {
            let seq = at as u64 + 1;
            if let Published::Output(text) = published
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
        let exited = published.iter().any(|published| matches!(published, Published::Exited));
        let closed = published.iter().any(|published| matches!(published, Published::Closed));
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

    fn notify(&self, sequencer: &mut EventSequencer, at: usize) {
        let seq = Some(at as u64 + 1);
        match &self.script[at] {
            Published::Output(text) => {
                sequencer.output(seq, OutputStream::Stdout, Bytes::from(text.clone()));
            }
            Published::Exited => sequencer.exited(seq, exit(5)),
            Published::Closed => sequencer.closed(seq.filter(|_| self.numbered_close)),
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
        let text = |n: usize| Published::Output(format!("<{n}>").repeat(n % 7 + 1).into_bytes());
        let mut script: Vec<Published> = (0..before).map(text).collect();
        script.push(Published::Exited);
        script.extend((before..before + after).map(text));
        script.push(Published::Closed);
        let expected: Vec<Delivered> = script.iter().map(|published| match published {
            Published::Output(text) => Delivered::Output(text.clone()),
            Published::Exited => Delivered::Exited(5),
            Published::Closed => Delivered::Closed,
        }).collect();

        let mut server = Server { script, published: 0, numbered_close };
        let mut sequencer = EventSequencer::new("p".into(), window, 0, false);
        let mut network = VecDeque::new();
        let mut delivered = Vec::new();
        let consume = |sequencer: &mut EventSequencer, delivered: &mut Vec<Delivered>, n: usize| {
            for _ in 0..n {
                let Some(event) = sequencer.delivery.pop() else { break };
                delivered.push(match event {
                    ProcessEvent::Output { bytes, .. } => Delivered::Output(bytes.to_vec()),
                    ProcessEvent::Lost(_) => Delivered::Lost(0, None),
                    ProcessEvent::Exited(status) => Delivered::Exited(status.code),
                    ProcessEvent::Closed => Delivered::Closed,
                    ProcessEvent::Failed(_) => Delivered::Failed,
                });
            }
        };
        let read = |sequencer: &mut EventSequencer, server: &Server| {
            let (after, max) = (sequencer.delivered(), sequencer.read_size());
            sequencer.read(after, server.read(after, max));
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
                        server.notify(&mut sequencer, which);
                    }
                }
                Step::Repeat(at) => {
                    if let Some(&which) = network.get(at) {
                        server.notify(&mut sequencer, which);
                    }
                }
                Step::Disconnect => {
                    network.clear();
                    sequencer.reconnected();
                }
                Step::Consume(n) => consume(&mut sequencer, &mut delivered, n),
                Step::Read => {
                    if sequencer.need() != Need::Nothing {
                        read(&mut sequencer, &server);
                    }
                }
            }
        }
        while server.published < server.script.len() {
            network.push_back(server.published);
            server.published += 1;
        }
        for which in network {
            server.notify(&mut sequencer, which);
        }
        for _ in 0..1000 {
            consume(&mut sequencer, &mut delivered, usize::MAX);
            if sequencer.end().is_some() {
                break;
            }
            prop_assert_ne!(sequencer.need(), Need::Nothing, "stuck");
            read(&mut sequencer, &server);
        }
        prop_assert_eq!(delivered, expected);
    }
}
