//! A file helper without a sandbox: runs the operations of its standard input until it ends.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use codex_exec_host::files::{FilesConfig, serve_helper};

fn main() -> io::Result<()> {
    // Plain descriptors: the buffer of `io::stdout` would only add a copy.
    let input = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let output = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    serve_helper(input, output, Arc::new(FilesConfig::default()))
}
