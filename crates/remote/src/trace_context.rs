//! W3C trace context: passes the trace of this program on.

use codex_exec_server_protocol::TraceParent;
use http::{HeaderMap, HeaderName, HeaderValue};

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// The headers `traceparent` and `tracestate`, or none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TraceContext(HeaderMap);

impl TraceContext {
    /// Reads the environment variables `TRACEPARENT` and `TRACESTATE`.
    pub fn from_env() -> Self {
        let text = |name| std::env::var(name).ok();
        Self::new(text("TRACEPARENT").as_deref(), text("TRACESTATE").as_deref())
    }

    /// Makes a trace context. An invalid `traceparent` gives an empty one, without `tracestate`.
    pub fn new(traceparent: Option<&str>, tracestate: Option<&str>) -> Self {
        let mut headers = HeaderMap::new();
        let value = |text: &str| HeaderValue::from_str(text.trim()).ok();
        if let Some(parent) =
            traceparent.filter(|text| text.parse::<TraceParent>().is_ok()).and_then(value)
        {
            headers.insert(TRACEPARENT, parent);
            let state = tracestate.filter(|text| !text.trim().is_empty() && text.len() <= 512);
            if let Some(state) = state.and_then(value) {
                headers.insert(TRACESTATE, state);
            }
        }
        Self(headers)
    }

    pub(crate) fn headers(&self) -> HeaderMap {
        self.0.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_valid_traceparent_is_forwarded() {
        let good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let context = TraceContext::new(Some(good), Some("a=b"));
        assert_eq!(context.0[TRACEPARENT], good);
        assert_eq!(context.0[TRACESTATE], "a=b");
        for bad in [
            "",
            "00",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\nx",
        ] {
            assert_eq!(TraceContext::new(Some(bad), Some("a=b")), TraceContext::default(), "{bad}");
        }
        assert_eq!(TraceContext::new(None, Some("a=b")), TraceContext::default());
    }
}
