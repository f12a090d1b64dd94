//! One program per target, named in the manifest: libFuzzer drives the functions of `codex-fuzz`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| codex_fuzz::check(env!("CARGO_BIN_NAME"), input));
