//! Files of this program that no sandbox may open, whatever its policy says: with them, a sandboxed process
//! could act outside its sandbox.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use codex_exec_server::SignInSources;
use codex_exec_server::credentials::home_dir;
use codex_linux_sandbox::OwnFiles;

use crate::{places_file, rendezvous, saved_sessions};

/// The credentials of `codex login`, the saved sessions, the places, the data of a rendezvous, this executable, and
/// `more` files with credentials, such as token files given by flags.
pub(crate) fn own_files<'a>(more: impl IntoIterator<Item = &'a Path>) -> OwnFiles {
    let signed_in = SignInSources::from_env().auth_file().map(|file| file.path().to_owned());
    // The default path too: another server of this user may read it.
    let usual = home_dir().map(|home| home.join(".codex/auth.json"));
    let denied = signed_in
        .into_iter()
        .chain(usual)
        .chain(saved_sessions::directories())
        .chain(places_file::directories())
        .chain([rendezvous::data_directory()])
        .chain(more.into_iter().map(Path::to_owned));
    let executable = std::env::current_exe().ok().into_iter().chain(started_as());
    OwnFiles { denied: absolute(denied), read_only: absolute(executable) }
}

/// The path by which this executable was started, if it still leads there: a link on it decides what the user
/// starts next.
fn started_as() -> Option<PathBuf> {
    let path = Path::new(OsStr::from_bytes(rustix::param::linux_execfn().to_bytes()));
    let path = std::path::absolute(path).ok()?;
    let file = |path: &Path| std::fs::metadata(path).ok().map(|file| (file.dev(), file.ino()));
    // A descriptor of the program that executed this one has no name.
    let is_descriptor = path.starts_with("/proc") || path.starts_with("/dev");
    let leads_here = file(&path).is_some() && file(&path) == file(Path::new("/proc/self/exe"));
    (leads_here && !is_descriptor).then_some(path)
}

/// The paths made absolute, without duplicates.
fn absolute(paths: impl Iterator<Item = PathBuf>) -> Vec<PathBuf> {
    let mut absolute: Vec<PathBuf> =
        paths.filter_map(|path| std::path::absolute(path).ok()).collect();
    absolute.sort();
    absolute.dedup();
    absolute
}
