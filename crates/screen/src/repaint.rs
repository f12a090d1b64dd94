//! The sequence that shows a screen on another terminal.

use std::fmt::Write;

use vte::ansi::StandardCharset;

use crate::cell::{Cell, Color, Line, Pen, flag};
use crate::grid::{Cursor, Grid};
use crate::screen::{Modes, PASSIVE_MODES, Screen, State};

impl Screen {
    /// The sequence that brings a terminal of the same size into the state of this screen, whatever state it
    /// is in. With `history`, the lines that have scrolled out go before it into the terminal's own history.
    pub fn repaint(&self, history: bool) -> Vec<u8> {
        let mut painter = Painter::default();
        painter.reset();
        painter.normal_screen(&self.state, history);
        painter.state(&self.state);
        let mut sequence = painter.out.into_bytes();
        sequence.extend(self.tail.bytes());
        sequence
    }
}

#[derive(Default)]
struct Painter {
    out: String,
    pen: Pen,
}

impl Painter {
    /// Writing to a string cannot fail.
    fn push(&mut self, text: std::fmt::Arguments<'_>) {
        let _ = self.out.write_fmt(text);
    }

    /// Undoes every mode that changes what output means, and clears the normal screen.
    fn reset(&mut self) {
        self.out.push_str("\x1b[?1049l\x1b[0m\x1b[r\x1b[?6l\x1b[?7h\x1b[4l\x1b[20l\x1b>");
        self.out.push_str("\x1b(B\x1b)B\x1b*B\x1b+B\x0f\x1b[?25l\x1b[H\x1b[2J");
        self.pen = Pen::default();
    }

    fn goto(&mut self, row: usize, col: usize) {
        self.push(format_args!("\x1b[{};{}H", row + 1, col + 1));
    }

    fn pen(&mut self, pen: Pen) {
        let pen = Pen { flags: pen.flags & !flag::CELL_ONLY, ..pen };
        if pen == std::mem::replace(&mut self.pen, pen) {
            return;
        }
        self.out.push_str("\x1b[0");
        let attributes = [
            (flag::BOLD, 1),
            (flag::DIM, 2),
            (flag::ITALIC, 3),
            (flag::BLINK, 5),
            (flag::REVERSE, 7),
            (flag::HIDDEN, 8),
            (flag::STRIKE, 9),
        ];
        for (flag, number) in attributes {
            if pen.flags & flag != 0 {
                self.push(format_args!(";{number}"));
            }
        }
        match (pen.flags & flag::UNDERLINE) >> flag::UNDERLINE_SHIFT {
            0 => {}
            1 => self.out.push_str(";4"),
            kind => self.push(format_args!(";4:{kind}")),
        }
        for (color, base) in [(pen.fg, 30), (pen.bg, 40)] {
            match color {
                Color::Default => {}
                Color::Indexed(index @ 0..8) => self.push(format_args!(";{}", base + index)),
                Color::Indexed(index @ 8..16) => self.push(format_args!(";{}", base + 52 + index)),
                Color::Indexed(index) => self.push(format_args!(";{};5;{index}", base + 8)),
                Color::Rgb(r, g, b) => self.push(format_args!(";{};2;{r};{g};{b}", base + 8)),
            }
        }
        self.out.push('m');
    }

    fn cell(&mut self, line: &Line, col: usize, cell: Cell) {
        if cell.is(flag::SPACER) {
            return;
        }
        self.pen(cell.pen);
        self.out.push(cell.text);
        self.out.extend(line.marks(col));
    }

    /// The first cells of a line.
    fn cells(&mut self, line: &Line, count: usize) {
        for (col, cell) in line.cells()[..count].iter().enumerate() {
            self.cell(line, col, *cell);
        }
    }

    /// The normal screen, from its upper left corner on; lines that do not fit scroll into the history.
    fn normal_screen(&mut self, state: &State, history: bool) {
        let normal = state.behind.as_ref().map_or(&state.grid, |(_, normal)| normal);
        let skipped = if history { 0 } else { state.history.lines().len() };
        let lines = state.history.lines().skip(skipped).chain(&normal.lines);
        let mut continues = true;
        for (n, line) in lines.enumerate() {
            // A line that was wrapped stays one for the terminal, if there is a character to wrap, without a
            // background that would fill the new line.
            let wraps = line.cells().first().is_some_and(|cell| cell.pen.bg == Color::Default);
            if n > 0 && !(continues && wraps) {
                self.pen(Pen::default());
                self.out.push_str("\r\n");
            }
            self.cells(line, line.cells().len());
            continues = line.wrapped && line.cells().len() == state.cols;
        }
        self.pen(Pen::default());
    }

    /// The rest of the state, after the normal screen is painted.
    fn state(&mut self, state: &State) {
        if let Some((mode, normal)) = &state.behind {
            self.saved_cursor(normal);
            self.cursor(normal, &normal.cursor);
            self.push(format_args!("\x1b[?{mode}h"));
            self.charsets(&Cursor::default());
            for (row, line) in state.grid.lines.iter().enumerate() {
                if !line.cells().is_empty() {
                    self.goto(row, 0);
                    self.cells(line, line.cells().len());
                }
            }
        }
        self.saved_cursor(&state.grid);
        self.tabs(state);
        self.passive_modes(&state.modes);
        if state.modes.keypad {
            self.out.push_str("\x1b=");
        }
        if let Some(title) = &state.title {
            self.push(format_args!("\x1b]2;{title}\x07"));
        }
        if state.cursor_style != 0 {
            self.push(format_args!("\x1b[{} q", state.cursor_style));
        }
        for mode in &state.keyboard {
            self.push(format_args!("\x1b[>{mode}u"));
        }
        if state.modify_other_keys != 0 {
            self.push(format_args!("\x1b[>4;{}m", state.modify_other_keys));
        }
        let (top, bottom) = state.region;
        if state.region != (0, state.rows - 1) {
            self.push(format_args!("\x1b[{};{}r", top + 1, bottom + 1));
        }
        let mut cursor = state.grid.cursor;
        if state.modes.origin {
            self.out.push_str("\x1b[?6h");
            cursor.row -= top;
        }
        self.place(&state.grid, &cursor, state.grid.cursor.row);
        for (set, sequence) in [
            (!state.modes.wrap, "\x1b[?7l"),
            (state.modes.insert, "\x1b[4h"),
            (state.modes.newline, "\x1b[20h"),
            (state.modes.show_cursor, "\x1b[?25h"),
        ] {
            if set {
                self.out.push_str(sequence);
            }
        }
    }

    fn saved_cursor(&mut self, grid: &Grid) {
        if let Some(saved) = &grid.saved {
            self.cursor(grid, saved);
            self.out.push_str("\x1b7");
            self.charsets(&Cursor::default());
        }
    }

    fn cursor(&mut self, grid: &Grid, cursor: &Cursor) {
        self.place(grid, cursor, cursor.row);
    }

    /// Moves the cursor, with its attributes; `row` is the row of the screen, where its own is relative.
    fn place(&mut self, grid: &Grid, cursor: &Cursor, row: usize) {
        self.goto(cursor.row, cursor.col);
        if cursor.wraps {
            // Only writing the last column leaves the cursor behind it.
            let line = &grid.lines[row];
            let last = line.cell(cursor.col);
            let col = cursor.col - usize::from(last.is(flag::SPACER));
            self.goto(cursor.row, col);
            self.cell(line, col, line.cell(col));
        }
        self.pen(cursor.pen);
        self.charsets(cursor);
    }

    fn charsets(&mut self, cursor: &Cursor) {
        for (slot, charset) in ['(', ')', '*', '+'].into_iter().zip(cursor.charsets) {
            let name = match charset {
                StandardCharset::Ascii => 'B',
                StandardCharset::SpecialCharacterAndLineDrawing => '0',
            };
            self.push(format_args!("\x1b{slot}{name}"));
        }
        self.out.push(if cursor.charset == 1 { '\x0e' } else { '\x0f' });
    }

    fn tabs(&mut self, state: &State) {
        self.out.push_str("\x1b[3g");
        for tab in &state.tabs {
            self.push(format_args!("\x1b[1;{}H\x1bH", tab + 1));
        }
    }

    fn passive_modes(&mut self, modes: &Modes) {
        // Resets first: terminals end all mouse reporting with the reset of any of its modes.
        let (set, reset): (Vec<u16>, Vec<u16>) =
            PASSIVE_MODES.iter().partition(|mode| modes.passive.contains(mode));
        for (modes, end) in [(reset, 'l'), (set, 'h')] {
            for mode in modes {
                self.push(format_args!("\x1b[?{mode}{end}"));
            }
        }
    }
}
