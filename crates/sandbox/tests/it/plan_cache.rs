//! Plans that are used again: handed out while they hold, and never once planning anew would give
//! another.

use std::ffi::CString;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use codex_exec_server_protocol::{AccessMode, FileSystemEntry, SandboxContext};
use codex_linux_sandbox::decide::policy::Surroundings;
use codex_linux_sandbox::{
    Capabilities, Config, HostFacts, OwnFiles, PLACEHOLDER_MODE, Planned, PrepareError, Sandbox,
    plan::Enforcement,
};
use proptest::prelude::*;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_change, unmount,
};

use super::support::*;

/// A directory with files of every kind, a policy that names them, and the sandbox that plans it.
struct Place {
    base: PathBuf,
    context: SandboxContext,
    sandbox: Sandbox,
    _directory: Option<tempfile::TempDir>,
}

fn directory() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("kept-").tempdir_in("/var/tmp").unwrap()
}

/// Creates the files.
fn furnish(base: &Path) {
    for name in ["work", "other/inside", "secret", "deep/er/est", "linked", "elsewhere"] {
        fs::create_dir_all(base.join(name)).unwrap();
    }
    symlink("linked", base.join("link")).unwrap();
}

/// Names them.
fn entries(base: &Path) -> Vec<FileSystemEntry> {
    vec![
        root(AccessMode::Read),
        at(&base.join("work"), AccessMode::Write),
        at(&base.join("other"), AccessMode::Write),
        at(&base.join("other/inside"), AccessMode::Deny),
        at(&base.join("link"), AccessMode::Write),
        at(&base.join("secret"), AccessMode::Deny),
        at(&base.join("deep/er/est"), AccessMode::Write),
        at(&base.join("work/missing"), AccessMode::Deny),
    ]
}

impl Place {
    fn new() -> Self {
        let directory = directory();
        let base = directory.path().canonicalize().unwrap();
        furnish(&base);
        Self { _directory: Some(directory), ..Self::furnished(&base, entries(&base)) }
    }

    fn furnished(base: &Path, entries: Vec<FileSystemEntry>) -> Self {
        Self::of_server(base, entries, OwnFiles::default())
    }

    fn of_server(base: &Path, entries: Vec<FileSystemEntry>, own_files: OwnFiles) -> Self {
        let context = SandboxContext::in_workspace(managed(entries), uri(&base.join("work")));
        let all = Capabilities { user_namespace: true, ..Capabilities::probe() };
        let mut config = Config::new("/codex");
        config.capabilities = Some(all);
        config.own_files = own_files;
        let sandbox = Sandbox::new(config).unwrap();
        Self { base: base.to_owned(), context, sandbox, _directory: None }
    }

    fn plan(&self) -> Planned {
        self.sandbox.plan(&self.context, Surroundings::default()).unwrap().unwrap()
    }

    /// Plans often enough to be cached: the second request for a policy caches its plan.
    fn keep(&self) -> *const Enforcement {
        let planned: Vec<Planned> = (0..4).map(|_| self.plan()).collect();
        let [kept, again] = [&planned[2], &planned[3]].map(|planned| {
            let enforcement: *const Enforcement = planned.enforcement();
            enforcement
        });
        assert_eq!(kept, again, "not kept");
        again
    }

    /// The cached plan equals a new one, refusals included.
    fn is_right(&self, after: &str) {
        let around = Surroundings::default();
        let told = |planned: Result<Option<Planned>, PrepareError>| {
            planned.map(|planned| planned.unwrap().key()).map_err(|error| error.to_string())
        };
        let kept = told(self.sandbox.plan(&self.context, around));
        let anew = self.sandbox.plan_with(&self.context, around, &HostFacts::default());
        assert_eq!(kept, told(anew), "after {after}");
    }
}

#[test]
fn plan_is_cached_while_nothing_relevant_changes() {
    let place = Place::new();
    let kept = place.keep();
    for round in 0..3 {
        fs::write(place.base.join(format!("beside-{round}")), "").unwrap();
        fs::write(place.base.join(format!("work/new-{round}")), "").unwrap();
        fs::write(place.base.join("work/new-0"), "changed").unwrap();
        fs::create_dir_all(place.base.join("other/src/.git")).unwrap();
        assert!(std::ptr::eq(place.plan().enforcement(), kept), "round {round}");
    }
    let other = SandboxContext { cwd: Some(uri(&place.base)), ..place.context.clone() };
    let other = place.sandbox.plan(&other, Surroundings::default()).unwrap().unwrap();
    assert!(!std::ptr::eq(other.enforcement(), kept), "another policy");
    let held = place.plan();
    place.sandbox.forget_plans();
    assert!(!std::ptr::eq(place.plan().enforcement(), held.enforcement()), "forgotten");
}

/// A change in the directory.
type Change = fn(&Path);

const CHANGES: &[(&str, Change)] = &[
    ("metadata made", |base| fs::create_dir(base.join("other/.git")).unwrap()),
    ("metadata made deeper", |base| fs::create_dir(base.join("deep/er/est/.codex")).unwrap()),
    ("metadata behind a link", |base| fs::create_dir(base.join("linked/.agents")).unwrap()),
    ("metadata moved in", |base| {
        fs::create_dir(base.join("elsewhere/.git")).unwrap();
        fs::rename(base.join("elsewhere/.git"), base.join("other/.git")).unwrap();
    }),
    ("metadata as a link", |base| symlink("inside", base.join("other/.agents")).unwrap()),
    ("metadata as a file", |base| fs::write(base.join("other/.codex"), "").unwrap()),
    ("a root replaced", |base| {
        fs::rename(base.join("other"), base.join("before")).unwrap();
        fs::create_dir_all(base.join("other/inside")).unwrap();
    }),
    ("a root exchanged for a link", |base| {
        fs::rename(base.join("other"), base.join("before")).unwrap();
        symlink("elsewhere", base.join("other")).unwrap();
    }),
    ("a root removed", |base| fs::remove_dir_all(base.join("deep")).unwrap()),
    ("a directory above replaced", |base| {
        fs::rename(base.join("deep"), base.join("before")).unwrap();
        fs::create_dir_all(base.join("deep/er/est")).unwrap();
    }),
    ("a directory above replaced by a link to it", |base| {
        fs::rename(base.join("deep/er"), base.join("before")).unwrap();
        symlink("../before", base.join("deep/er")).unwrap();
    }),
    ("a link turned elsewhere", |base| {
        fs::remove_file(base.join("link")).unwrap();
        symlink("elsewhere", base.join("link")).unwrap();
    }),
    ("what a link leads to replaced", |base| {
        fs::rename(base.join("linked"), base.join("before")).unwrap();
        fs::create_dir(base.join("linked")).unwrap();
    }),
    ("a denied place made a file", |base| {
        fs::remove_dir(base.join("secret")).unwrap();
        fs::write(base.join("secret"), "").unwrap();
    }),
    ("a missing place made", |base| fs::create_dir(base.join("work/missing")).unwrap()),
];

#[test]
fn every_relevant_change_is_noticed() {
    for (what, change) in CHANGES {
        notices(&Place::new(), what, *change);
    }
}

fn notices(place: &Place, what: &str, change: Change) {
    place.keep();
    let before = place.plan().key();
    change(&place.base);
    place.is_right(what);
    assert!(place.plan().key() != before, "{what} made no difference");
    // From then on it is cached again.
    place.keep();
    place.is_right(what);
}

#[test]
fn new_link_among_hooks_is_noticed() {
    let links: [(&str, Change); 4] = [
        ("a hook", |base| symlink("../../x", base.join("other/.git/hooks/update")).unwrap()),
        ("a configuration", |base| symlink("../x", base.join("other/.git/config")).unwrap()),
        ("a skill", |base| symlink("../x", base.join("other/.agents/skill")).unwrap()),
        ("a hook turned elsewhere", |base| {
            let hook = base.join("other/.git/hooks/post-commit");
            fs::remove_file(&hook).unwrap();
            symlink("../../x", hook).unwrap();
        }),
    ];
    for (what, change) in links {
        let place = Place::new();
        for name in ["other/.git/hooks", "other/.agents"] {
            fs::create_dir_all(place.base.join(name)).unwrap();
        }
        for name in ["other/x", "other/y"] {
            fs::write(place.base.join(name), "").unwrap();
        }
        symlink("../../y", place.base.join("other/.git/hooks/post-commit")).unwrap();
        let kept = place.keep();
        fs::write(place.base.join("other/.git/index"), "").unwrap();
        fs::write(place.base.join("other/.git/hooks/other"), "").unwrap();
        assert!(std::ptr::eq(place.plan().enforcement(), kept), "files make no difference");
        notices(&place, what, change);
    }
}

#[test]
fn pointer_file_is_read_each_time() {
    let place = Place::new();
    for name in ["one", "two"] {
        fs::create_dir(place.base.join("other").join(name)).unwrap();
    }
    let pointer = place.base.join("other/.git");
    fs::write(&pointer, "gitdir: one\n").unwrap();
    place.keep();
    let before = place.plan().key();
    // In place, and of the same length.
    fs::write(&pointer, "gitdir: two\n").unwrap();
    place.is_right("another pointer");
    assert!(place.plan().key() != before);
}

#[test]
fn placeholder_is_inspected_each_time() {
    let place = Place::new();
    let held = place.base.join("work/.git");
    let kept = place.keep();
    fs::create_dir(&held).unwrap();
    fs::set_permissions(&held, fs::Permissions::from_mode(PLACEHOLDER_MODE)).unwrap();
    assert!(std::ptr::eq(place.plan().enforcement(), kept), "the name is as absent as before");
    // Written into by root, nothing happens in the directory around it; another user has to change its
    // mode, of which there is word.
    let own = !rustix::process::geteuid().is_root();
    let into = |work: &dyn Fn(PathBuf)| {
        let mode = |mode| fs::set_permissions(&held, fs::Permissions::from_mode(mode)).unwrap();
        if own {
            mode(0o755);
        }
        work(held.join("HEAD"));
        if own {
            mode(PLACEHOLDER_MODE);
        }
    };
    into(&|file| fs::write(file, "").unwrap());
    place.is_right("a placeholder is used");
    place.keep();
    into(&|file| fs::remove_file(file).unwrap());
    place.is_right("a placeholder is free again");
    fs::remove_dir(&held).unwrap();
    place.is_right("a placeholder is gone");
}

/// Has a directory tell of so much, and change nothing that matters.
fn make_noise(directory: &Path, events: usize) {
    let [a, b] = [directory.join("a"), directory.join("b")];
    fs::write(&a, "").unwrap();
    for _ in 0..events.div_ceil(4) {
        fs::rename(&a, &b).unwrap();
        fs::rename(&b, &a).unwrap();
    }
}

#[test]
fn noisy_directory_is_looked_up_instead() {
    let place = Place::new();
    let kept = place.keep();
    make_noise(&place.base.join("other"), 1000);
    for _ in 0..2 {
        assert!(std::ptr::eq(place.plan().enforcement(), kept));
    }
    fs::create_dir(place.base.join("other/.git")).unwrap();
    place.is_right("a change in the noisy directory");
}

#[test]
fn inotify_overflow_invalidates_the_plan() {
    let queued = fs::read_to_string("/proc/sys/fs/inotify/max_queued_events");
    let queued: usize = queued.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(16384);
    let place = Place::new();
    place.keep();
    make_noise(&place.base.join("linked"), queued);
    // No watch reports this.
    fs::create_dir(place.base.join("deep/er/est/.git")).unwrap();
    place.is_right("a flood");
}

/// Kernel trees tell of nothing: they are looked at each time.
#[test]
fn unwatchable_file_system_is_looked_up_each_time() {
    let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let process = PathBuf::from(format!("/proc/{}/task", child.id()));
    let directory = directory();
    furnish(directory.path());
    // No entry may name it.
    let own = OwnFiles { denied: vec![process], read_only: Vec::new() };
    let place = Place::of_server(directory.path(), entries(directory.path()), own);
    place.keep();
    let before = place.plan().key();
    child.kill().unwrap();
    child.wait().unwrap();
    place.is_right("a process ended");
    assert!(place.plan().key() != before);
}

/// Runs a test in a thread with a private mount namespace, if that is possible here.
fn where_mounts_are_private(test: impl FnOnce() + Send + 'static) {
    let test = || {
        // SAFETY: changes what this thread sees of the file system, nothing else.
        if unsafe { libc::unshare(libc::CLONE_NEWNS) } == 0 {
            let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
            mount_change("/", private).unwrap();
            test();
        }
    };
    std::thread::spawn(test).join().unwrap();
}

#[test]
fn new_mount_is_noticed() {
    where_mounts_are_private(|| {
        let place = Place::new();
        place.keep();
        let before = place.plan().key();
        let other = place.base.join("other");
        mount_bind(place.base.join("elsewhere"), &other).unwrap();
        place.is_right("a mount");
        assert!(place.plan().key() != before);
        place.keep();
        unmount(&other, UnmountFlags::DETACH).unwrap();
        place.is_right("an unmount");
        assert!(place.plan().key() == before);
    });
}

/// In a container most directories come from a layer below, and move up when they are first changed.
#[test]
fn every_change_in_an_overlay_is_noticed() {
    where_mounts_are_private(|| {
        for (what, change) in CHANGES {
            let directory = directory();
            let base = directory.path().join("merged");
            for name in ["lower", "upper", "work", "merged"] {
                fs::create_dir(directory.path().join(name)).unwrap();
            }
            furnish(&directory.path().join("lower"));
            let options = ["lower", "upper", "work"]
                .map(|name| format!("{name}dir={}", directory.path().join(name).display()));
            let options = CString::new(options.join(",") + ",redirect_dir=on").unwrap();
            if mount("overlay", &base, "overlay", MountFlags::empty(), options.as_c_str()).is_err()
            {
                return;
            }
            notices(&Place::furnished(&base, entries(&base)), what, *change);
            unmount(&base, UnmountFlags::DETACH).unwrap();
        }
    });
}

/// A name below the base, of few, so that changes meet.
fn name() -> impl Strategy<Value = PathBuf> {
    let first = prop::sample::select(vec![
        "work",
        "other",
        "link",
        "linked",
        "secret",
        "deep",
        "deep/er",
        "deep/er/est",
        "elsewhere",
    ]);
    let second = prop::sample::select(vec![
        "",
        "",
        ".git",
        ".git/hooks",
        ".git/hooks/x",
        ".git/config",
        ".agents",
        ".agents/x",
        ".codex",
        "inside",
        "missing",
        "x",
    ]);
    (first, second).prop_map(|(first, second)| match second {
        "" => PathBuf::from(first),
        second => Path::new(first).join(second),
    })
}

#[derive(Debug, Clone)]
enum Step {
    Directory(PathBuf),
    File(PathBuf),
    Link(PathBuf, PathBuf),
    Rename(PathBuf, PathBuf),
    Remove(PathBuf),
    Mode(PathBuf, u32),
}

fn step() -> impl Strategy<Value = Step> {
    let mode = prop::sample::select(vec![0o755, 0o700, 0, PLACEHOLDER_MODE]);
    prop_oneof![
        name().prop_map(Step::Directory),
        name().prop_map(Step::File),
        (name(), name()).prop_map(|(from, to)| Step::Link(from, to)),
        (name(), name()).prop_map(|(from, to)| Step::Rename(from, to)),
        name().prop_map(Step::Remove),
        (name(), mode).prop_map(|(name, mode)| Step::Mode(name, mode)),
    ]
}

impl Step {
    /// Does it, if it can be done.
    fn take(&self, base: &Path) {
        let _ = match self {
            Self::Directory(path) => fs::create_dir_all(base.join(path)),
            Self::File(path) => fs::write(base.join(path), "gitdir: x"),
            Self::Link(path, target) => symlink(base.join(target), base.join(path)),
            Self::Rename(from, to) => fs::rename(base.join(from), base.join(to)),
            Self::Remove(path) => {
                fs::remove_dir_all(base.join(path)).or_else(|_| fs::remove_file(base.join(path)))
            }
            Self::Mode(path, mode) => {
                fs::set_permissions(base.join(path), fs::Permissions::from_mode(*mode))
            }
        };
    }
}

/// Has every directory be one that can be removed.
fn open_up(directory: &Path) {
    fs::set_permissions(directory, fs::Permissions::from_mode(0o755)).unwrap();
    for entry in fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            open_up(&entry.path());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// After any changes to the files of a policy, the cached plan equals a new one.
    #[test]
    fn cached_plan_equals_a_new_one(
        steps in prop::collection::vec(prop::collection::vec(step(), 1..4), 1..24)
    ) {
        let place = Place::new();
        for steps in steps {
            for step in &steps {
                step.take(&place.base);
            }
            // Twice, so that it is cached between the changes.
            for _ in 0..2 {
                place.is_right(&format!("{steps:?}"));
            }
        }
        open_up(&place.base);
    }
}
