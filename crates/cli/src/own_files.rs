//! Files of this program that no sandbox may open, whatever its policy says: with them, a sandboxed process
//! could act outside its sandbox.

use std::path::{Path, PathBuf};

use codex_exec_server::SignInSources;
use codex_linux_sandbox::OwnFiles;

use crate::{rendezvous, saved_sessions};

/// The credentials of `codex login`, the saved sessions, the data of a rendezvous, this executable, and
/// `more` files with credentials, such as token files given by flags.
pub(crate) fn own_files<'a>(more: impl IntoIterator<Item = &'a Path>) -> OwnFiles {
    let signed_in = SignInSources::from_env().auth_file().map(|file| file.path().to_owned());
    // The default path too: another server of this user may read it.
    let usual = std::env::home_dir().map(|home| home.join(".codex/auth.json"));
    let denied = signed_in
        .into_iter()
        .chain(usual)
        .chain(saved_sessions::directory().ok())
        .chain([rendezvous::data_directory()])
        .chain(more.into_iter().map(Path::to_owned));
    OwnFiles {
        denied: absolute(denied),
        read_only: absolute(std::env::current_exe().ok().into_iter()),
    }
}

/// The paths made absolute, without duplicates.
fn absolute(paths: impl Iterator<Item = PathBuf>) -> Vec<PathBuf> {
    let mut absolute: Vec<PathBuf> =
        paths.filter_map(|path| std::path::absolute(path).ok()).collect();
    absolute.sort();
    absolute.dedup();
    absolute
}
