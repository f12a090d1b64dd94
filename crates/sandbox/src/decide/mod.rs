//! Decide: a policy and a file system in, an access for every path out. Pure.

pub mod access;
mod alias;
pub mod facts;
pub mod glob;
pub mod metadata;
pub mod order;
pub mod policy;
mod scan;
mod way;
pub mod written;
