//! The smallest executable that can be re-entered as a sandbox; used by the tests and the benches.

fn main() {
    codex_linux_sandbox::reentry::main_if_reentered(&[]);
}
