//! Cells and lines.
//!
//! Invariant: a line stores no default blanks at its end, so an empty line takes no memory for its cells.

use vte::ansi::{Attr, Color as AnsiColor, NamedColor};

/// A colour as programs set it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Color {
    #[default]
    Default,
    Indexed(u8),
    Rgb(u8, u8, u8),
}

impl From<AnsiColor> for Color {
    fn from(color: AnsiColor) -> Self {
        match color {
            AnsiColor::Named(name) if (name as usize) < 16 => Self::Indexed(name as usize as u8),
            AnsiColor::Named(
                NamedColor::Foreground | NamedColor::Background | NamedColor::Cursor,
            )
            | AnsiColor::Named(_) => Self::Default,
            AnsiColor::Indexed(index) => Self::Indexed(index),
            AnsiColor::Spec(rgb) => Self::Rgb(rgb.r, rgb.g, rgb.b),
        }
    }
}

/// Attributes, as bits of [`Pen::flags`].
pub(crate) mod flag {
    pub(crate) const BOLD: u16 = 1;
    pub(crate) const DIM: u16 = 1 << 1;
    pub(crate) const ITALIC: u16 = 1 << 2;
    pub(crate) const BLINK: u16 = 1 << 3;
    pub(crate) const REVERSE: u16 = 1 << 4;
    pub(crate) const HIDDEN: u16 = 1 << 5;
    pub(crate) const STRIKE: u16 = 1 << 6;
    /// The kind of underline, from 0 (none) to 5, in three bits.
    pub(crate) const UNDERLINE_SHIFT: u16 = 7;
    pub(crate) const UNDERLINE: u16 = 0b111 << UNDERLINE_SHIFT;
    /// The left half of a wide character.
    pub(crate) const WIDE: u16 = 1 << 10;
    /// The right half of a wide character.
    pub(crate) const SPACER: u16 = 1 << 11;
    /// What a pen does not set.
    pub(crate) const CELL_ONLY: u16 = WIDE | SPACER;
}

/// The attributes that the next character gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Pen {
    pub(crate) fg: Color,
    pub(crate) bg: Color,
    pub(crate) flags: u16,
}

impl Pen {
    pub(crate) fn set(&mut self, attr: &Attr) {
        let underline = |kind: u16| kind << flag::UNDERLINE_SHIFT;
        let (clear, set) = match attr {
            Attr::Reset => {
                *self = Self::default();
                return;
            }
            Attr::Foreground(color) => {
                self.fg = (*color).into();
                return;
            }
            Attr::Background(color) => {
                self.bg = (*color).into();
                return;
            }
            // Not kept: a repainted underline has the colour of its text.
            Attr::UnderlineColor(_) => return,
            Attr::Bold => (0, flag::BOLD),
            Attr::Dim => (0, flag::DIM),
            Attr::Italic => (0, flag::ITALIC),
            Attr::Underline => (flag::UNDERLINE, underline(1)),
            Attr::DoubleUnderline => (flag::UNDERLINE, underline(2)),
            Attr::Undercurl => (flag::UNDERLINE, underline(3)),
            Attr::DottedUnderline => (flag::UNDERLINE, underline(4)),
            Attr::DashedUnderline => (flag::UNDERLINE, underline(5)),
            Attr::BlinkSlow | Attr::BlinkFast => (0, flag::BLINK),
            Attr::Reverse => (0, flag::REVERSE),
            Attr::Hidden => (0, flag::HIDDEN),
            Attr::Strike => (0, flag::STRIKE),
            Attr::CancelBold => (flag::BOLD, 0),
            Attr::CancelBoldDim => (flag::BOLD | flag::DIM, 0),
            Attr::CancelItalic => (flag::ITALIC, 0),
            Attr::CancelUnderline => (flag::UNDERLINE, 0),
            Attr::CancelBlink => (flag::BLINK, 0),
            Attr::CancelReverse => (flag::REVERSE, 0),
            Attr::CancelHidden => (flag::HIDDEN, 0),
            Attr::CancelStrike => (flag::STRIKE, 0),
        };
        self.flags = (self.flags & !clear) | set;
    }

    /// What an erased cell looks like: only the background stays.
    pub(crate) fn blank(self) -> Cell {
        Cell { text: ' ', pen: Pen { bg: self.bg, ..Self::default() } }
    }
}

/// One cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cell {
    pub(crate) text: char,
    pub(crate) pen: Pen,
}

impl Default for Cell {
    fn default() -> Self {
        Self { text: ' ', pen: Pen::default() }
    }
}

impl Cell {
    pub(crate) fn is(&self, flag: u16) -> bool {
        self.pen.flags & flag != 0
    }
}

/// Combining characters of one line beyond this many are dropped.
const MAX_MARKS: usize = 1024;

/// One line of the screen or of its history.
#[derive(Debug, Clone, Default)]
pub(crate) struct Line {
    cells: Vec<Cell>,
    /// Combining characters, each with its column, in the order of columns.
    marks: Vec<(u16, char)>,
    /// The text continues on the next line.
    pub(crate) wrapped: bool,
}

impl PartialEq for Line {
    fn eq(&self, other: &Self) -> bool {
        self.cells == other.cells && self.marks == other.marks
    }
}

impl Line {
    pub(crate) fn cells(&self) -> &[Cell] {
        &self.cells
    }

    pub(crate) fn cell(&self, col: usize) -> Cell {
        self.cells.get(col).copied().unwrap_or_default()
    }

    /// The combining characters of this column.
    pub(crate) fn marks(&self, col: usize) -> impl Iterator<Item = char> + '_ {
        let from = self.marks.partition_point(|mark| usize::from(mark.0) < col);
        self.marks[from..]
            .iter()
            .take_while(move |mark| usize::from(mark.0) == col)
            .map(|mark| mark.1)
    }

    pub(crate) fn add_mark(&mut self, col: usize, mark: char) {
        if self.marks.len() < MAX_MARKS {
            let at = self.marks.partition_point(|known| usize::from(known.0) <= col);
            self.marks.insert(at, (col as u16, mark));
        }
    }

    /// Puts a cell, without what was there before; both halves of a wide character that it cuts.
    pub(crate) fn put(&mut self, col: usize, cell: Cell) {
        if self.cells.len() <= col {
            if cell == Cell::default() {
                return;
            }
            self.cells.resize(col + 1, Cell::default());
        }
        let old = self.cells[col];
        if old.is(flag::CELL_ONLY) {
            self.split_wide(col, old);
        }
        if !self.marks.is_empty() {
            self.marks.retain(|mark| usize::from(mark.0) != col);
        }
        self.cells[col] = cell;
        if self.cells.last() == Some(&Cell::default()) {
            self.trim();
        }
    }

    fn split_wide(&mut self, col: usize, old: Cell) {
        let other = if old.is(flag::WIDE) { col + 1 } else { col.wrapping_sub(1) };
        if let Some(half) = self.cells.get_mut(other).filter(|half| half.is(flag::CELL_ONLY)) {
            *half = half.pen.blank();
            self.marks.retain(|mark| usize::from(mark.0) != other);
        }
    }

    /// Fills columns with a blank.
    pub(crate) fn fill(&mut self, from: usize, to: usize, blank: Cell) {
        for col in from..to {
            if blank == Cell::default() && col >= self.cells.len() {
                break;
            }
            self.put(col, blank);
        }
        self.trim();
    }

    /// Inserts blanks at a column; what moves out of the width is dropped.
    pub(crate) fn insert(&mut self, col: usize, count: usize, cols: usize, blank: Cell) {
        let count = count.min(cols - col);
        self.cut_wide_at(col);
        self.cells.resize(cols, Cell::default());
        self.cells[col..].rotate_right(count);
        self.cells[col..col + count].fill(blank);
        for mark in self.marks.iter_mut().filter(|mark| usize::from(mark.0) >= col) {
            mark.0 = mark.0.saturating_add(count as u16);
        }
        self.marks.retain(|mark| usize::from(mark.0) < cols);
        self.cut_wide_at(cols);
        self.trim();
    }

    /// Deletes cells at a column; blanks follow at the end.
    pub(crate) fn delete(&mut self, col: usize, count: usize, cols: usize, blank: Cell) {
        let count = count.min(cols - col);
        self.cut_wide_at(col);
        self.cut_wide_at(col + count);
        self.cells.resize(cols, Cell::default());
        self.cells[col..].rotate_left(count);
        self.cells[cols - count..].fill(blank);
        let gone = col..col + count;
        self.marks.retain(|mark| !gone.contains(&usize::from(mark.0)));
        for mark in self.marks.iter_mut().filter(|mark| usize::from(mark.0) >= gone.end) {
            mark.0 -= count as u16;
        }
        self.trim();
    }

    /// Blanks a wide character that lies on both sides of this column.
    fn cut_wide_at(&mut self, col: usize) {
        let spacer = self.cells.get(col).is_some_and(|cell| cell.is(flag::SPACER));
        let wide = col > 0 && self.cells.get(col - 1).is_some_and(|cell| cell.is(flag::WIDE));
        if spacer && let Some(cell) = self.cells.get_mut(col) {
            *cell = cell.pen.blank();
        }
        if wide
            && (spacer || col >= self.cells.len())
            && let Some(cell) = self.cells.get_mut(col - 1)
        {
            *cell = cell.pen.blank();
            self.marks.retain(|mark| usize::from(mark.0) != col - 1);
        }
    }

    /// Cuts the line at a new width.
    pub(crate) fn set_width(&mut self, cols: usize) {
        if self.cells.len() > cols {
            self.cells.truncate(cols);
            self.marks.retain(|mark| usize::from(mark.0) < cols);
            self.cut_wide_at(cols);
            self.trim();
        }
    }

    pub(crate) fn trim(&mut self) {
        let len = self.cells.iter().rposition(|cell| *cell != Cell::default());
        self.cells.truncate(len.map_or(0, |last| last + 1));
    }

    /// Gives back memory that the cells do not need.
    pub(crate) fn shrink(&mut self) {
        self.cells.shrink_to_fit();
        self.marks.shrink_to_fit();
    }

    /// Characters of the line, for its share of a limit.
    pub(crate) fn weight(&self) -> usize {
        self.cells.len() + self.marks.len()
    }
}
