//! Files that are read again: those of a rendezvous, saved sessions and recordings.

use std::time::Duration;

use codex_rendezvous::fuzzing;

use super::asciicast::{Event, MAX_PAUSE, Recording};
use super::session_file::{SavedSession, SessionName};

pub(super) fn journal(bytes: &[u8]) -> u64 {
    fuzzing::journal(bytes) as u64
}

/// A state journal; its first byte says when it is read.
pub(super) fn state(bytes: &[u8]) -> u64 {
    let Some((now, lines)) = bytes.split_first() else { return 0 };
    let now = [0, 1, 1_700_000_000, u64::MAX - 1, u64::MAX][usize::from(*now) % 5];
    fuzzing::state(lines, now) as u64
}

pub(super) fn tokens(bytes: &[u8]) -> u64 {
    fuzzing::tokens(bytes) as u64
}

/// A saved session is written as it was read, and its name is never a path.
pub(super) fn saved_session(bytes: &[u8]) -> u64 {
    let name = std::str::from_utf8(bytes).ok().and_then(|text| text.parse::<SessionName>().ok());
    if let Some(name) = name {
        let file = format!("{name}.json");
        let plain = std::path::Path::new(&file).file_name().is_some_and(|only| *only == *file);
        assert!(plain && !file.starts_with('.'), "{file}");
        return 1;
    }
    let Ok(session) = SavedSession::parse(bytes) else { return 0 };
    let text = session.to_text().expect("a session is JSON");
    assert_eq!(SavedSession::parse(&text).expect("what was written can be read"), session);
    2 + u64::from(session.tty) + 2 * u64::from(session.credential.is_some())
}

/// A recording: events are what a second reader of JSON finds, and no pause is longer than the longest.
pub(super) fn recording(bytes: &[u8]) -> u64 {
    let Ok(mut recording) = Recording::open(bytes) else { return 0 };
    let mut kind = 1;
    loop {
        match recording.next_event() {
            Ok(Some(event)) => {
                check_event(&event);
                kind = (kind + 1).min(9);
            }
            Ok(None) => return kind,
            Err(_) => return kind + 10,
        }
    }
}

fn check_event(event: &Event) {
    let longest = Duration::from_secs_f64(MAX_PAUSE);
    assert!(event.pause(None, 1.0) <= longest, "{event:?}");
    assert!(event.pause(Some(Duration::from_secs(2)), 1.0) <= Duration::from_secs(2), "{event:?}");
    assert!(event.pause(None, 0.01) <= 100 * longest, "{event:?}");
    let text = serde_json::to_string(&(event.interval, &event.code, &event.data));
    let again: Event = serde_json::from_str(&text.expect("an event is JSON")).expect("an event");
    assert_eq!((&again.code, &again.data), (&event.code, &event.data));
    // serde_json reads fractions fast, and only nearly.
    let off = (again.interval - event.interval).abs();
    assert!(off <= event.interval.abs() * 1e-12, "{event:?}, then {again:?}");
}
