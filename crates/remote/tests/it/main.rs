//! Remote mode against a registry and a rendezvous on this machine.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[allow(dead_code, reason = "the tests of sign-in use more of it")]
#[path = "../../../credentials/tests/it/accounts.rs"]
mod accounts;
mod clock;
#[allow(dead_code, reason = "the tests of sign-in use more of it")]
mod cloud;
mod cut;
mod ends;
mod faults;
mod hostile;
mod probes;
mod secrets;
mod session;
