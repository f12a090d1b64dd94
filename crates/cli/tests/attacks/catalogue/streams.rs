//! Standard streams that the caller opened: whoever owns them and however the user may write them, a command
//! that was given one to read does no more.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{Mode, OFlags, XattrFlags};

use super::{read_only, runtime, world::World};
use crate::generator::random::Random;
use crate::program::attacker;
use crate::server::{self, UNPRIVILEGED, User};
use crate::support::codex;

/// A user who is neither root nor the server's.
const OTHER: u32 = 54_321;

/// Random streams per user.
const CASES: u64 = 60;

/// Attempts to change what is behind a stream, its metadata only.
const METADATA: [&str; 8] = [
    "touch /proc/self/fd/0",
    "utimes /proc/self/fd/0",
    "touch /dev/stdin",
    "setxattr /proc/self/fd/0",
    "chmod 777 /proc/self/fd/0",
    "chmod-fd 0 777",
    "fchmod 777 /dev/stdin",
    "chown 1 1 /proc/self/fd/0",
];

/// The content as well.
const CONTENT: [&str; 8] = [
    "write /proc/self/fd/0 attack",
    "append /dev/stdin attack",
    "open /proc/self/fd/0 t",
    "truncate /proc/self/fd/0 0",
    "truncate-fd 0",
    "write-fd 0 attack",
    "fallocate /proc/self/fd/0",
    "reopen-write /proc/self/fd/0 attack",
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    File,
    Fifo,
    Device,
}

/// A file that a command gets as its standard input.
#[derive(Debug)]
struct Input {
    kind: Kind,
    owner: u32,
    group: u32,
    mode: u32,
    /// An access control list lets the unprivileged user write.
    listed: bool,
    /// Its directory lets only root in.
    closed: bool,
}

/// Everything of a file that must stay.
#[derive(Debug, PartialEq, Eq)]
struct Look {
    mode: u32,
    owner: (u32, u32),
    links: u64,
    changed: (i64, i64),
    modified: (i64, i64),
    content: Vec<u8>,
}

fn look(path: &Path, kind: Kind) -> Look {
    let found = path.metadata().unwrap();
    let content = if kind == Kind::File { std::fs::read(path).unwrap() } else { Vec::new() };
    Look {
        mode: found.mode(),
        owner: (found.uid(), found.gid()),
        links: found.nlink(),
        // The time of the last change of anything, attributes included.
        changed: (found.ctime(), found.ctime_nsec()),
        modified: (found.mtime(), found.mtime_nsec()),
        content,
    }
}

impl Input {
    fn generate(random: &mut Random, user: User) -> Self {
        let is_root = rustix::process::geteuid().is_root();
        let own = match user {
            User::Nobody => UNPRIVILEGED,
            User::Own => rustix::process::geteuid().as_raw(),
        };
        let owners = if is_root { vec![0, own, OTHER] } else { vec![own] };
        Self {
            kind: *random.pick(&[Kind::File, Kind::File, Kind::File, Kind::Fifo, Kind::Device]),
            owner: *random.pick(&owners),
            group: *random.pick(&owners),
            mode: *random.pick(&[0o600, 0o644, 0o664, 0o666, 0o646, 0o660, 0o620, 0o440, 0o222]),
            listed: is_root && random.percent(20),
            closed: is_root && random.percent(20),
        }
    }

    /// Whether an unprivileged user has a permission by its class, or by the list.
    fn permits(&self, bit: u32) -> bool {
        let class = match (self.owner, self.group) {
            (UNPRIVILEGED, _) => self.mode >> 6,
            _ if self.listed => 0o6,
            (_, UNPRIVILEGED) => self.mode >> 3,
            _ => self.mode,
        };
        class & bit != 0
    }

    /// Whether the sandbox has to give the stream to its command.
    fn must_work(&self, user: User) -> bool {
        let changeable = self.owner == UNPRIVILEGED || self.permits(2);
        user == User::Own
            || self.kind == Kind::Device
            || !changeable
            || (!self.closed && self.permits(4))
    }

    fn create(&self, world: &World) -> PathBuf {
        let directory = world.path(if self.closed { "{OUT}/closed" } else { "{OUT}/open" });
        std::fs::create_dir(&directory).unwrap();
        let path = directory.join("input");
        match self.kind {
            Kind::Device => return "/dev/zero".into(),
            Kind::File => std::fs::write(&path, "tinputq").unwrap(),
            Kind::Fifo => {
                assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
            }
        }
        if rustix::process::geteuid().is_root() {
            chown(&path, Some(self.owner), Some(self.group)).unwrap();
        }
        std::fs::set_permissions(&path, PermissionsExt::from_mode(self.mode)).unwrap();
        if self.listed {
            let name = "system.posix_acl_access";
            rustix::fs::setxattr(&path, name, &self.list(), XattrFlags::empty()).unwrap();
        }
        let mode = if self.closed { 0o700 } else { 0o755 };
        std::fs::set_permissions(&directory, PermissionsExt::from_mode(mode)).unwrap();
        path
    }

    /// An access control list in the kernel's form: tag, permissions and id of each entry.
    fn list(&self) -> Vec<u8> {
        let mut list = 2u32.to_le_bytes().to_vec();
        let class = |shift: u32| (self.mode >> shift & 7) as u16;
        let entries = [
            (1, class(6), u32::MAX),
            (2, 6, UNPRIVILEGED),
            (4, class(3), u32::MAX),
            (16, 6, u32::MAX),
            (32, class(0), u32::MAX),
        ];
        for (tag, permissions, id) in entries {
            list.extend(u16::to_le_bytes(tag));
            list.extend(permissions.to_le_bytes());
            list.extend(id.to_le_bytes());
        }
        list
    }

    fn open(&self, path: &Path) -> OwnedFd {
        let access = if self.kind == Kind::Device { OFlags::RDWR } else { OFlags::RDONLY };
        let flags = access | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = rustix::fs::open(path, flags, Mode::empty()).unwrap();
        rustix::fs::fcntl_setfl(&opened, access).unwrap();
        opened
    }
}

/// Runs `codex sandbox` with this standard input: at full assurance, or as on a kernel without Landlock.
fn attack(input: OwnedFd, user: User, landlock: bool, steps: &[&str]) -> std::process::Output {
    let mut command = codex();
    if !landlock {
        let program = command.get_program().to_owned();
        command = Command::new(attacker());
        command.arg("--without-landlock").arg(program).env_remove("CODEX_HOME");
    }
    let assurance = if landlock { "full" } else { "namespaces" };
    command.args(["sandbox", "--assurance", assurance, "--"]).arg(attacker());
    command.args(steps).current_dir("/").stdin(input).env("HOME", "/nonexistent");
    if user == User::Nobody {
        command.uid(UNPRIVILEGED).gid(UNPRIVILEGED);
    }
    command.output().unwrap()
}

/// Random owners, groups, modes and access control lists of files, named pipes and devices, at both levels.
#[test]
fn catalogue_an_inherited_stream_stays_as_it_is_whoever_may_write_it() {
    let mut failures = Vec::new();
    let mut worked = 0;
    for &user in User::all() {
        for seed in 0..CASES {
            let mut random = Random::new(seed);
            let input = Input::generate(&mut random, user);
            let world = World::new(user);
            let path = input.create(&world);
            let before = look(&path, input.kind);
            let landlock = random.percent(50);
            let mut steps = vec!["say started", "read-fd 0"];
            steps.extend(METADATA);
            if input.kind == Kind::File {
                steps.extend(CONTENT);
            }
            if input.kind != Kind::File {
                // It would wait for a writer, or never end.
                steps.remove(1);
            }
            let output = attack(input.open(&path), user, landlock, &steps);
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            let what = format!("{seed} {user:?} landlock {landlock} {input:?}");
            let after = look(&path, input.kind);
            if after != before {
                failures.push(format!("{what}: {before:?} became {after:?}: {said}"));
            }
            let fine =
                said.contains("started") && (input.kind != Kind::File || said.contains("tinputq"));
            worked += usize::from(fine);
            if input.must_work(user) && !fine {
                failures.push(format!("{what}: the control: {output:?}"));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(worked > 0, "nothing ran");
}

/// The standard input of a process that gets none from its client.
#[test]
fn catalogue_the_null_device_of_the_host_stays_as_it_is() {
    let path = Path::new("/dev/null");
    for &user in User::all() {
        let world = World::new(user);
        let server = user.server();
        let (said, before) = runtime().block_on(async {
            let mut client = server.client().await;
            let before = look(path, Kind::Device);
            let mut steps: Vec<String> = METADATA.map(str::to_owned).into();
            steps.extend(["read /dev/stdin".into(), "touch /dev/null".into()]);
            let policy = read_only().within(&world);
            let outcome = server::run(&mut client, &steps, &policy.wire(), &policy.cwd, None).await;
            (outcome.said, before)
        });
        assert!(said.contains(&format!("#{} ok", METADATA.len() + 1)), "the control: {said}");
        assert_eq!(look(path, Kind::Device), before, "{user:?}: {said}");
    }
    // And as any stream of `codex sandbox`.
    for &user in User::all() {
        let before = look(path, Kind::Device);
        for landlock in [true, false] {
            let input = File::options().read(true).write(true).open(path).unwrap().into();
            let mut steps: Vec<&str> = METADATA.into();
            steps.push("write-fd 0 word");
            let said = attack(input, user, landlock, &steps);
            let text = String::from_utf8_lossy(&said.stdout);
            assert!(text.contains(&format!("#{} ok", steps.len())), "the control: {said:?}");
            assert_eq!(look(path, Kind::Device), before, "{user:?}: {said:?}");
        }
    }
}
