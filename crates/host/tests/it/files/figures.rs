//! Costs of operations, at the level of this crate. Run with `cargo test --release -p codex-exec-host
//! --test it figures -- --ignored --nocapture`.

use std::hint::black_box;
use std::time::{Duration, Instant};

use codex_exec_host::files::Backend;
use codex_exec_server_protocol::files::*;

use super::connection::Client;
use super::*;

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn time(rounds: usize, mut work: impl FnMut()) -> Duration {
    work();
    median(
        (0..rounds)
            .map(|_| {
                let start = Instant::now();
                work();
                start.elapsed()
            })
            .collect(),
    )
}

fn large_tree() -> Fixture {
    let f = Fixture::new();
    for directory in 0..1000 {
        let path = f.native(format!("{:02}/{directory:04}", directory % 20));
        std::fs::create_dir_all(&path).unwrap();
        for file in 0..48 {
            std::fs::File::create(path.join(format!("file-{file:03}.txt"))).unwrap();
        }
    }
    f
}

/// The baseline: a plain walk that stats each entry.
fn bare_walk(root: &Path) -> usize {
    let (mut count, mut waiting) = (0, vec![root.to_owned()]);
    while let Some(directory) = waiting.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let entry = entry.unwrap();
            if black_box(entry.metadata().unwrap()).is_dir() {
                waiting.push(entry.path());
            }
            count += 1;
        }
    }
    count
}

#[test]
#[ignore = "measures; see the module"]
fn a_walk_costs_no_more_than_one_and_a_half_bare_ones() {
    let f = large_tree();
    let bare = time(11, || assert_eq!(bare_walk(&f.root), 49_020));
    let params = FsWalkParams::new(f.path(""), FsWalkOptions::default());
    let ours = time(11, || {
        let answer = f.run(params.clone()).unwrap();
        assert!(answer.entries.len() > 40_000);
    });
    let ratio = ours.as_secs_f64() / bare.as_secs_f64();
    eprintln!("walk of 49,020 entries: {ours:?}, bare walk with stat: {bare:?}, ratio {ratio:.2}");
    assert!(ratio < 1.5);
}

/// The median time of a call, as a server would make it.
fn on_a_worker<R: FileRequest + Clone>(
    runtime: &tokio::runtime::Runtime,
    client: &Client,
    request: &R,
) -> Duration {
    let mut times = Vec::new();
    for _ in 0..2001 {
        let call = client.connection.call(Backend::Here, request.clone());
        let task = async move {
            let start = Instant::now();
            drop(call.await);
            start.elapsed()
        };
        times.push(runtime.block_on(async { tokio::spawn(task).await.unwrap() }));
    }
    median(times)
}

#[test]
#[ignore = "measures; see the module"]
fn small_requests_and_large_reads() {
    let c = Client::new();
    let small = c.f.file("small", [7; 1024]);
    let large = c.f.file("large", vec![7; 32 << 20]);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let stat = FsGetMetadataParams::new(small.clone());
    let read = FsReadFileParams::new(small);
    let stat_sync = time(2001, || drop(black_box(c.f.run(stat.clone()))));
    let stat_here = time(2001, || drop(black_box(c.connection.call_if_cached(&stat))));
    let read_sync = time(2001, || drop(black_box(c.f.run(read.clone()))));
    let stat_pool = on_a_worker(&runtime, &c, &stat);
    let read_pool = on_a_worker(&runtime, &c, &read);
    eprintln!(
        "getMetadata: {stat_sync:?} itself, {stat_here:?} by call_now, {stat_pool:?} by call"
    );
    eprintln!("readFile of 1 KiB: {read_sync:?} itself, {read_pool:?} by call");
    let read = FsReadFileParams::new(large.clone());
    let whole = time(11, || {
        assert_eq!(c.f.run(read.clone()).unwrap().data.len(), 32 << 20);
    });
    let plain = time(11, || drop(black_box(std::fs::read(large.as_path()).unwrap())));
    eprintln!("readFile of 32 MiB: {whole:?}, std::fs::read: {plain:?}");
    c.f.run(FsOpenParams::new("h", large, FsOpenMode::Read)).unwrap();
    let blocks = time(11, || {
        for at in 0..32 {
            drop(black_box(c.f.run(FsReadBlockParams::new("h", at << 20, 1 << 20)).unwrap()));
        }
    });
    eprintln!("32 MiB in blocks of 1 MiB: {blocks:?}");
}
