//! The attacker's program, built once per run of the tests.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The path of the program.
pub(crate) const DIRECTORY: &str = "/var/tmp/codex-attacks-bin";

/// The static attacker, in a directory that everyone may read.
pub(crate) fn attacker() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/attacks");
        let sources = ["attacker.c", "attacker.h", "raw.c"].map(|name| sources.join(name));
        let mut hash = DefaultHasher::new();
        for source in &sources {
            std::fs::read(source).unwrap().hash(&mut hash);
        }
        // The name contains a digest of the source, so that concurrent runs share it or do not conflict.
        let directory = Path::new(DIRECTORY);
        std::fs::create_dir_all(directory).unwrap();
        let _ = std::fs::set_permissions(directory, PermissionsExt::from_mode(0o755));
        let program = directory.join(format!("attacker-{:016x}", hash.finish()));
        if program.exists() {
            return program;
        }
        let building = directory.join(format!("building-{}", std::process::id()));
        let output = Command::new("cc")
            .args(["-O1", "-static", "-Wall", "-Wno-unused-result", "-o"])
            .arg(&building)
            .args([&sources[0], &sources[2]])
            .output()
            .expect("cc, which builds the attacker");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        std::fs::rename(&building, &program).unwrap();
        program
    })
}
