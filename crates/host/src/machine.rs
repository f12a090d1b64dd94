//! Facts about this machine and its user, for `environment/info`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The user's shell: `$SHELL`, else that of the password file, else `/bin/sh`.
pub fn shell() -> PathBuf {
    let executable = |path: &PathBuf| path.is_absolute() && path.exists();
    std::env::var_os("SHELL")
        .map(PathBuf::from)
        .filter(executable)
        .or_else(|| password_entry().map(|entry| entry.shell).filter(executable))
        .unwrap_or_else(|| PathBuf::from("/bin/sh"))
}

/// The user's home directory: `$HOME`, else that of the password file.
pub fn home() -> Option<PathBuf> {
    std::env::var_os("HOME")
        .map(PathBuf::from)
        .filter(|path| path.is_absolute())
        .or_else(|| password_entry().map(|entry| entry.home))
}

/// Every home directory of the user: `$HOME` and that of the password file.
pub fn homes() -> Vec<PathBuf> {
    home().into_iter().chain(password_entry().map(|entry| entry.home)).collect()
}

/// `$TMPDIR`, if it is set to an absolute path.
pub fn tmpdir() -> Option<PathBuf> {
    std::env::var_os("TMPDIR").map(PathBuf::from).filter(|path| path.is_absolute())
}

/// A shell's name: `bash` for `/bin/bash`.
pub fn shell_name(shell: &Path) -> String {
    shell.file_name().map(OsString::from).unwrap_or_default().to_string_lossy().into_owned()
}

struct PasswordEntry {
    home: PathBuf,
    shell: PathBuf,
}

fn password_entry() -> Option<PasswordEntry> {
    let uid = rustix::process::getuid().as_raw().to_string();
    let file = std::fs::read_to_string("/etc/passwd").ok()?;
    let entry = file.lines().map(|line| line.split(':').collect::<Vec<_>>());
    let entry = entry.into_iter().find(|fields| fields.get(2) == Some(&uid.as_str()))?;
    Some(PasswordEntry { home: entry.get(5)?.into(), shell: entry.get(6)?.into() })
}
