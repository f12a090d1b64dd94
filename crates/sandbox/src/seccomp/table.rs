//! The filter as data: the system calls that are allowed, each group with its reason.
//!
//! Invariant: what is not listed is refused. The tree and Landlock say *where* something may be done,
//! this table says *what* there is to do at all. A call belongs here if ordinary programs use it and if
//! it acts on nothing but the caller, its own descendants, or files and sockets that it could open.
//!
//! Left out on purpose, each with `EPERM`:
//! - looking into or steering other processes: `ptrace`, `process_vm_*`, `process_madvise`, `kcmp`,
//!   `pidfd_getfd`;
//! - `io_uring`, whose operations no filter sees;
//! - mounts, roots and namespaces: `mount`, `umount2`, `pivot_root`, `chroot`, `open_tree`,
//!   `open_tree_attr`, `move_mount`, `fsopen` and its relatives, `mount_setattr`, `unshare`, `setns`;
//! - code in the kernel: modules, `kexec`, `bpf`;
//! - keyrings, which are shared across namespaces;
//! - `userfaultfd` and `perf_event_open`, which serve exploits more often than programs;
//! - files by handle (`open_by_handle_at`) and watches on whole file systems (`fanotify`), which go
//!   around the tree;
//! - running the machine: clocks, host name, swap, accounting, quotas, kernel log, `reboot`, `vhangup`;
//! - hardware ports, and `modify_ldt`: only emulators of 16-bit code use it, and its segments have been
//!   a source of kernel bugs;
//! - `lsm_set_self_attr`, which changes the process's label in other security modules;
//! - calls without a use or an implementation: `uselib`, `sysfs`, `lookup_dcookie`, `nfsservctl`, …

use libc::c_long;

use super::numbers;

/// Calls that are allowed in every sandbox, some of them with conditions on their arguments
/// ([`super::arguments`]).
pub(super) const ALLOWED: &[(&str, &[c_long])] = &[
    (
        "reading and writing what is open",
        &[
            libc::SYS_read,
            libc::SYS_write,
            libc::SYS_readv,
            libc::SYS_writev,
            libc::SYS_pread64,
            libc::SYS_pwrite64,
            libc::SYS_preadv,
            libc::SYS_pwritev,
            libc::SYS_preadv2,
            libc::SYS_pwritev2,
            libc::SYS_lseek,
            libc::SYS_close,
            libc::SYS_close_range,
            libc::SYS_dup,
            libc::SYS_dup3,
            libc::SYS_fcntl,
            libc::SYS_ioctl,
            libc::SYS_flock,
            libc::SYS_fsync,
            libc::SYS_fdatasync,
            libc::SYS_sync,
            libc::SYS_syncfs,
            numbers::SYNC_FILE_RANGE,
            libc::SYS_ftruncate,
            libc::SYS_fallocate,
            libc::SYS_fadvise64,
            libc::SYS_readahead,
            numbers::CACHESTAT,
            libc::SYS_sendfile,
            libc::SYS_splice,
            libc::SYS_tee,
            libc::SYS_vmsplice,
            libc::SYS_copy_file_range,
            libc::SYS_pipe2,
            libc::SYS_memfd_create,
            libc::SYS_memfd_secret,
        ],
    ),
    (
        "asynchronous operations on what is open; unlike io_uring they are the calls above",
        &[
            libc::SYS_io_setup,
            libc::SYS_io_destroy,
            libc::SYS_io_submit,
            libc::SYS_io_cancel,
            libc::SYS_io_getevents,
            numbers::IO_PGETEVENTS,
        ],
    ),
    (
        "files by name, where the tree and Landlock decide",
        &[
            libc::SYS_openat,
            libc::SYS_newfstatat,
            libc::SYS_fstat,
            libc::SYS_statx,
            libc::SYS_statfs,
            libc::SYS_fstatfs,
            libc::SYS_faccessat,
            libc::SYS_faccessat2,
            libc::SYS_readlinkat,
            libc::SYS_getdents64,
            libc::SYS_truncate,
            libc::SYS_mkdirat,
            libc::SYS_mknodat,
            libc::SYS_unlinkat,
            numbers::RENAMEAT,
            libc::SYS_renameat2,
            libc::SYS_linkat,
            libc::SYS_symlinkat,
            libc::SYS_getcwd,
            libc::SYS_chdir,
            libc::SYS_fchdir,
            libc::SYS_umask,
            libc::SYS_name_to_handle_at,
            libc::SYS_getxattr,
            libc::SYS_lgetxattr,
            libc::SYS_fgetxattr,
            numbers::GETXATTRAT,
            libc::SYS_listxattr,
            libc::SYS_llistxattr,
            libc::SYS_flistxattr,
            numbers::LISTXATTRAT,
            numbers::FILE_GETATTR,
            libc::SYS_inotify_init1,
            libc::SYS_inotify_add_watch,
            libc::SYS_inotify_rm_watch,
        ],
    ),
    (
        "the table of mounts, which /proc/self/mountinfo tells as well",
        &[numbers::STATMOUNT, numbers::LISTMOUNT],
    ),
    (
        "memory of the caller",
        &[
            libc::SYS_brk,
            libc::SYS_mmap,
            libc::SYS_munmap,
            libc::SYS_mremap,
            libc::SYS_remap_file_pages,
            libc::SYS_mprotect,
            libc::SYS_pkey_mprotect,
            libc::SYS_pkey_alloc,
            libc::SYS_pkey_free,
            libc::SYS_madvise,
            libc::SYS_mincore,
            libc::SYS_msync,
            libc::SYS_mlock,
            libc::SYS_mlock2,
            libc::SYS_mlockall,
            libc::SYS_munlock,
            libc::SYS_munlockall,
            numbers::MSEAL,
            numbers::MAP_SHADOW_STACK,
            libc::SYS_mbind,
            libc::SYS_get_mempolicy,
            libc::SYS_set_mempolicy,
            libc::SYS_set_mempolicy_home_node,
            libc::SYS_membarrier,
        ],
    ),
    (
        "starting, ending and waiting for processes and threads",
        &[
            libc::SYS_clone,
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_exit,
            libc::SYS_exit_group,
            libc::SYS_wait4,
            libc::SYS_waitid,
            libc::SYS_pidfd_open,
            libc::SYS_set_tid_address,
            libc::SYS_set_robust_list,
            libc::SYS_get_robust_list,
            libc::SYS_rseq,
            libc::SYS_restart_syscall,
            libc::SYS_futex,
            libc::SYS_futex_waitv,
            numbers::FUTEX_WAIT,
            numbers::FUTEX_WAKE,
            numbers::FUTEX_REQUEUE,
        ],
    ),
    (
        "signals; the PID namespace and Landlock keep them inside",
        &[
            libc::SYS_kill,
            libc::SYS_tkill,
            libc::SYS_tgkill,
            libc::SYS_pidfd_send_signal,
            libc::SYS_rt_sigaction,
            libc::SYS_rt_sigprocmask,
            libc::SYS_rt_sigpending,
            libc::SYS_rt_sigqueueinfo,
            libc::SYS_rt_tgsigqueueinfo,
            libc::SYS_rt_sigreturn,
            libc::SYS_rt_sigsuspend,
            libc::SYS_rt_sigtimedwait,
            libc::SYS_sigaltstack,
            libc::SYS_signalfd4,
        ],
    ),
    (
        "who and what the caller is; without capabilities it can only give up more",
        &[
            libc::SYS_getpid,
            libc::SYS_getppid,
            libc::SYS_gettid,
            libc::SYS_getpgid,
            libc::SYS_setpgid,
            libc::SYS_getsid,
            libc::SYS_setsid,
            libc::SYS_getuid,
            libc::SYS_geteuid,
            libc::SYS_getgid,
            libc::SYS_getegid,
            libc::SYS_getresuid,
            libc::SYS_getresgid,
            libc::SYS_getgroups,
            libc::SYS_setuid,
            libc::SYS_setgid,
            libc::SYS_setreuid,
            libc::SYS_setregid,
            libc::SYS_setresuid,
            libc::SYS_setresgid,
            libc::SYS_setfsuid,
            libc::SYS_setfsgid,
            libc::SYS_setgroups,
            libc::SYS_capget,
            libc::SYS_capset,
            libc::SYS_prctl,
            // Its flags make nothing possible that `mmap` and `mprotect` do not; `setarch -R` and
            // some language runtimes turn off address randomization for themselves.
            libc::SYS_personality,
            numbers::LSM_GET_SELF_ATTR,
            numbers::LSM_LIST_MODULES,
        ],
    ),
    (
        "programs that sandbox themselves or their children further",
        &[
            libc::SYS_seccomp,
            libc::SYS_landlock_create_ruleset,
            libc::SYS_landlock_add_rule,
            libc::SYS_landlock_restrict_self,
        ],
    ),
    (
        "scheduling and limits as the caller finds them",
        &[
            libc::SYS_sched_yield,
            libc::SYS_sched_getparam,
            libc::SYS_sched_getscheduler,
            libc::SYS_sched_getattr,
            libc::SYS_sched_getaffinity,
            libc::SYS_sched_get_priority_max,
            libc::SYS_sched_get_priority_min,
            libc::SYS_sched_rr_get_interval,
            libc::SYS_getpriority,
            libc::SYS_ioprio_get,
            numbers::GETRLIMIT,
            numbers::SETRLIMIT,
            libc::SYS_getrusage,
            libc::SYS_getcpu,
        ],
    ),
    (
        "time, timers and waiting",
        &[
            libc::SYS_clock_gettime,
            libc::SYS_clock_getres,
            libc::SYS_clock_nanosleep,
            libc::SYS_nanosleep,
            libc::SYS_gettimeofday,
            libc::SYS_times,
            libc::SYS_getitimer,
            libc::SYS_setitimer,
            libc::SYS_timer_create,
            libc::SYS_timer_delete,
            libc::SYS_timer_getoverrun,
            libc::SYS_timer_gettime,
            libc::SYS_timer_settime,
            libc::SYS_timerfd_create,
            libc::SYS_timerfd_gettime,
            libc::SYS_timerfd_settime,
            libc::SYS_eventfd2,
            libc::SYS_ppoll,
            libc::SYS_pselect6,
            libc::SYS_epoll_create1,
            libc::SYS_epoll_ctl,
            libc::SYS_epoll_pwait,
            libc::SYS_epoll_pwait2,
        ],
    ),
    (
        "sockets; the conditions on `socket` and `socketpair` say which",
        &[
            libc::SYS_socket,
            libc::SYS_socketpair,
            libc::SYS_getsockname,
            libc::SYS_getpeername,
            libc::SYS_getsockopt,
            libc::SYS_setsockopt,
            libc::SYS_sendto,
            libc::SYS_sendmsg,
            libc::SYS_sendmmsg,
            libc::SYS_recvfrom,
            libc::SYS_recvmsg,
            libc::SYS_recvmmsg,
            libc::SYS_shutdown,
        ],
    ),
    ("facts about the machine", &[libc::SYS_uname, libc::SYS_sysinfo, libc::SYS_getrandom]),
    #[cfg(target_arch = "x86_64")]
    (
        "older forms of the above, which only x86-64 has",
        &[
            libc::SYS_open,
            libc::SYS_creat,
            libc::SYS_stat,
            libc::SYS_lstat,
            libc::SYS_access,
            libc::SYS_readlink,
            libc::SYS_getdents,
            libc::SYS_mkdir,
            libc::SYS_rmdir,
            libc::SYS_mknod,
            libc::SYS_unlink,
            libc::SYS_rename,
            libc::SYS_link,
            libc::SYS_symlink,
            libc::SYS_ustat,
            libc::SYS_dup2,
            libc::SYS_pipe,
            libc::SYS_poll,
            libc::SYS_select,
            libc::SYS_epoll_create,
            libc::SYS_epoll_wait,
            libc::SYS_eventfd,
            libc::SYS_signalfd,
            libc::SYS_inotify_init,
            libc::SYS_fork,
            libc::SYS_vfork,
            libc::SYS_getpgrp,
            libc::SYS_pause,
            libc::SYS_alarm,
            libc::SYS_time,
        ],
    ),
    #[cfg(target_arch = "x86_64")]
    ("registers that only x86-64 has", &[libc::SYS_arch_prctl]),
    #[cfg(target_arch = "x86_64")]
    (
        "returning from probes that an observer outside has set; refusing them would crash the program",
        &[numbers::URETPROBE, numbers::UPROBE],
    ),
];

/// Calls by which a socket connects or is reached. Refused with the network restricted.
pub(super) const BY_NAME: &[c_long] =
    &[libc::SYS_connect, libc::SYS_bind, libc::SYS_listen, libc::SYS_accept, libc::SYS_accept4];

/// Changes of file metadata: mode, owner, times, extended attributes. A read-only mount refuses them,
/// but Landlock does not cover them; so without namespaces they are refused by number, even where the
/// policy allows writing.
pub(super) const METADATA: &[c_long] = &[
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    numbers::FCHMODAT2,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_utimensat,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_fsetxattr,
    numbers::SETXATTRAT,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    libc::SYS_fremovexattr,
    numbers::REMOVEXATTRAT,
    numbers::FILE_SETATTR,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chmod,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chown,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lchown,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_utime,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_utimes,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_futimesat,
];

/// Calls on objects of the IPC namespace. Without namespaces those are the host's.
pub(super) const IPC: &[c_long] = &[
    libc::SYS_shmget,
    libc::SYS_shmat,
    libc::SYS_shmctl,
    libc::SYS_shmdt,
    libc::SYS_msgget,
    libc::SYS_msgsnd,
    libc::SYS_msgrcv,
    libc::SYS_msgctl,
    libc::SYS_semget,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_semctl,
    libc::SYS_mq_open,
    libc::SYS_mq_unlink,
    libc::SYS_mq_timedsend,
    libc::SYS_mq_timedreceive,
    libc::SYS_mq_notify,
    libc::SYS_mq_getsetattr,
];

/// Calls that control a process by pid, besides signals. The PID namespace hides other processes;
/// without it every process of the same user is reachable, and Landlock confines only signals. The
/// conditions in [`super::arguments`] still allow the caller's own process, given as 0.
pub(super) const CONTROL_SELF: &[c_long] = &[
    libc::SYS_setpriority,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_setscheduler,
    libc::SYS_sched_setparam,
    libc::SYS_sched_setattr,
    libc::SYS_ioprio_set,
    libc::SYS_prlimit64,
];

/// Like [`CONTROL_SELF`], but useless for a program's own process.
pub(super) const CONTROL_OTHERS: &[c_long] =
    &[libc::SYS_migrate_pages, libc::SYS_move_pages, libc::SYS_process_mrelease];

/// Calls that fail with `ENOSYS`, upon which programs use an older one: their arguments are behind a
/// pointer, so they cannot be checked.
pub(super) const ABSENT: &[c_long] = &[libc::SYS_clone3, libc::SYS_openat2];
