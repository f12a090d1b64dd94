//! Decide: a policy and a file system in, an access for every path out. Pure.

pub(crate) mod access;
mod alias;
pub mod facts;
pub mod glob;
pub(crate) mod metadata;
pub(crate) mod order;
pub mod policy;
mod scan;
mod way;
pub mod written;
