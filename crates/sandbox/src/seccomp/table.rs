//! The filter as data: which system calls are refused, and why.
//!
//! Everything else is allowed: the tree and Landlock say *where*, this table says *what* nobody
//! inside ever gets to do.

use libc::c_long;

/// Refused with `EPERM`, whatever the arguments.
pub(super) const REFUSED: &[(&str, &[c_long])] = &[
    (
        "looking into or steering other processes",
        &[
            libc::SYS_ptrace,
            libc::SYS_process_vm_readv,
            libc::SYS_process_vm_writev,
            libc::SYS_process_madvise,
            libc::SYS_kcmp,
            libc::SYS_pidfd_getfd,
        ],
    ),
    (
        "io_uring, which does what this filter cannot see",
        &[libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register],
    ),
    (
        "changing the tree",
        &[
            libc::SYS_mount,
            libc::SYS_umount2,
            libc::SYS_pivot_root,
            libc::SYS_chroot,
            libc::SYS_open_tree,
            libc::SYS_move_mount,
            libc::SYS_fsopen,
            libc::SYS_fsconfig,
            libc::SYS_fsmount,
            libc::SYS_fspick,
            libc::SYS_mount_setattr,
            SYS_OPEN_TREE_ATTR,
        ],
    ),
    ("entering or making namespaces", &[libc::SYS_unshare, libc::SYS_setns]),
    (
        "loading code into the kernel",
        &[
            libc::SYS_init_module,
            libc::SYS_finit_module,
            libc::SYS_delete_module,
            libc::SYS_kexec_load,
            libc::SYS_kexec_file_load,
            libc::SYS_bpf,
        ],
    ),
    (
        "the keyring, which is shared across namespaces",
        &[libc::SYS_add_key, libc::SYS_request_key, libc::SYS_keyctl],
    ),
    (
        "interfaces that serve exploits more often than programs",
        &[libc::SYS_userfaultfd, libc::SYS_perf_event_open],
    ),
    (
        "files by handle, and watches on whole file systems, which go around the tree",
        &[libc::SYS_open_by_handle_at, libc::SYS_fanotify_init],
    ),
    (
        "running the machine",
        &[
            libc::SYS_reboot,
            libc::SYS_swapon,
            libc::SYS_swapoff,
            libc::SYS_acct,
            libc::SYS_quotactl,
            libc::SYS_quotactl_fd,
            libc::SYS_settimeofday,
            libc::SYS_clock_settime,
            libc::SYS_clock_adjtime,
            libc::SYS_adjtimex,
            libc::SYS_sethostname,
            libc::SYS_setdomainname,
            libc::SYS_syslog,
            libc::SYS_vhangup,
            libc::SYS_lookup_dcookie,
            libc::SYS_nfsservctl,
        ],
    ),
    #[cfg(target_arch = "x86_64")]
    ("hardware ports", &[libc::SYS_iopl, libc::SYS_ioperm, libc::SYS_uselib]),
];

/// Too new for the C library's table; the same number on every architecture.
const SYS_OPEN_TREE_ATTR: c_long = 467;

/// Terminal controls that type into a terminal or redirect the console. Refused with `EPERM`.
pub(super) const REFUSED_IOCTLS: &[u64] = &[libc::TIOCSTI, libc::TIOCLINUX, libc::TIOCCONS];

/// New namespaces by way of `clone`. `clone3` hides its flags behind a pointer and is answered
/// `ENOSYS`, upon which C libraries fall back to `clone`.
pub(super) const NAMESPACE_FLAGS: &[i32] = &[
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWNS,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWNET,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWCGROUP,
];

/// Socket families there are with the network enabled. The others have brought more holes than uses.
pub(super) const ENABLED_FAMILIES: &[i32] =
    &[libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];

/// With the network restricted there are connected pairs of streams (type 1) and of sequenced packets
/// (type 5) and nothing else: a datagram socket could name any socket file of the host with each
/// message it sends. As bits that tell the other types: the low four are the type.
pub(super) const REFUSED_UNIX_TYPES: &[(u64, u64)] =
    &[(0b0001, 0), (0b0010, 0b0010), (0b1000, 0b1000)];

/// With the network restricted: how a socket would reach or be reached by name.
pub(super) const RESTRICTED_CALLS: &[c_long] =
    &[libc::SYS_connect, libc::SYS_bind, libc::SYS_listen, libc::SYS_accept, libc::SYS_accept4];
