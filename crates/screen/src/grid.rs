//! A screenful of lines with its cursor, and the history of lines that have scrolled out.

use std::collections::VecDeque;

use vte::ansi::StandardCharset;

use crate::cell::{Cell, Line, Pen};

/// Lines of history that a screen keeps, at most.
pub const HISTORY_LINES: usize = 1000;
/// Characters of history, 16 bytes each.
const HISTORY_CELLS: usize = 128 << 10;

/// The cursor, and what DECSC saves with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Cursor {
    pub(crate) row: usize,
    pub(crate) col: usize,
    /// The last column is written, and the next character goes to the next line.
    pub(crate) wraps: bool,
    pub(crate) pen: Pen,
    pub(crate) charsets: [StandardCharset; 4],
    pub(crate) charset: usize,
}

/// One of the two screens of a terminal.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Grid {
    pub(crate) lines: VecDeque<Line>,
    pub(crate) cursor: Cursor,
    pub(crate) saved: Option<Cursor>,
}

impl Grid {
    pub(crate) fn new(rows: usize) -> Self {
        let lines = (0..rows).map(|_| Line::default()).collect();
        Self { lines, cursor: Cursor::default(), saved: None }
    }

    /// Removes lines at the top of a region, and puts blank ones at its end.
    pub(crate) fn scroll_up(
        &mut self,
        top: usize,
        bottom: usize,
        count: usize,
        blank: Cell,
        cols: usize,
        mut history: Option<&mut History>,
    ) {
        for _ in 0..count.min(bottom + 1 - top) {
            if let Some(line) = self.lines.remove(top)
                && let Some(history) = &mut history
            {
                history.push(line);
            }
            self.lines.insert(bottom, blank_line(blank, cols));
        }
    }

    /// Removes lines at the end of a region, and puts blank ones at its top.
    pub(crate) fn scroll_down(
        &mut self,
        top: usize,
        bottom: usize,
        count: usize,
        blank: Cell,
        cols: usize,
    ) {
        for _ in 0..count.min(bottom + 1 - top) {
            self.lines.remove(bottom);
            self.lines.insert(top, blank_line(blank, cols));
        }
    }

    /// Changes the size. The lines around the cursor stay: blank lines below it go first, then lines at the
    /// top, into the history; lines come back from there.
    pub(crate) fn resize(&mut self, rows: usize, cols: usize, mut history: Option<&mut History>) {
        while self.lines.len() > rows {
            let last_blank = self.lines.back().is_some_and(|line| *line == Line::default());
            if self.cursor.row + 1 < self.lines.len() && last_blank {
                self.lines.pop_back();
                continue;
            }
            if let Some(line) = self.lines.pop_front()
                && let Some(history) = &mut history
            {
                history.push(line);
            }
            self.cursor.row = self.cursor.row.saturating_sub(1);
            if let Some(saved) = &mut self.saved {
                saved.row = saved.row.saturating_sub(1);
            }
        }
        while self.lines.len() < rows {
            match history.as_mut().and_then(|history| history.pop()) {
                Some(line) => {
                    self.lines.push_front(line);
                    self.cursor.row += 1;
                    if let Some(saved) = &mut self.saved {
                        saved.row += 1;
                    }
                }
                None => self.lines.push_back(Line::default()),
            }
        }
        for line in &mut self.lines {
            line.set_width(cols);
        }
        for cursor in std::iter::once(&mut self.cursor).chain(&mut self.saved) {
            cursor.row = cursor.row.min(rows - 1);
            cursor.col = cursor.col.min(cols - 1);
            cursor.wraps = false;
        }
    }
}

pub(crate) fn blank_line(blank: Cell, cols: usize) -> Line {
    let mut line = Line::default();
    if blank != Cell::default() {
        line.fill(0, cols, blank);
    }
    line
}

/// The lines that have scrolled out of the screen, newest last.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct History {
    lines: VecDeque<Line>,
    cells: usize,
}

impl History {
    fn push(&mut self, mut line: Line) {
        line.shrink();
        self.cells += line.weight();
        self.lines.push_back(line);
        while self.lines.len() > HISTORY_LINES || self.cells > HISTORY_CELLS {
            let Some(oldest) = self.lines.pop_front() else { break };
            self.cells -= oldest.weight();
        }
    }

    fn pop(&mut self) -> Option<Line> {
        let line = self.lines.pop_back()?;
        self.cells -= line.weight();
        Some(line)
    }

    pub(crate) fn set_width(&mut self, cols: usize) {
        for line in &mut self.lines {
            let weight = line.weight();
            line.set_width(cols);
            self.cells -= weight - line.weight();
        }
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    pub(crate) fn lines(&self) -> impl ExactSizeIterator<Item = &Line> {
        self.lines.iter()
    }
}
