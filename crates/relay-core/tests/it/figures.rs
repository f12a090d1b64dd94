//! Figures, printed. Not run by default: they mean something only in a release build.
//!
//! `cargo test --release -p codex-exec-relay-core -- --ignored --nocapture figures`

use std::time::Instant;

use bytes::Bytes;
use codex_exec_relay_core::*;

use crate::util::*;

#[test]
#[ignore = "a measurement"]
fn figures_handshake() {
    let count = 500u32;
    let mut executor = executor(Config { max_streams: 1000, ..Config::default() });
    let (mut ours, mut theirs) = (std::time::Duration::ZERO, std::time::Duration::ZERO);
    for seed in 0..count {
        let mut harness = harness(u64::from(seed) + 10, Config::default());
        let start = Instant::now();
        harness.open(t0()).unwrap();
        let out = frames_h(&mut harness, t0());
        theirs += start.elapsed();
        let start = Instant::now();
        for frame in out {
            executor.handle_frame(t0(), frame).unwrap();
        }
        for event in events_e(&mut executor) {
            if let Event::AuthorizeRequest { stream, generation, .. } = event {
                executor.authorize(t0(), &stream, generation, Verdict::Allowed).unwrap();
            }
        }
        let back = frames_e(&mut executor, t0());
        ours += start.elapsed();
        let start = Instant::now();
        for frame in back {
            harness.handle_frame(t0(), frame).unwrap();
        }
        theirs += start.elapsed();
        assert!(matches!(events_h(&mut harness)[..], [Event::Opened { .. }]));
        events_e(&mut executor);
    }
    eprintln!("handshake: executor {:?}, harness {:?}", ours / count, theirs / count);
}

#[test]
#[ignore = "a measurement"]
fn figures_throughput() {
    for size in [100usize, 4096, 60 * 1024 - 4, 1 << 20] {
        let mut pair = Pair::open(&Config::default());
        pair.prove();
        let message = Bytes::from(vec![7; size]);
        let total = (512usize << 20).min(size * 400_000);
        let count = total / size;
        let (mut sent, mut got) = (0, 0);
        let start = Instant::now();
        while got < count {
            while sent < count && pair.executor.send(&pair.stream, message.clone()).is_ok() {
                sent += 1;
            }
            pair.run();
            pair.executor_events.clear();
            got += pair.harness_messages().len();
            pair.now += ms(20);
            pair.harness.handle_timeout(pair.now);
        }
        let took = start.elapsed().as_secs_f64();
        eprintln!(
            "throughput: {size:>8} byte messages: {:.0} MiB/s, {:.0} messages/s (both ends, one core)",
            (count * size) as f64 / took / (1 << 20) as f64,
            count as f64 / took
        );
    }
}

#[test]
#[ignore = "a measurement"]
fn figures_idle_stream() {
    fn resident() -> usize {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
    }
    let count = 2000;
    let config = Config { max_streams: 2 * count, ..Config::default() };
    let mut executor = executor(config);
    let open = |executor: &mut Executor, seed: u64| {
        let mut harness = harness(seed, Config::default());
        let stream = harness.open(t0()).unwrap();
        let mut pump = |executor: &mut Executor| {
            for frame in frames_h(&mut harness, t0()) {
                executor.handle_frame(t0(), frame).unwrap();
            }
            for event in events_e(executor) {
                if let Event::AuthorizeRequest { stream, generation, .. } = event {
                    executor.authorize(t0(), &stream, generation, Verdict::Allowed).unwrap();
                }
            }
            for frame in frames_e(executor, t0()) {
                harness.handle_frame(t0(), frame).unwrap();
            }
            let _ = harness.send(Bytes::from_static(b"hello"));
        };
        pump(executor);
        pump(executor);
        executor.send(&stream, Bytes::from_static(b"hello")).unwrap();
        pump(executor);
    };
    for seed in 0..100 {
        open(&mut executor, 10_000 + seed);
    }
    let before = resident();
    for seed in 0..count as u64 {
        open(&mut executor, 20_000 + seed);
    }
    let grown = resident().saturating_sub(before);
    eprintln!("idle stream: {} bytes resident each", grown / count);
    assert!(grown / count < 40 * 1024);
}
