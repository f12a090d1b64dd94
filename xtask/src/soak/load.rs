//! The load: idle connections that come and go, processes that wait, terminals that echo, programs that start.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::task::JoinSet;

use super::sample::Series;
use crate::bench::client::{Client, start};

/// Connections that start programs, one after the other.
const STARTERS: usize = 8;
/// How many connections are opened at the same time.
const AT_ONCE: usize = 32;
/// How long a terminal waits between keystrokes.
const BETWEEN_KEYS: Duration = Duration::from_millis(500);

/// How much of everything.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub connections: usize,
    pub processes: usize,
    pub terminals: usize,
    pub starts: usize,
}

impl Sizes {
    /// This part of the full load, at least one of each.
    pub(crate) fn scaled(scale: f64) -> Self {
        let of = |full: f64| ((full * scale) as usize).max(1);
        Self {
            connections: of(5000.0),
            processes: of(1000.0),
            terminals: of(200.0),
            starts: of(20_000.0),
        }
    }

    /// Connections without a process or a terminal.
    fn idle(self) -> usize {
        self.connections.saturating_sub(self.processes + self.terminals + STARTERS).max(1)
    }
}

#[derive(Debug)]
pub(crate) struct Load {
    url: String,
    sizes: Sizes,
    started: AtomicU64,
    starts: Mutex<Series>,
    keystrokes: Mutex<Series>,
    connects: Mutex<Series>,
}

/// What stays open for the steady time.
#[derive(Debug, Default)]
pub(crate) struct Held {
    idle: Vec<Listener>,
    processes: Vec<Listener>,
    terminals: Vec<Client>,
}

/// A connection that only listens, and so answers the pings of the server, which drops silent ones.
#[derive(Debug)]
struct Listener(tokio::task::JoinHandle<()>);

impl Listener {
    fn new(mut client: Client) -> Self {
        Self(tokio::spawn(async move { while client.next().await.is_ok() {} }))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Load {
    pub(crate) fn new(url: String, sizes: Sizes) -> Self {
        let series = || Mutex::new(Series::default());
        let (starts, keystrokes, connects) = (series(), series(), series());
        Self { url, sizes, started: AtomicU64::new(0), starts, keystrokes, connects }
    }

    /// The times of starts, keystrokes and connects.
    pub(crate) fn series(&self) -> [Series; 3] {
        [&self.starts, &self.keystrokes, &self.connects].map(|series| series.lock().clone())
    }

    async fn connect(&self) -> anyhow::Result<Client> {
        let began = Instant::now();
        let client = Client::initialize(&self.url).await?;
        self.connects.lock().0.push((began, began.elapsed()));
        Ok(client)
    }

    /// One of everything.
    pub(crate) async fn warm_up(&self) -> anyhow::Result<()> {
        let mut client = self.connect().await?;
        client.send(start("true", &["/bin/true"], "")).await?;
        client.until("process/closed").await?;
        let mut terminal = self.terminal().await?;
        self.press_key(&mut terminal, 0).await
    }

    async fn process(&self) -> anyhow::Result<Client> {
        let mut client = self.connect().await?;
        client.send(start("waits", &["sleep", "100000"], "")).await?;
        client.until("\"result\"").await?;
        Ok(client)
    }

    async fn terminal(&self) -> anyhow::Result<Client> {
        let mut client = self.connect().await?;
        // A member that is named twice would be refused.
        let request = start("cat", &["cat"], "").replace(r#""tty":false"#, r#""tty":true"#);
        client.send(request).await?;
        client.until("\"result\"").await?;
        Ok(client)
    }

    async fn press_key(&self, terminal: &mut Client, number: u64) -> anyhow::Result<()> {
        let began = Instant::now();
        let write = format!(
            r#"{{"id":2,"method":"process/write","params":{{"processId":"cat","chunk":"aw==","writeId":"{number}"}}}}"#
        );
        terminal.send(write).await?;
        terminal.until("process/output").await?;
        self.keystrokes.lock().0.push((began, began.elapsed()));
        Ok(())
    }

    /// Opens everything that stays.
    pub(crate) async fn open_all(self: Arc<Self>) -> anyhow::Result<Held> {
        let mut held = Held::default();
        let Sizes { processes, terminals, .. } = self.sizes;
        let kinds = std::iter::repeat_n(0, self.sizes.idle())
            .chain(std::iter::repeat_n(1, processes))
            .chain(std::iter::repeat_n(2, terminals));
        let mut opening = JoinSet::new();
        for kind in kinds {
            if opening.len() >= AT_ONCE
                && let Some(opened) = opening.join_next().await
            {
                held.add(opened??);
            }
            let load = self.clone();
            opening.spawn(async move {
                anyhow::Ok(match kind {
                    0 => (0, load.connect().await?),
                    1 => (1, load.process().await?),
                    _ => (2, load.terminal().await?),
                })
            });
        }
        while let Some(opened) = opening.join_next().await {
            held.add(opened??);
        }
        Ok(held)
    }

    /// Starts programs, presses keys, and replaces idle connections. Returns what is open at the end.
    pub(crate) async fn run_until(
        self: Arc<Self>,
        until: Instant,
        held: Held,
    ) -> anyhow::Result<Held> {
        let Held { mut idle, processes, terminals } = held;
        let mut running = JoinSet::new();
        let between = (until - Instant::now()) * STARTERS as u32 / self.sizes.starts as u32;
        for _ in 0..STARTERS {
            running.spawn(self.clone().start_programs(until, between));
        }
        for (number, terminal) in terminals.into_iter().enumerate() {
            running.spawn(self.clone().type_keys(until, terminal, number as u64));
        }
        let mut at = 0;
        while Instant::now() < until {
            // Each is replaced several times in an hour.
            at = (at + 1) % idle.len();
            idle[at] = Listener::new(self.connect().await?);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let mut terminals = Vec::new();
        while let Some(done) = running.join_next().await {
            terminals.extend(done??);
        }
        Ok(Held { idle, processes, terminals })
    }

    async fn start_programs(
        self: Arc<Self>,
        until: Instant,
        between: Duration,
    ) -> anyhow::Result<Option<Client>> {
        let mut client = self.connect().await?;
        let mut next = Instant::now();
        while next < until && self.started.load(Ordering::Relaxed) < self.sizes.starts as u64 {
            tokio::time::sleep_until(next.into()).await;
            let number = self.started.fetch_add(1, Ordering::Relaxed);
            let began = Instant::now();
            client.send(start(&number.to_string(), &["/bin/true"], "")).await?;
            client.until("process/closed").await?;
            self.starts.lock().0.push((began, began.elapsed()));
            // A machine that is too slow starts fewer, and the page says how many.
            next = (next + between).max(Instant::now());
        }
        Ok(Some(client))
    }

    async fn type_keys(
        self: Arc<Self>,
        until: Instant,
        mut terminal: Client,
        first: u64,
    ) -> anyhow::Result<Option<Client>> {
        let mut number = first;
        while Instant::now() + BETWEEN_KEYS < until {
            tokio::time::sleep(BETWEEN_KEYS).await;
            number += 1_000_000;
            self.press_key(&mut terminal, number).await?;
        }
        Ok(Some(terminal))
    }
}

impl Held {
    fn add(&mut self, (kind, client): (u8, Client)) {
        match kind {
            0 => self.idle.push(Listener::new(client)),
            1 => self.processes.push(Listener::new(client)),
            _ => self.terminals.push(client),
        }
    }
}
