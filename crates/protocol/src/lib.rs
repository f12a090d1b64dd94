//! The exec-server wire protocol.

mod path_uri;

pub use path_uri::{PathUri, PathUriError};
