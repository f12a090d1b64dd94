//! The home directory, which every file of this user's `codex` is found by.

use std::env;
use std::path::PathBuf;

/// The user's home directory: `$HOME` if it is an absolute path, else that of the password database.
///
/// The one way to find it: what one command stores, another has to find and keep out of its sandboxes.
pub fn home_dir() -> Option<PathBuf> {
    // The standard library asks the database if HOME is unset or empty, but takes a relative path as it is.
    env::home_dir().filter(|home| home.is_absolute()).or_else(in_password_file)
}

fn in_password_file() -> Option<PathBuf> {
    let user = rustix::process::getuid().as_raw().to_string();
    let file = std::fs::read_to_string("/etc/passwd").ok()?;
    let home = file.lines().find_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        (fields.get(2) == Some(&user.as_str())).then(|| fields.get(5).copied()).flatten()
    })?;
    Some(PathBuf::from(home)).filter(|home| home.is_absolute())
}
