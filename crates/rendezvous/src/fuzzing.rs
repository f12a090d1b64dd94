//! Entry points for the fuzz targets of `codex-fuzz`: what the files of a data directory may contain.
//!
//! Each function panics if a promise is broken, and returns the number of records that it read.

use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use crate::file_store::{Contents, Record};
use crate::journal::{line, parse};
use crate::store::{TokenChange, Tokens};

/// A journal with any bytes: what is read from it can be written and read again.
pub fn journal(bytes: &[u8]) -> usize {
    let (records, len) = parse::<Box<RawValue>>(bytes);
    assert!(len <= bytes.len(), "more than there is");
    let again = records.iter().flat_map(|record| line(record).unwrap_or_default());
    let again: Vec<u8> = again.collect();
    // Text that is kept as it was may hold a line break, which ends the line of a record.
    if records.iter().all(|record| !record.get().contains('\n')) {
        let (read, len) = parse::<Box<RawValue>>(&again);
        assert_eq!(len, again.len());
        assert!(read.iter().map(|record| record.get()).eq(records.iter().map(|r| r.get())));
    }
    records.len()
}

/// A state journal whose lines have their checksums: compacting it keeps what it says.
pub fn state(lines: &[u8], now: u64) -> usize {
    let records: Vec<Record> = sealed(lines);
    let count = records.len();
    let mut contents = Contents::of(records);
    contents.forget_before(now);
    let compacted: Vec<u8> =
        contents.records().flat_map(|record| line(&record).unwrap_or_default()).collect();
    let (records, len) = parse::<Record>(&compacted);
    assert_eq!(len, compacted.len());
    assert_eq!(Contents::of(records), contents, "compacting changed the state");
    count
}

/// A journal of tokens whose lines have their checksums: a revoked id has no token, by digest either.
pub fn tokens(lines: &[u8]) -> usize {
    let changes: Vec<TokenChange> = sealed(lines);
    let mut tokens = Tokens::default();
    for change in &changes {
        tokens.apply(change.clone());
        let (id, revoked) = match change {
            TokenChange::Create(record) => (&record.id, false),
            TokenChange::Revoke(id) => (id, true),
        };
        let listed = tokens.list();
        let with_id = listed.iter().filter(|record| record.id == *id).count();
        assert_eq!(with_id, usize::from(!revoked), "{change:?}");
        for record in &listed {
            assert_eq!(tokens.by_id(&record.id), Some(record), "a token that cannot be revoked");
            assert_eq!(tokens.by_digest(&record.digest), Some(record));
        }
    }
    changes.len()
}

/// The records in these lines of JSON, read as a journal with the right checksums.
fn sealed<R: DeserializeOwned>(lines: &[u8]) -> Vec<R> {
    let values = lines.split(|byte| *byte == b'\n');
    let values = values.filter_map(|json| serde_json::from_slice::<serde_json::Value>(json).ok());
    let journal: Vec<u8> = values.flat_map(|value| line(&value).unwrap_or_default()).collect();
    parse(&journal).0
}
