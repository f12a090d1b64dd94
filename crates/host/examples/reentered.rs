//! The executable of sandboxes in tests: does nothing unless it is re-entered.

fn main() {
    codex_exec_host::main_if_reentered();
}
