//! The screen of a process's terminal, built when a client asks for it.
//!
//! Output waits in chunks, which share their memory with the retained output, and is applied to the model only
//! when a client asks, or when too much waits. So a terminal that no client attaches to again costs a queue,
//! and one with much output, what applying it costs.
//!
//! ```text
//!   output, sizes ──▶ waiting (at most MAX_WAITING) ──▶ model ──▶ repaint
//!                          └─▶ dropped: lines that would have left the model's history again
//! ```

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};
use codex_exec_screen::{HISTORY_LINES, Screen};
use codex_exec_server_protocol::process::TerminalSize;

/// Output that waits, in bytes: as much as can be applied before a client that attaches notices.
const MAX_WAITING: usize = 2 << 20;
/// Chunks and sizes that wait.
const MAX_PIECES: usize = 1024;
/// Smaller chunks are copied together, up to [`MERGED`] bytes: each would keep a buffer of its own.
const SMALL: usize = 4 << 10;
const MERGED: usize = 64 << 10;

/// The screen of one terminal.
#[derive(Debug)]
pub(super) struct TerminalScreen {
    model: Screen,
    waiting: VecDeque<Piece>,
    waiting_bytes: usize,
    /// Small chunks at the end of the queue.
    merged: BytesMut,
    size: TerminalSize,
    resizes: u64,
}

#[derive(Debug)]
enum Piece {
    /// Output; the number of its lines if it is nothing but lines of text.
    Output(Bytes, Option<usize>),
    Size(TerminalSize),
}

impl TerminalScreen {
    pub(super) fn new(size: TerminalSize) -> Self {
        Self {
            model: Screen::new(size.rows, size.cols),
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            merged: BytesMut::new(),
            size,
            resizes: 0,
        }
    }

    /// How often the size has changed.
    pub(super) fn resizes(&self) -> u64 {
        self.resizes
    }

    /// The size of the terminal.
    pub(super) fn size(&self) -> TerminalSize {
        self.size
    }

    pub(super) fn output(&mut self, bytes: &Bytes) {
        self.waiting_bytes += bytes.len();
        if bytes.len() < SMALL {
            self.merged.extend_from_slice(bytes);
            if self.merged.len() < MERGED {
                return;
            }
            self.flush();
        } else {
            self.flush();
            self.waiting.push_back(Piece::Output(bytes.clone(), lines_of_text(bytes)));
        }
        if self.waiting_bytes > MAX_WAITING {
            self.drop_old_lines();
        }
        while self.waiting_bytes > MAX_WAITING && self.apply_oldest() {}
    }

    pub(super) fn resized(&mut self, size: TerminalSize) {
        self.size = size;
        self.resizes += 1;
        self.flush();
        // Each size counts, also one that is changed again at once: a smaller one cuts lines.
        self.waiting.push_back(Piece::Size(size));
        while self.waiting.len() > MAX_PIECES && self.apply_oldest() {}
    }

    /// What brings a terminal of this size into the same state.
    pub(super) fn repaint(&mut self) -> Vec<u8> {
        self.flush();
        while self.apply_oldest() {}
        self.model.repaint(true)
    }

    fn flush(&mut self) {
        if !self.merged.is_empty() {
            let bytes = self.merged.split().freeze();
            let lines = lines_of_text(&bytes);
            self.waiting.push_back(Piece::Output(bytes, lines));
        }
    }

    fn apply_oldest(&mut self) -> bool {
        match self.waiting.pop_front() {
            Some(Piece::Output(bytes, _)) => {
                self.waiting_bytes -= bytes.len();
                self.model.feed(&bytes);
            }
            Some(Piece::Size(size)) => self.model.resize(size.rows, size.cols),
            None => return false,
        }
        true
    }

    /// Drops lines of text that later lines would push out of the history.
    fn drop_old_lines(&mut self) {
        if !self.model.only_scrolls() {
            return;
        }
        let needed = HISTORY_LINES + usize::from(self.size.rows) + 1;
        let mut later = 0;
        for piece in &self.waiting {
            match piece {
                Piece::Output(_, Some(lines)) => later += lines,
                _ => return,
            }
        }
        while self.waiting_bytes > MAX_WAITING
            && let Some(Piece::Output(bytes, Some(lines))) = self.waiting.front()
            && later - lines >= needed
        {
            later -= lines;
            self.waiting_bytes -= bytes.len();
            self.waiting.pop_front();
        }
    }
}

/// The number of lines, each ended by CR LF, if the output is nothing else.
fn lines_of_text(bytes: &[u8]) -> Option<usize> {
    let is_text = |byte: &u8| matches!(byte, b'\r' | b'\n' | b'\t' | 0x20..=0x7e | 0x80..);
    if !bytes.iter().all(is_text) {
        return None;
    }
    let mut lines = 0;
    for at in memchr::memchr_iter(b'\n', bytes) {
        // The first byte follows the carriage return of the chunk before it, or the line is not whole.
        if at > 0 && bytes[at - 1] != b'\r' {
            return None;
        }
        lines += 1;
    }
    Some(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random floods, with a screen that gets every byte at once beside it.
    #[test]
    fn a_screen_that_waits_and_drops_equals_one_that_applies_everything() {
        for seed in 0..40 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let size = TerminalSize { rows: 24, cols: 80 };
            let (mut lazy, mut eager) = (TerminalScreen::new(size), Screen::new(24, 80));
            let mut dropped = false;
            for _ in 0..rng.usize(1..8) {
                let line = ["x\r\n", "some text in a line\r\n", "\u{6f22}\r\n"][rng.usize(..3)];
                let mut bytes = line.repeat(rng.usize(1..60_000)).into_bytes();
                match rng.u8(..8) {
                    0 => bytes.extend_from_slice(b"\x1b[31mred\x1b[?1049h"),
                    1 => bytes.extend_from_slice(b"\x1b[?1049l\x1b[0mback\r\n"),
                    2 => bytes.extend_from_slice(b"\x1b[3;9r"),
                    3 => bytes.extend_from_slice(b"no end of a line"),
                    _ => {}
                }
                let mut rest = &bytes[..];
                while !rest.is_empty() {
                    let (chunk, more) = rest.split_at(rng.usize(1..=rest.len().min(100_000)));
                    let before = lazy.waiting_bytes + chunk.len();
                    lazy.output(&Bytes::copy_from_slice(chunk));
                    dropped |= lazy.waiting_bytes < before;
                    assert!(lazy.waiting_bytes <= MAX_WAITING + MERGED, "{}", lazy.waiting_bytes);
                    eager.feed(chunk);
                    rest = more;
                }
                for _ in 0..rng.usize(..3) {
                    let (rows, cols) = (rng.u16(1..50), rng.u16(1..100));
                    lazy.resized(TerminalSize { rows, cols });
                    eager.resize(rows, cols);
                }
                if rng.bool() {
                    lazy.repaint();
                }
            }
            lazy.repaint();
            assert_eq!(lazy.model.text(), eager.text(), "seed {seed}, dropped: {dropped}");
            assert!(lazy.model == eager, "seed {seed}, dropped: {dropped}");
        }
    }
}
