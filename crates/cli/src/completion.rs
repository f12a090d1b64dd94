//! `codex completion`: completion scripts for shells.
//!
//! The scripts of clap know the flags. What only this machine knows, the names of places and of detached processes,
//! they ask this program for (`codex __complete places|names`), which reads files and connects to nothing.

use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use clap_complete::Shell;

use crate::places_file::PlacesFile;
use crate::saved_sessions::SavedSession;

/// Print a completion script for a shell
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex completion bash > ~/.local/share/bash-completion/completions/codex
  codex completion zsh > \"${fpath[1]}/_codex\"
  codex completion fish > ~/.config/fish/completions/codex.fish")]
pub(crate) struct CompletionArgs {
    /// The shell to generate completions for
    shell: Shell,
}

/// The argument with which a script asks for names.
const CANDIDATES_ARGUMENT: &str = "__complete";

pub(crate) fn run(args: &CompletionArgs, command: &mut clap::Command) -> anyhow::Result<ExitCode> {
    // Via a buffer: clap panics if the reader of stdout has gone.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, command, "codex", &mut script);
    let script = with_names(args.shell, String::from_utf8(script)?);
    std::io::stdout().write_all(script.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// Adds names to the script of clap.
fn with_names(shell: Shell, script: String) -> String {
    match shell {
        Shell::Bash => script + BASH,
        Shell::Zsh => {
            script.replace(":SERVER:_default", ":SERVER:_codex_places").replacen('\n', ZSH, 1)
        }
        Shell::Fish => script + FISH,
        _ => script,
    }
}

/// A function around that of clap: names where they belong, and flags only for a word that begins like one.
const BASH: &str = r#"
_codex_with_names() {
    _codex "$@"
    local word="$2" before="$3" kind="" candidate
    case "$before" in
        --on) kind=places ;;
    esac
    if [[ -z "$kind" && "$word" != -* ]]; then
        case "${COMP_WORDS[1]} ${COMP_WORDS[2]}" in
            "places remove" | "places test") kind=places ;;
            "attach "* | "logs "* | "kill "*) [[ "$before" == -* ]] || kind=names ;;
        esac
    fi
    if [[ -n "$kind" ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$(codex __complete "$kind" 2>/dev/null)" -- "$word")
        return
    fi
    if [[ "$word" != -* ]]; then
        local kept=()
        for candidate in "${COMPREPLY[@]}"; do
            [[ "$candidate" == -* ]] || kept+=("$candidate")
        done
        COMPREPLY=("${kept[@]}")
    fi
}
complete -F _codex_with_names -o bashdefault -o default codex
"#;

const ZSH: &str = r#"

_codex_places() {
    local -a places
    places=(${(f)"$(codex __complete places 2>/dev/null)"})
    compadd -a places
    _default
}
"#;

const FISH: &str = r#"
complete -c codex -l on -x -a '(codex __complete places 2>/dev/null)'
complete -c codex -n '__fish_seen_subcommand_from attach logs kill' -x -a '(codex __complete names 2>/dev/null)'
"#;

/// Prints names and exits, if a script asks for them. Without any, and on failure, it prints nothing: a person who
/// presses Tab cannot read an error.
pub(crate) fn main_if_candidates() {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().is_none_or(|word| word != CANDIDATES_ARGUMENT) {
        return;
    }
    let names: Vec<String> = match arguments.next().as_deref() {
        Some("places") => {
            PlacesFile::read().map(|file| file.places.into_keys().collect()).unwrap_or_default()
        }
        Some("names") => {
            let saved = SavedSession::all().unwrap_or_default();
            saved.into_iter().map(|saved| saved.name).collect()
        }
        _ => Vec::new(),
    };
    let text: String = names.iter().map(|name| format!("{name}\n")).collect();
    let _ = std::io::stdout().write_all(text.as_bytes());
    std::process::exit(0);
}
