//! Pseudoterminals: a master for the server, a terminal for the child.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use codex_exec_server_protocol::process::TerminalSize;
use rustix::pty::OpenptFlags;
use rustix::termios::{SpecialCodeIndex, Winsize};

/// Both ends of a new terminal. The master is non-blocking.
#[derive(Debug)]
pub(super) struct Pty {
    pub master: OwnedFd,
    pub terminal: OwnedFd,
}

pub(super) fn open(size: TerminalSize) -> io::Result<Pty> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let master = rustix::pty::openpt(flags)?;
    rustix::pty::grantpt(&master)?;
    rustix::pty::unlockpt(&master)?;
    // By descriptor: in another mount namespace the name may mean another terminal.
    let terminal = rustix::pty::ioctl_tiocgptpeer(&master, flags)?;
    resize(&master, size)?;
    rustix::io::ioctl_fionbio(&master, true)?;
    Ok(Pty { master, terminal })
}

/// Sets the size; the kernel signals the foreground process group (SIGWINCH).
pub(super) fn resize(master: impl AsFd, size: TerminalSize) -> io::Result<()> {
    let size = Winsize { ws_row: size.rows, ws_col: size.cols, ws_xpixel: 0, ws_ypixel: 0 };
    Ok(rustix::termios::tcsetwinsize(master, size)?)
}

/// The terminal's current end-of-file character.
pub(super) fn eof_character(master: impl AsFd) -> io::Result<u8> {
    Ok(rustix::termios::tcgetattr(master)?.special_codes[SpecialCodeIndex::VEOF])
}

/// The foreground process group, which the terminal's keys signal.
pub(super) fn foreground_group(master: impl AsFd) -> Option<rustix::process::Pid> {
    rustix::termios::tcgetpgrp(master).ok()
}
