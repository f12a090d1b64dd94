//! Messages of the filesystem methods (`fs/*`).
//!
//! Invariant: what an older peer does not know is left out unless it is asked for. A member marked
//! *extension* is only written when it differs from its default, so a request without extensions
//! is byte for byte what the published protocol says.

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

/// The empty answer `{}` of a request that has nothing to tell but that it succeeded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FsDone {}

crate::encode::by_serde! { FsDone }

/// Default of members that are on unless switched off.
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

/// Reads a switch that is on by default; `null` is the same as absent.
fn null_is_true<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    Ok(Option::<bool>::deserialize(deserializer)?.unwrap_or(true))
}

/// Reads a member whose `null` is the same as absent.
fn null_is_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}
