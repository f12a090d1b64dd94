//! Messages of the filesystem methods (`fs/*`).
//!
//! Invariant: a member marked *extension* is written only when it differs from its default, so a request
//! without extensions is byte for byte that of the published protocol.

mod blocks;
mod content;
mod encode;
mod entries;
mod search;
mod walk;
mod watch;

pub use blocks::{
    FsCloseParams, FsCloseResponse, FsOpenMode, FsOpenParams, FsOpenResponse, FsReadBlockParams,
    FsReadBlockResponse, FsWriteBlockParams, FsWriteBlockResponse,
};
pub use content::{FsReadFileParams, FsReadFileResponse, FsWriteFileParams, FsWriteFileResponse};
pub use entries::{
    FsCanonicalizeParams, FsCanonicalizeResponse, FsCopyParams, FsCopyResponse,
    FsCreateDirectoryParams, FsCreateDirectoryResponse, FsGetMetadataParams, FsGetMetadataResponse,
    FsReadDirectoryEntry, FsReadDirectoryParams, FsReadDirectoryResponse, FsRemoveParams,
    FsRemoveResponse, FsRenameParams, FsRenameResponse, FsSetModeParams, FsSetModeResponse,
    FsSymlinkParams, FsSymlinkResponse,
};
pub use search::{
    FsCancelSearchParams, FsCancelSearchResponse, FsGlobParams, FsGlobResponse, FsSearchFile,
    FsSearchLine, FsSearchLineKind, FsSearchMatchesNotification, FsSearchParams, FsSearchRange,
    FsSearchResponse,
};
pub use walk::{
    FsEntryKind, FsPathError, FsWalkEntry, FsWalkOptions, FsWalkParams, FsWalkResponse,
};
pub use watch::{
    FsChange, FsChangeKind, FsChangedNotification, FsMissingChangedNotification, FsUnwatchParams,
    FsUnwatchResponse, FsWatchMissingParams, FsWatchMissingResponse, FsWatchParams,
    FsWatchResponse,
};

use serde::{Deserialize, Deserializer, Serialize};

/// The empty result `{}`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FsDone {}

crate::encode::by_serde! { FsDone }

/// The default of members that are true if absent.
fn default_true() -> bool {
    true
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature serde asks for")]
fn is_true(value: &bool) -> bool {
    *value
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature serde asks for")]
fn is_false(value: &bool) -> bool {
    !*value
}

/// Parses a boolean that is true by default; `null` means absent.
fn null_is_true<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    Ok(Option::<bool>::deserialize(deserializer)?.unwrap_or(true))
}

/// Parses a member whose `null` means absent.
fn null_is_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}
