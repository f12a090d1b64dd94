//! What starts in place of a login shell: the text that restores its state, and the command line that reads
//! that text from descriptor 3.
//!
//! Order of the text: close the descriptor; options that change how functions are read; functions, while no
//! alias is expanded; aliases; the remaining options last, because `errexit`, `xtrace` and others would act
//! on the text itself.
//!
//! Invariant: from the first function of the profile on, every command of ours begins with `builtin` (in sh:
//! `command`), and a state with a function of that name is refused. So no function takes a command of ours, nor the
//! client's.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use super::captured::{Alias, AliasScope, CapturedState};
use super::words::quoted;
use super::{ShellKind, SnapshotError};
use crate::process::Environment;

/// Where the shell finds its state.
const STATE: &str = "/dev/fd/3";

/// Holds the `BASH_ENV` of the command while bash reads its state through that variable.
const SAVED_BASH_ENV: &str = "__codex_bash_env";

/// Options that describe how a shell was started; no shell can change them, or none needs to.
const FIXED: [&str; 11] = [
    "noexec",
    "interactive",
    "login",
    "login_shell",
    "privileged",
    "restricted",
    "restricted_shell",
    "shinstdin",
    "singlecommand",
    "stdin",
    "zle",
];

/// Options with which a shell does not run a script to its end.
const UNSUPPORTED: [&str; 3] = ["noexec", "onecmd", "restricted"];

/// Functions that would take the commands of the text.
const PREFIXES: [&[u8]; 2] = [b"builtin", b"command"];

/// Variables with which bash would not read its state, or would change options before it does.
const BASH_STARTUP: [&str; 3] = ["POSIXLY_CORRECT", "SHELLOPTS", "BASHOPTS"];

/// The text that restores the state.
pub(super) fn state_text(kind: ShellKind, state: &CapturedState) -> Result<Vec<u8>, SnapshotError> {
    let is = |name: &[u8], list: &[&str]| list.iter().any(|option| option.as_bytes() == name);
    let unsupported = |(name, on): &(Vec<u8>, bool)| *on && is(name, &UNSUPPORTED);
    if state.options.iter().chain(&state.shell_options).any(unsupported) {
        return Err(SnapshotError::Unsupported("an option"));
    }
    if state.function_names.iter().any(|name| PREFIXES.contains(&name.as_slice())) {
        return Err(SnapshotError::Unsupported("a function with the name of a prefix"));
    }
    let settable = |options: &[(Vec<u8>, bool)], wanted: bool| -> Vec<Vec<u8>> {
        let options = options.iter().filter(|(name, on)| *on == wanted && !is(name, &FIXED));
        options.map(|(name, _)| name.clone()).collect()
    };
    let [on, off] = [true, false].map(|wanted| settable(&state.options, wanted));
    let [mut shopt_on, shopt_off] =
        [true, false].map(|wanted| settable(&state.shell_options, wanted));
    if !state.umask.iter().all(u8::is_ascii_digit) {
        return Err(SnapshotError::Incomplete);
    }
    let mut text = Text::default();
    text.line([b"umask ".as_slice(), &state.umask]);
    match kind {
        ShellKind::Bash => {
            // Bash reads this file because of `BASH_ENV`.
            text.line([format!(
                "if [[ -v {SAVED_BASH_ENV} ]]; then export BASH_ENV=\"${SAVED_BASH_ENV}\"; \
                 unset {SAVED_BASH_ENV}; else unset BASH_ENV; fi"
            )]);
            let expand = shopt_on.iter().position(|name| name == b"expand_aliases");
            let expand = expand.map(|at| shopt_on.swap_remove(at)).is_some();
            text.names(b"shopt -u", &shopt_off);
            text.names(b"shopt -s", &shopt_on);
            text.aliases(b"alias ", b"-- ", &state.aliases);
            text.line([&state.functions]);
            for (flags, name) in &state.attributes {
                text.line([b"builtin declare ".as_slice(), flags, b" -- ", &quoted(name)]);
            }
            for name in &state.unexported {
                text.line([b"builtin export -fn -- ".as_slice(), &quoted(name)]);
            }
            if expand {
                text.line(["builtin shopt -s expand_aliases"]);
            }
            text.options(b"builtin set", &on, &off);
        }
        ShellKind::Zsh => {
            text.line(["builtin unsetopt aliases"]);
            text.line(["builtin unalias -m '*'"]);
            text.aliases(b"builtin alias ", b"-- ", &state.aliases);
            if !state.fpath.is_empty() {
                let list: Vec<_> = state.fpath.iter().map(|path| quoted(path)).collect();
                text.line([b"fpath=(".as_slice(), &list.join(&b' '), b")"]);
            }
            text.line([&state.functions]);
            // On one line, because aliases apply from the next one on.
            let [on, off] = [on, off].map(|names| names.join(&b' '));
            let unset: &[u8] = if off.is_empty() { b"builtin true" } else { b"builtin unsetopt " };
            let set: &[u8] = if on.is_empty() { b"builtin true" } else { b"builtin setopt " };
            text.line([unset, &off, b"; ", set, &on]);
        }
        ShellKind::Sh => {
            text.line([&state.functions]);
            // Some shells take no `--` here.
            let named: Vec<_> = state
                .aliases
                .iter()
                .filter(|alias| !alias.name.starts_with(b"-"))
                .cloned()
                .collect();
            text.aliases(br"\command alias ", b"", &named);
            text.options(br"\command set", &on, &off);
        }
    }
    Ok(text.0)
}

/// The command line, and what it needs in the environment. `None` if the shell would not read its state.
pub(super) fn command_line(
    kind: ShellKind,
    argv: &[String],
    environment: &mut Environment,
) -> Option<Vec<String>> {
    let [path, _, script, rest @ ..] = argv else { return None };
    let mut line = vec![path.clone()];
    match kind {
        ShellKind::Bash => {
            if BASH_STARTUP.iter().any(|name| environment.contains_key(OsStr::new(name))) {
                return None;
            }
            // Functions that the environment defines are in the snapshot.
            environment.retain(|name, _| !name.as_bytes().starts_with(b"BASH_FUNC_"));
            if let Some(value) = environment.insert("BASH_ENV".into(), STATE.into()) {
                environment.insert(OsString::from(SAVED_BASH_ENV), value);
            }
            // Started by sshd, bash would read ~/.bashrc.
            line.extend(["--norc".to_owned(), "-c".to_owned(), script.clone()]);
        }
        // It reads all of its command before it runs any, so that aliases would come too late.
        ShellKind::Zsh => {
            let script = String::from_utf8_lossy(&quoted(script.as_bytes())).into_owned();
            // Set before the options, one of which may export what is set.
            let script = format!(
                "ZSH_EXECUTION_STRING={script}\n{RESTORE}builtin eval \"$ZSH_EXECUTION_STRING\""
            );
            line.extend(["-fc".to_owned(), script]);
        }
        // The script starts a line of its own, because aliases apply from the next line on.
        ShellKind::Sh => line.extend(["-c".to_owned(), format!("{RESTORE}{script}")]),
    }
    line.extend_from_slice(rest);
    Some(line)
}

/// Reads the state.
const RESTORE: &str =
    ". /dev/fd/3 || { exec 3<&-; echo 'failed to restore shell snapshot' >&2; }\n";

/// Text that grows line by line; it begins by closing its descriptor.
struct Text(Vec<u8>);

impl Default for Text {
    fn default() -> Self {
        Self(b"exec 3<&-\n".to_vec())
    }
}

impl Text {
    fn line<P: AsRef<[u8]>>(&mut self, parts: impl IntoIterator<Item = P>) {
        for part in parts {
            self.0.extend(part.as_ref());
        }
        self.0.push(b'\n');
    }

    /// A command with these names; no line without names.
    fn names(&mut self, command: &[u8], names: &[Vec<u8>]) {
        if !names.is_empty() {
            self.line([command, b" ", &names.join(&b' ')]);
        }
    }

    /// One `set` for all options.
    fn options(&mut self, command: &[u8], on: &[Vec<u8>], off: &[Vec<u8>]) {
        let mut line = command.to_vec();
        for (flag, names) in [(b" +o ", off), (b" -o ", on)] {
            for name in names {
                line.extend(flag);
                line.extend(name);
            }
        }
        if line != command {
            self.line([line]);
        }
    }

    fn aliases(&mut self, command: &[u8], end_of_flags: &[u8], aliases: &[Alias]) {
        for Alias { scope, name, value } in aliases {
            let flag: &[u8] = match scope {
                AliasScope::Command => b"",
                AliasScope::Global => b"-g ",
                AliasScope::Suffix => b"-s ",
            };
            self.line([command, flag, end_of_flags, &quoted(name), b"=", &quoted(value)]);
        }
    }
}
