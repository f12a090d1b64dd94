//! The status line of an outage, as mosh has it: what is lost, since when, what is being tried, how to leave.
//!
//! On the main screen of a terminal it is the line below the cursor, which a shell leaves empty; on the
//! alternate screen it is the last line, which the program paints again when the outage is over. A cursor that the
//! program has saved (`ESC 7`) is lost: a terminal keeps one.

use std::time::{Duration, Instant};

/// An outage.
#[derive(Debug, Clone)]
pub(crate) struct Outage {
    /// The server, for people.
    pub server: String,
    pub since: Instant,
    pub trying: Trying,
}

/// What the client does about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Trying {
    /// It waits for an answer on the connection that it has.
    Waiting,
    /// It makes another connection.
    Reconnecting { attempt: u32, reason: String },
}

impl Outage {
    /// The line for this time; `leave` says how to stop waiting.
    pub(crate) fn line(&self, now: Instant, leave: &str) -> String {
        let server = &self.server;
        let seconds = now.saturating_duration_since(self.since).as_secs();
        let (lost, trying) = match &self.trying {
            Trying::Waiting => (
                format!("no answer from {server}"),
                "waiting for one, then reconnecting".to_owned(),
            ),
            Trying::Reconnecting { attempt, reason } => (
                format!("connection to {server} lost"),
                format!("reconnecting, attempt {attempt} ({reason})"),
            ),
        };
        let line = format!("codex: {lost} for {seconds} s; {leave}; {trying}");
        crate::style::printable(&line)
    }

    /// The line after the outage.
    pub(crate) fn over(&self, now: Instant) -> String {
        let lasted = now.saturating_duration_since(self.since);
        format!("codex: connected again after {} s", lasted.as_secs().max(1))
    }
}

/// How often the line shows a new time.
pub(crate) const TICK: Duration = Duration::from_secs(1);

/// Where the line is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Where {
    /// Below the cursor of the main screen.
    BelowCursor,
    /// The last of this many lines of the alternate screen.
    Last(u16),
}

impl Where {
    /// What paints the line; `first`: it is not there yet. The cursor stays where it is.
    pub(crate) fn paint(self, line: &str, columns: u16, first: bool) -> Vec<u8> {
        let clipped: String = line.chars().take(usize::from(columns.max(2)) - 1).collect();
        // A line feed at the bottom scrolls, and the cursor goes up with its line.
        let room = if first && self == Self::BelowCursor { "\n\x1b[A" } else { "" };
        format!("{room}{}\x1b[7m{clipped}\x1b[0m\x1b8", self.enter()).into_bytes()
    }

    /// What removes the line.
    pub(crate) fn clear(self) -> Vec<u8> {
        format!("{}\x1b8", self.enter()).into_bytes()
    }

    /// Saves the cursor with its attributes, moves to the line and empties it.
    fn enter(self) -> String {
        match self {
            Self::BelowCursor => "\x1b7\x1b[B\r\x1b[0m\x1b[2K".to_owned(),
            Self::Last(rows) => format!("\x1b7\x1b[{rows};1H\x1b[0m\x1b[2K"),
        }
    }
}

#[cfg(test)]
mod tests {
    use codex_exec_screen::Screen;

    use super::*;

    fn outage(trying: Trying) -> Outage {
        Outage { server: "env:laptop".to_owned(), since: Instant::now(), trying }
    }

    #[test]
    fn the_line_says_what_since_when_what_next_and_how_to_leave() {
        let waiting = outage(Trying::Waiting);
        let line = waiting.line(waiting.since + Duration::from_secs(4), "Enter ~. leaves");
        for part in ["env:laptop", "for 4 s", "waiting", "Enter ~. leaves"] {
            assert!(line.contains(part), "{line}");
        }
        let reason = "refused\x1b[2J".to_owned();
        let lost = outage(Trying::Reconnecting { attempt: 3, reason });
        let line = lost.line(lost.since, "Ctrl-C leaves");
        assert!(line.contains("attempt 3 (refused") && !line.contains('\x1b'), "{line:?}");
    }

    /// Random screens: after the line has come and gone, the screen is as it was, apart from the line's row, a
    /// scroll by one, and the saved cursor.
    #[test]
    fn a_line_that_is_gone_leaves_the_text_and_the_cursor_alone() {
        let mut random = fastrand::Rng::with_seed(16);
        for round in 0..300 {
            let (rows, columns) = (random.u16(3..12), random.u16(10..40));
            let mut text = String::new();
            for _ in 0..random.usize(0..20) {
                text.push_str(&"x".repeat(random.usize(0..usize::from(columns) - 1)));
                text.push_str("\r\n");
            }
            text.push_str(random.choice(["$ ", "", "\x1b[1;31mred "]).unwrap());
            let (mut with, mut without) = (Screen::new(rows, columns), Screen::new(rows, columns));
            with.feed(text.as_bytes());
            without.feed(text.as_bytes());
            for first in [true, false, false] {
                with.feed(&Where::BelowCursor.paint("codex: no answer for 3 s", columns, first));
            }
            with.feed(&Where::BelowCursor.clear());
            // The room for the line, and the cursor that a terminal saves only once.
            without.feed(b"\n\x1b[A\x1b7");
            with.feed(b"next");
            without.feed(b"next");
            assert_eq!(with.repaint(true), without.repaint(true), "round {round}");
        }
    }
}
