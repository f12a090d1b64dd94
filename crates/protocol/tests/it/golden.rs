//! Comparing values with their text, and their text with the schema.

use std::fmt::Debug;

use schemars::JsonSchema;
use serde::{Serialize, de::DeserializeOwned};

use crate::schema;

/// The text is what we write, what we read as the value, and what the schema permits.
pub(crate) fn golden<T>(value: &T, text: &str)
where
    T: Serialize + DeserializeOwned + JsonSchema + PartialEq + Debug,
{
    assert_eq!(serde_json::to_string(value).unwrap(), text);
    reads_as(text, value);
}

/// The text is another spelling of the value, which the schema permits and we only read.
pub(crate) fn reads_as<T: DeserializeOwned + JsonSchema + PartialEq + Debug>(
    text: &str,
    value: &T,
) {
    schema::assert_valid::<T>(text);
    tolerates(text, value);
}

/// The text is a spelling of the value that we read and the schema leaves out.
pub(crate) fn tolerates<T: DeserializeOwned + PartialEq + Debug>(text: &str, value: &T) {
    assert_eq!(&serde_json::from_str::<T>(text).unwrap(), value, "{text}");
}

pub(crate) fn refuses<T: DeserializeOwned + Debug>(text: &str) {
    let read = serde_json::from_str::<T>(text);
    assert!(read.is_err(), "{text} was read as {read:?}");
}
