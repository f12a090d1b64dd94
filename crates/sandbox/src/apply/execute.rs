//! Starts the target.
//!
//! Invariant: all allocation happens before the child exists; the child shares this process's memory
//! until it has executed, and only makes system calls.

use std::ffi::{CStr, CString, OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

use super::{at, during, landlock, privileges, sys};
use crate::plan::{Plan, Program, Target};
use crate::reentry::{Helper, INHERITED, REFUSED_CODE};
use crate::status::{Failure, Stage};

/// Search path if the environment has no `PATH`, as in libc.
const DEFAULT_PATH: &str = "/bin:/usr/bin";

/// Runs a script without a `#!` line, as in libc.
const SHELL: &CStr = c"/bin/sh";

/// Stack size of the child, in bytes; enough for a few system calls.
const CHILD_STACK: usize = 64 * 1024;

pub(super) fn enter(cwd: &Path) -> Result<(), Failure> {
    rustix::process::chdir(cwd).map_err(at(Stage::WorkingDirectory, cwd))
}

pub(super) fn find_helper<'h>(helpers: &'h [Helper], name: &str) -> Result<&'h Helper, Failure> {
    helpers
        .iter()
        .find(|helper| helper.name == name)
        .ok_or_else(|| Failure::new(Stage::Execute, libc::ENOENT, format!("helper `{name}`")))
}

/// Replaces the environment.
pub(super) fn set_environment(env: &[(OsString, OsString)]) {
    for (name, _) in std::env::vars_os().collect::<Vec<_>>() {
        // SAFETY: this process has one thread.
        unsafe { std::env::remove_var(name) };
    }
    for (name, value) in env {
        // SAFETY: this process has one thread.
        unsafe { std::env::set_var(name, value) };
    }
}

/// Without namespaces: confines this process, which becomes the target.
pub(super) fn in_place(plan: &Plan, helpers: &[Helper]) -> Result<i32, Failure> {
    let enforcement = &plan.enforcement;
    privileges::limit_processes(enforcement.processes)?;
    privileges::limit_signals()?;
    if let Target::Program(program) = &plan.target {
        enter(&program.cwd)?;
    }
    sys::prctl(libc::PR_SET_NO_NEW_PRIVS, 1).map_err(during(Stage::NoNewPrivileges))?;
    landlock::enter(plan)?;
    privileges::drop_capabilities(&enforcement.tree)?;
    privileges::load_seccomp(&plan.seccomp)?;
    match &plan.target {
        Target::Program(program) => {
            sys::close_from(3, true).map_err(during(Stage::Descriptors))?;
            let mut image = Image::new(program)?;
            let errno = image.execute();
            Err(image.failure(errno))
        }
        Target::Helper { name, env } => {
            let helper = find_helper(helpers, name)?;
            set_environment(env);
            sys::close_from(3, false).map_err(during(Stage::Descriptors))?;
            Ok((helper.run)())
        }
        Target::Refusal { message } => {
            sys::close_from(3, false).map_err(during(Stage::Descriptors))?;
            Ok(refuse(message))
        }
    }
}

/// Writes `message`, the reason why no program runs, to stderr; returns the exit code.
pub(super) fn refuse(message: &str) -> i32 {
    let mut rest = message.as_bytes();
    while let Ok(written @ 1..) = rustix::io::write(rustix::stdio::stderr(), rest) {
        rest = &rest[written..];
    }
    REFUSED_CODE
}

/// Starts the program in a child; returns once the child has executed it.
pub(super) fn spawn(program: &Program) -> Result<i32, Failure> {
    let mut image = Image::new(program)?;
    let mut stack = vec![0u8; CHILD_STACK];
    // SAFETY: the end of the stack, rounded down to what every architecture wants.
    let top = unsafe { stack.as_mut_ptr().add(CHILD_STACK) };
    let top = top.wrapping_sub(top as usize % 16);
    // SAFETY: the child runs on its own stack and shares the rest; this process is suspended until the
    // child has executed or exited (CLONE_VFORK), so stack and image outlive its use of them.
    let pid = unsafe {
        libc::clone(
            child,
            top.cast(),
            libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD,
            (&raw mut image).cast(),
        )
    };
    let pid = sys::check(i64::from(pid)).map_err(during(Stage::Execute))? as i32;
    match image.errno {
        0 => Ok(pid),
        errno => Err(image.failure(errno)),
    }
}

extern "C" fn child(image: *mut libc::c_void) -> libc::c_int {
    // SAFETY: `spawn` passes its image and is suspended while this runs.
    let image = unsafe { &mut *image.cast::<Image>() };
    image.errno = image.execute();
    sys::exit_now(127)
}

/// A program in the form that the kernel takes.
struct Image {
    /// Paths to try, in order.
    candidates: Vec<CString>,
    arguments: Vec<CString>,
    argument_pointers: Vec<*const libc::c_char>,
    /// The shell, a slot for the script, and the arguments.
    shell_pointers: Vec<*const libc::c_char>,
    _environment: Vec<CString>,
    environment_pointers: Vec<*const libc::c_char>,
    /// Becomes [`INHERITED`].
    inherits: Option<i32>,
    errno: i32,
}

impl Image {
    fn new(program: &Program) -> Result<Self, Failure> {
        let named = &program.argv[0];
        let c_string = |text: &OsStr| {
            CString::new(text.as_bytes())
                .map_err(|_| Failure::new(Stage::Execute, libc::EINVAL, "NUL in a string"))
        };
        let mut arguments = Vec::with_capacity(program.argv.len());
        arguments.push(c_string(program.arg0.as_ref().unwrap_or(named))?);
        for argument in &program.argv[1..] {
            arguments.push(c_string(argument)?);
        }
        let mut environment = Vec::with_capacity(program.env.len());
        for (name, value) in &program.env {
            let mut line = name.clone();
            line.push("=");
            line.push(value);
            environment.push(c_string(&line)?);
        }
        let mut candidates = Vec::new();
        if named.as_bytes().contains(&b'/') {
            candidates.push(c_string(named)?);
        } else {
            let path = program.env.iter().find(|(name, _)| name == "PATH");
            let path = path.map_or(OsStr::new(DEFAULT_PATH), |(_, value)| value);
            for directory in path.as_bytes().split(|&byte| byte == b':') {
                let mut candidate = directory.to_vec();
                if !candidate.is_empty() {
                    candidate.push(b'/');
                }
                candidate.extend(named.as_bytes());
                candidates.push(c_string(OsStr::from_bytes(&candidate))?);
            }
        }
        let mut argument_pointers: Vec<_> = arguments.iter().map(|text| text.as_ptr()).collect();
        argument_pointers.push(ptr::null());
        let mut shell_pointers = vec![SHELL.as_ptr(), ptr::null()];
        shell_pointers.extend(&argument_pointers[1..]);
        let mut environment_pointers: Vec<_> =
            environment.iter().map(|text| text.as_ptr()).collect();
        environment_pointers.push(ptr::null());
        Ok(Self {
            candidates,
            arguments,
            argument_pointers,
            shell_pointers,
            _environment: environment,
            environment_pointers,
            inherits: program.inherits,
            errno: 0,
        })
    }

    /// Executes the program; returns only if that failed, with the errno.
    fn execute(&mut self) -> i32 {
        reset_signals();
        if let Some(number) = self.inherits {
            // The other descriptors are closed on execution; a copy is not. The number was the plan's, which
            // has been read.
            // SAFETY: no pointers; nothing in this process uses the number any more.
            let copied = unsafe { libc::dup2(number, INHERITED) };
            if copied < 0 {
                return last_errno();
            }
        }
        let mut found = libc::ENOENT;
        for candidate in &self.candidates {
            // SAFETY: every pointer is to a C string that `self` owns, and the lists end with null.
            unsafe {
                libc::execve(
                    candidate.as_ptr(),
                    self.argument_pointers.as_ptr(),
                    self.environment_pointers.as_ptr(),
                );
            }
            match last_errno() {
                // A script without a `#!` line.
                libc::ENOEXEC => {
                    self.shell_pointers[1] = candidate.as_ptr();
                    // SAFETY: as above; the list ends with the null that ends the arguments.
                    unsafe {
                        libc::execve(
                            SHELL.as_ptr(),
                            self.shell_pointers.as_ptr(),
                            self.environment_pointers.as_ptr(),
                        );
                    }
                    return last_errno();
                }
                libc::ENOENT | libc::ENOTDIR | libc::ESTALE | libc::ENODEV | libc::ETIMEDOUT => {}
                // A later directory may have the program, but this is the better error.
                libc::EACCES => found = libc::EACCES,
                other => return other,
            }
        }
        found
    }

    fn failure(&self, errno: i32) -> Failure {
        Failure::new(Stage::Execute, errno, self.arguments[0].to_string_lossy())
    }
}

fn last_errno() -> i32 {
    // SAFETY: the location is this thread's own.
    unsafe { *libc::__errno_location() }
}

/// Resets signals: default actions, none blocked. Rust's runtime ignores SIGPIPE, which children would
/// inherit.
fn reset_signals() {
    // SAFETY: the default action is always valid, and the set is emptied before it is used.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        let mut none = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
    }
}
