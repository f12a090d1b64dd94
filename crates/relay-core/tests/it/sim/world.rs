//! The endpoints, their applications and the clock of one schedule.

use std::cmp::Reverse;
use std::collections::hash_map::DefaultHasher;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{Hash, Hasher};
use std::time::{Duration, Instant};

use bytes::Bytes;
use codex_exec_relay_core::*;

use super::Kind;
use super::relay::{Faults, invented, tampered, without_acks};
use crate::util::*;

/// Trouble and new messages stop here; what follows must come to rest.
const BUSY_MS: u64 = 20_000;
/// Long enough for the slowest giving-up, and some.
const END_MS: u64 = 480_000;
/// Only heartbeats in the last so many.
const QUIET_MS: u64 = 90_000;

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Action {
    ToExecutor { from: usize, harness_socket: u32, executor_socket: u32, frame: Bytes },
    ToHarness { to: usize, harness_socket: u32, executor_socket: u32, frame: Bytes },
    Verdict { stream: StreamId, generation: Generation, allow: bool },
    Say { harness: usize, by_harness: bool },
    Drop { harness: Option<usize> },
    Return { harness: Option<usize> },
    Inject,
    Poke,
}

/// One direction of one stream, as the applications see it.
#[derive(Default)]
struct Flow {
    /// Lengths of the messages the application wants sent.
    wanted: Vec<usize>,
    accepted: usize,
    received: usize,
}

struct Node {
    harness: Harness,
    stream: StreamId,
    socket: u32,
    connected: bool,
    opened: bool,
    executor_opened: bool,
    ended: Option<String>,
    executor_ended: Option<String>,
    /// Both sides know that the other acknowledges.
    settled: bool,
    up: Flow,
    down: Flow,
    last_up: Instant,
    last_down: Instant,
    /// Frames of this stream that went by, for replays.
    seen: Vec<Bytes>,
    busy: bool,
}

pub(crate) struct World {
    seed: u64,
    kind: Kind,
    clear: bool,
    config: Config,
    faults: Faults,
    /// Frames a socket takes per millisecond.
    budget: u64,
    strip_up: bool,
    strip_down: bool,
    rng: Rng,
    now: Instant,
    executor: Executor,
    executor_connected: bool,
    executor_socket: u32,
    nodes: Vec<Node>,
    actions: BinaryHeap<Reverse<(Instant, u64, Action)>>,
    order: u64,
    payloads: HashMap<(usize, bool, u32), u64>,
    trace: DefaultHasher,
    poked: bool,
}

impl World {
    pub(crate) fn new(seed: u64, kind: Kind, clear: bool) -> Self {
        let mut rng = Rng(seed ^ 0x5eed);
        let window = 8 + rng.below(57) as u32;
        let config = Config {
            record_len: 64 + rng.below(1500) as usize,
            segment_len: 64 + rng.below(1500) as usize,
            window_segments: window,
            reorder_segments: window,
            window_bytes: 16 * 1024,
            reorder_bytes: 16 * 1024,
            unproven_segments: rng.below(12) as usize,
            unproven_bytes: 8 * 1024,
            send_buffer: 1 + rng.below(6000) as usize,
            max_message_len: 64 * 1024,
            max_streams: 8,
            ack_every: 1 + rng.below(8) as u32,
            ..Config::default()
        };
        let storm = Faults {
            loss: rng.below(25),
            repeat: rng.below(20),
            disorder: rng.below(30),
            ..Faults::default()
        };
        let delay = 1 + rng.below(150);
        let faults = match kind {
            Kind::Lossy | Kind::Wild => storm,
            Kind::Hostile => Faults { tamper: [2, 20][rng.below(2) as usize], ..storm },
            Kind::Calm | Kind::Reconnect | Kind::NeverAck => Faults::default(),
        };
        let never = kind == Kind::NeverAck;
        let which = rng.below(3);
        let executor_mode = if clear { ExecutorMode::Clear } else { executor_mode() };
        let mut executor =
            Executor::new(config.clone(), executor_mode, Box::new(Rng(rng.next()))).unwrap();
        executor.handle_connected(t0());
        let count = match kind {
            Kind::Hostile => 2,
            _ => 1 + usize::from(rng.chance(20)),
        };
        let mut nodes = Vec::new();
        for _ in 0..count {
            let mode = if clear { HarnessMode::Clear } else { harness_mode() };
            let mut harness = harness_as(rng.next(), config.clone(), mode);
            let stream = harness.open(t0()).unwrap();
            let mut flow = || {
                let count = 1 + rng.below(12) as usize;
                let wanted = (0..count)
                    .map(|_| match rng.below(10) {
                        0 => 4 + rng.below(9000) as usize,
                        _ => 4 + rng.below(300) as usize,
                    })
                    .collect();
                Flow { wanted, ..Flow::default() }
            };
            let (up, down) = (flow(), flow());
            nodes.push(Node {
                harness,
                stream,
                socket: 0,
                connected: true,
                opened: false,
                executor_opened: false,
                ended: None,
                executor_ended: None,
                settled: false,
                up,
                down,
                last_up: t0(),
                last_down: t0(),
                seen: Vec::new(),
                busy: false,
            });
        }
        Self {
            seed,
            kind,
            clear,
            config,
            faults: Faults { delay, ..faults },
            budget: [1, 5, 1000][rng.below(3) as usize],
            strip_up: never && which != 0,
            strip_down: never && which != 1,
            rng,
            now: t0(),
            executor,
            executor_connected: true,
            executor_socket: 0,
            nodes,
            actions: BinaryHeap::new(),
            order: 0,
            payloads: HashMap::new(),
            trace: DefaultHasher::new(),
            poked: false,
        }
    }

    fn at(millis: u64) -> Instant {
        t0() + ms(millis)
    }

    fn schedule(&mut self, after: Duration, action: Action) {
        self.order += 1;
        self.actions.push(Reverse((self.now + after, self.order, action)));
    }

    fn is_busy(&self) -> bool {
        self.now < Self::at(BUSY_MS)
    }

    /// Whether frames of this node are in trouble now.
    fn is_troubled(&self, node: usize) -> bool {
        self.is_busy()
            && match self.kind {
                Kind::Wild => true,
                Kind::Hostile => node == 0 && self.nodes.iter().skip(1).all(|n| n.settled),
                _ => self.nodes[node].settled,
            }
    }

    /// Whether the faults of this schedule must not end this node's stream.
    fn must_survive(&self, node: usize) -> bool {
        match self.kind {
            Kind::Calm | Kind::Reconnect | Kind::Lossy => true,
            Kind::Hostile => node > 0,
            Kind::NeverAck => self.now < Self::at(END_MS - QUIET_MS),
            Kind::Wild => false,
        }
    }

    pub(crate) fn run(mut self) -> u64 {
        if matches!(self.kind, Kind::Wild) {
            self.schedule_drops();
        }
        if self.kind == Kind::Hostile {
            self.schedule(ms(100), Action::Inject);
        }
        let mut steps = 0u64;
        loop {
            steps += 1;
            assert!(steps < 300_000, "seed {}: never at rest", self.seed);
            self.pump();
            self.check_limits();
            let next = [
                self.actions.peek().map(|Reverse((at, ..))| *at),
                self.executor.poll_timeout(),
                self.nodes.iter().filter_map(|node| node.harness.poll_timeout()).min(),
            ];
            let Some(next) = next.into_iter().flatten().min() else { break };
            if next > Self::at(END_MS) {
                break;
            }
            self.now = self.now.max(next);
            while self.actions.peek().is_some_and(|Reverse((at, ..))| *at <= self.now)
                && let Some(Reverse((_, _, action))) = self.actions.pop()
            {
                self.act(action);
            }
            self.executor.handle_timeout(self.now);
            for node in &mut self.nodes {
                node.harness.handle_timeout(self.now);
            }
        }
        self.check_end();
        if self.kind == Kind::NeverAck {
            self.check_drop_is_the_end();
        }
        self.trace.finish()
    }

    fn schedule_drops(&mut self) {
        for _ in 0..1 + self.rng.below(3) {
            let after = ms(self.rng.below(BUSY_MS / 2));
            let harness = self.rng.chance(60).then(|| self.rng.below(self.nodes.len() as u64));
            self.schedule(after, Action::Drop { harness: harness.map(|h| h as usize) });
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::ToExecutor { from, harness_socket, executor_socket, frame } => {
                // What was on its way when a socket dropped may or may not arrive.
                let stale = harness_socket != self.nodes[from].socket
                    || executor_socket != self.executor_socket;
                if self.executor_connected && (!stale || self.rng.chance(30)) {
                    let _ = self.executor.handle_frame(self.now, frame);
                }
            }
            Action::ToHarness { to, harness_socket, executor_socket, frame } => {
                let stale = harness_socket != self.nodes[to].socket
                    || executor_socket != self.executor_socket;
                if self.nodes[to].connected && (!stale || self.rng.chance(30)) {
                    let _ = self.nodes[to].harness.handle_frame(self.now, frame);
                }
            }
            Action::Verdict { stream, generation, allow } => {
                let verdict = if allow { Verdict::Allowed } else { Verdict::Denied };
                let _ = self.executor.authorize(self.now, &stream, generation, verdict);
            }
            Action::Say { harness, by_harness } => self.say(harness, by_harness),
            Action::Drop { harness: Some(node) } => {
                let away = ms(1 + self.rng.below(8000));
                let node_state = &mut self.nodes[node];
                if node_state.connected {
                    node_state.connected = false;
                    node_state.socket += 1;
                    node_state.harness.handle_disconnected(self.now);
                    self.schedule(away, Action::Return { harness: Some(node) });
                }
            }
            Action::Drop { harness: None } => {
                if self.executor_connected {
                    let away = ms(1 + self.rng.below(8000));
                    self.executor_connected = false;
                    self.executor_socket += 1;
                    self.executor.handle_disconnected(self.now);
                    self.schedule(away, Action::Return { harness: None });
                }
            }
            Action::Return { harness: Some(node) } => {
                self.nodes[node].connected = true;
                self.nodes[node].harness.handle_connected(self.now);
            }
            Action::Return { harness: None } => {
                self.executor_connected = true;
                self.executor.handle_connected(self.now);
            }
            Action::Inject => self.inject(),
            Action::Poke => self.poked = false,
        }
    }

    /// Rubbish for the hostile node's stream, for streams that are not, and that is no frame.
    fn inject(&mut self) {
        if !self.is_busy() {
            return;
        }
        if self.is_troubled(0) {
            let own = self.nodes[0].stream.clone();
            let stranger = StreamId::generate(&mut self.rng).unwrap();
            let stream = if self.rng.chance(50) { own } else { stranger };
            let frame = match self.rng.below(8) {
                0 => Bytes::from(vec![0x0a; 300 * 1024]),
                1 => Bytes::new(),
                _ => invented(stream, &mut self.rng).encode(),
            };
            let _ = if self.rng.chance(50) {
                self.executor.handle_frame(self.now, frame)
            } else {
                self.nodes[0].harness.handle_frame(self.now, frame)
            };
        }
        let after = ms(1 + self.rng.below(1000));
        self.schedule(after, Action::Inject);
    }

    // --- applications ---

    fn say(&mut self, index: usize, by_harness: bool) {
        let node = &mut self.nodes[index];
        let flow = if by_harness { &mut node.up } else { &mut node.down };
        while flow.accepted < flow.wanted.len() {
            // The first goes alone, so that both sides come to know each other.
            if flow.accepted > 0 && !node.settled && self.kind != Kind::Wild {
                break;
            }
            let message = content(flow.accepted, flow.wanted[flow.accepted]);
            let sent = if by_harness {
                node.harness.send(message)
            } else {
                self.executor.send(&node.stream, message)
            };
            match sent {
                Ok(()) => flow.accepted += 1,
                Err(SendError::Blocked) => return,
                Err(SendError::NotOpen) => break,
                // A clear message too long for a peer that may not know segments.
                Err(SendError::MessageLength { .. }) => unreachable!("{sent:?}"),
            }
            if self.rng.chance(40) {
                let after = ms(self.rng.below(2000));
                self.schedule(after, Action::Say { harness: index, by_harness });
                return;
            }
        }
    }

    fn receive(&mut self, index: usize, by_executor: bool, message: &Bytes) {
        let node = &mut self.nodes[index];
        let flow = if by_executor { &mut node.up } else { &mut node.down };
        let expected = content(flow.received, flow.wanted[flow.received]);
        assert!(*message == expected, "not message {} of node {index}", flow.received);
        flow.received += 1;
        assert!(flow.received <= flow.accepted);
    }

    fn settle(&mut self) {
        for index in 0..self.nodes.len() {
            let node = &self.nodes[index];
            if node.settled || !node.opened || !node.executor_opened {
                continue;
            }
            let (Some(up), Some(down)) = (node.harness.stats(), self.executor.stats(&node.stream))
            else {
                continue;
            };
            // Nothing in flight either: of what left before the peer was known, a part may have
            // been forgotten, and a socket lost then is the stream's end.
            let known = [up, down].iter().all(|s| s.peer_acknowledges && s.in_flight_segments == 0);
            let greeted = node.up.received > 0 && node.down.received > 0;
            if greeted && (known || self.kind == Kind::NeverAck) {
                self.nodes[index].settled = true;
                for by_harness in [true, false] {
                    self.schedule(ms(0), Action::Say { harness: index, by_harness });
                }
            }
        }
        let all_settled = self.nodes.iter().all(|node| node.settled);
        if all_settled && !self.nodes[0].busy && matches!(self.kind, Kind::Reconnect | Kind::Lossy)
        {
            self.nodes[0].busy = true;
            self.schedule_drops();
        }
    }

    // --- the wire ---

    fn pump(&mut self) {
        self.drain_executor_events();
        for index in 0..self.nodes.len() {
            self.drain_harness_events(index);
        }
        self.settle();
        if self.poked {
            return;
        }
        let mut left = false;
        for index in 0..self.nodes.len() {
            let mut budget = self.budget;
            while budget > 0
                && let Some(frame) = self.nodes[index].harness.poll_transmit(self.now)
            {
                budget -= 1;
                self.carry(index, true, frame);
            }
            left |= budget == 0;
        }
        let mut budget = self.budget;
        while budget > 0
            && let Some(frame) = self.executor.poll_transmit(self.now)
        {
            budget -= 1;
            let stream = peek(&frame, &self.config.frame).unwrap().stream_id;
            if let Some(index) = self.nodes.iter().position(|n| n.stream.as_str() == stream) {
                self.carry(index, false, frame);
            }
        }
        left |= budget == 0;
        if left {
            self.poked = true;
            self.schedule(ms(1), Action::Poke);
        }
        self.drain_executor_events();
        for index in 0..self.nodes.len() {
            self.drain_harness_events(index);
        }
    }

    fn carry(&mut self, index: usize, up: bool, frame: Bytes) {
        (self.now - t0()).hash(&mut self.trace);
        frame.hash(&mut self.trace);
        self.check_frame(index, up, &frame);
        let strip = if up { self.strip_up } else { self.strip_down };
        let frame = if strip {
            let Some(frame) = without_acks(&frame) else { return };
            frame
        } else {
            frame
        };
        let troubled = self.is_troubled(index);
        let faults = if troubled { self.faults } else { Faults::default() };
        if self.kind == Kind::Hostile && self.nodes[index].seen.len() < 50 {
            self.nodes[index].seen.push(frame.clone());
        }
        let frame = if self.rng.chance(faults.tamper) {
            tampered(&frame, &self.nodes[index].seen, &mut self.rng)
        } else {
            frame
        };
        if self.rng.chance(faults.loss) {
            return;
        }
        let copies = 1 + u64::from(self.rng.chance(faults.repeat));
        for _ in 0..copies {
            let arrival = self.now + ms(self.rng.below(self.faults.delay));
            let node = &mut self.nodes[index];
            let last = if up { &mut node.last_up } else { &mut node.last_down };
            let at = if self.rng.chance(faults.disorder) {
                arrival + ms(self.rng.below(300))
            } else {
                *last = arrival.max(*last);
                *last
            };
            let (harness_socket, executor_socket) = (node.socket, self.executor_socket);
            let frame = frame.clone();
            let action = if up {
                Action::ToExecutor { from: index, harness_socket, executor_socket, frame }
            } else {
                Action::ToHarness { to: index, harness_socket, executor_socket, frame }
            };
            self.schedule(at - self.now, action);
        }
    }

    fn drain_executor_events(&mut self) {
        while let Some(event) = self.executor.poll_event() {
            let index =
                |stream: &StreamId| self.nodes.iter().position(|node| node.stream == *stream);
            match event {
                Event::AuthorizeRequest { stream, generation, harness_key, authorization } => {
                    assert_eq!(harness_key, identity(1).public_key());
                    assert_eq!(authorization.expose(), "let me in");
                    let allow = self.kind != Kind::Wild || self.rng.chance(90);
                    let after = ms(self.rng.below(300));
                    self.schedule(after, Action::Verdict { stream, generation, allow });
                }
                Event::Opened { stream } => {
                    let Some(index) = index(&stream) else {
                        assert!(self.clear, "a stranger's stream opened");
                        continue;
                    };
                    self.nodes[index].executor_opened = true;
                    self.say(index, false);
                }
                Event::Message { stream, message } => {
                    if let Some(index) = index(&stream) {
                        // Without a cipher, lies are believed.
                        if !(self.clear && self.kind == Kind::Hostile && index == 0) {
                            self.receive(index, true, &message);
                        }
                    } else {
                        assert!(self.clear);
                    }
                }
                Event::Writable { stream } => {
                    if let Some(index) = index(&stream) {
                        self.say(index, false);
                    }
                }
                Event::Reset { ref stream, .. } | Event::Closed { ref stream, .. } => {
                    if let Some(index) = index(stream) {
                        assert!(!self.must_survive(index), "node {index}: {event:?}");
                        let before = self.nodes[index].executor_ended.replace(format!("{event:?}"));
                        assert_eq!(before, None);
                    }
                }
                Event::HandshakeFailed { .. } => assert_eq!(self.kind, Kind::Hostile),
                Event::PhysicalClose => {
                    self.schedule(ms(0), Action::Drop { harness: None });
                }
                _ => unreachable!(),
            }
        }
    }

    fn drain_harness_events(&mut self, index: usize) {
        while let Some(event) = self.nodes[index].harness.poll_event() {
            match event {
                Event::Opened { .. } => {
                    assert!(!self.nodes[index].opened);
                    self.nodes[index].opened = true;
                    self.say(index, true);
                }
                Event::Message { message, .. } => {
                    if !(self.clear && self.kind == Kind::Hostile && index == 0) {
                        self.receive(index, false, &message);
                    }
                }
                Event::Writable { .. } => self.say(index, true),
                Event::Reset { .. } | Event::Closed { .. } => {
                    assert!(!self.must_survive(index), "node {index}: {event:?}");
                    let before = self.nodes[index].ended.replace(format!("{event:?}"));
                    assert_eq!(before, None);
                }
                _ => unreachable!("{event:?}"),
            }
        }
    }

    // --- what must hold ---

    fn check_frame(&mut self, index: usize, up: bool, bytes: &Bytes) {
        let frame = decode(bytes);
        assert_eq!(frame.encode(), *bytes, "not canonical");
        let quiet = self.now >= Self::at(END_MS - QUIET_MS);
        assert!(
            !quiet || frame.body.kind() == BodyKind::Heartbeat,
            "not quiet: {frame:?} from node {index}, up {up}"
        );
        if let Body::Data(data) = frame.body {
            let mut hasher = DefaultHasher::new();
            data.payload.hash(&mut hasher);
            let digest = hasher.finish();
            let before = self.payloads.insert((index, up, data.seq), digest);
            assert!(before.is_none_or(|before| before == digest), "a nonce was used twice");
        }
    }

    fn check_limits(&self) {
        assert!(self.executor.stream_count() <= self.config.max_streams);
        for node in &self.nodes {
            for stats in [node.harness.stats(), self.executor.stats(&node.stream)] {
                let Some(stats) = stats else { continue };
                let config = &self.config;
                let longest = 9100;
                assert!(stats.queued_bytes <= config.send_buffer + longest);
                let kept = config.window_bytes.max(config.unproven_bytes);
                assert!(stats.in_flight_bytes <= kept + longest, "{stats:?}");
                assert!(stats.held_segments <= config.reorder_segments as usize);
                assert!(stats.held_bytes <= config.reorder_bytes);
                assert!(stats.assembling_bytes <= config.max_message_len + 4);
            }
        }
    }

    fn check_end(&self) {
        for (index, node) in self.nodes.iter().enumerate() {
            let whole = |flow: &Flow| flow.accepted == flow.received;
            let alive = node.ended.is_none() && node.executor_ended.is_none();
            let lied_to = self.kind == Kind::Hostile && index == 0;
            if alive && node.opened && node.executor_opened && !lied_to {
                // What was lost on the way to a peer not known to acknowledge is beyond knowing;
                // no socket loses it silently, only this relay.
                let knows = |stats: Option<StreamStats>| {
                    self.kind != Kind::Wild || stats.unwrap().peer_acknowledges
                };
                let (up, down) = (&node.up, &node.down);
                if knows(node.harness.stats()) {
                    assert!(whole(up), "node {index}: up {} of {}", up.received, up.accepted);
                }
                if knows(self.executor.stats(&node.stream)) {
                    assert!(
                        whole(down),
                        "node {index}: down {} of {}",
                        down.received,
                        down.accepted
                    );
                }
                for stats in [node.harness.stats(), self.executor.stats(&node.stream)] {
                    let stats = stats.unwrap();
                    assert_eq!((stats.queued_bytes, stats.held_segments), (0, 0), "{stats:?}");
                    assert!(!stats.peer_acknowledges || stats.in_flight_segments == 0);
                    assert_eq!(stats.assembling_bytes, 0);
                }
            }
            if self.must_survive(index) || self.kind == Kind::NeverAck {
                assert!(alive && node.settled, "node {index}: {:?}", node.ended);
                assert_eq!(node.up.received, node.up.wanted.len());
                assert_eq!(node.down.received, node.down.wanted.len());
            }
        }
    }

    /// A peer that never acknowledged cannot resume: the socket's end is the stream's.
    fn check_drop_is_the_end(&mut self) {
        self.executor.handle_disconnected(self.now);
        let ended = events_e(&mut self.executor);
        for node in &mut self.nodes {
            let closed =
                Event::Closed { stream: node.stream.clone(), cause: CloseCause::Disconnected };
            assert_eq!(ended.contains(&closed), self.strip_up);
            node.harness.handle_disconnected(self.now);
            assert_eq!(events_h(&mut node.harness).contains(&closed), self.strip_down);
        }
    }
}

/// The message with this number.
fn content(number: usize, len: usize) -> Bytes {
    let mut bytes: Vec<u8> =
        (0..len).map(|at| (at as u8).wrapping_mul(31) ^ number as u8).collect();
    bytes[..4].copy_from_slice(&(number as u32).to_le_bytes());
    bytes.into()
}
