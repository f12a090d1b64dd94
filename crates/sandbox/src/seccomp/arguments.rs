//! The filter as data: arguments for which an allowed call is refused.
//!
//! Invariant: a condition compares the low 32 bits. Every checked argument is an `int`, whose upper
//! half the kernel ignores; a filter that compared it could be bypassed with garbage there.

use libc::c_long;

use super::{Filter, Sockets, controls, numbers};

/// A rule refuses a call if all of its conditions hold.
pub(super) type Rule = &'static [Condition];

/// The masked argument is one of some values, or none of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Condition {
    pub argument: u8,
    pub mask: u32,
    pub values: &'static [u32],
    /// Whether it must be one of the values, or none of them.
    pub one_of: bool,
}

pub(super) const fn one_of(argument: u8, mask: u32, values: &'static [u32]) -> Condition {
    Condition { argument, mask, values, one_of: true }
}

pub(super) const fn none_of(argument: u8, mask: u32, values: &'static [u32]) -> Condition {
    Condition { argument, mask, values, one_of: false }
}

/// At least one of these bits is set.
const fn any_bit(argument: u8, bits: u32) -> Condition {
    none_of(argument, bits, &[0])
}

const ALL: u32 = u32::MAX;

/// Set-id bits: a file runs with the rights of its owner or group.
const SET_ID: u32 = libc::S_ISUID | libc::S_ISGID;

/// Flags that create a file and so take a mode. The second is the kernel's own bit of `O_TMPFILE`,
/// which in libc includes `O_DIRECTORY`.
const CREATES: u32 = libc::O_CREAT as u32 | 0o20_000_000;

/// Rules by the calls they apply to.
type Rules = &'static [(&'static [c_long], Rule)];

/// Rules for every sandbox.
const ALWAYS: Rules = &[
    // New namespaces. `clone3` fails with `ENOSYS`.
    (
        &[libc::SYS_clone],
        &[any_bit(
            0,
            (libc::CLONE_NEWUSER
                | libc::CLONE_NEWNS
                | libc::CLONE_NEWPID
                | libc::CLONE_NEWIPC
                | libc::CLONE_NEWNET
                | libc::CLONE_NEWUTS
                | libc::CLONE_NEWCGROUP) as u32,
        )],
    ),
    // Set-id files: anyone outside could run them with the rights of the server's user. `openat2` fails
    // with `ENOSYS`.
    (&[libc::SYS_fchmod], &[any_bit(1, SET_ID)]),
    (
        &[libc::SYS_fchmodat, numbers::FCHMODAT2, libc::SYS_mkdirat, libc::SYS_mknodat],
        &[any_bit(2, SET_ID)],
    ),
    (&[libc::SYS_openat], &[any_bit(2, CREATES), any_bit(3, SET_ID)]),
    #[cfg(target_arch = "x86_64")]
    (&[libc::SYS_chmod, libc::SYS_creat, libc::SYS_mkdir, libc::SYS_mknod], &[any_bit(1, SET_ID)]),
    #[cfg(target_arch = "x86_64")]
    (&[libc::SYS_open], &[any_bit(1, CREATES), any_bit(2, SET_ID)]),
    // A process group may have members outside, such as the rest of a pipeline. Other processes are out
    // of reach through the PID namespace or the rules below.
    (&[libc::SYS_setpriority], &[one_of(0, ALL, &[PRIO_PGRP])]),
    (&[libc::SYS_ioprio_set], &[one_of(0, ALL, &[IOPRIO_WHO_PGRP])]),
    // Leases and delegations delay other processes that open the file, for 45 seconds by default;
    // directory notifications signal the actions of others. Read permission suffices for all three.
    (&[libc::SYS_fcntl], &[one_of(1, ALL, &[F_SETLEASE, F_NOTIFY, F_SETDELEG])]),
    // Write lifetime hints: stored with the file, and settable through any descriptor.
    (&[libc::SYS_fcntl], &[one_of(1, ALL, &[F_SET_RW_HINT, F_SET_FILE_RW_HINT])]),
    // I/O signals go to the owner of the open file; for a stream from outside that may be a process
    // outside, and the holder of the stream chooses the signal.
    (&[libc::SYS_fcntl], &[one_of(1, ALL, &[F_SETOWN, F_SETSIG, F_SETOWN_EX])]),
    (&[libc::SYS_fcntl], &[one_of(1, ALL, &[F_SETFL]), any_bit(2, libc::O_ASYNC as u32)]),
    (&[libc::SYS_ioctl], &[one_of(1, ALL, &[FIOASYNC, FIOSETOWN, SIOCSPGRP])]),
    // Other processes may use the terminal. Injecting input, redirecting the console and pasting are
    // escapes; exclusive mode locks others out; setting a line discipline loads kernel modules on
    // demand and serves only modems.
    (
        &[libc::SYS_ioctl],
        &[one_of(
            1,
            ALL,
            &[
                libc::TIOCSTI as u32,
                libc::TIOCLINUX as u32,
                libc::TIOCCONS as u32,
                libc::TIOCEXCL as u32,
                TIOCSETD,
            ],
        )],
    ),
];

const F_SETFL: u32 = libc::F_SETFL as u32;
const F_SETOWN: u32 = libc::F_SETOWN as u32;
const F_SETSIG: u32 = 10;
const F_SETOWN_EX: u32 = 15;
const FIOASYNC: u32 = 0x5452;
const FIOSETOWN: u32 = 0x8901;
const SIOCSPGRP: u32 = 0x8902;
const F_SETLEASE: u32 = 1024;
const F_NOTIFY: u32 = 1026;
const F_SET_RW_HINT: u32 = 1036;
const F_SET_FILE_RW_HINT: u32 = 1038;
/// Leases on directories, from Linux 6.19 on.
const F_SETDELEG: u32 = 1040;
const TIOCSETD: u32 = 0x5423;

/// Socket families that are allowed with the network enabled. The others have had more vulnerabilities
/// than uses. Of the netlink protocols only the routing table is allowed: the others report the sockets,
/// processes and devices of the host, or carry messages between its processes.
const NETWORK_ENABLED: Rules = &[
    (
        &[libc::SYS_socket, libc::SYS_socketpair],
        &[none_of(
            0,
            ALL,
            &[
                libc::AF_UNIX as u32,
                libc::AF_INET as u32,
                libc::AF_INET6 as u32,
                libc::AF_NETLINK as u32,
            ],
        )],
    ),
    (
        &[libc::SYS_socket, libc::SYS_socketpair],
        &[
            one_of(0, ALL, &[libc::AF_NETLINK as u32]),
            none_of(2, ALL, &[libc::NETLINK_ROUTE as u32]),
        ],
    ),
];

/// With a broker: a datagram socket could send to any socket file of the host, which the broker does
/// not see.
const BROKERED: Rules = &[(
    &[libc::SYS_socket, libc::SYS_socketpair],
    &[
        one_of(0, ALL, &[libc::AF_UNIX as u32]),
        none_of(1, 0xf, &[libc::SOCK_STREAM as u32, libc::SOCK_SEQPACKET as u32]),
    ],
)];

/// With the network restricted, only connected pairs of streams and of sequenced packets are allowed: a
/// datagram socket could send to any socket file of the host. The low four bits are the type.
const NETWORK_RESTRICTED: Rules = &[
    (&[libc::SYS_socket, libc::SYS_socketpair], &[none_of(0, ALL, &[libc::AF_UNIX as u32])]),
    (
        &[libc::SYS_socket, libc::SYS_socketpair],
        &[none_of(1, 0xf, &[libc::SOCK_STREAM as u32, libc::SOCK_SEQPACKET as u32])],
    ),
];

/// With a managed network: TCP and UDP, which end at the server, and connected pairs. A Unix socket of
/// any other kind could reach a socket file of the host. Programs that try another transport than TCP
/// (MPTCP, SCTP) fall back. The low four bits of the second argument are the type.
const NETWORK_MANAGED: Rules = &[
    (&[libc::SYS_socket], &[none_of(0, ALL, &[libc::AF_INET as u32, libc::AF_INET6 as u32])]),
    (&[libc::SYS_socket], &[none_of(1, 0xf, &[libc::SOCK_STREAM as u32, libc::SOCK_DGRAM as u32])]),
    (
        &[libc::SYS_socket],
        &[
            none_of(2, ALL, &[0, libc::IPPROTO_TCP as u32]),
            one_of(1, 0xf, &[libc::SOCK_STREAM as u32]),
        ],
    ),
    (
        &[libc::SYS_socket],
        &[
            none_of(2, ALL, &[0, libc::IPPROTO_UDP as u32]),
            one_of(1, 0xf, &[libc::SOCK_DGRAM as u32]),
        ],
    ),
    (&[libc::SYS_socketpair], &[none_of(0, ALL, &[libc::AF_UNIX as u32])]),
    (
        &[libc::SYS_socketpair],
        &[none_of(1, 0xf, &[libc::SOCK_STREAM as u32, libc::SOCK_SEQPACKET as u32])],
    ),
];

/// Without a PID namespace: a process may control itself, for which it passes 0.
const OTHER_PROCESSES: Rules = &[
    (
        &[
            libc::SYS_sched_setaffinity,
            libc::SYS_sched_setscheduler,
            libc::SYS_sched_setparam,
            libc::SYS_sched_setattr,
            libc::SYS_prlimit64,
        ],
        &[any_bit(0, ALL)],
    ),
    (&[libc::SYS_setpriority], &[none_of(0, ALL, &[PRIO_PROCESS])]),
    (&[libc::SYS_ioprio_set], &[none_of(0, ALL, &[IOPRIO_WHO_PROCESS])]),
    (&[libc::SYS_setpriority, libc::SYS_ioprio_set], &[any_bit(1, ALL)]),
];

const PRIO_PROCESS: u32 = 0;
const PRIO_PGRP: u32 = 1;
const IOPRIO_WHO_PROCESS: u32 = 1;
const IOPRIO_WHO_PGRP: u32 = 2;

const LISTED_CONTROLS: Rules = &[(&[libc::SYS_ioctl], controls::LISTED_ONLY)];
const NO_FILE_SYSTEM_CONTROLS: Rules = &[(&[libc::SYS_ioctl], controls::NOT_OF_FILE_SYSTEMS)];

/// The rules of a filter, in the order they are tried.
pub(super) fn rules(filter: Filter) -> impl Iterator<Item = (c_long, Rule)> {
    let network = match filter.sockets {
        Sockets::Network => NETWORK_ENABLED,
        Sockets::Pairs => NETWORK_RESTRICTED,
        Sockets::Managed => NETWORK_MANAGED,
    };
    let processes: Rules = if filter.shared_processes { OTHER_PROCESSES } else { &[] };
    let controls = if filter.host_devices { NO_FILE_SYSTEM_CONTROLS } else { LISTED_CONTROLS };
    let brokered: Rules = if filter.brokered { BROKERED } else { &[] };
    [ALWAYS, network, brokered, processes, controls]
        .into_iter()
        .flatten()
        .flat_map(|(calls, rule)| calls.iter().map(|call| (*call, *rule)))
}
