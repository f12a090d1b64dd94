//! Sign-in against services on this machine.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod accounts;
#[allow(dead_code, reason = "the tests of remote mode use more of it")]
#[path = "../../../remote/tests/it/cloud.rs"]
mod cloud;
mod executor;
mod renewal;
mod sign_in;
mod stdin_token;
