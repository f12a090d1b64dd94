//! What to execute, in the form the kernel takes: everything a child needs between `clone` and
//! `execve`, prepared in advance because the child must not allocate.

use std::ffi::{CString, OsStr};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::env::Environment;
use crate::sandbox::Executable;

/// Search path if the child's environment has no `PATH`, as in `execvp`.
const DEFAULT_PATH: &str = "/bin:/usr/bin";

/// A program with its arguments, environment and working directory.
#[derive(Debug)]
pub struct Command {
    /// Executed by descriptor, instead of any candidate.
    pub(super) executable: Option<Executable>,
    /// Files to try, in order.
    pub(super) candidates: Vec<CString>,
    pub(super) argv: Vec<CString>,
    pub(super) env: Vec<CString>,
    pub(super) cwd: CString,
}

/// A string contains a NUL byte, which no argument, variable or path can hold.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} contains a NUL byte")]
pub struct NulByte {
    what: &'static str,
}

impl Command {
    /// `program` is looked up in the `PATH` of `env` unless it has a slash; the child sees `argv0`.
    pub fn new<'a>(
        program: &OsStr,
        argv0: &'a OsStr,
        args: impl IntoIterator<Item = &'a OsStr>,
        env: &Environment,
        cwd: &Path,
    ) -> Result<Self, NulByte> {
        let path = env.get(OsStr::new("PATH")).map_or(OsStr::new(DEFAULT_PATH), |path| path);
        let candidates =
            candidates(program.as_bytes(), path.as_bytes()).map(|file| c_string(file, "argv"));
        let argv = std::iter::once(argv0).chain(args);
        let pairs = env.iter().map(|(name, value)| {
            c_string([name.as_bytes(), b"=", value.as_bytes()].concat(), "env")
        });
        Ok(Self {
            executable: None,
            candidates: candidates.collect::<Result<_, _>>()?,
            argv: argv.map(|arg| c_string(arg.as_bytes(), "argv")).collect::<Result<_, _>>()?,
            env: pairs.collect::<Result<_, _>>()?,
            cwd: c_string(cwd.as_os_str().as_bytes(), "cwd")?,
        })
    }
}

impl Command {
    /// Whether this process could execute the program.
    pub fn is_executable(&self) -> bool {
        use rustix::fs::{Access, AtFlags, CWD, Mode, OFlags, accessat, open, statat};
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = open(&self.cwd, flags, Mode::empty()).ok();
        let around = directory.as_ref().map_or(CWD, AsFd::as_fd);
        self.candidates.iter().any(|file| {
            statat(around, file, AtFlags::empty())
                .is_ok_and(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file())
                && accessat(around, file, Access::EXEC_OK, AtFlags::EACCESS).is_ok()
        })
    }
}

impl Command {
    /// Executes this open file, even if another file takes its name.
    pub(super) fn with_executable(self, executable: &Executable) -> Self {
        Self { executable: executable.descriptor().map(|_| executable.clone()), ..self }
    }
}

fn c_string(bytes: impl Into<Vec<u8>>, what: &'static str) -> Result<CString, NulByte> {
    CString::new(bytes).map_err(|_| NulByte { what })
}

fn candidates<'a>(program: &'a [u8], path: &'a [u8]) -> Box<dyn Iterator<Item = Vec<u8>> + 'a> {
    if program.is_empty() || program.contains(&b'/') {
        return Box::new(std::iter::once(program.to_vec()));
    }
    Box::new(path.split(|&b| b == b':').map(move |dir| match dir {
        // An empty element stands for the working directory.
        b"" => [b"./", program].concat(),
        dir => [dir, b"/", program].concat(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(program: &str, path: Option<&str>) -> Vec<String> {
        let env = path.map(|path| ("PATH".into(), path.into())).into_iter().collect();
        Command::new(program.as_ref(), "x".as_ref(), [], &env, Path::new("/"))
            .unwrap()
            .candidates
            .into_iter()
            .map(|file| file.into_string().unwrap())
            .collect()
    }

    #[test]
    fn bare_name_is_looked_up_in_the_childs_path() {
        assert_eq!(files("ls", Some("/a:/b::c")), ["/a/ls", "/b/ls", "./ls", "c/ls"]);
        assert_eq!(files("ls", None), ["/bin/ls", "/usr/bin/ls"]);
        assert_eq!(files("./ls", Some("/a")), ["./ls"]);
        assert_eq!(files("/x/ls", Some("/a")), ["/x/ls"]);
        assert_eq!(files("", Some("/a")), [""]);
    }

    #[test]
    fn nul_bytes_are_refused() {
        let env = Environment::new();
        let command =
            |program: &str| Command::new(program.as_ref(), "x".as_ref(), [], &env, Path::new("/"));
        assert_eq!(command("a\0b").unwrap_err(), NulByte { what: "argv" });
    }
}
