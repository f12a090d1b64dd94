//! The script that prints the state of a login shell: NUL-terminated fields between two marks.
//!
//! The profile may have defined aliases and functions with the names of builtins, set any option and
//! printed anything. So every command is quoted against aliases and prefixed with `builtin` or `command`,
//! and the marks hold a random number. What still goes wrong ends in a missing mark.
//!
//! | field | followed by |
//! | --- | --- |
//! | `umask` | the mask, in octal |
//! | `set`, `shopt` | the output of `set +o` and `shopt -p` |
//! | `alias`, `galias`, `salias` | name, value |
//! | `aliases` | the output of `alias` (sh) |
//! | `functions` | their definitions |
//! | `function` | the name of one (zsh) |
//! | `attributes` | the output of `declare -F` (bash) |
//! | `fpath` | one directory (zsh) |
//! | `variable` | name, value |
//! | `exports` | the output of `export -p` (sh) |

use super::ShellKind;

/// Start of the names of the script's own variables.
pub(super) const PREFIX: &str = "__codex_";

/// The mark as it is printed. It starts with a letter, because `printf` reads digits after `\0` as part of a
/// number.
pub(super) fn full_mark(mark: &str) -> String {
    format!("mark-{mark}")
}

/// The script for one capture; `mark` is a random word of letters and digits.
pub fn capture_script(kind: ShellKind, mark: &str) -> String {
    let text = match kind {
        ShellKind::Bash => BASH,
        ShellKind::Zsh => ZSH,
        ShellKind::Sh => SH,
    };
    text.replace("MARK", &full_mark(mark))
}

/// `/dev/fd` is needed for the replay. Once the options are printed, those that could disturb are turned
/// off. `"${!a@}"` lists the names of variables without splitting words. The
/// end checks that the printed functions define the same functions again.
const BASH: &str = r#"if ! [[ -r /dev/fd/0 ]]; then \builtin exit 1; fi
\builtin trap - DEBUG ERR RETURN
\builtin printf '\0MARK\0umask\0'
\builtin umask
\builtin printf '\0set\0'
\builtin set +o
\builtin printf '\0shopt\0'
\builtin shopt -p
\builtin set +aefkux
\builtin printf '\0'
for __codex_name in "${!BASH_ALIASES[@]}"; do
\builtin printf 'alias\0%s\0%s\0' "$__codex_name" "${BASH_ALIASES[$__codex_name]}"
done
__codex_functions=$(\builtin declare -f)
\builtin printf 'functions\0%s\0attributes\0' "$__codex_functions"
\builtin declare -F
\builtin printf '\0'
for __codex_name in "${!_@}" "${!a@}" "${!b@}" "${!c@}" "${!d@}" "${!e@}" "${!f@}" "${!g@}" "${!h@}" "${!i@}" "${!j@}" "${!k@}" "${!l@}" "${!m@}" "${!n@}" "${!o@}" "${!p@}" "${!q@}" "${!r@}" "${!s@}" "${!t@}" "${!u@}" "${!v@}" "${!w@}" "${!x@}" "${!y@}" "${!z@}" "${!A@}" "${!B@}" "${!C@}" "${!D@}" "${!E@}" "${!F@}" "${!G@}" "${!H@}" "${!I@}" "${!J@}" "${!K@}" "${!L@}" "${!M@}" "${!N@}" "${!O@}" "${!P@}" "${!Q@}" "${!R@}" "${!S@}" "${!T@}" "${!U@}" "${!V@}" "${!W@}" "${!X@}" "${!Y@}" "${!Z@}"; do
case ${!__codex_name@a} in
*[aAn]*) ;;
*x*) \builtin printf 'variable\0%s\0%s\0' "$__codex_name" "${!__codex_name}" ;;
esac
done
if [[ $__codex_functions != "$(\builtin shopt -u expand_aliases; \builtin eval "$__codex_functions" && \builtin declare -f)" ]]; then \builtin exit 1; fi
\builtin printf 'end\0MARK\0'
\builtin exit 0
"#;

/// Words are quoted because global aliases replace them anywhere. The end checks that the printed functions
/// can be read under the options of a new shell, as in a replay.
const ZSH: &str = r#"if ! [[ -r /dev/fd/0 ]]; then \builtin "exit" 1; fi
\builtin "zmodload" zsh/parameter || \builtin "exit" 1
\builtin "print" -rN -- "" "MARK" "umask" "$(\builtin "umask")" "set" "$(\builtin "set" +o)"
\builtin "emulate" -R zsh
\builtin "unsetopt" aliases
for __codex_name in "${(@k)aliases}"; do \builtin "print" -rN -- "alias" "$__codex_name" "${aliases[$__codex_name]}"; done
for __codex_name in "${(@k)galiases}"; do \builtin "print" -rN -- "galias" "$__codex_name" "${galiases[$__codex_name]}"; done
for __codex_name in "${(@k)saliases}"; do \builtin "print" -rN -- "salias" "$__codex_name" "${saliases[$__codex_name]}"; done
__codex_functions=$(\builtin "typeset" -f)
\builtin "print" -rN -- "functions" "$__codex_functions"
for __codex_name in "${(@k)functions}"; do \builtin "print" -rN -- "function" "$__codex_name"; done
for __codex_name in "${fpath[@]}"; do \builtin "print" -rN -- "fpath" "$__codex_name"; done
for __codex_name in "${(@k)parameters}"; do
case "${parameters[$__codex_name]}" in
(array*|association*) ;;
(*export*) \builtin "print" -rN -- "variable" "$__codex_name" "${(P)__codex_name}" ;;
esac
done
if ! ( \builtin "eval" "$__codex_functions" ); then \builtin "exit" 1; fi
\builtin "print" -rN -- "end" "MARK"
\builtin "exit" 0
"#;

/// A POSIX shell prints its functions if it knows `typeset`; dash cannot print them.
const SH: &str = r#"[ -r /dev/fd/0 ] || \exit 1
\command printf '\0MARK\0umask\0'
\command umask
\command printf '\0set\0'
\command set +o
\command set +aefux
\command printf '\0aliases\0'
\command alias
\command printf '\0functions\0'
\command typeset -f 2>/dev/null || \command :
\command printf '\0exports\0'
\command export -p
\command printf '\0end\0MARK\0'
\exit 0
"#;
