//! The host that the hello of a TLS client names.

use crate::host::Host;

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    fn u8(&mut self) -> Option<usize> {
        self.take(1).map(|byte| byte[0].into())
    }

    fn u16(&mut self) -> Option<usize> {
        self.take(2).map(|bytes| usize::from(bytes[0]) << 8 | usize::from(bytes[1]))
    }

    /// What follows its own length of two bytes.
    fn vector(&mut self) -> Option<Reader<'a>> {
        let length = self.u16()?;
        self.take(length).map(Reader)
    }
}

/// The name in a hello. `None`: it is not well-formed, or has several.
pub(super) fn named_by_hello(hello: &[u8]) -> Option<Option<Host>> {
    let mut hello = Reader(hello);
    hello.take(2 + 32)?; // Version, random.
    let session = hello.u8()?;
    hello.take(session)?;
    hello.vector()?; // Cipher suites.
    let compressions = hello.u8()?;
    hello.take(compressions)?;
    if hello.0.is_empty() {
        return Some(None);
    }
    let mut extensions = hello.vector()?;
    if !hello.0.is_empty() {
        return None;
    }
    let mut named = None;
    while !extensions.0.is_empty() {
        let kind = extensions.u16()?;
        let mut data = extensions.vector()?;
        if kind != 0 {
            continue;
        }
        let mut list = data.vector()?;
        let kind = list.u8()?;
        let name = list.vector()?;
        if kind != 0 || !list.0.is_empty() || !data.0.is_empty() || named.is_some() {
            return None;
        }
        let name =
            std::str::from_utf8(name.0).ok().filter(|name| !name.contains([':', '[', ' ']))?;
        named = Some(Host::parse(name).ok()?);
    }
    Some(named)
}
