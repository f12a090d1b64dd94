//! Decide: resolves a policy against a file system to an access for every path. Pure.

pub(crate) mod access;
pub(crate) mod alias;
pub(crate) mod ceiling;
mod expand;
pub mod facts;
pub mod glob;
pub(crate) mod kernel_trees;
pub(crate) mod metadata;
mod path_trace;
pub(crate) mod paths;
pub mod policy;
mod policy_error;
mod spelling;
pub mod writable_history;
