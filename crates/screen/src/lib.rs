//! A screen model: what a terminal shows after the output of a program, and the sequence that shows it on
//! another terminal.
//!
//! Pure: no I/O, no clock. A [`Screen`] is fed with bytes and sizes; [`Screen::repaint`] returns a sequence that
//! brings a terminal of the same size into the same state. The sequence contains no query, so no terminal
//! answers it.
//!
//! Invariant: a terminal that was fed everything, and one that was fed the repaint instead, are equal, and
//! stay equal whatever both are fed next. Memory is bounded by [`MAX_ROWS`], [`MAX_COLS`] and the limits of
//! the history.
//!
//! Not kept: hyperlinks, colours of underlines, images, changes of the palette.

mod cell;
mod grid;
mod repaint;
mod screen;
mod tail;

pub use grid::HISTORY_LINES;
pub use screen::{MAX_COLS, MAX_ROWS, Screen};
