//! Limits of one message, checked before it is parsed.
//!
//! Invariant: the check reads the text once and keeps only the keys of open objects, so a hostile message
//! costs no more memory than its own text.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::HashSet;
use std::fmt;

use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

/// The limits of one message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeLimits {
    /// Length in bytes. Default 64 MiB.
    pub message_bytes: usize,
    /// JSON values of any kind, the message itself included. Default 262,144.
    pub values: usize,
}

impl Default for DecodeLimits {
    fn default() -> Self {
        Self { message_bytes: 64 << 20, values: 262_144 }
    }
}

/// Checks that `text` is well-formed JSON within the limit of values, without duplicate keys. serde_json
/// limits the depth to 128.
pub(crate) fn check(text: &[u8], limits: &DecodeLimits) -> Result<(), serde_json::Error> {
    let count = Cell::new(0);
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    LimitChecker { count: &count, limit: limits.values }.deserialize(&mut deserializer)?;
    deserializer.end()
}

/// Visits and counts a value and everything inside it.
#[derive(Clone, Copy)]
struct LimitChecker<'a> {
    count: &'a Cell<usize>,
    limit: usize,
}

impl LimitChecker<'_> {
    fn count_one<E: de::Error>(&self) -> Result<(), E> {
        self.count.set(self.count.get() + 1);
        if self.count.get() > self.limit {
            return Err(E::custom(format_args!("more than {} JSON values", self.limit)));
        }
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for LimitChecker<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        self.count_one()?;
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for LimitChecker<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while seq.next_element_seed(self)?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut seen = Keys::default();
        while let Some(key) = map.next_key_seed(Key)? {
            if let Err(key) = seen.insert(key) {
                return Err(de::Error::custom(format_args!("duplicate key `{key}`")));
            }
            map.next_value_seed(self)?;
        }
        Ok(())
    }
}

/// The keys of one open object: a short list, then a set.
#[derive(Default)]
struct Keys<'de> {
    list: Vec<Cow<'de, str>>,
    set: HashSet<Cow<'de, str>>,
}

impl<'de> Keys<'de> {
    const MAX_LIST_LEN: usize = 16;

    fn insert(&mut self, key: Cow<'de, str>) -> Result<(), Cow<'de, str>> {
        if self.list.contains(&key) || self.set.contains(&key) {
            return Err(key);
        }
        if self.list.len() < Self::MAX_LIST_LEN {
            self.list.push(key);
        } else {
            self.set.insert(key);
        }
        Ok(())
    }
}

/// Reads an object's key, borrowed from the text where it has no escapes.
struct Key;

impl<'de> DeserializeSeed<'de> for Key {
    type Value = Cow<'de, str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Key {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object key")
    }

    fn visit_borrowed_str<E>(self, key: &'de str) -> Result<Self::Value, E> {
        Ok(Cow::Borrowed(key))
    }

    fn visit_str<E>(self, key: &str) -> Result<Self::Value, E> {
        Ok(Cow::Owned(key.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        check(text.as_bytes(), &DecodeLimits::default()).unwrap_err().to_string()
    }

    #[test]
    fn duplicate_keys_are_found_at_any_depth_and_through_escapes() {
        assert!(error(r#"{"a":1,"a":2}"#).contains("duplicate key `a`"));
        assert!(error(r#"{"x":[{"a":{"b":1,"\u0062":2}}]}"#).contains("duplicate key `b`"));
        let many: Vec<_> = (0..100).map(|i| format!("\"k{i}\":{i}")).collect();
        check(format!("{{{}}}", many.join(",")).as_bytes(), &DecodeLimits::default()).unwrap();
        assert!(
            error(&format!("{{{},\"k99\":0}}", many.join(","))).contains("duplicate key `k99`")
        );
    }

    #[test]
    fn values_are_counted_exactly() {
        let limits = DecodeLimits { values: 5, ..DecodeLimits::default() };
        check(br#"{"a":[1,null],"b":"x"}"#, &limits).unwrap();
        let error = check(br#"{"a":[1,null],"b":"x","c":true}"#, &limits).unwrap_err();
        assert!(error.to_string().contains("more than 5 JSON values"));
    }

    #[test]
    fn depth_is_limited() {
        assert!(error(&"[".repeat(10_000)).contains("recursion limit"));
    }

    #[test]
    fn text_after_the_value_is_refused() {
        assert!(error("{} {}").contains("trailing characters"));
    }
}
