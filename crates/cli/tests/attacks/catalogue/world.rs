//! The directory of an attempt.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::generator::snapshot;
use crate::program::attacker;
use crate::server::{UNPRIVILEGED, User};
use crate::support::Running;

pub(super) struct World {
    base: PathBuf,
    user: User,
    server: u32,
    port: u16,
}

impl World {
    pub(super) fn new(user: User) -> Self {
        Self::below("/var/tmp", user)
    }

    /// Sets the values of `{SERVER}` and `{PORT}`.
    pub(super) fn served_by(&mut self, server: &Running) {
        self.server = server.pid();
        self.port = server.url.rsplit_once(':').unwrap().1.parse().unwrap();
    }

    /// A new world in a directory.
    pub(super) fn below(parent: &str, user: User) -> Self {
        static LAST: AtomicUsize = AtomicUsize::new(0);
        let number = LAST.fetch_add(1, Ordering::Relaxed);
        let base = PathBuf::from(format!("{parent}/atk-c{}-{number}", std::process::id()));
        let world = Self { base, user, server: 0, port: 0 };
        world.create();
        world
    }

    fn create(&self) {
        for name in [
            "",
            "out",
            "out/d",
            "ro",
            "td",
            "w",
            "w/sub",
            "w/sub/deep",
            "w/td",
            "w/den",
            "w/.git",
            "w/.git/hooks",
            "w2",
            "w2/.git",
            "w2/sub",
        ] {
            let path = self.base.join(name);
            std::fs::create_dir(&path).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
            self.user.give(&path);
        }
        // Unique contents, which the model treats as secrets where they are not granted.
        let files = [
            "out/f",
            "out/d/f",
            "ro/f",
            "w/f",
            "w/sub/f",
            "w/sub/x.key",
            "w/sub/deep/y.key",
            "w/x.key",
            "w/den/key",
            "w/.git/config",
            "w/.git/hooks/pre-commit",
            "w2/f",
            "w2/.git/config",
            // Names that only a listing reveals.
            "out/ncz1q",
            "out/d/ncz2q",
            "w/den/ncz3q",
        ];
        for (number, name) in files.iter().enumerate() {
            let path = self.base.join(name);
            std::fs::write(&path, format!("tcz{number}q")).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
            self.user.give(&path);
        }
    }

    /// A path in the world.
    pub(super) fn path(&self, text: &str) -> PathBuf {
        self.expand(text).into()
    }

    pub(super) fn base(&self) -> &Path {
        &self.base
    }

    pub(super) fn expand(&self, text: &str) -> String {
        let base = self.base.to_str().unwrap();
        text.replace("{W}", &format!("{base}/w"))
            .replace("{W2}", &format!("{base}/w2"))
            .replace("{OUT}", &format!("{base}/out"))
            .replace("{RO}", &format!("{base}/ro"))
            .replace("{B}", base)
            .replace("{SERVER}", &self.server.to_string())
            .replace("{PORT}", &self.port.to_string())
    }

    /// Executes steps without a sandbox, as the server's user; each must succeed.
    pub(super) fn prepare(&self, steps: &[String]) {
        if steps.is_empty() {
            return;
        }
        let mut command = Command::new(attacker());
        command.args(steps.iter().map(|step| self.expand(step))).current_dir(&self.base);
        if self.user == User::Nobody {
            command.uid(UNPRIVILEGED).gid(UNPRIVILEGED);
        }
        let output = command.stdin(Stdio::null()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        for number in 1..=steps.len() {
            assert!(said.contains(&format!("\n#{number} ok\n")), "setup {steps:?}: {said}");
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        snapshot::remove(&self.base);
    }
}
