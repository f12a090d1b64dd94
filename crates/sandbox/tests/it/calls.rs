//! Raw system calls, past every library: the real kernel refuses what the filter refuses, and only
//! that. Each has a control that distinguishes the refusal from a call that would have failed anyway.

use std::os::unix::process::CommandExt;

use codex_exec_server_protocol::{AccessMode, NetworkPolicy, PermissionProfile};
use libc::c_long;

use super::support::*;

/// `AT_FDCWD` as the kernel reads it.
const HERE: u64 = -100i32 as u32 as u64;

/// Garbage for the upper half of an argument that the kernel reads as `int`.
const GARBAGE: u64 = 0xdead_beef << 32;

/// An argument of a call.
#[derive(Clone, Copy)]
enum Argument {
    /// A literal value.
    Plain(u64),
    /// An `int`: tried with an upper half of zeros and with garbage.
    Int(u64),
    /// A word of the test program: `{w}` is the workspace, `{o}` a directory outside.
    Word(&'static str),
}

use Argument::{Int, Plain, Word};

/// A call and the evidence that the filter refuses it.
struct Trial {
    call: c_long,
    arguments: &'static [Argument],
    control: Control,
}

enum Control {
    /// Outside, without privileges, the same call has another result.
    Outside,
    /// Also, inside, the same call succeeds with these arguments.
    Sibling(&'static [Argument]),
}

use Control::{Outside, Sibling};

const fn trial(call: c_long, arguments: &'static [Argument], control: Control) -> Trial {
    Trial { call, arguments, control }
}

/// Mode bits that no file may get, one at a time.
const SET_UID: Argument = Int(0o4755);
const SET_GID: Argument = Int(0o2755);
const ORDINARY: Argument = Int(0o755);
const FILE: Argument = Word("@{w}/file");
const NEW: Argument = Word("@{w}/new");
const OPEN: Argument = Word("<{w}/file");
const CREATE: Argument = Int((libc::O_CREAT | libc::O_WRONLY) as u64);
const UNNAMED: Argument = Int((libc::O_TMPFILE | libc::O_WRONLY) as u64);
const FCHMODAT2: c_long = 452;
const REGULAR: u64 = libc::S_IFREG as u64;

const GET_HINT: u64 = 1035;
const SET_HINT: u64 = 1036;
const SET_FILE_HINT: u64 = 1038;

/// Refused because of their arguments.
const BY_ARGUMENTS: &[Trial] = &[
    trial(libc::SYS_fchmod, &[OPEN, SET_UID], Sibling(&[OPEN, ORDINARY])),
    trial(libc::SYS_fchmod, &[OPEN, SET_GID], Sibling(&[OPEN, ORDINARY])),
    trial(
        libc::SYS_fchmodat,
        &[Plain(HERE), FILE, SET_UID],
        Sibling(&[Plain(HERE), FILE, ORDINARY]),
    ),
    trial(libc::SYS_fchmodat, &[Plain(HERE), FILE, SET_GID], Outside),
    trial(FCHMODAT2, &[Plain(HERE), FILE, SET_UID, Plain(0)], Outside),
    trial(FCHMODAT2, &[Plain(HERE), FILE, SET_GID, Plain(0)], Outside),
    trial(
        libc::SYS_openat,
        &[Plain(HERE), NEW, CREATE, SET_UID],
        Sibling(&[Plain(HERE), NEW, CREATE, ORDINARY]),
    ),
    // Without creating, the mode is ignored.
    trial(
        libc::SYS_openat,
        &[Plain(HERE), NEW, CREATE, SET_GID],
        Sibling(&[Plain(HERE), FILE, Int(0), SET_GID]),
    ),
    trial(
        libc::SYS_openat,
        &[Plain(HERE), Word("@{w}"), UNNAMED, SET_UID],
        Sibling(&[Plain(HERE), Word("@{w}"), UNNAMED, ORDINARY]),
    ),
    trial(libc::SYS_mkdirat, &[Plain(HERE), NEW, SET_GID], Sibling(&[Plain(HERE), NEW, ORDINARY])),
    trial(
        libc::SYS_mknodat,
        &[Plain(HERE), NEW, Int(REGULAR | 0o4755), Plain(0)],
        Sibling(&[Plain(HERE), NEW, Int(REGULAR | 0o755), Plain(0)]),
    ),
    #[cfg(target_arch = "x86_64")]
    trial(libc::SYS_chmod, &[FILE, SET_UID], Sibling(&[FILE, ORDINARY])),
    #[cfg(target_arch = "x86_64")]
    trial(libc::SYS_open, &[NEW, CREATE, SET_UID], Sibling(&[NEW, CREATE, ORDINARY])),
    #[cfg(target_arch = "x86_64")]
    trial(libc::SYS_open, &[Word("@{w}"), UNNAMED, SET_GID], Outside),
    #[cfg(target_arch = "x86_64")]
    trial(libc::SYS_creat, &[NEW, SET_UID], Sibling(&[NEW, ORDINARY])),
    #[cfg(target_arch = "x86_64")]
    trial(libc::SYS_mkdir, &[NEW, SET_GID], Sibling(&[NEW, ORDINARY])),
    #[cfg(target_arch = "x86_64")]
    trial(
        libc::SYS_mknod,
        &[NEW, Int(REGULAR | 0o2755), Plain(0)],
        Sibling(&[NEW, Int(REGULAR | 0o755), Plain(0)]),
    ),
    // A lease, and directory notifications.
    trial(
        libc::SYS_fcntl,
        &[OPEN, Int(libc::F_SETLEASE as u64), Plain(libc::F_RDLCK as u64)],
        Sibling(&[OPEN, Int(libc::F_GETLEASE as u64)]),
    ),
    trial(
        libc::SYS_fcntl,
        &[Word("<{w}"), Int(libc::F_NOTIFY as u64), Plain(4)],
        Sibling(&[Word("<{w}"), Int(libc::F_GETFL as u64)]),
    ),
    // Hints that are stored with the file. Reading them writes to the third argument.
    trial(
        libc::SYS_fcntl,
        &[OPEN, Int(SET_HINT), Word("%8")],
        Sibling(&[OPEN, Int(GET_HINT), Word("%8")]),
    ),
    trial(
        libc::SYS_fcntl,
        &[OPEN, Int(SET_FILE_HINT), Word("%8")],
        Sibling(&[OPEN, Int(GET_HINT), Word("%8")]),
    ),
    // Signals to the owner of a stream, which may be outside.
    trial(
        libc::SYS_fcntl,
        &[OPEN, Int(libc::F_SETFL as u64), Int((libc::O_ASYNC | libc::O_NONBLOCK) as u64)],
        Sibling(&[OPEN, Int(libc::F_SETFL as u64), Int(libc::O_NONBLOCK as u64)]),
    ),
    trial(
        libc::SYS_fcntl,
        &[OPEN, Int(libc::F_SETOWN as u64), Plain(0)],
        Sibling(&[OPEN, Int(libc::F_GETOWN as u64)]),
    ),
    trial(libc::SYS_fcntl, &[OPEN, Int(10), Int(libc::SIGKILL as u64)], Outside),
    trial(libc::SYS_fcntl, &[OPEN, Int(15), Word("%8")], Outside),
    trial(libc::SYS_ioctl, &[OPEN, Int(libc::FIOASYNC), Word("%8")], Outside),
    // Controls of file systems take a descriptor that is open for reading: flags, and a question.
    trial(
        libc::SYS_ioctl,
        &[OPEN, Int(0x4008_6602), Word("%8")],
        Sibling(&[OPEN, Int(0x8008_6601), Word("%8")]),
    ),
    // Snapshots and subvolumes of btrfs, keys and policies of encryption, subvolumes of bcachefs, and a
    // number that means nothing yet.
    trial(libc::SYS_ioctl, &[OPEN, Int(0x5000_9401), Word("%64")], Outside),
    trial(libc::SYS_ioctl, &[OPEN, Int(0x5000_9417), Word("%64")], Outside),
    trial(libc::SYS_ioctl, &[OPEN, Int(0x5000_940f), Word("%64")], Outside),
    trial(libc::SYS_ioctl, &[OPEN, Int(0x4008_941a), Word("%8")], Outside),
    trial(libc::SYS_ioctl, &[OPEN, Int(0xc040_6618), Word("%64")], Outside),
    trial(libc::SYS_ioctl, &[OPEN, Int(0x800c_6613), Word("%64")], Outside),
    trial(libc::SYS_ioctl, &[OPEN, Int(0x4020_bc10), Word("%64")], Outside),
    trial(libc::SYS_ioctl, &[OPEN, Int(0x4008_ab7f), Word("%8")], Outside),
    // Terminals; on another file the kernel would report that.
    trial(
        libc::SYS_ioctl,
        &[OPEN, Int(libc::TIOCSTI), Word("@x")],
        Sibling(&[OPEN, Int(libc::FIONREAD), Word("%8")]),
    ),
    trial(libc::SYS_ioctl, &[OPEN, Int(libc::TIOCLINUX), Word("@x")], Outside),
    trial(libc::SYS_ioctl, &[OPEN, Int(libc::TIOCCONS), Word("@x")], Outside),
    trial(libc::SYS_ioctl, &[OPEN, Int(0x5423), Word("%8")], Outside),
    // A new user namespace, and a plain child. Their upper halves are ignored too.
    trial(
        libc::SYS_clone,
        &[Int((libc::CLONE_NEWUSER | libc::SIGCHLD) as u64)],
        Sibling(&[Int(libc::SIGCHLD as u64)]),
    ),
    trial(
        libc::SYS_socket,
        &[Int(libc::AF_INET as u64), Int(libc::SOCK_STREAM as u64), Plain(0)],
        Sibling(&[Int(libc::AF_UNIX as u64), Int(libc::SOCK_STREAM as u64), Plain(0)]),
    ),
    trial(
        libc::SYS_socket,
        &[Int(libc::AF_UNIX as u64), Int(libc::SOCK_DGRAM as u64), Plain(0)],
        Sibling(&[Int(libc::AF_UNIX as u64), Int(libc::SOCK_SEQPACKET as u64), Plain(0)]),
    ),
];

/// The priority of a process group that has members outside.
const GROUP: &[Trial] = &[
    trial(libc::SYS_setpriority, &[Int(1), Int(0), Plain(5)], Sibling(&[Int(0), Int(0), Plain(5)])),
    trial(libc::SYS_ioprio_set, &[Int(2), Int(0), Plain(0)], Sibling(&[Int(1), Int(0), Plain(0)])),
];

/// Refused by number; outside, the same arguments do not lead to `EPERM`.
const BY_NUMBER: &[Trial] = &[
    trial(libc::SYS_ptrace, &[Plain(0)], Outside),
    trial(libc::SYS_process_vm_readv, &[Word("#pid")], Outside),
    trial(libc::SYS_process_vm_writev, &[Word("#pid")], Outside),
    trial(libc::SYS_process_madvise, &[Plain(u64::MAX)], Outside),
    trial(libc::SYS_kcmp, &[Word("#pid"), Word("#pid"), Plain(1)], Outside),
    trial(libc::SYS_pidfd_getfd, &[Plain(u64::MAX)], Outside),
    trial(libc::SYS_io_uring_setup, &[Plain(1), Word("%256")], Outside),
    trial(libc::SYS_io_uring_enter, &[Plain(u64::MAX)], Outside),
    trial(libc::SYS_io_uring_register, &[Plain(u64::MAX)], Outside),
    trial(libc::SYS_unshare, &[Plain(0)], Outside),
    trial(libc::SYS_setns, &[Plain(u64::MAX)], Outside),
    trial(libc::SYS_open_tree, &[Plain(HERE), Word("@/"), Plain(0)], Outside),
    trial(467, &[Plain(HERE), Word("@/"), Plain(0)], Outside),
    trial(libc::SYS_mount_setattr, &[Plain(HERE), Word("@/"), Plain(0), Plain(0)], Outside),
    trial(libc::SYS_fsconfig, &[Plain(u64::MAX)], Outside),
    trial(libc::SYS_add_key, &[], Outside),
    trial(libc::SYS_request_key, &[], Outside),
    trial(libc::SYS_keyctl, &[Plain(9999)], Outside),
    // Pages of the own program only, which needs no privilege.
    trial(libc::SYS_userfaultfd, &[Plain(1)], Outside),
    trial(libc::SYS_perf_event_open, &[], Outside),
    // Reporting files by handle, which needs no privilege.
    trial(libc::SYS_fanotify_init, &[Plain(0x200)], Outside),
    trial(libc::SYS_fanotify_mark, &[Plain(u64::MAX)], Outside),
    trial(libc::SYS_clock_adjtime, &[Plain(0), Word("%256")], Outside),
    trial(libc::SYS_adjtimex, &[Word("%256")], Outside),
    trial(libc::SYS_quotactl_fd, &[Plain(u64::MAX)], Outside),
    trial(460, &[Plain(0)], Outside),
    #[cfg(target_arch = "x86_64")]
    trial(libc::SYS_modify_ldt, &[Plain(0), Word("%16"), Plain(16)], Outside),
    #[cfg(target_arch = "x86_64")]
    trial(libc::SYS_ioperm, &[Plain(u64::MAX), Plain(2)], Outside),
    trial(libc::SYS_connect, &[Plain(u64::MAX)], Outside),
    trial(libc::SYS_bind, &[Plain(u64::MAX)], Outside),
    trial(libc::SYS_listen, &[Plain(u64::MAX)], Outside),
    trial(libc::SYS_accept, &[Plain(u64::MAX)], Outside),
    trial(libc::SYS_accept4, &[Plain(u64::MAX)], Outside),
];

/// Refused without namespaces, and allowed with them. Files outside can only be read.
const LANDLOCK_ONLY: &[Trial] = &[
    trial(libc::SYS_fchmod, &[OPEN, Int(0o600)], Outside),
    trial(libc::SYS_fchmodat, &[Plain(HERE), FILE, Int(0o600)], Outside),
    trial(FCHMODAT2, &[Plain(HERE), FILE, Int(0o600), Plain(0)], Outside),
    trial(libc::SYS_fchown, &[OPEN, NO_ONE, NO_ONE], Outside),
    trial(libc::SYS_fchownat, &[Plain(HERE), FILE, NO_ONE, NO_ONE, Plain(0)], Outside),
    trial(libc::SYS_utimensat, &[Plain(HERE), FILE, Plain(0), Plain(0)], Outside),
    trial(libc::SYS_setxattr, &[FILE, Word("@user.x"), Word("@v"), Plain(1), Plain(0)], Outside),
    trial(libc::SYS_lsetxattr, &[FILE, Word("@user.x"), Word("@v"), Plain(1), Plain(0)], Outside),
    trial(libc::SYS_fsetxattr, &[OPEN, Word("@user.x"), Word("@v"), Plain(1), Plain(0)], Outside),
    trial(libc::SYS_removexattr, &[FILE, Word("@user.none")], Outside),
    trial(libc::SYS_lremovexattr, &[FILE, Word("@user.none")], Outside),
    trial(libc::SYS_fremovexattr, &[OPEN, Word("@user.none")], Outside),
    #[cfg(target_arch = "x86_64")]
    trial(libc::SYS_chmod, &[FILE, Int(0o600)], Outside),
    #[cfg(target_arch = "x86_64")]
    trial(libc::SYS_chown, &[FILE, NO_ONE, NO_ONE], Outside),
    #[cfg(target_arch = "x86_64")]
    trial(libc::SYS_lchown, &[FILE, NO_ONE, NO_ONE], Outside),
    #[cfg(target_arch = "x86_64")]
    trial(libc::SYS_utime, &[FILE, Plain(0)], Outside),
    #[cfg(target_arch = "x86_64")]
    trial(libc::SYS_utimes, &[FILE, Plain(0)], Outside),
    #[cfg(target_arch = "x86_64")]
    trial(libc::SYS_futimesat, &[Plain(HERE), FILE, Plain(0)], Outside),
    trial(libc::SYS_shmget, &[Plain(0), Plain(4096), Plain(0o1600)], Outside),
    trial(libc::SYS_shmdt, &[Plain(0)], Outside),
    trial(libc::SYS_msgget, &[Plain(0), Plain(0o1600)], Outside),
    trial(libc::SYS_semget, &[Plain(0), Plain(1), Plain(0o1600)], Outside),
    trial(libc::SYS_semop, &[Plain(u64::MAX)], Outside),
    trial(libc::SYS_mq_open, &[Word("@none"), Plain(0)], Outside),
    trial(libc::SYS_mq_unlink, &[Word("@none")], Outside),
    trial(
        libc::SYS_setpriority,
        &[Int(0), Word("#pid"), Plain(5)],
        Sibling(&[Int(0), Int(0), Plain(5)]),
    ),
    trial(libc::SYS_setpriority, &[Int(2), Int(0), Plain(5)], Outside),
    trial(
        libc::SYS_ioprio_set,
        &[Int(1), Word("#pid"), Plain(0)],
        Sibling(&[Int(1), Int(0), Plain(0)]),
    ),
    trial(
        libc::SYS_sched_setscheduler,
        &[Word("#pid"), Plain(0), Word("%8")],
        Sibling(&[Int(0), Plain(0), Word("%8")]),
    ),
    trial(libc::SYS_sched_setparam, &[Word("#pid"), Word("%8")], Sibling(&[Int(0), Word("%8")])),
    trial(
        libc::SYS_sched_setattr,
        &[Word("#pid"), Word("%64"), Plain(0)],
        Sibling(&[Int(0), Word("%64"), Plain(0)]),
    ),
    // An empty processor set: an invalid argument, which the kernel sees only if the filter allows the
    // call.
    trial(libc::SYS_sched_setaffinity, &[Word("#pid"), Plain(8), Word("%8")], Outside),
    trial(
        libc::SYS_prlimit64,
        &[Word("#pid"), Plain(7), Plain(0), Word("%16")],
        Sibling(&[Int(0), Plain(7), Plain(0), Word("%16")]),
    ),
    trial(libc::SYS_move_pages, &[Word("#pid")], Outside),
    trial(libc::SYS_migrate_pages, &[Word("#pid")], Outside),
    trial(libc::SYS_process_mrelease, &[Plain(u64::MAX)], Outside),
];

/// Leaves an owner unchanged.
const NO_ONE: Argument = Int(u32::MAX as u64);

/// The arguments for the test program.
fn words(world: &World, call: c_long, arguments: &[Argument], garbage: bool) -> Vec<String> {
    let mut words = vec!["raw".to_owned(), call.to_string()];
    words.extend(arguments.iter().map(|argument| {
        match argument {
            Int(value) if garbage => (value | GARBAGE).to_string(),
            Plain(value) | Int(value) => value.to_string(),
            Word(word) => word
                .replace("{w}", world.work.to_str().unwrap())
                .replace("{o}", world.outside.to_str().unwrap()),
        }
    }));
    words
}

/// Where a call is made.
#[derive(Clone, Copy)]
enum Side<'a> {
    Inside(&'a PermissionProfile),
    LandlockOnly(&'a PermissionProfile),
    Outside,
}

fn make(world: &World, side: Side<'_>, words: &[String]) -> Done {
    let file = world.work.join("file");
    if !file.exists() {
        std::fs::write(&file, "").unwrap();
        world.own();
    }
    let program = program();
    let mut argv = vec![program.to_str().unwrap(), "attempt"];
    argv.extend(words.iter().map(String::as_str));
    let done = match side {
        Side::Inside(permissions) => world.run(permissions.clone(), argv),
        Side::LandlockOnly(permissions) => {
            let context = world.context(permissions.clone());
            let mut server = world.server(&context, &world.work, argv);
            finish(server.env("TEST_LANDLOCK_ONLY", "1"))
        }
        Side::Outside => {
            let mut command = std::process::Command::new(argv[0]);
            // Its own process group, as inside.
            command.args(&argv[1..]).process_group(0);
            world.clothe(&mut command);
            finish(&mut command)
        }
    };
    assert!(done.code != REFUSED && done.code != FAILED, "{words:?}: {done:?}");
    let new = world.work.join("new");
    if new.is_dir() {
        std::fs::remove_dir(new).unwrap();
    } else {
        let _ = std::fs::remove_file(new);
    }
    done
}

/// Every trial fails with `EPERM` on `inside`, does not on `outside` if that is given, and its sibling
/// succeeds on `inside`.
fn judge(world: &World, trials: &[Trial], inside: Side<'_>, outside: Option<Side<'_>>) {
    for trial in trials {
        for garbage in [false, true] {
            let words = words(world, trial.call, trial.arguments, garbage);
            let done = make(world, inside, &words);
            assert_eq!(done.code, libc::EPERM, "{:?} {words:?}: {done:?}", world.user);
            if let Some(outside) = outside {
                let done = make(world, outside, &words);
                assert_ne!(done.code, libc::EPERM, "{:?} {words:?}: {done:?}", world.user);
            }
        }
        if let Sibling(arguments) = trial.control {
            for garbage in [false, true] {
                let words = self::words(world, trial.call, arguments, garbage);
                let done = make(world, inside, &words);
                assert_eq!(done.code, 0, "{:?} {words:?}: {done:?}", world.user);
            }
        }
    }
}

/// The unprivileged user that makes the same calls outside.
fn is_harmless(user: User) -> bool {
    user == User::Nobody || !rustix::process::geteuid().is_root()
}

#[test]
fn refused_arguments_are_refused_and_others_are_not() {
    let policy = workspace();
    for user in users() {
        let outside = is_harmless(user).then_some(Side::Outside);
        judge(&World::new(user), BY_ARGUMENTS, Side::Inside(&policy), outside);
    }
}

/// With the network restricted, the outer process has capabilities over the empty network, so the
/// kernel itself refuses to change its priority. With the network enabled only the filter does.
#[test]
fn group_members_outside_keep_their_priority() {
    let policy = managed_with(vec![root(AccessMode::Read)], NetworkPolicy::Enabled);
    for user in users() {
        let outside = is_harmless(user).then_some(Side::Outside);
        judge(&World::new(user), GROUP, Side::Inside(&policy), outside);
    }
}

#[test]
fn unlisted_calls_are_refused() {
    let policy = workspace();
    for user in users() {
        let outside = is_harmless(user).then_some(Side::Outside);
        judge(&World::new(user), BY_NUMBER, Side::Inside(&policy), outside);
    }
}

#[test]
fn calls_with_hidden_arguments_fail_with_enosys() {
    let policy = workspace();
    for user in users() {
        let world = World::new(user);
        let openat2 = [Plain(HERE), Word("@/"), Word("%24"), Plain(24)];
        for (call, arguments) in [(libc::SYS_openat2, &openat2[..]), (libc::SYS_clone3, &[])] {
            let words = words(&world, call, arguments, false);
            let done = make(&world, Side::Inside(&policy), &words);
            assert_eq!(done.code, libc::ENOSYS, "{user:?} {words:?}: {done:?}");
            let done = make(&world, Side::Outside, &words);
            assert_ne!(done.code, libc::ENOSYS, "{user:?} {words:?}: {done:?}");
        }
        // Newer than the table, whether or not the kernel has it.
        let done = make(&world, Side::Inside(&policy), &words(&world, 600, &[], false));
        assert_eq!(done.code, libc::ENOSYS, "{user:?}: {done:?}");
    }
}

/// The 32-bit calls of x86 have other numbers, so each would be checked as another call.
#[cfg(target_arch = "x86_64")]
#[test]
fn calls_of_another_architecture_kill_the_process() {
    for user in users() {
        let world = World::new(user);
        let call = ["foreign-getpid".to_owned()];
        let done = make(&world, Side::Inside(&workspace()), &call);
        assert_eq!(done.code, 128 + libc::SIGSYS, "{user:?}: {done:?}");
        assert_ne!(make(&world, Side::Outside, &call).code, 128 + libc::SIGSYS, "{user:?}");
    }
}

#[test]
fn enabled_network_allows_four_socket_families() {
    let policy = managed_with(vec![root(AccessMode::Read)], NetworkPolicy::Enabled);
    for user in users() {
        let world = World::new(user);
        // With AX25, PACKET, BLUETOOTH, ALG, VSOCK and XDP.
        for family in [0, 1, 2, 3, 10, 16, 17, 31, 38, 40, 44] {
            // A datagram socket could name a socket file with each message.
            let kind = if family == 1 { libc::SOCK_STREAM } else { libc::SOCK_DGRAM };
            let arguments = [Int(family), Int(kind as u64), Plain(0)];
            for garbage in [false, true] {
                let words = words(&world, libc::SYS_socket, &arguments, garbage);
                let done = make(&world, Side::Inside(&policy), &words);
                let expected = if [1, 2, 10, 16].contains(&family) { 0 } else { libc::EPERM };
                assert_eq!(done.code, expected, "{user:?} {words:?}: {done:?}");
            }
        }
    }
}

/// With a managed network: TCP and UDP, connected pairs of streams, and nothing else.
#[test]
fn managed_network_allows_tcp_and_udp_only() {
    let network = Managed { ports: "3128,", transparent: false };
    // Stream, datagram, raw, packets; with ICMP, TCP, UDP, DCCP, SCTP, UDP-Lite and MPTCP.
    let families = [0, 1, 2, 3, 10, 16, 17, 29, 31, 38, 40, 44];
    let transports =
        [(1, 0), (1, 6), (1, 132), (1, 262), (2, 0), (2, 1), (2, 17), (2, 58), (2, 136)]
            .into_iter()
            .chain([(3, 0), (3, 1), (3, 255), (5, 0), (6, 33), (10, 0)]);
    let all: Vec<(u64, (u64, u64))> = families
        .iter()
        .flat_map(|family| transports.clone().map(move |transport| (*family, transport)))
        .collect();
    for user in users() {
        let world = World::new(user);
        for policy in [workspace(), PermissionProfile::Disabled] {
            for garbage in [0, GARBAGE] {
                for (call, name) in [(libc::SYS_socket, "socket"), (libc::SYS_socketpair, "pair")] {
                    let words: Vec<String> = all
                        .iter()
                        .map(|(family, (kind, protocol))| {
                            format!(
                                "{},{},{}",
                                family | garbage,
                                kind | garbage,
                                protocol | garbage
                            )
                        })
                        .collect();
                    let mut attempt = vec!["sockets".to_owned(), call.to_string()];
                    attempt.extend(words);
                    let attempt: Vec<&str> = attempt.iter().map(String::as_str).collect();
                    let done = world.attempt_managed(policy.clone(), &network, &attempt);
                    let results: Vec<i32> =
                        done.ok().out.split_whitespace().map(|n| n.parse().unwrap()).collect();
                    assert_eq!(results.len(), all.len());
                    for ((family, (kind, protocol)), result) in all.iter().zip(results) {
                        let is_inet = matches!(family, 2 | 10)
                            && matches!((kind, protocol), (1, 0 | 6) | (2, 0 | 17));
                        let allowed = match name {
                            "socket" => is_inet,
                            // The kernel knows no protocol of a Unix socket but 0 and 1.
                            _ => *family == 1 && matches!(kind, 1 | 5),
                        };
                        let what = format!("{user:?} {policy:?} {name} {family} {kind} {protocol}");
                        match allowed {
                            true if name == "socket" || *protocol == 0 => {
                                assert_eq!(result, 0, "{what}");
                            }
                            true => assert_ne!(result, libc::EPERM, "{what}"),
                            false => assert_eq!(result, libc::EPERM, "{what}"),
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn calls_beyond_landlock_are_refused_without_namespaces() {
    for user in users() {
        let world = World::new(user);
        // A directory would contain protected names, which need namespaces.
        let file = at(&world.work.join("file"), AccessMode::Write);
        let policy = managed(vec![root(AccessMode::Read), file]);
        let with_namespaces = Side::Inside(&policy);
        judge(&world, LANDLOCK_ONLY, Side::LandlockOnly(&policy), Some(with_namespaces));
        judge(&world, BY_NUMBER, Side::LandlockOnly(&policy), None);
        // The owner's own file, which the policy lets it only read.
        let secret = [Plain(HERE), Word("@{o}/secret"), Int(0o640)];
        let words = words(&world, libc::SYS_fchmodat, &secret, false);
        let done = make(&world, Side::LandlockOnly(&policy), &words);
        assert_eq!(done.code, libc::EPERM, "{user:?}: {done:?}");
        assert_eq!(make(&world, Side::Outside, &words).code, 0, "{user:?}");
    }
}

/// Without file restrictions there is no metadata to protect; the host still is.
#[test]
fn unrestricted_files_keep_their_metadata_calls_without_namespaces() {
    let policy = PermissionProfile::External { network: NetworkPolicy::Restricted };
    for user in users() {
        let world = World::new(user);
        let side = Side::LandlockOnly(&policy);
        let chmod = words(&world, libc::SYS_fchmod, &[OPEN, Int(0o600)], false);
        assert_eq!(make(&world, side, &chmod).code, 0, "{user:?}");
        let share = [Plain(0), Plain(4096), Plain(0o1600)];
        let share = words(&world, libc::SYS_shmget, &share, false);
        assert_eq!(make(&world, side, &share).code, libc::EPERM, "{user:?}");
    }
}
