//! Asking the controller about a host that the rules leave undecided.
//!
//! Invariant: whatever is not a well-formed answer in time is a refusal. Answers are not remembered.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

use crate::decide::{Answer, Protocol, Reason};
use crate::host::Host;

/// Maximum length of a controller's reason in bytes.
const MAX_REASON_BYTES: usize = 1024;

/// A request that the rules leave undecided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// How the request came.
    pub protocol: Protocol,
    /// In normal form, so at most 253 bytes, not empty, without blanks and control characters.
    pub host: Host,
    /// The port it is to go to.
    pub port: u16,
}

/// A controller's answer, as it said it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// Let this request through.
    Allow,
    /// Refuse it.
    Deny {
        /// Why.
        reason: String,
    },
    /// Refuse it; a person has to be asked first.
    Ask {
        /// Why.
        reason: String,
    },
}

/// No usable answer: an error, an answer that does not decode, a lost or absent controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the controller gave no usable answer")]
pub struct NoReply;

/// Asks the controller. Dropping the future withdraws the question.
pub trait Decider: Send + Sync {
    /// Asks about one request. Takes as long as it takes: the proxy has a timeout of its own.
    fn decide(&self, question: Question) -> BoxFuture<'_, Result<Reply, NoReply>>;
}

/// A decider with its time limit.
pub(crate) struct Asking {
    pub decider: Arc<dyn Decider>,
    pub timeout: Duration,
}

impl Asking {
    pub(crate) async fn ask(&self, question: Question) -> Answer {
        let reply = tokio::time::timeout(self.timeout, self.decider.decide(question)).await;
        validated(reply.unwrap_or(Err(NoReply)))
    }
}

fn validated(reply: Result<Reply, NoReply>) -> Answer {
    let is_usable =
        |reason: &str| reason.len() <= MAX_REASON_BYTES && !reason.chars().any(char::is_control);
    match reply {
        Ok(Reply::Allow) => Answer::Allow,
        Ok(Reply::Deny { reason }) if is_usable(&reason) => {
            Answer::Deny(Reason::from_words(&reason))
        }
        Ok(Reply::Ask { reason }) if is_usable(&reason) => Answer::Ask(Reason::from_words(&reason)),
        Ok(Reply::Deny { .. } | Reply::Ask { .. }) | Err(NoReply) => {
            Answer::Deny(Reason::NotAllowed)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unusable_reasons_are_refusals() {
        let deny = |reason: &str| validated(Ok(Reply::Deny { reason: reason.into() }));
        let ask = |reason: &str| validated(Ok(Reply::Ask { reason: reason.into() }));
        let refused = Answer::Deny(Reason::NotAllowed);
        assert_eq!(validated(Ok(Reply::Allow)), Answer::Allow);
        assert_eq!(validated(Err(NoReply)), refused);
        assert_eq!(deny("because é"), Answer::Deny(Reason::Other("because é".into())));
        assert_eq!(ask("later"), Answer::Ask(Reason::Other("later".into())));
        assert_eq!(deny(""), Answer::Deny(Reason::Other("policy_denied".into())));
        assert_eq!(deny("denied"), Answer::Deny(Reason::Denied));
        let longest = "x".repeat(MAX_REASON_BYTES);
        assert_eq!(deny(&longest), Answer::Deny(Reason::Other(longest.clone())));
        for bad in
            [format!("{longest}x"), "a\nb".into(), "a\u{7f}".into(), "\u{85}".into(), "\0".into()]
        {
            assert_eq!(deny(&bad), refused, "{bad:?}");
            assert_eq!(ask(&bad), refused, "{bad:?}");
        }
    }
}
