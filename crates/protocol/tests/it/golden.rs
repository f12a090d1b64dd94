//! Comparing values with their text.

use std::fmt::Debug;

use serde::{Serialize, de::DeserializeOwned};

/// The text is what we write, and what we read as the value.
pub(crate) fn golden<T: Serialize + DeserializeOwned + PartialEq + Debug>(value: &T, text: &str) {
    assert_eq!(serde_json::to_string(value).unwrap(), text);
    reads_as(text, value);
}

/// The text is another spelling of the value, which we only read.
pub(crate) fn reads_as<T: DeserializeOwned + PartialEq + Debug>(text: &str, value: &T) {
    assert_eq!(&serde_json::from_str::<T>(text).unwrap(), value, "{text}");
}

pub(crate) fn refuses<T: DeserializeOwned + Debug>(text: &str) {
    let read = serde_json::from_str::<T>(text);
    assert!(read.is_err(), "{text} was read as {read:?}");
}
