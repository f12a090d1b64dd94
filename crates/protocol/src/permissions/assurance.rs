//! Assurance: which kernel mechanisms enforce a sandbox.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize};

/// Which kernel mechanisms enforce a sandbox, weakest first. At every level a policy is enforced exactly or
/// refused; the levels differ in the additional barriers.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Assurance {
    /// Landlock and seccomp, without namespaces: other processes are visible, and `/proc`, `/dev` and
    /// IPC are the host's. Policies that deny a part of what they grant are refused.
    Landlock,
    /// Namespaces and seccomp, with the kernel's Landlock version, if any.
    Namespaces,
    /// Namespaces, seccomp, and Landlock version 6 or newer as a second barrier.
    #[default]
    Full,
}

impl Assurance {
    /// Every level, weakest first.
    pub const ALL: [Self; 3] = [Self::Landlock, Self::Namespaces, Self::Full];

    /// The name in JSON and in flags.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Landlock => "landlock",
            Self::Namespaces => "namespaces",
            Self::Full => "full",
        }
    }
}

impl fmt::Display for Assurance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Assurance {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|level| level.as_str() == text);
        found.ok_or_else(|| "expected full, namespaces or landlock".to_owned())
    }
}

/// Parses the level in a response; an unknown level counts as none.
pub(crate) fn lenient<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Assurance>, D::Error> {
    let word = Option::<String>::deserialize(from)?;
    Ok(word.and_then(|word| word.parse().ok()))
}
