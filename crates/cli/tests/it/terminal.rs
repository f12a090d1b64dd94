//! A real terminal with the binary in it.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcgetattr, tcsetwinsize};

/// How long a test waits for the terminal before it fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// A terminal, from the user's side.
#[derive(Debug)]
pub(crate) struct Terminal {
    master: File,
    slave: OwnedFd,
    pub child: Child,
    /// Output that no call has returned yet.
    screen: String,
    /// All output.
    bytes: Vec<u8>,
}

impl Terminal {
    /// Starts the command with the terminal as its controlling terminal.
    pub(crate) fn start(command: &Command) -> Self {
        // Inherited by nobody: whoever held it would keep the window open.
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let master = openpt(flags).expect("a terminal");
        grantpt(&master).expect("granted");
        unlockpt(&master).expect("unlocked");
        let name = ptsname(&master, Vec::new()).expect("a name");
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let slave = rustix::fs::open(&name, flags, Mode::empty()).expect("its other side");
        let size = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&slave, size).expect("a size");
        let mut inside = Command::new("setsid");
        inside.arg("--ctty").arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => inside.env(name, value),
                None => inside.env_remove(name),
            };
        }
        if let Some(directory) = command.get_current_dir() {
            inside.current_dir(directory);
        }
        let end = || slave.try_clone().expect("another");
        inside.env("TERM", "xterm").stdin(end()).stdout(end()).stderr(end());
        let child = inside.spawn().expect("it runs");
        Self { master: File::from(master), slave, child, screen: String::new(), bytes: Vec::new() }
    }

    pub(crate) fn type_in(&mut self, text: &str) {
        self.master.write_all(text.as_bytes()).expect("the terminal takes it");
    }

    /// Waits until the text is shown, and returns the output up to its end.
    #[track_caller]
    pub(crate) fn shows(&mut self, text: &str) -> String {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(at) = self.screen.find(text) {
                let rest = self.screen.split_off(at + text.len());
                return std::mem::replace(&mut self.screen, rest);
            }
            assert!(self.read_more(until), "`{text}` was not shown: {:?}", self.screen);
        }
    }

    fn read_more(&mut self, until: Instant) -> bool {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: i64::try_from(left.as_secs()).unwrap_or(0), tv_nsec: 0 };
        let mut one = [PollFd::new(&self.master, PollFlags::IN)];
        if !matches!(poll(&mut one, Some(&left)), Ok(1..)) {
            return false;
        }
        let mut buffer = [0; 4096];
        match self.master.read(&mut buffer) {
            Ok(len @ 1..) => {
                self.bytes.extend_from_slice(&buffer[..len]);
                self.screen.push_str(&String::from_utf8_lossy(&buffer[..len]));
                true
            }
            _ => false,
        }
    }

    pub(crate) fn resize(&self, rows: u16, cols: u16) {
        let size = Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&self.master, size).expect("resized");
    }

    /// The settings of the terminal, as text to compare.
    pub(crate) fn settings(&self) -> String {
        format!("{:?}", tcgetattr(&self.slave).expect("settings"))
    }

    /// Waits until the terminal has these settings again.
    #[track_caller]
    pub(crate) fn is_again(&self, settings: &str) {
        let until = Instant::now() + PATIENCE;
        while self.settings() != settings {
            assert!(Instant::now() < until, "{}\nis not\n{settings}", self.settings());
            std::thread::yield_now();
        }
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).expect("signalled");
    }

    /// Closes the window: the kernel hangs up the program in it, whose exit status is returned.
    #[track_caller]
    pub(crate) fn close(mut self) -> ExitStatus {
        let nothing = || File::open("/dev/null").expect("/dev/null");
        self.slave = nothing().into();
        self.master = nothing();
        self.child.wait().expect("a child")
    }

    /// All output of a program that has ended.
    pub(crate) fn all_output(mut self) -> Vec<u8> {
        // Without another end, reading ends after what is left.
        self.slave = File::open("/dev/null").expect("/dev/null").into();
        while self.read_more(Instant::now() + PATIENCE) {}
        std::mem::take(&mut self.bytes)
    }

    /// Waits for the exit, and reads output meanwhile.
    #[track_caller]
    pub(crate) fn ends(&mut self) -> ExitStatus {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status;
            }
            assert!(Instant::now() < until, "it does not end: {:?}", self.screen);
            self.read_more(Instant::now() + Duration::from_millis(1));
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
