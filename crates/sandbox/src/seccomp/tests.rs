//! Runs the compiled programs as the kernel would, against an oracle that is independent of the tables:
//! it lists what is refused where they list what is allowed.

use std::collections::BTreeMap;

use super::compile::{AND, JUMP, JUMP_AT_LEAST, JUMP_EQUAL, LOAD, RETURN};
use super::*;

const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
const EPERM: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
const ENOSYS: u32 = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;

/// Every call of this architecture up to Linux 6.18, as the kernel's headers name them.
#[cfg(target_arch = "x86_64")]
const NAMES: &str = include_str!("names/x86_64.txt");
#[cfg(not(target_arch = "x86_64"))]
const NAMES: &str = include_str!("names/aarch64.txt");

fn names() -> BTreeMap<u32, &'static str> {
    NAMES
        .lines()
        .map(|line| {
            let (number, name) = line.split_once(' ').unwrap();
            (number.parse().unwrap(), name)
        })
        .collect()
}

fn filters() -> impl Iterator<Item = Filter> {
    let sockets = [Sockets::Network, Sockets::Pairs, Sockets::Managed];
    let all = sockets.into_iter().flat_map(|sockets| {
        (0..32).map(move |bits| Filter {
            sockets,
            shared_host: bits & 1 != 0,
            shared_processes: bits & 2 != 0,
            frozen_metadata: bits & 4 != 0,
            brokered: bits & 8 != 0,
            host_devices: bits & 16 != 0,
        })
    });
    // Only connections to the host's network are brokered.
    all.filter(|filter| !filter.brokered || filter.sockets == Sockets::Network)
}

/// Runs a program as the kernel would.
fn run(program: &[Instruction], architecture: u32, number: u32, arguments: [u64; 6]) -> u32 {
    let mut data = vec![number, architecture, 0, 0];
    data.extend(arguments.iter().flat_map(|argument| [*argument as u32, (argument >> 32) as u32]));
    let (mut at, mut accumulator) = (0, 0u32);
    loop {
        let bytes = program[at].to_ne_bytes();
        let code = u16::from_ne_bytes([bytes[0], bytes[1]]);
        let (yes, no) = (usize::from(bytes[2]), usize::from(bytes[3]));
        let k = u32::from_ne_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        at += 1;
        let jump = |condition: bool| if condition { yes } else { no };
        match code {
            LOAD => accumulator = data[k as usize / 4],
            AND => accumulator &= k,
            JUMP => at += k as usize,
            JUMP_EQUAL => at += jump(accumulator == k),
            JUMP_AT_LEAST => at += jump(accumulator >= k),
            RETURN => return k,
            other => panic!("instruction {other:#x}"),
        }
    }
}

/// The expected result of a call, by its name.
fn expected(filter: Filter, name: Option<&str>, arguments: [u64; 6]) -> u32 {
    let Some(name) = name else { return ENOSYS };
    let int = |n: usize| arguments[n] as u32;
    let set_id = |n: usize| int(n) & 0o6000 != 0;
    let creates = |n: usize| int(n) & (0o100 | 0o20_000_000) != 0;
    let refused = match name {
        "clone3" | "openat2" => return ENOSYS,
        "ptrace" | "process_vm_readv" | "process_vm_writev" | "process_madvise" | "kcmp"
        | "pidfd_getfd" => true,
        "io_uring_setup" | "io_uring_enter" | "io_uring_register" => true,
        "mount" | "umount2" | "pivot_root" | "chroot" | "open_tree" | "open_tree_attr"
        | "move_mount" | "fsopen" | "fsconfig" | "fsmount" | "fspick" | "mount_setattr" => true,
        "unshare" | "setns" => true,
        "init_module" | "finit_module" | "delete_module" | "create_module" | "query_module"
        | "get_kernel_syms" | "kexec_load" | "kexec_file_load" | "bpf" => true,
        "add_key" | "request_key" | "keyctl" => true,
        "userfaultfd" | "perf_event_open" => true,
        "open_by_handle_at" | "fanotify_init" | "fanotify_mark" => true,
        "reboot" | "swapon" | "swapoff" | "acct" | "quotactl" | "quotactl_fd" | "settimeofday"
        | "clock_settime" | "clock_adjtime" | "adjtimex" | "sethostname" | "setdomainname"
        | "syslog" | "vhangup" => true,
        "iopl" | "ioperm" | "modify_ldt" | "set_thread_area" | "get_thread_area" => true,
        "lsm_set_self_attr" => true,
        "uselib" | "sysfs" | "_sysctl" | "lookup_dcookie" | "nfsservctl" | "getpmsg"
        | "putpmsg" | "afs_syscall" | "tuxcall" | "security" | "vserver" | "epoll_ctl_old"
        | "epoll_wait_old" => true,
        "connect" if filter.brokered => return libc::SECCOMP_RET_USER_NOTIF,
        "connect" | "bind" | "listen" | "accept" | "accept4" => filter.sockets == Sockets::Pairs,
        "socket" if filter.sockets == Sockets::Managed => {
            let transport = (int(1) & 15, int(2));
            ![2, 10].contains(&int(0)) || ![(1, 0), (1, 6), (2, 0), (2, 17)].contains(&transport)
        }
        "socket" | "socketpair" if filter.sockets != Sockets::Network => {
            int(0) != 1 || ![1, 5].contains(&(int(1) & 15))
        }
        "socket" | "socketpair" => {
            ![1, 2, 10, 16].contains(&int(0))
                || int(0) == 16 && int(2) != 0
                || filter.brokered && int(0) == 1 && ![1, 5].contains(&(int(1) & 15))
        }
        "clone" => int(0) & 0x7e02_0000 != 0,
        "creat" | "mkdir" | "mknod" => set_id(1),
        "mkdirat" | "mknodat" => set_id(2),
        "open" => creates(1) && set_id(2),
        "openat" => creates(2) && set_id(3),
        "chmod" | "fchmod" => filter.frozen_metadata || set_id(1),
        "fchmodat" | "fchmodat2" => filter.frozen_metadata || set_id(2),
        "chown" | "fchown" | "lchown" | "fchownat" | "utime" | "utimes" | "futimesat"
        | "utimensat" | "setxattr" | "lsetxattr" | "fsetxattr" | "setxattrat" | "removexattr"
        | "lremovexattr" | "fremovexattr" | "removexattrat" | "file_setattr" => {
            filter.frozen_metadata
        }
        "fcntl" => {
            matches!(int(1), 8 | 10 | 15 | 1024 | 1026 | 1036 | 1038 | 1040)
                || int(1) == 4 && int(2) & 0o20_000 != 0
        }
        "ioctl" if filter.host_devices => {
            matches!(int(1), 0x540c | 0x5412 | 0x541c | 0x541d | 0x5423 | 0x5452 | 0x8901 | 0x8902)
                || matches!(
                    int(1) >> 8 & 0xff,
                    0x58 | 0x66
                        | 0x68
                        | 0x6e
                        | 0x6f
                        | 0x72
                        | 0x76
                        | 0x94
                        | 0x97
                        | 0xbc
                        | 0xcd
                        | 0xcf
                        | 0xf5
                ) && !READING_IOCTLS.contains(&int(1))
        }
        "ioctl" => !is_harmless_control(int(1)),
        "migrate_pages" | "move_pages" | "process_mrelease" => filter.shared_processes,
        "prlimit64" | "sched_setaffinity" | "sched_setscheduler" | "sched_setparam"
        | "sched_setattr" => filter.shared_processes && int(0) != 0,
        "setpriority" => int(0) == 1 || filter.shared_processes && (int(0), int(1)) != (0, 0),
        "ioprio_set" => int(0) == 2 || filter.shared_processes && (int(0), int(1)) != (1, 0),
        name => {
            let ipc = ["shm", "msg", "sem", "mq_"];
            filter.shared_host && ipc.iter().any(|ipc| name.starts_with(ipc))
        }
    };
    if refused { EPERM } else { ALLOW }
}

/// File system ioctls that change nothing, or only what is open for writing.
const READING_IOCTLS: [u32; 7] = [
    0x8008_6601, // FS_IOC_GETFLAGS
    0xc020_660b, // FS_IOC_FIEMAP
    0x801c_581f, // FS_IOC_FSGETXATTR
    0x8008_7601, // FS_IOC_GETVERSION
    0x4004_9409, // FICLONE
    0x4020_940d, // FICLONERANGE
    0xc018_9436, // FIDEDUPERANGE
];

/// Controls that tell something, or act on what the caller has made: by ranges, where the table has a list.
fn is_harmless_control(control: u32) -> bool {
    let (size_and_direction, number) = (control >> 16, control & 0xffff);
    READING_IOCTLS.contains(&control)
        || match number {
            2 | 0x5401..=0x540b | 0x540d..=0x5411 | 0x5413..=0x5415 | 0x541b => {
                size_and_direction == 0
            }
            0x5420..=0x5422 | 0x5424 | 0x5425 | 0x5429 => size_and_direction == 0,
            0x5441 | 0x5450 | 0x5451 | 0x5460 => size_and_direction == 0,
            0x542a => size_and_direction == 0x802c,
            0x542b..=0x542d => size_and_direction == 0x402c,
            0x5200 | 0x5430 | 0x5432 | 0x5438..=0x5440 => {
                size_and_direction == 0x8004
                    && ![0x543a, 0x543b, 0x543c, 0x543d, 0x543e, 0x543f].contains(&number)
            }
            0x5431 | 0x5436 => size_and_direction == 0x4004,
            0x8903..=0x8907 => size_and_direction == 0,
            0x8910 | 0x8912 | 0x8913 | 0x8915 | 0x8917 | 0x8919 | 0x891b | 0x891d | 0x8921
            | 0x8927 | 0x8933 | 0x8942 => size_and_direction == 0,
            _ => false,
        }
}

/// Values that some rule distinguishes, and their neighbours.
const TELLING: &[u32] = &[
    0,
    1,
    2,
    3,
    5,
    6,
    7,
    10,
    15,
    16,
    17,
    40,
    132,
    262,
    0o100,
    0o644,
    0o755,
    0o1777,
    0o2755,
    0o4755,
    0o6777,
    0o20_000_000,
    0o20_200_000,
    0o2_000_101,
    1023,
    1024,
    1025,
    1026,
    1033,
    1035,
    1036,
    1037,
    1038,
    1039,
    1040,
    0x5401,
    0x5412,
    0x5413,
    0x541b,
    0x541c,
    0x541d,
    0x5423,
    0x4008_6602,
    0x401c_5820,
    0x4008_7602,
    0x5000_940e,
    0x4004_7211,
    0xf501,
    0x8008_6601,
    0xc020_660b,
    0x801c_581f,
    0x8008_7601,
    0x4004_9409,
    0x4020_940d,
    0xc018_9436,
    0x5401,
    0x5412,
    0x5413,
    0x541b,
    0x5423,
    0x5480,
    0x8927,
    0x8924,
    0x802c_542a,
    0x4008_6602,
    0x5000_940e,
    0x3d_0f00,
    0x0120_0011,
    0x1000_0011,
    0x4000_0011,
    0x0002_0000,
    0x0200_0000,
    0x7e02_0000,
    0x81fd_ffff,
    u32::MAX,
];

/// A xorshift generator, so that failures are reproducible.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Usually a distinguished value, half of the time with garbage in the upper half.
    fn argument(&mut self) -> u64 {
        let draw = self.next();
        let low = match draw % 8 {
            0 => self.next() as u32,
            _ => TELLING[(draw >> 8) as usize % TELLING.len()],
        };
        let high = if draw & 1 << 40 == 0 { 0 } else { self.next() & !u64::from(u32::MAX) };
        high | u64::from(low)
    }
}

#[test]
fn every_call_matches_the_oracle() {
    let names = names();
    let own = ARCHITECTURE.unwrap();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for filter in filters() {
        let program = program(filter).unwrap();
        for number in 0..700 {
            let name = names.get(&number).copied();
            for round in 0..200 {
                let arguments = match round {
                    0 => [0; 6],
                    1 => [u64::MAX; 6],
                    _ => std::array::from_fn(|_| random.argument()),
                };
                let expected = expected(filter, name, arguments);
                let verdict = run(&program, own, number, arguments);
                assert_eq!(verdict, expected, "{filter:?} {number} {name:?} {arguments:x?}");
            }
        }
    }
}

#[test]
fn upper_half_of_an_argument_is_ignored() {
    let names = names();
    let own = ARCHITECTURE.unwrap();
    let mut random = Random(0x2545_f491_4f6c_dd1d);
    for filter in filters() {
        let program = program(filter).unwrap();
        for &number in names.keys() {
            for _ in 0..50 {
                let plain: [u64; 6] =
                    std::array::from_fn(|_| random.argument() & u64::from(u32::MAX));
                let garbage = plain.map(|argument| argument | random.next() << 32);
                assert_eq!(
                    run(&program, own, number, plain),
                    run(&program, own, number, garbage),
                    "{filter:?} {number} {plain:x?}"
                );
            }
        }
    }
}

#[test]
fn foreign_calls_kill_and_unknown_ones_fail_with_enosys() {
    let own = ARCHITECTURE.unwrap();
    for filter in filters() {
        let program = program(filter).unwrap();
        // The 32-bit and 64-bit variants of x86 and arm, except this one.
        for foreign in [0x4000_0003, 0xc000_003e, 0x4000_0028, 0xc000_00b7, own ^ 1] {
            let verdict = run(&program, foreign, libc::SYS_getpid as u32, [0; 6]);
            let expected = if foreign == own { ALLOW } else { libc::SECCOMP_RET_KILL_PROCESS };
            assert_eq!(verdict, expected, "{foreign:#x}");
        }
        // x32 numbers of x86-64, and an invalid number.
        for number in [0x4000_0000, 0x4000_0000 | 521, 0x8000_0000, u32::MAX, 470, 1 << 20] {
            assert_eq!(run(&program, own, number, [0; 6]), ENOSYS, "{number:#x}");
        }
    }
}

/// The kernel reads a program at each start, and runs it for each call whose arguments are checked.
#[test]
fn programs_are_small() {
    for filter in filters() {
        let length = program(filter).unwrap().len();
        assert!(length < 480, "{filter:?}: {length}");
    }
    let mut programs: Vec<_> = filters().map(|filter| program(filter).unwrap()).collect();
    programs.sort();
    programs.dedup();
    assert_eq!(programs.len(), filters().count(), "each filter has a program of its own");
}

#[test]
fn no_call_is_listed_twice() {
    let lists = [
        table::BY_NAME,
        table::METADATA,
        table::IPC,
        table::CONTROL_SELF,
        table::CONTROL_OTHERS,
        table::ABSENT,
    ];
    let groups = table::ALLOWED.iter().map(|(_, calls)| *calls);
    let mut numbers: Vec<_> = groups.chain(lists).flatten().collect();
    numbers.sort();
    let all = numbers.len();
    numbers.dedup();
    assert_eq!(numbers.len(), all);
}
