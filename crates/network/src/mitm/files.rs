//! The files that tell programs whom to trust: the authority's certificate, and a bundle of all roots
//! with it.
//!
//! A server holds a lock on `.ca-….pem.lock` as long as it lives. The next server removes the files
//! whose lock nobody holds; `.artifacts.lock` keeps two from doing so at a time.

use std::fs::{DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The files of one server. Dropping it removes them.
#[derive(Debug)]
pub struct CaFiles {
    certificate: PathBuf,
    bundle: PathBuf,
    lock_path: PathBuf,
    _lock: File,
}

impl CaFiles {
    /// Writes the files into `directory`, which is made if it is not there, and removes those of servers
    /// that are gone. Blocks.
    pub fn write(directory: &Path, certificate: &str, roots: &str) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o755).create(directory)?;
        let artifacts = open_lock(&directory.join(".artifacts.lock"))?;
        artifacts.lock()?;
        remove_abandoned(directory)?;
        let bundle = format!("{roots}{certificate}");
        let certificate_path = directory.join(format!("ca-{}.pem", sha256(certificate)));
        let bundle_path = directory.join(format!("ca-bundle-{}.pem", sha256(&bundle)));
        let lock_path = lock_path(&certificate_path);
        let lock = open_lock(&lock_path)?;
        lock.lock()?;
        write_whole(directory, &certificate_path, certificate)?;
        write_whole(directory, &bundle_path, &bundle)?;
        Ok(Self { certificate: certificate_path, bundle: bundle_path, lock_path, _lock: lock })
    }

    /// The bundle: what the variables of [`ca_variables`](crate::ca_variables) name.
    pub fn bundle(&self) -> &Path {
        &self.bundle
    }
}

impl Drop for CaFiles {
    fn drop(&mut self) {
        for path in [&self.bundle, &self.certificate, &self.lock_path] {
            // What is left is removed by the next server.
            let _ = std::fs::remove_file(path);
        }
    }
}

fn lock_path(certificate: &Path) -> PathBuf {
    let name = certificate.file_name().unwrap_or_default().to_string_lossy();
    certificate.with_file_name(format!(".{name}.lock"))
}

fn open_lock(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path)
}

/// Programs see the whole file or none.
fn write_whole(directory: &Path, path: &Path, text: &str) -> io::Result<()> {
    let mut file = tempfile::NamedTempFile::new_in(directory)?;
    file.write_all(text.as_bytes())?;
    file.as_file().set_permissions(Permissions::from_mode(0o644))?;
    file.persist(path)?;
    Ok(())
}

fn remove_abandoned(directory: &Path) -> io::Result<()> {
    let mut bundles = Vec::new();
    let mut locks = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.starts_with("ca-bundle-") && name.ends_with(".pem") {
            bundles.push(path);
        } else if name.starts_with(".ca-") && name.ends_with(".pem.lock") {
            locks.push((path, name));
        }
    }
    for (lock, name) in locks {
        match open_lock(&lock)?.try_lock() {
            Err(TryLockError::WouldBlock) => continue,
            Err(TryLockError::Error(error)) => return Err(error),
            Ok(()) => {}
        }
        let certificate = name.trim_start_matches('.').trim_end_matches(".lock");
        let certificate = directory.join(certificate);
        // A bundle ends with the certificate that it was made for.
        if let Ok(text) = std::fs::read_to_string(&certificate) {
            for bundle in &bundles {
                if std::fs::read_to_string(bundle).is_ok_and(|bundle| bundle.ends_with(&text)) {
                    std::fs::remove_file(bundle)?;
                }
            }
            std::fs::remove_file(&certificate)?;
        }
        std::fs::remove_file(&lock)?;
    }
    Ok(())
}

fn sha256(text: &str) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, text.as_bytes());
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        let mut names: Vec<_> = std::fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn files_last_as_long_as_their_server() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path().join("proxy");
        let first = CaFiles::write(&directory, "one\n", "roots\n").unwrap();
        assert_eq!(std::fs::read_to_string(first.bundle()).unwrap(), "roots\none\n");
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(first.bundle()), mode(&first.lock_path)), (0o644, 0o600));
        // A server that is killed removes nothing, and its lock ends with it.
        let killed = CaFiles::write(&directory, "two\n", "roots\n").unwrap();
        let left = [killed.bundle.clone(), killed.certificate.clone(), killed.lock_path.clone()];
        let texts = left.each_ref().map(|path| std::fs::read(path).unwrap());
        drop(killed);
        for (path, text) in left.iter().zip(texts) {
            std::fs::write(path, text).unwrap();
        }
        assert_eq!(names(&directory).len(), 7);
        let third = CaFiles::write(&directory, "three\n", "roots\n").unwrap();
        assert!(left.iter().all(|path| !path.exists()), "{:?}", names(&directory));
        assert!(first.bundle().exists() && third.bundle().exists());
        drop((first, third));
        assert_eq!(names(&directory), [".artifacts.lock"]);
    }
}
