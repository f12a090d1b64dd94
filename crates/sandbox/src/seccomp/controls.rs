//! The filter as data: the controls (`ioctl`) that a sandboxed process may use.
//!
//! A control is judged by its number alone: the filter does not see what is behind the descriptor. Many need no
//! more than a descriptor that is open for reading, and a read-only mount does not stop them: btrfs makes a
//! snapshot of a denied directory, fscrypt takes away the key of an encrypted one. So a process with devices
//! of its own may use what is listed here, and nothing that a file system or driver adds in future.

use super::arguments::{Condition, Rule, none_of, one_of};

/// Everything that may be used where the policy names no device. The most frequent ones come first: they are
/// compared in this order.
const LISTED: &[u32] = &[
    // Terminals: attributes, size, foreground group, pseudo-terminals of the sandbox's own.
    0x5401,      // TCGETS
    0x5413,      // TIOCGWINSZ
    0x541b,      // FIONREAD
    0x5451,      // FIOCLEX
    0x5450,      // FIONCLEX
    0x5421,      // FIONBIO
    0x5402,      // TCSETS
    0x5403,      // TCSETSW
    0x5404,      // TCSETSF
    0x5405,      // TCGETA
    0x5406,      // TCSETA
    0x5407,      // TCSETAW
    0x5408,      // TCSETAF
    0x5409,      // TCSBRK
    0x5425,      // TCSBRKP
    0x540a,      // TCXONC
    0x540b,      // TCFLSH
    0x540d,      // TIOCNXCL
    0x540e,      // TIOCSCTTY
    0x5422,      // TIOCNOTTY
    0x540f,      // TIOCGPGRP
    0x5410,      // TIOCSPGRP
    0x5429,      // TIOCGSID
    0x5411,      // TIOCOUTQ
    0x5414,      // TIOCSWINSZ
    0x5415,      // TIOCMGET
    0x5420,      // TIOCPKT
    0x5424,      // TIOCGETD
    0x5460,      // FIOQSIZE
    0x802c_542a, // TCGETS2
    0x402c_542b, // TCSETS2
    0x402c_542c, // TCSETSW2
    0x402c_542d, // TCSETSF2
    0x8004_5430, // TIOCGPTN
    0x4004_5431, // TIOCSPTLCK
    0x8004_5432, // TIOCGDEV
    0x4004_5436, // TIOCSIG
    0x8004_5438, // TIOCGPKT
    0x8004_5439, // TIOCGPTLCK
    0x8004_5440, // TIOCGEXCL
    0x5441,      // TIOCGPTPEER
    // Files: questions, and sharing blocks with a descriptor that is open for writing.
    0x0002, // FIGETBSZ
    FS_IOC_GETFLAGS,
    FS_IOC_FIEMAP,
    FS_IOC_FSGETXATTR,
    FS_IOC_GETVERSION,
    FICLONE,
    FICLONERANGE,
    FIDEDUPERANGE,
    // How much randomness there is.
    0x8004_5200, // RNDGETENTCNT
    // Sockets, and questions about network interfaces.
    0x8903, // FIOGETOWN
    0x8904, // SIOCGPGRP
    0x8905, // SIOCATMARK
    0x8906, // SIOCGSTAMP
    0x8907, // SIOCGSTAMPNS
    0x8910, // SIOCGIFNAME
    0x8912, // SIOCGIFCONF
    0x8913, // SIOCGIFFLAGS
    0x8915, // SIOCGIFADDR
    0x8917, // SIOCGIFDSTADDR
    0x8919, // SIOCGIFBRDADDR
    0x891b, // SIOCGIFNETMASK
    0x891d, // SIOCGIFMETRIC
    0x8921, // SIOCGIFMTU
    0x8927, // SIOCGIFHWADDR
    0x8933, // SIOCGIFINDEX
    0x8942, // SIOCGIFTXQLEN
];

const FS_IOC_GETFLAGS: u32 = 0x8008_6601;
const FS_IOC_FIEMAP: u32 = 0xc020_660b;
const FS_IOC_FSGETXATTR: u32 = 0x801c_581f;
const FS_IOC_GETVERSION: u32 = 0x8008_7601;
const FICLONE: u32 = 0x4004_9409;
const FICLONERANGE: u32 = 0x4020_940d;
const FIDEDUPERANGE: u32 = 0xc018_9436;

const ALL: u32 = u32::MAX;

/// The byte of a control's number that says whose it is.
const TYPE: u32 = 0xff00;

/// Refuses what is not listed.
pub(super) const LISTED_ONLY: Rule = &[none_of(1, ALL, LISTED)];

/// Refuses controls of file systems, by the byte that says whose they are, except for the listed ones. For a
/// process that has devices of the host, whose controls nobody can list.
pub(super) const NOT_OF_FILE_SYSTEMS: Rule = &[
    one_of(
        1,
        TYPE,
        &[
            0x6600, // ext4 and what others share with it: flags, verity, encryption
            0x5800, // XFS and what others share with it: attributes, freezing, trimming
            0x7600, // versions of inodes
            0x9400, // btrfs
            0xbc00, // bcachefs
            0x7200, // FAT
            0xf500, // f2fs
            0x6e00, // NILFS
            0x6f00, // OCFS2, UBIFS
            0x6800, // HFS+
            0x9700, // Ceph
            0xcf00, // SMB
            0xcd00, // ReiserFS
        ],
    ),
    EXCEPT_LISTED,
];

const EXCEPT_LISTED: Condition = none_of(
    1,
    ALL,
    &[
        FS_IOC_GETFLAGS,
        FS_IOC_FIEMAP,
        FS_IOC_FSGETXATTR,
        FS_IOC_GETVERSION,
        FICLONE,
        FICLONERANGE,
        FIDEDUPERANGE,
    ],
);
