//! The `traceparent` header of W3C trace context.

use std::str::FromStr;

/// A caller's span, in which a request is a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceParent {
    /// The trace.
    pub trace_id: [u8; 16],
    /// The caller's span.
    pub span_id: [u8; 8],
    /// Whether the caller records this trace.
    pub is_sampled: bool,
}

/// The text is not `version-trace-parent-flags` in lower-case hexadecimal, or an id has only zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a W3C traceparent")]
pub struct TraceParentError;

impl FromStr for TraceParent {
    type Err = TraceParentError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts: Vec<&str> = text.trim().split('-').collect();
        let [version, trace_id, span_id, flags] = parts[..] else { return Err(TraceParentError) };
        let [version] = hex(version)?;
        let [flags] = hex(flags)?;
        let (trace_id, span_id) = (hex(trace_id)?, hex(span_id)?);
        if version == 0xff || trace_id == [0; 16] || span_id == [0; 8] {
            return Err(TraceParentError);
        }
        Ok(Self { trace_id, span_id, is_sampled: flags & 1 != 0 })
    }
}

/// Lower-case hexadecimal of exactly this many bytes.
fn hex<const N: usize>(text: &str) -> Result<[u8; N], TraceParentError> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Ok(byte - b'0'),
        b'a'..=b'f' => Ok(byte - b'a' + 10),
        _ => Err(TraceParentError),
    };
    let (pairs, []) = text.as_bytes().as_chunks::<2>() else { return Err(TraceParentError) };
    let pairs: &[[u8; 2]; N] = pairs.try_into().map_err(|_| TraceParentError)?;
    let mut bytes = [0; N];
    for (byte, &[high, low]) in bytes.iter_mut().zip(pairs) {
        *byte = digit(high)? << 4 | digit(low)?;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_traceparent_has_two_ids_and_flags() {
        let parent: TraceParent =
            " 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-03\n".parse().unwrap();
        assert_eq!(parent.trace_id[..3], [0x0a, 0xf7, 0x65]);
        assert_eq!(parent.span_id, 0xb7ad_6b71_6920_3331_u64.to_be_bytes());
        assert!(parent.is_sampled);
    }

    #[test]
    fn invalid_traceparents_are_refused() {
        for bad in [
            "",
            "00",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-x",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\nx",
        ] {
            assert_eq!(bad.parse::<TraceParent>(), Err(TraceParentError), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn what_is_accepted_is_what_was_written(
            trace in 1..=u128::MAX, span in 1..=u64::MAX, version in 0..0xff_u8, flags: u8,
        ) {
            let text = format!("{version:02x}-{trace:032x}-{span:016x}-{flags:02x}");
            let expected = TraceParent {
                trace_id: trace.to_be_bytes(),
                span_id: span.to_be_bytes(),
                is_sampled: flags & 1 == 1,
            };
            prop_assert_eq!(text.parse(), Ok(expected));
        }

        #[test]
        fn no_text_panics(text in "\\PC*|[-0-9a-f]{0,60}") {
            let _ = text.parse::<TraceParent>();
        }
    }
}
