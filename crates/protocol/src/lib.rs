//! The exec-server wire protocol.

mod base64_bytes;
mod envelope;
pub mod error;
mod limits;
mod path_uri;

pub use base64_bytes::Base64Bytes;
pub use envelope::{Incoming, MalformedMessage, RequestId, Trace};
pub use error::RpcError;
pub use limits::DecodeLimits;
pub use path_uri::{PathUri, PathUriError};
