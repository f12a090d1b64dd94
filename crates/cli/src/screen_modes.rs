//! Tracks the terminal modes that a program has set: the alternate screen, a hidden cursor, mouse
//! reports. A program resets them when it exits; after a detach or a kill, this program does.

use std::collections::BTreeSet;

/// The terminal modes that differ from the default, according to the output so far.
#[derive(Debug, Default)]
pub(crate) struct ScreenModes {
    state: State,
    /// Private modes that are set; for the cursor, reset.
    changed: BTreeSet<u16>,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Text,
    Escape,
    /// After `ESC [`: the bytes since then.
    Sequence(Vec<u8>),
}

/// Cursor keys, alternate screens, mouse, focus, bracketed paste.
const TRACKED: [u16; 12] = [1, 47, 1000, 1002, 1003, 1004, 1005, 1006, 1015, 1047, 1049, 2004];
/// The only mode that is set by default.
const CURSOR: u16 = 25;
/// Longer than any tracked sequence, in bytes.
const LONGEST: usize = 32;

impl ScreenModes {
    /// Tracks more output; true if the modes have changed.
    pub(crate) fn watch(&mut self, output: &[u8]) -> bool {
        let mut any_changed = false;
        for &byte in output {
            match (&mut self.state, byte) {
                (_, 0x1b) => self.state = State::Escape,
                (State::Text, _) => {}
                (State::Escape, b'[') => self.state = State::Sequence(Vec::new()),
                (State::Escape, _) => self.state = State::Text,
                (State::Sequence(so_far), 0x20..=0x3f) if so_far.len() < LONGEST => {
                    so_far.push(byte);
                }
                (State::Sequence(so_far), end) => {
                    let sequence = std::mem::take(so_far);
                    self.state = State::Text;
                    any_changed |= self.sequence(&sequence, end);
                }
            }
        }
        any_changed
    }

    /// Whether the alternate screen is shown.
    pub(crate) fn is_alternate(&self) -> bool {
        [47, 1047, 1049].iter().any(|mode| self.changed.contains(mode))
    }

    fn sequence(&mut self, sequence: &[u8], end: u8) -> bool {
        let Some(numbers) = sequence.strip_prefix(b"?") else { return false };
        let set = match end {
            b'h' => true,
            b'l' => false,
            _ => return false,
        };
        let mut any_changed = false;
        let numbers = String::from_utf8_lossy(numbers);
        for mode in numbers.split(';').filter_map(|number| number.parse::<u16>().ok()) {
            let changed = match mode {
                CURSOR => !set,
                mode if TRACKED.contains(&mode) => set,
                _ => continue,
            };
            any_changed |=
                if changed { self.changed.insert(mode) } else { self.changed.remove(&mode) };
        }
        any_changed
    }

    /// The sequence that resets all modes to the default.
    pub(crate) fn reset(&self) -> Vec<u8> {
        let mut reset = Vec::new();
        for mode in &self.changed {
            let end = if *mode == CURSOR { 'h' } else { 'l' };
            reset.extend_from_slice(format!("\x1b[?{mode}{end}").as_bytes());
        }
        if !reset.is_empty() {
            reset.extend_from_slice(b"\x1b[0m");
        }
        reset
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_reset_wherever_the_output_is_split() {
        let whole = b"text\x1b[?1049h\x1b[?25l\x1b[31mred\x1b[?1000;1006h";
        for cut in 0..whole.len() {
            let mut modes = ScreenModes::default();
            modes.watch(&whole[..cut]);
            modes.watch(&whole[cut..]);
            let reset = b"\x1b[?25h\x1b[?1000l\x1b[?1006l\x1b[?1049l\x1b[0m";
            assert_eq!(modes.reset(), reset);
            assert!(modes.watch(b"\x1b[?1006;1000l\x1b[?1049l\x1b[?25h"));
            assert_eq!(modes.reset(), b"");
        }
    }
}
