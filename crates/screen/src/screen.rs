//! The screen: applies output to its grids.

use std::collections::BTreeSet;
use std::time::Duration;

use unicode_width::UnicodeWidthChar;
use vte::ansi::{
    Attr, CharsetIndex, ClearMode, CursorShape, CursorStyle, Handler, KeyboardModes,
    KeyboardModesApplyBehavior, LineClearMode, Mode, ModifyOtherKeys, PrivateMode, Processor,
    StandardCharset, TabulationClearMode, Timeout,
};

use crate::cell::{Cell, Line, Pen, flag};
use crate::grid::{Cursor, Grid, History, blank_line};
use crate::tail::Tail;

/// The most rows; a larger terminal is modelled with its first rows only.
pub const MAX_ROWS: u16 = 512;
/// The most columns; a wider terminal is modelled with its first columns only.
pub const MAX_COLS: u16 = 1024;

/// Bytes of a title that are kept.
const MAX_TITLE: usize = 1024;
/// Depth of the stack of keyboard modes.
const MAX_KEYBOARD_MODES: usize = 16;
const TAB_WIDTH: usize = 8;

/// Private modes that change what a terminal sends or how it looks, but not what output means.
pub(crate) const PASSIVE_MODES: [u16; 15] =
    [1, 5, 9, 12, 1000, 1002, 1003, 1004, 1005, 1006, 1007, 1015, 1016, 2004, 2031];

/// A terminal's screen.
///
/// ```
/// let mut screen = codex_exec_screen::Screen::new(24, 80);
/// screen.feed(b"\x1b[6nhello");
/// assert_eq!(screen.text(), "hello");
/// assert!(!screen.repaint(true).windows(4).any(|bytes| bytes == b"\x1b[6n"));
/// ```
pub struct Screen {
    parser: Processor<NoSync>,
    pub(crate) tail: Tail,
    pub(crate) state: State,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct State {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// The screen that is shown.
    pub(crate) grid: Grid,
    /// While the alternate screen is shown: the mode that it was entered by, and the normal screen.
    pub(crate) behind: Option<(u16, Grid)>,
    pub(crate) history: History,
    /// First and last row of the scrolling region.
    pub(crate) region: (usize, usize),
    pub(crate) tabs: BTreeSet<usize>,
    pub(crate) modes: Modes,
    pub(crate) title: Option<String>,
    pub(crate) keyboard: Vec<u8>,
    pub(crate) modify_other_keys: u8,
    pub(crate) cursor_style: u8,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Modes {
    pub(crate) passive: BTreeSet<u16>,
    pub(crate) origin: bool,
    pub(crate) wrap: bool,
    pub(crate) insert: bool,
    pub(crate) newline: bool,
    pub(crate) show_cursor: bool,
    pub(crate) keypad: bool,
}

impl Default for Modes {
    fn default() -> Self {
        Self {
            passive: BTreeSet::new(),
            origin: false,
            wrap: true,
            insert: false,
            newline: false,
            show_cursor: true,
            keypad: false,
        }
    }
}

/// Turns off the parser's buffer for synchronized updates: nothing here looks at the screen between two bytes.
#[derive(Debug, Default)]
struct NoSync;

impl Timeout for NoSync {
    fn set_timeout(&mut self, _: Duration) {}
    fn clear_timeout(&mut self) {}
    fn pending_timeout(&self) -> bool {
        false
    }
}

impl std::fmt::Debug for Screen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let State { rows, cols, .. } = self.state;
        f.debug_struct("Screen").field("rows", &rows).field("cols", &cols).finish_non_exhaustive()
    }
}

/// Screens are equal if they show the same, with the same history, and react equally to more output.
impl PartialEq for Screen {
    fn eq(&self, other: &Self) -> bool {
        self.state == other.state
    }
}

impl Screen {
    /// A blank screen; sizes from 1 to [`MAX_ROWS`] and [`MAX_COLS`].
    pub fn new(rows: u16, cols: u16) -> Self {
        let (rows, cols) = clamp(rows, cols);
        Self { parser: Processor::new(), tail: Tail::default(), state: State::new(rows, cols) }
    }

    /// Applies output.
    pub fn feed(&mut self, output: &[u8]) {
        self.parser.advance(&mut self.state, output);
        self.tail.push(output);
    }

    /// Rows and columns.
    pub fn size(&self) -> (u16, u16) {
        (self.state.rows as u16, self.state.cols as u16)
    }

    /// Everything that decides what it shows, now and after more output; for messages of tests.
    pub fn state(&self) -> impl std::fmt::Debug {
        &self.state
    }

    /// Whether lines of text only scroll the screen: they end up in the history in their order, whatever there
    /// was before them.
    pub fn only_scrolls(&self) -> bool {
        let State { modes, behind, region, rows, grid, .. } = &self.state;
        let cursor = &grid.cursor;
        self.tail.is_empty()
            && behind.is_none()
            && *region == (0, rows - 1)
            && modes.wrap
            && !modes.insert
            && cursor.charsets[cursor.charset] == StandardCharset::Ascii
            && cursor.pen == Pen::default()
    }

    /// Changes the size, as a terminal does: no line is wrapped anew.
    pub fn resize(&mut self, rows: u16, cols: u16) {
        let (rows, cols) = clamp(rows, cols);
        self.state.resize(rows, cols);
    }

    /// What it shows, without attributes; blanks at the end of lines, and of the screen, left out.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for line in &self.state.grid.lines {
            let mut shown = String::new();
            for (col, cell) in line.cells().iter().enumerate() {
                if !cell.is(flag::SPACER) {
                    shown.push(cell.text);
                    shown.extend(line.marks(col));
                }
            }
            text.push_str(shown.trim_end());
            text.push('\n');
        }
        text.truncate(text.trim_end().len());
        text
    }
}

fn clamp(rows: u16, cols: u16) -> (usize, usize) {
    (usize::from(rows.clamp(1, MAX_ROWS)), usize::from(cols.clamp(1, MAX_COLS)))
}

fn default_tabs(cols: std::ops::Range<usize>) -> impl Iterator<Item = usize> {
    cols.filter(|col| col % TAB_WIDTH == 0 && *col > 0)
}

impl State {
    fn new(rows: usize, cols: usize) -> Self {
        Self {
            rows,
            cols,
            grid: Grid::new(rows),
            behind: None,
            history: History::default(),
            region: (0, rows - 1),
            tabs: default_tabs(0..cols).collect(),
            modes: Modes::default(),
            title: None,
            keyboard: Vec::new(),
            modify_other_keys: 0,
            cursor_style: 0,
        }
    }

    fn resize(&mut self, rows: usize, cols: usize) {
        if (rows, cols) == (self.rows, self.cols) {
            return;
        }
        match &mut self.behind {
            None => self.grid.resize(rows, cols, Some(&mut self.history)),
            Some((_, normal)) => {
                normal.resize(rows, cols, Some(&mut self.history));
                self.grid.resize(rows, cols, None);
            }
        }
        self.history.set_width(cols);
        self.tabs.retain(|col| *col < cols);
        self.tabs.extend(default_tabs(self.cols..cols));
        (self.rows, self.cols) = (rows, cols);
        self.region = (0, rows - 1);
    }

    fn cursor(&mut self) -> &mut Cursor {
        &mut self.grid.cursor
    }

    fn line(&mut self) -> &mut Line {
        let row = self.grid.cursor.row;
        &mut self.grid.lines[row]
    }

    fn blank(&self) -> Cell {
        self.grid.cursor.pen.blank()
    }

    /// The rows that the cursor can move to.
    fn bounds(&self) -> (usize, usize) {
        if self.modes.origin { self.region } else { (0, self.rows - 1) }
    }

    fn move_to(&mut self, row: usize, col: usize) {
        let (first, last) = self.bounds();
        let (row, col) = (row.clamp(first, last), col.min(self.cols - 1));
        let cursor = self.cursor();
        (cursor.row, cursor.col, cursor.wraps) = (row, col, false);
    }

    fn scroll_region_up(&mut self, top: usize, bottom: usize, count: usize) {
        let (blank, cols) = (self.blank(), self.cols);
        let history = (self.behind.is_none() && top == 0).then_some(&mut self.history);
        self.grid.scroll_up(top, bottom, count, blank, cols, history);
    }

    fn scroll_region_down(&mut self, top: usize, bottom: usize, count: usize) {
        let (blank, cols) = (self.blank(), self.cols);
        self.grid.scroll_down(top, bottom, count, blank, cols);
    }

    /// Moves to the next row, and scrolls at the end of the region.
    fn index(&mut self) {
        let (top, bottom) = self.region;
        let row = self.grid.cursor.row;
        if row == bottom {
            self.scroll_region_up(top, bottom, 1);
        } else if row + 1 < self.rows {
            self.cursor().row += 1;
        }
        self.cursor().wraps = false;
    }

    fn wrap_line(&mut self) {
        self.line().wrapped = true;
        self.index();
        self.cursor().col = 0;
    }

    fn print(&mut self, text: char, width: usize) {
        if self.modes.wrap && self.grid.cursor.wraps {
            self.wrap_line();
        }
        let cols = self.cols;
        if width == 2 && self.grid.cursor.col + 1 >= cols {
            if cols < 2 {
                return;
            }
            if self.modes.wrap {
                let blank = self.blank();
                let col = self.grid.cursor.col;
                self.line().put(col, blank);
                self.wrap_line();
            } else {
                self.cursor().col = cols - 2;
            }
        }
        let Cursor { row, col, pen, .. } = self.grid.cursor;
        let insert = self.modes.insert;
        let line = &mut self.grid.lines[row];
        if insert && col + width < cols {
            line.insert(col, width, cols, Cell::default());
        }
        let mut cell = Cell { text, pen };
        if width == 2 {
            let mut spacer = Cell { text: ' ', pen };
            spacer.pen.flags |= flag::SPACER;
            cell.pen.flags |= flag::WIDE;
            // The spacer first: putting a half blanks the other half of what was there.
            line.put(col + 1, pen.blank());
            line.put(col, cell);
            line.put(col + 1, spacer);
        } else {
            line.put(col, cell);
        }
        if col + width == cols {
            line.wrapped = false;
        }
        let wrap = self.modes.wrap;
        let cursor = self.cursor();
        if col + width >= cols {
            cursor.col = cols - 1;
            cursor.wraps = wrap;
        } else {
            cursor.col = col + width;
        }
    }

    /// Adds a combining character to the last one.
    fn combine(&mut self, mark: char) {
        let Cursor { row, col, wraps, .. } = self.grid.cursor;
        let mut at = if wraps { Some(col) } else { col.checked_sub(1) };
        let line = &mut self.grid.lines[row];
        if let Some(col) = at
            && line.cell(col).is(flag::SPACER)
        {
            at = col.checked_sub(1);
        }
        // A blank at the end of a line is not stored, so no blank has a mark.
        if let Some(col) = at.filter(|col| line.cell(*col) != Cell::default()) {
            line.add_mark(col, mark);
        }
    }

    fn save_cursor(&mut self) {
        self.grid.saved = Some(self.grid.cursor);
    }

    fn restore_cursor(&mut self) {
        self.grid.cursor = self.grid.saved.unwrap_or_default();
        let (first, last) = self.bounds();
        let wrap = self.modes.wrap;
        let cursor = self.cursor();
        cursor.row = cursor.row.clamp(first, last);
        cursor.wraps &= wrap;
    }

    fn enter_alternate(&mut self, mode: u16) {
        if self.behind.is_some() {
            return;
        }
        if mode == 1049 {
            self.save_cursor();
        }
        let mut alternate = Grid::new(self.rows);
        alternate.cursor = self.grid.cursor;
        let normal = std::mem::replace(&mut self.grid, alternate);
        self.behind = Some((mode, normal));
    }

    fn leave_alternate(&mut self, mode: u16) {
        if let Some((_, normal)) = self.behind.take() {
            let cursor = self.grid.cursor;
            self.grid = normal;
            self.grid.cursor = cursor;
        }
        if mode == 1049 {
            self.restore_cursor();
        }
    }

    fn private_mode(&mut self, mode: u16, set: bool) {
        match mode {
            6 => {
                self.modes.origin = set;
                self.move_to(self.bounds().0, 0);
            }
            7 => {
                self.modes.wrap = set;
                self.cursor().wraps &= set;
            }
            25 => self.modes.show_cursor = set,
            47 | 1047 | 1049 if set => self.enter_alternate(mode),
            47 | 1047 | 1049 => self.leave_alternate(mode),
            1048 if set => self.save_cursor(),
            1048 => self.restore_cursor(),
            mode if PASSIVE_MODES.contains(&mode) => {
                let passive = &mut self.modes.passive;
                if set {
                    passive.insert(mode)
                } else {
                    passive.remove(&mode)
                };
            }
            _ => {}
        }
    }

    fn erase_lines(&mut self, rows: std::ops::Range<usize>) {
        let (blank, cols) = (self.blank(), self.cols);
        for row in rows {
            self.grid.lines[row] = blank_line(blank, cols);
        }
    }

    fn tab_forward(&mut self, count: u16) {
        for _ in 0..count {
            let col = self.grid.cursor.col;
            let next = self.tabs.range(col + 1..).next().copied();
            let next = next.unwrap_or(self.cols - 1).min(self.cols - 1);
            if next == col {
                break;
            }
            self.cursor().col = next;
        }
    }
}

impl Handler for State {
    fn set_title(&mut self, title: Option<String>) {
        self.title = title.map(|mut title| {
            title.retain(|c| !c.is_control());
            let end = (0..=title.len().min(MAX_TITLE)).rev().find(|at| title.is_char_boundary(*at));
            title.truncate(end.unwrap_or(0));
            title
        });
    }

    fn set_cursor_style(&mut self, style: Option<CursorStyle>) {
        self.cursor_style = match style {
            None => 0,
            Some(style) => {
                let steady = u8::from(!style.blinking);
                match style.shape {
                    CursorShape::Underline => 3 + steady,
                    CursorShape::Beam => 5 + steady,
                    _ => 1 + steady,
                }
            }
        };
    }

    fn input(&mut self, c: char) {
        let cursor = &self.grid.cursor;
        let c = cursor.charsets[cursor.charset].map(c);
        match if c.is_ascii() { 1 } else { c.width().unwrap_or(0) } {
            0 => self.combine(c),
            width => self.print(c, width),
        }
    }

    fn goto(&mut self, line: i32, col: usize) {
        self.goto_line(line);
        self.goto_col(col);
    }

    fn goto_line(&mut self, line: i32) {
        let first = self.bounds().0;
        let col = self.grid.cursor.col;
        self.move_to(first + usize::try_from(line).unwrap_or(0), col);
    }

    fn goto_col(&mut self, col: usize) {
        let row = self.grid.cursor.row;
        let cols = self.cols;
        let cursor = self.cursor();
        (cursor.row, cursor.col, cursor.wraps) = (row, col.min(cols - 1), false);
    }

    fn insert_blank(&mut self, count: usize) {
        let (blank, cols, col) = (self.blank(), self.cols, self.grid.cursor.col);
        self.line().insert(col, count, cols, blank);
        self.cursor().wraps = false;
    }

    fn move_up(&mut self, count: usize) {
        let Cursor { row, col, .. } = self.grid.cursor;
        let top = if row >= self.region.0 { self.region.0 } else { 0 };
        self.move_to(row.saturating_sub(count).max(top), col);
    }

    fn move_down(&mut self, count: usize) {
        let Cursor { row, col, .. } = self.grid.cursor;
        let bottom = if row <= self.region.1 { self.region.1 } else { self.rows - 1 };
        self.move_to((row.saturating_add(count)).min(bottom), col);
    }

    fn move_forward(&mut self, count: usize) {
        let col = self.grid.cursor.col;
        self.goto_col(col.saturating_add(count));
    }

    fn move_backward(&mut self, count: usize) {
        let col = self.grid.cursor.col;
        self.goto_col(col.saturating_sub(count));
    }

    fn move_down_and_cr(&mut self, count: usize) {
        self.move_down(count);
        self.goto_col(0);
    }

    fn move_up_and_cr(&mut self, count: usize) {
        self.move_up(count);
        self.goto_col(0);
    }

    fn put_tab(&mut self, count: u16) {
        // A tab leaves the pending wrap alone, as in xterm.
        self.tab_forward(count);
    }

    fn backspace(&mut self) {
        self.move_backward(1);
    }

    fn carriage_return(&mut self) {
        self.goto_col(0);
    }

    fn linefeed(&mut self) {
        self.index();
        if self.modes.newline {
            self.goto_col(0);
        }
    }

    fn newline(&mut self) {
        self.linefeed();
    }

    fn set_horizontal_tabstop(&mut self) {
        let col = self.grid.cursor.col;
        self.tabs.insert(col);
    }

    fn scroll_up(&mut self, count: usize) {
        let (top, bottom) = self.region;
        self.scroll_region_up(top, bottom, count);
    }

    fn scroll_down(&mut self, count: usize) {
        let (top, bottom) = self.region;
        self.scroll_region_down(top, bottom, count);
    }

    fn insert_blank_lines(&mut self, count: usize) {
        let ((top, bottom), row) = (self.region, self.grid.cursor.row);
        if (top..=bottom).contains(&row) {
            self.scroll_region_down(row, bottom, count);
            self.goto_col(0);
        }
    }

    fn delete_lines(&mut self, count: usize) {
        let ((top, bottom), row) = (self.region, self.grid.cursor.row);
        if (top..=bottom).contains(&row) {
            let (blank, cols) = (self.blank(), self.cols);
            self.grid.scroll_up(row, bottom, count, blank, cols, None);
            self.goto_col(0);
        }
    }

    fn erase_chars(&mut self, count: usize) {
        let (blank, cols, col) = (self.blank(), self.cols, self.grid.cursor.col);
        self.line().fill(col, col.saturating_add(count).min(cols), blank);
        self.cursor().wraps = false;
    }

    fn delete_chars(&mut self, count: usize) {
        let (blank, cols, col) = (self.blank(), self.cols, self.grid.cursor.col);
        self.line().delete(col, count, cols, blank);
        self.cursor().wraps = false;
    }

    fn move_backward_tabs(&mut self, count: u16) {
        for _ in 0..count {
            let col = self.grid.cursor.col;
            let previous = self.tabs.range(..col).next_back().copied().unwrap_or(0);
            self.goto_col(previous);
            if previous == 0 {
                break;
            }
        }
    }

    fn move_forward_tabs(&mut self, count: u16) {
        self.tab_forward(count);
    }

    fn save_cursor_position(&mut self) {
        self.save_cursor();
    }

    fn restore_cursor_position(&mut self) {
        self.restore_cursor();
    }

    fn clear_line(&mut self, mode: LineClearMode) {
        let (blank, cols, col) = (self.blank(), self.cols, self.grid.cursor.col);
        let (from, to) = match mode {
            LineClearMode::Right => (col, cols),
            LineClearMode::Left => (0, col + 1),
            LineClearMode::All => (0, cols),
        };
        let line = self.line();
        line.fill(from, to, blank);
        line.wrapped &= to < cols;
        self.cursor().wraps = false;
    }

    fn clear_screen(&mut self, mode: ClearMode) {
        let (row, rows) = (self.grid.cursor.row, self.rows);
        match mode {
            ClearMode::Below => {
                self.clear_line(LineClearMode::Right);
                self.erase_lines(row + 1..rows);
            }
            ClearMode::Above => {
                self.clear_line(LineClearMode::Left);
                self.erase_lines(0..row);
            }
            ClearMode::All => {
                self.erase_lines(0..rows);
                self.cursor().wraps = false;
            }
            ClearMode::Saved => self.history.clear(),
        }
    }

    fn clear_tabs(&mut self, mode: TabulationClearMode) {
        match mode {
            TabulationClearMode::Current => {
                let col = self.grid.cursor.col;
                self.tabs.remove(&col);
            }
            TabulationClearMode::All => self.tabs.clear(),
        }
    }

    fn set_tabs(&mut self, interval: u16) {
        let interval = usize::from(interval.max(1));
        self.tabs = (interval..self.cols).step_by(interval).collect();
    }

    fn reset_state(&mut self) {
        let history = std::mem::take(&mut self.history);
        *self = Self { history, ..Self::new(self.rows, self.cols) };
    }

    fn reverse_index(&mut self) {
        let (top, bottom) = self.region;
        let row = self.grid.cursor.row;
        if row == top {
            self.scroll_region_down(top, bottom, 1);
        } else if row > 0 {
            self.cursor().row -= 1;
        }
        self.cursor().wraps = false;
    }

    fn terminal_attribute(&mut self, attr: Attr) {
        self.cursor().pen.set(&attr);
    }

    fn set_mode(&mut self, mode: Mode) {
        match mode.raw() {
            4 => self.modes.insert = true,
            20 => self.modes.newline = true,
            _ => {}
        }
    }

    fn unset_mode(&mut self, mode: Mode) {
        match mode.raw() {
            4 => self.modes.insert = false,
            20 => self.modes.newline = false,
            _ => {}
        }
    }

    fn set_private_mode(&mut self, mode: PrivateMode) {
        self.private_mode(mode.raw(), true);
    }

    fn unset_private_mode(&mut self, mode: PrivateMode) {
        self.private_mode(mode.raw(), false);
    }

    fn set_scrolling_region(&mut self, top: usize, bottom: Option<usize>) {
        let (top, bottom) = (top.max(1) - 1, bottom.unwrap_or(self.rows).min(self.rows));
        if top + 1 >= bottom {
            return;
        }
        self.region = (top, bottom - 1);
        self.move_to(self.bounds().0, 0);
    }

    fn set_keypad_application_mode(&mut self) {
        self.modes.keypad = true;
    }

    fn unset_keypad_application_mode(&mut self) {
        self.modes.keypad = false;
    }

    fn set_active_charset(&mut self, index: CharsetIndex) {
        self.cursor().charset = index as usize;
    }

    fn configure_charset(&mut self, index: CharsetIndex, charset: StandardCharset) {
        self.cursor().charsets[index as usize] = charset;
    }

    fn decaln(&mut self) {
        let cell = Cell { text: 'E', ..Cell::default() };
        for line in &mut self.grid.lines {
            *line = blank_line(cell, self.cols);
        }
        self.cursor().wraps = false;
    }

    fn push_keyboard_mode(&mut self, mode: KeyboardModes) {
        if self.keyboard.len() == MAX_KEYBOARD_MODES {
            self.keyboard.remove(0);
        }
        self.keyboard.push(mode.bits());
    }

    fn pop_keyboard_modes(&mut self, count: u16) {
        self.keyboard.truncate(self.keyboard.len().saturating_sub(usize::from(count)));
    }

    fn set_keyboard_mode(&mut self, mode: KeyboardModes, behaviour: KeyboardModesApplyBehavior) {
        let Some(current) = self.keyboard.last_mut() else { return };
        *current = match behaviour {
            KeyboardModesApplyBehavior::Replace => mode.bits(),
            KeyboardModesApplyBehavior::Union => *current | mode.bits(),
            KeyboardModesApplyBehavior::Difference => *current & !mode.bits(),
        };
    }

    fn set_modify_other_keys(&mut self, mode: ModifyOtherKeys) {
        self.modify_other_keys = mode as u8;
    }
}
