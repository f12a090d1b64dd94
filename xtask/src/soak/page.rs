//! What a run found, as a table, and docs/reliability.md with its plots.

use std::fmt::Write;
use std::process::Command;

use super::Findings;
use super::plot::{Line, svg};
use super::sample::Series;

const PAGE: &str = "docs/reliability.md";
const PLOTS: &str = "docs/reliability";
/// Points of a plot of times.
const PARTS: usize = 60;

/// The table.
pub(crate) fn summary(found: &Findings) -> String {
    let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
    let (first, last) = (found.samples.first(), found.samples.last());
    let (first, last) = (first.copied().unwrap_or_default(), last.copied().unwrap_or_default());
    let mut out = String::from(
        "| of the server | idle | first sample | last sample | after the drain |\n\
         | --- | ---: | ---: | ---: | ---: |\n",
    );
    let samples = [found.idle, first, last, found.drained];
    let mut row = |name: &str, cells: Vec<String>| {
        let _ = writeln!(out, "| {name} | {} |", cells.join(" | "));
    };
    row("memory", samples.iter().map(|sample| mib(sample.memory)).collect());
    row("descriptors", samples.iter().map(|sample| sample.descriptors.to_string()).collect());
    row("processes that it keeps", samples.iter().map(|s| s.keepers.to_string()).collect());
    out.push_str("\n| request | count | p50 | p99 |\n| --- | ---: | ---: | ---: |\n");
    for (name, series) in named(found) {
        let ms = |share| format!("{:.2} ms", series.percentile(share).as_secs_f64() * 1e3);
        let _ = writeln!(out, "| {name} | {} | {} | {} |", series.0.len(), ms(0.5), ms(0.99));
    }
    out
}

fn named(found: &Findings) -> [(&'static str, &Series); 3] {
    [
        ("start of `/bin/true` until closed", &found.starts),
        ("keystroke until its echo, on a terminal", &found.keystrokes),
        ("connect and initialize", &found.connects),
    ]
}

/// Writes the page and its plots.
pub(crate) fn write(found: &Findings) -> anyhow::Result<()> {
    std::fs::create_dir_all(PLOTS)?;
    let seconds = found.seconds as f64;
    let of = |value: fn(&super::Sample) -> f64| found.samples.iter().map(value).collect::<Vec<_>>();
    let memory = of(|sample| sample.memory as f64 / f64::from(1 << 20));
    let descriptors = of(|sample| sample.descriptors as f64);
    let keepers = of(|sample| sample.keepers as f64);
    let times = |series: &Series, share| {
        let times = series.over_time(PARTS, share).into_iter();
        times.map(|time| time.as_secs_f64() * 1e3).collect::<Vec<_>>()
    };
    let percentiles = |series| {
        [
            Line { name: "p50", values: times(series, 0.5) },
            Line { name: "p99", values: times(series, 0.99) },
        ]
    };
    let memory = [Line { name: "resident", values: memory }];
    let counts = [
        Line { name: "descriptors", values: descriptors },
        Line { name: "processes", values: keepers },
    ];
    let plots = [
        ("memory", svg("Memory of the server", "MiB", seconds, &memory)),
        ("counts", svg("Descriptors and processes", "number", seconds, &counts)),
        ("starts", svg("Start until closed", "ms", seconds, &percentiles(&found.starts))),
        ("keystrokes", svg("Keystroke until echo", "ms", seconds, &percentiles(&found.keystrokes))),
    ];
    for (name, plot) in plots {
        std::fs::write(format!("{PLOTS}/{name}.svg"), plot)?;
    }
    Ok(std::fs::write(PAGE, page(found)?)?)
}

fn page(found: &Findings) -> anyhow::Result<String> {
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let processors = std::thread::available_parallelism()?;
    let commit = Command::new("git").args(["rev-parse", "--short", "HEAD"]).output()?.stdout;
    let commit = String::from_utf8(commit)?;
    let profile = if cfg!(debug_assertions) { "dev (not optimized)" } else { "release" };
    let sizes = found.sizes;
    Ok(format!(
        "# Reliability under load

Written by `cargo xtask soak --write`, which also draws the plots; nothing here is edited by hand. The run loads
one server, and fails if its memory, descriptors or processes grow between the second and the last quarter of the
time, or if anything is left after every client is gone. Times depend on the machine and are not judged.

This run: {} connections, of which {} hold a waiting process and {} a terminal with a key every half second; idle
connections are replaced all the time; {} programs are started in {} s.
Commit {}, profile {profile}, Linux {}, {processors} processors, shared with other work.

{}
![memory](reliability/memory.svg)
![descriptors and processes](reliability/counts.svg)
![start until closed](reliability/starts.svg)
![keystroke until echo](reliability/keystrokes.svg)

The full load is `cargo xtask soak` (an hour, 5,000 connections, 1,000 processes, 200 terminals, 20,000 starts);
`--scale` and `--seconds` make it smaller. CI runs a short one and writes nothing.
",
        sizes.connections,
        sizes.processes,
        sizes.terminals,
        found.starts.0.len(),
        found.seconds,
        commit.trim(),
        kernel.trim(),
        summary(found),
    ))
}
