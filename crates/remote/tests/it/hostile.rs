//! A relay that may do anything, and harnesses that do what they should not.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use bytes::Bytes;
use codex_exec_relay_core::{
    Authorization, Body, Data, Frame, FrameLimits, Harness, HarnessMode, NoiseIdentity, StreamId,
};
use codex_exec_remote::{EnvironmentError, NoiseKeyJson, RelayConfig, entropy};
use codex_exec_rpc::Connection;
use serde_json::json;
use tokio::sync::mpsc;
use tokio_websockets::Message;

use crate::cloud::{Cloud, ENVIRONMENT, Mangle};
use crate::ends::{Served, environment, link, registry, serve};

fn decode(frame: &Bytes) -> Frame {
    Frame::decode(frame.clone(), &FrameLimits::default()).unwrap()
}

fn data(frame: &Bytes) -> Option<Data> {
    match decode(frame).body {
        Body::Data(data) => Some(data),
        _ => None,
    }
}

/// Both ends through this relay, and what the test holds of them.
struct Ends {
    cloud: Cloud,
    served: Served,
    harness: Connection,
    executor: Connection,
}

impl Ends {
    async fn through(mangle: Mangle) -> Self {
        let cloud = Cloud::start().await;
        cloud.script(|script| script.mangle = Some(mangle));
        let mut served = serve(environment(&cloud), RelayConfig::default());
        cloud.upgraded(1).await;
        let harness = link(&cloud).dial().await.unwrap();
        let executor = served.connections.recv().await.unwrap();
        Self { cloud, served, harness, executor }
    }

    /// Acknowledgements ride on answers: from then on each end knows that the other acknowledges.
    async fn prove(&mut self) {
        for _ in 0..3 {
            self.harness.outbound().send("ping").await.unwrap();
            self.executor.next().await.unwrap().unwrap();
            self.executor.outbound().send("pong").await.unwrap();
            self.harness.next().await.unwrap().unwrap();
        }
    }

    /// Messages of many sizes, both ways at once: all arrive, once, in order.
    async fn all_arrives(&mut self) {
        let sizes = [1, 7, 60_000, 200_000, 3, 1_000_000, 12];
        let messages = |end: char| {
            let sizes = sizes.iter().cycle().take(28).enumerate();
            sizes.map(move |(n, size)| format!("{end}{n:04}{}", "x".repeat(*size)))
        };
        let (out, back) = (self.harness.outbound().clone(), self.executor.outbound().clone());
        let send = async |outbound: codex_exec_rpc::Outbound, end| {
            for message in messages(end) {
                outbound.send(message).await.unwrap();
            }
        };
        let hear = async |connection: &mut Connection, end| {
            for message in messages(end) {
                let heard = connection.next().await.unwrap().unwrap();
                assert!(heard == message.as_bytes(), "{end}: in order and once");
            }
        };
        tokio::join!(
            send(out, 'h'),
            send(back, 'e'),
            hear(&mut self.executor, 'h'),
            hear(&mut self.harness, 'e')
        );
    }

    /// The stream is dead at both ends, and the server serves the next one.
    async fn ended_alone(mut self) {
        assert!(self.harness.next().await.is_none_or(|last| last.is_err()));
        assert!(self.executor.next().await.is_none_or(|last| last.is_err()));
        self.cloud.script(|script| script.mangle = None);
        let harness = link(&self.cloud).dial().await.unwrap();
        let mut executor = self.served.connections.recv().await.unwrap();
        harness.outbound().send("unhurt").await.unwrap();
        assert_eq!(&executor.next().await.unwrap().unwrap()[..], b"unhurt");
        self.served.stop().await.unwrap();
    }
}

#[tokio::test]
async fn frames_sent_twice_arrive_once() {
    let mangle = Mangle::new(|_, frame| vec![frame.clone(), frame]);
    let mut ends = Ends::through(mangle).await;
    ends.all_arrives().await;
    ends.served.stop().await.unwrap();
}

#[tokio::test]
async fn records_out_of_order_arrive_in_order() {
    // Every third data frame waits for the next one of its direction.
    let mut held: [Option<Bytes>; 2] = [None, None];
    let mangle = Mangle::new(move |from_executor, frame| {
        let held = &mut held[usize::from(from_executor)];
        match (held.take(), data(&frame)) {
            (None, Some(data)) if data.seq % 3 == 2 => {
                *held = Some(frame);
                vec![]
            }
            (None, _) => vec![frame],
            (Some(earlier), _) => vec![frame, earlier],
        }
    });
    let mut ends = Ends::through(mangle).await;
    ends.all_arrives().await;
    ends.served.stop().await.unwrap();
}

#[tokio::test]
async fn lost_records_are_retransmitted() {
    // Both ends have shown that they acknowledge, so what the relay drops is made up for.
    let mut lost: HashSet<(bool, u32)> = HashSet::new();
    let mangle = Mangle::new(move |from_executor, frame| match data(&frame) {
        Some(data)
            if data.seq > 3 && data.seq % 5 == 0 && lost.insert((from_executor, data.seq)) =>
        {
            vec![]
        }
        _ => vec![frame],
    });
    let mut ends = Ends::through(mangle).await;
    ends.prove().await;
    ends.all_arrives().await;
    ends.served.stop().await.unwrap();
}

/// The relay changes the third record to the executor, or from it.
async fn changed(from_executor: bool, change: impl Fn(Data) -> Data + Send + 'static) {
    let mangle = Mangle::new(move |executor, frame| {
        let mut whole = decode(&frame);
        match whole.body {
            Body::Data(data) if executor == from_executor && data.seq == 2 => {
                whole.body = Body::Data(change(data));
                vec![whole.encode()]
            }
            _ => vec![frame],
        }
    });
    let mut ends = Ends::through(mangle).await;
    let (from, to) = match from_executor {
        true => (&ends.executor, &mut ends.harness),
        false => (&ends.harness, &mut ends.executor),
    };
    for message in ["one", "two", "three", "four"] {
        from.outbound().send(message).await.unwrap();
    }
    for expected in ["one", "two"] {
        assert_eq!(&to.next().await.unwrap().unwrap()[..], expected.as_bytes());
    }
    ends.ended_alone().await;
}

#[tokio::test]
async fn tampered_ciphertext_ends_only_its_stream() {
    for from_executor in [false, true] {
        changed(from_executor, |mut data| {
            let mut payload = data.payload.to_vec();
            payload[0] ^= 1;
            data.payload = payload.into();
            data
        })
        .await;
    }
}

#[tokio::test]
async fn truncated_record_ends_only_its_stream() {
    changed(false, |mut data| {
        data.payload.truncate(data.payload.len() - 1);
        data
    })
    .await;
}

#[tokio::test]
async fn record_replayed_under_the_next_number_ends_only_its_stream() {
    let mut first = None;
    let mangle = Mangle::new(move |from_executor, frame| {
        let Some(one) = data(&frame).filter(|_| !from_executor) else { return vec![frame] };
        let mut whole = decode(&frame);
        let replayed = first.get_or_insert(one.payload.clone()).clone();
        if one.seq == 1 {
            whole.body = Body::Data(Data { payload: replayed, ..one });
        }
        vec![whole.encode()]
    });
    let mut ends = Ends::through(mangle).await;
    for message in ["one", "two"] {
        ends.harness.outbound().send(message).await.unwrap();
    }
    assert_eq!(&ends.executor.next().await.unwrap().unwrap()[..], b"one");
    ends.ended_alone().await;
}

/// A harness driven by hand: its frames go to the executor one by one.
struct ByHand {
    machine: Harness,
    stream: StreamId,
    answers: mpsc::Receiver<Message>,
}

impl ByHand {
    async fn new(cloud: &Cloud) -> Self {
        let identity = NoiseIdentity::generate(&mut *entropy()).unwrap();
        let admission = registry(cloud).connect(ENVIRONMENT, &identity.public_key()).await.unwrap();
        let mode = HarnessMode::Noise {
            identity,
            executor_key: admission.executor_key,
            environment_id: ENVIRONMENT.into(),
            registration_id: admission.registration_id,
            authorization: Authorization::new(admission.authorization.expose().to_owned()),
        };
        let config = RelayConfig::default().core;
        let mut machine = Harness::new(config, mode, entropy()).unwrap();
        machine.handle_connected(Instant::now());
        let stream = machine.open(Instant::now()).unwrap();
        let answers = cloud.harness_of(stream.as_str());
        Self { machine, stream, answers }
    }

    fn next(&mut self) -> Option<Bytes> {
        self.machine.poll_transmit(Instant::now())
    }

    /// What the executor says next on this stream.
    async fn answer(&mut self) -> Frame {
        let message = self.answers.recv().await.unwrap();
        decode(&Bytes::from(message.into_payload()))
    }

    /// The executor ends the stream with its one reason.
    async fn refused(&mut self) {
        let answer = self.answer().await;
        let Body::Reset { reason } = answer.body else { panic!("not a reset") };
        assert_eq!(reason, "noise_relay_protocol_error");
    }

    fn frame(&self, body: Body) -> Message {
        Message::binary(Frame::new(self.stream.clone(), 0, 0, body).encode())
    }
}

fn some_data(seq: u32) -> Body {
    let payload = Bytes::from_static(b"in clear, perhaps?");
    Body::Data(Data { seq, segment_index: 0, segment_count: 1, payload })
}

#[tokio::test]
async fn data_before_the_handshake_is_refused() {
    let cloud = Cloud::start().await;
    let mut served = serve(environment(&cloud), RelayConfig::default());
    cloud.upgraded(1).await;
    for announced in [false, true] {
        let mut harness = ByHand::new(&cloud).await;
        if announced {
            cloud.to_executor(Message::binary(harness.next().unwrap())).await;
        }
        cloud.to_executor(harness.frame(some_data(0))).await;
        harness.refused().await;
    }
    assert!(served.connections.try_recv().is_err(), "no stream was opened");
    served.stop().await.unwrap();
}

#[tokio::test]
async fn second_handshake_and_reused_stream_id_are_refused() {
    let cloud = Cloud::start().await;
    let mut served = serve(environment(&cloud), RelayConfig::default());
    cloud.upgraded(1).await;
    let mut harness = ByHand::new(&cloud).await;
    let (resume, handshake) = (harness.next().unwrap(), harness.next().unwrap());
    cloud.to_executor(Message::binary(resume.clone())).await;
    cloud.to_executor(Message::binary(handshake.clone())).await;
    let answer = harness.answer().await;
    assert!(matches!(answer.body, Body::Handshake { .. }));
    let mut executor = served.connections.recv().await.unwrap();
    // The very same message is a repetition on the way, and does nothing.
    cloud.to_executor(Message::binary(handshake.clone())).await;
    assert_eq!(cloud.seen("/validate").len(), 1);
    // Another one is no repetition.
    let second = ByHand::new(&cloud).await.handshake();
    cloud.to_executor(harness.frame(second)).await;
    harness.refused().await;
    assert!(executor.next().await.is_none());
    // What opened the stream does not open it again.
    for spent in [resume, handshake] {
        cloud.to_executor(Message::binary(spent)).await;
        harness.refused().await;
    }
    assert_eq!(cloud.seen("/validate").len(), 1, "no second validation");
    // Nor does it open one of another name, to which it is not bound.
    let mut other = ByHand::new(&cloud).await;
    let stolen = ByHand::new(&cloud).await.handshake();
    cloud.to_executor(other.frame(stolen)).await;
    other.refused().await;
    assert!(served.connections.try_recv().is_err());
    served.stop().await.unwrap();
}

impl ByHand {
    /// The message that opens its stream.
    fn handshake(mut self) -> Body {
        let _resume = self.next();
        decode(&self.next().unwrap()).body
    }
}

#[tokio::test]
async fn stream_129_is_refused_until_another_stream_ends() {
    let cloud = Cloud::start().await;
    let mut served = serve(environment(&cloud), RelayConfig::default());
    cloud.upgraded(1).await;
    let link = link(&cloud);
    let mut ends = Vec::new();
    for _ in 0..128 {
        let harness = link.dial().await.unwrap();
        ends.push((harness, served.connections.recv().await.unwrap()));
    }
    let error = link.dial().await.unwrap_err();
    assert!(matches!(error, EnvironmentError::Refused), "{error}");
    let (harness, mut executor) = ends.pop().unwrap();
    drop(harness);
    assert!(executor.next().await.is_none());
    drop(executor);
    let harness = link.dial().await.unwrap();
    let mut executor = served.connections.recv().await.unwrap();
    harness.outbound().send("the last").await.unwrap();
    assert_eq!(&executor.next().await.unwrap().unwrap()[..], b"the last");
    let (harness, executor) = &mut ends[0];
    harness.outbound().send("the first").await.unwrap();
    assert_eq!(&executor.next().await.unwrap().unwrap()[..], b"the first");
    served.stop().await.unwrap();
}

/// A peer as deployed today: it acknowledges nothing and picks no stream up again.
#[tokio::test]
async fn executor_without_acks_never_blocks_the_harness() {
    let silence = |from_executor: bool, frame: Bytes| {
        let mut whole = decode(&frame);
        match whole.body {
            Body::Ack if from_executor => vec![],
            _ if from_executor => {
                (whole.ack, whole.ack_bits) = (0, 0);
                vec![whole.encode()]
            }
            Body::Data(ref data) => {
                assert_eq!((data.segment_index, data.segment_count), (0, 1), "nothing is cut");
                vec![frame]
            }
            _ => vec![frame],
        }
    };
    let mut ends = Ends::through(Mangle::new(silence)).await;
    // Far more than could be kept unacknowledged.
    ends.all_arrives().await;
    ends.all_arrives().await;
    // A dropped socket ends the stream; the caller may dial again.
    ends.cloud.drop_sockets();
    assert!(ends.harness.next().await.is_none());
    assert_eq!(ends.cloud.seen("/connect").len(), 1, "it is not resumed");
    ends.served.stop().await.unwrap();
}

#[tokio::test]
async fn harness_reports_a_registry_refusal() {
    let cloud = Cloud::start().await;
    let served = serve(environment(&cloud), RelayConfig::default());
    cloud.upgraded(1).await;
    let error = json!({"error": {"code": "nope", "message": "because"}}).to_string();
    for (status, body, expected, transient) in [
        (401, error.clone(), "refused the sign-in (HTTP 401: nope: because)", false),
        (403, error.clone(), "refused the sign-in (HTTP 403: nope: because)", false),
        (404, error.clone(), "HTTP 404: nope: because", false),
        (409, error.clone(), "HTTP 409: nope: because", true),
        (500, String::new(), "HTTP 500", true),
        (200, "garbage".into(), "invalid response", false),
        (200, "{}".into(), "invalid response", false),
    ] {
        cloud.script(|script| {
            script.answers.insert("connect", (status, body));
        });
        let error = link(&cloud).dial().await.unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(error.is_transient(), transient, "{error}");
    }
    cloud.script(|script| script.answers.clear());
    // What it names has to be what was asked for, with keys of the one known suite.
    let asked = registry(&cloud).connect(ENVIRONMENT, &key()).await.unwrap();
    let good = json!({"environment_id": ENVIRONMENT, "url": asked.url.expose(),
        "security_profile": "noise_hybrid_ik_v1",
        "executor_registration_id": asked.registration_id,
        "executor_public_key": NoiseKeyJson(asked.executor_key.clone()),
        "harness_key_authorization": asked.authorization.expose()});
    let mut bad = Vec::new();
    for (member, value) in [
        ("environment_id", json!("env_2")),
        ("security_profile", json!("none")),
        ("url", json!("https://h")),
        ("executor_registration_id", json!("")),
        ("executor_public_key", json!({"suite": "none"})),
    ] {
        let mut answer = good.clone();
        answer[member] = value;
        bad.push(answer);
    }
    for (member, value) in
        [("suite", json!("other")), ("x25519_public_key", json!("AAAA")), ("more", json!(1))]
    {
        let mut answer = good.clone();
        answer["executor_public_key"][member] = value;
        bad.push(answer);
    }
    for answer in bad {
        cloud.script(|script| {
            script.answers.insert("connect", (200, answer.to_string()));
        });
        let error = link(&cloud).dial().await.unwrap_err();
        assert!(error.to_string().contains("invalid response"), "{error}: {answer}");
    }
    // Another executor's key: the handshake comes to nothing, whatever the registry says.
    let mut answer = good.clone();
    answer["executor_public_key"] = json!(NoiseKeyJson(key()));
    cloud.script(|script| {
        script.answers.insert("connect", (200, answer.to_string()));
    });
    link(&cloud).dial().await.unwrap_err();
    cloud.script(|script| script.answers.clear());
    link(&cloud).dial().await.unwrap();
    served.stop().await.unwrap();
}

fn key() -> codex_exec_relay_core::NoisePublicKey {
    NoiseIdentity::generate(&mut *entropy()).unwrap().public_key()
}

#[tokio::test]
async fn only_valid_true_admits_a_harness() {
    let cloud = Cloud::start().await;
    let mut config = RelayConfig::default();
    config.core.authorization_timeout = Duration::from_millis(100);
    let mut served = serve(environment(&cloud), config);
    cloud.upgraded(1).await;
    for (status, body) in [
        (401, ""),
        (403, ""),
        (404, ""),
        (409, ""),
        (500, ""),
        (302, ""),
        (200, "garbage"),
        (200, ""),
        (200, "{}"),
        (200, r#"{"valid":"true"}"#),
        (200, r#"{"valid":1}"#),
    ] {
        cloud.script(|script| {
            script.answers.insert("validate", (status, body.into()));
        });
        link(&cloud).dial().await.unwrap_err();
    }
    cloud.script(|script| {
        script.answers.clear();
        script.silent = Some("validate");
    });
    link(&cloud).dial().await.unwrap_err();
    assert!(served.connections.try_recv().is_err(), "no harness was admitted");
    // None of that was the harness's failure: the socket is still the first.
    cloud.script(|script| script.silent = None);
    link(&cloud).dial().await.unwrap();
    served.stop().await.unwrap();
}
