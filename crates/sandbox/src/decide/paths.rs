//! Path order, nesting and ancestors, comparing bytes instead of components.
//!
//! Invariant: paths here are absolute and normal. A byte comparison that sorts `/` before every other
//! byte sorts each directory directly before everything below it. Comparing components, as the standard
//! library does, costs several times as much.

use std::cmp::Ordering;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Sorts parents before children, and children directly after their parents.
pub(crate) fn order(a: &Path, b: &Path) -> Ordering {
    let (a, b) = (a.as_os_str().as_bytes(), b.as_os_str().as_bytes());
    match a.iter().zip(b).position(|(a, b)| a != b) {
        None => a.len().cmp(&b.len()),
        Some(at) => {
            let weight = |byte: u8| if byte == b'/' { 0 } else { u16::from(byte) + 1 };
            weight(a[at]).cmp(&weight(b[at]))
        }
    }
}

/// Whether `path` is `above` or below it.
pub(crate) fn is_within(path: &Path, above: &Path) -> bool {
    let (path, above) = (path.as_os_str().as_bytes(), above.as_os_str().as_bytes());
    path.starts_with(above)
        && (path.len() == above.len() || above == b"/" || path[above.len()] == b'/')
}

/// The parent directory; `None` for the root.
pub(crate) fn parent(path: &Path) -> Option<&Path> {
    let bytes = path.as_os_str().as_bytes();
    let slash = bytes.iter().rposition(|&byte| byte == b'/')?;
    match (slash, bytes.len()) {
        (0, 1) => None,
        (0, _) => Some(Path::new("/")),
        (slash, _) => Some(Path::new(OsStr::from_bytes(&bytes[..slash]))),
    }
}

/// The path itself, then each directory above it.
pub(crate) fn ancestors(path: &Path) -> impl Iterator<Item = &Path> {
    std::iter::successors(Some(path), |path| parent(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_order_agrees_with_component_order() {
        let paths =
            ["/", "/a", "/a/b", "/a/b/c", "/a-b", "/a.b", "/ab", "/b", "/b/a"].map(Path::new);
        for a in paths {
            assert_eq!(ancestors(a).collect::<Vec<_>>(), a.ancestors().collect::<Vec<_>>());
            for b in paths {
                assert_eq!(order(a, b), a.cmp(b), "{a:?} {b:?}");
                assert_eq!(is_within(a, b), a.starts_with(b), "{a:?} {b:?}");
            }
        }
    }
}
