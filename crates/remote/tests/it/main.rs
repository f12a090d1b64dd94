//! Remote mode against a registry and a rendezvous on this machine.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod clock;
mod cloud;
mod cut;
mod ends;
mod faults;
mod hostile;
mod probes;
mod renewal;
mod secrets;
mod session;
mod sign_in;
