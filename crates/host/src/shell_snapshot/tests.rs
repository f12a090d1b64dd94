//! The oracle is the shell itself: a replayed shell has to look like an ordinary login shell.

use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Command, Stdio};

use codex_exec_server_protocol::process::EnvInherit;

use super::words::{Line, lines, quoted};
use super::*;

/// A home with one profile, and a shell that runs in it.
struct World {
    home: tempfile::TempDir,
    kind: ShellKind,
    path: &'static str,
    base: Environment,
}

/// Whether the shell is there. On a machine that guards main it has to be.
fn shell(path: &'static str) -> Option<&'static str> {
    if Path::new(path).exists() {
        return Some(path);
    }
    assert!(std::env::var_os("CI").is_none(), "{path} is not installed");
    eprintln!("skipped: {path} is not installed");
    None
}

impl World {
    fn new(kind: ShellKind, path: &'static str, profile: &[u8], locale: &str) -> Self {
        let home = tempfile::tempdir().unwrap();
        for name in [".profile", ".bash_profile", ".zprofile"] {
            std::fs::write(home.path().join(name), profile).unwrap();
        }
        let base = [
            ("HOME", home.path().to_str().unwrap()),
            ("PATH", "/usr/local/bin:/usr/bin:/bin"),
            ("LC_ALL", locale),
            ("SHLVL", "3"),
            ("REMOVED", "by the profile"),
            ("UNTOUCHED", "x  y"),
        ];
        let base = base.map(|(name, value)| (name.into(), value.into())).into_iter().collect();
        Self { home, kind, path, base }
    }

    fn run(&self, argv: &[String], environment: &Environment, state: Option<&OwnedFd>) -> Vec<u8> {
        let mut command = match state {
            None => {
                let mut command = Command::new(&argv[0]);
                command.args(&argv[1..]);
                command
            }
            // Gives it the descriptor, then becomes the shell.
            Some(state) => {
                let file = format!("/proc/{}/fd/{}", std::process::id(), state.as_raw_fd());
                let mut command = Command::new("/bin/sh");
                command.args(["-c", "file=$1; shift; exec \"$@\" 3<\"$file\"", "sh", &file]);
                command.args(argv);
                command
            }
        };
        command.env_clear().envs(environment).stdin(Stdio::null()).current_dir(self.home.path());
        let output = command.output().unwrap();
        let mut all = output.stdout;
        all.extend(b"\n--- stderr\n");
        let shown = String::from_utf8_lossy(&output.stderr).replace("printed by the profile\n", "");
        // What is evaluated has another name.
        all.extend(shown.replace("(eval):", "zsh:").into_bytes());
        all.extend(format!("--- {:?}", output.status).into_bytes());
        all
    }

    fn argv(&self, script: &str) -> Vec<String> {
        [self.path, "-lc", script, "zero", "a b", ""].map(str::to_owned).to_vec()
    }

    fn captured(&self) -> Result<CapturedState, SnapshotError> {
        let output = self.run(&self.argv(&capture_script(self.kind, "7e57")), &self.base, None);
        CapturedState::parse(self.kind, "7e57", &output)
    }

    fn snapshot(&self, policy: Option<&EnvPolicy>) -> Result<ShellSnapshot, SnapshotError> {
        ShellSnapshot::new(self.kind, self.captured()?, &self.base, policy, |_| ())
    }

    fn ordinary(&self, script: &str) -> Vec<u8> {
        self.run(&self.argv(script), &self.base, None)
    }

    fn replayed(&self, snapshot: &ShellSnapshot, script: &str) -> Vec<u8> {
        self.replayed_with(snapshot, script, &[])
    }

    fn replayed_with(
        &self,
        snapshot: &ShellSnapshot,
        script: &str,
        env: &[(&str, &str)],
    ) -> Vec<u8> {
        let env: Env = env.iter().copied().collect();
        let mut base = self.base.clone();
        base.extend(env.0.iter().map(|(name, value)| (name.into(), value.into())));
        let replay = snapshot.replay(&self.argv(script), base, &env, |_| ()).unwrap();
        self.run(&replay.argv, &replay.environment, Some(&replay.state))
    }
}

/// Prints all that a snapshot keeps, and what a command sees of its shell.
fn dump(kind: ShellKind) -> &'static str {
    match kind {
        ShellKind::Bash => {
            "declare -f; declare -F; alias -p; set +o; shopt -p | grep -v login_shell; umask\n\
             env -0 | sort -z | grep -zv ^_=; echo \"$0\" \"$1\" $# $- $LINENO \"$BASH_EXECUTION_STRING\"\n\
             /bin/ls /proc/self/fd; no-such-command"
        }
        ShellKind::Zsh => {
            "typeset -f; alias -L; alias -sL; umask; set -o | grep -v -e login -e rcs\n\
             env -0 | sort -z | grep -zv ^_=; echo $0 $1 $# $ZSH_EXECUTION_STRING; /bin/ls /proc/self/fd"
        }
        ShellKind::Sh => {
            "alias; set +o; umask; env -0 | sort -z | grep -zv ^_=; echo $0 $1 $# $-; /bin/ls /proc/self/fd"
        }
    }
}

fn without(mut output: Vec<u8>, part: &[u8]) -> Vec<u8> {
    while let Some(at) = output.windows(part.len()).position(|window| window == part) {
        output.drain(at..at + part.len());
    }
    output
}

#[track_caller]
fn assert_same(world: &World, profile: &[u8], seed: u64) {
    let snapshot = match world.snapshot(None) {
        Ok(snapshot) => snapshot,
        Err(error) => panic!("seed {seed}: {error}: {}", String::from_utf8_lossy(profile)),
    };
    let script = dump(world.kind);
    // zsh prints this pattern with spaces until it was read again.
    let [ordinary, replayed] = [world.ordinary(script), world.replayed(&snapshot, script)]
        .map(|output| without(output, b"(a | b)"))
        .map(|output| without(output, b"(a|b)"));
    if ordinary != replayed {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).replace('\0', "\n");
        let (ordinary, replayed) = (text(&ordinary), text(&replayed));
        let differing: Vec<_> = ordinary
            .lines()
            .filter(|line| !replayed.contains(line))
            .map(|line| format!("- {line}"))
            .chain(
                replayed
                    .lines()
                    .filter(|line| !ordinary.contains(line))
                    .map(|line| format!("+ {line}")),
            )
            .collect();
        let profile = String::from_utf8_lossy(profile);
        panic!("seed {seed}: {profile}\n{}\n{ordinary}\n=====\n{replayed}", differing.join("\n"));
    }
}

fn seeds() -> Vec<u64> {
    match std::env::var("SEED") {
        Ok(seed) => vec![seed.parse().unwrap()],
        Err(_) => (0..40).collect(),
    }
}

fn bytes(random: &mut fastrand::Rng, longest: usize) -> Vec<u8> {
    let length = random.usize(0..longest);
    match random.u8(0..3) {
        0 => (0..length).map(|_| random.u8(1..)).collect(),
        1 => (0..length).map(|_| b"'\"\\$`\n \t!*?#;&|(){}[]~=-"[random.usize(0..24)]).collect(),
        _ => (0..length).map(|_| random.u8(b' '..0x7f)).collect(),
    }
}

fn name(random: &mut fastrand::Rng) -> String {
    let length = random.usize(0..8);
    std::iter::once(random.alphabetic()).chain((0..length).map(|_| random.alphanumeric())).collect()
}

fn one<'a>(random: &mut fastrand::Rng, of: &[&'a str]) -> &'a str {
    of[random.usize(0..of.len())]
}

const BODIES: [&str; 10] = [
    "echo \"$@\" 'it'\\''s' $'a\\tb'",
    "for x in 1 2; do echo $x; done; return 3",
    "if true; then echo yes; else echo no; fi | cat",
    "case $1 in a|b) echo ab;; *) echo other;; esac",
    "cat <<EOF\nhere $1 `date`\nEOF",
    "local a=1; (( a++ )); [[ $a == 2* ]] && echo ${a:-x}",
    "inner() { echo in; }; inner; unset -f inner",
    "while read -r line; do echo \"$line\"; done < /dev/null 2>&1 &",
    "( cd / && pwd ); { echo a; echo b; } > /dev/null; time true",
    "echo $(( 1 << 3 )) \"$(echo \"nested $(echo deep)\")\" ; :",
];

/// A profile of random variables, aliases, functions and options.
fn profile(kind: ShellKind, random: &mut fastrand::Rng) -> Vec<u8> {
    let mut text = Vec::new();
    let mut add = |parts: &[&[u8]]| {
        text.extend(parts.concat());
        text.push(b'\n');
    };
    add(&[b"echo printed by the profile >&2; unset REMOVED; local_only=1"]);
    for _ in 0..random.usize(0..8) {
        let name = name(random);
        let value = quoted(&bytes(random, 60));
        add(&[b"export ", name.as_bytes(), b"=", &value]);
    }
    if random.bool() {
        add(&[b"export PATH=\"$HOME/bin:$PATH\" UNTOUCHED"]);
    }
    if random.bool() {
        add(&[b"umask 0", random.u8(0..64).to_string().replace(['8', '9'], "7").as_bytes()]);
    }
    if kind != ShellKind::Sh {
        for _ in 0..random.usize(0..6) {
            let name = format!("f{}", name(random));
            add(&[b"function ", name.as_bytes(), b" {\n", one(random, &BODIES).as_bytes(), b"\n}"]);
            if kind == ShellKind::Bash && random.bool() {
                add(&[b"export -f ", name.as_bytes()]);
            }
        }
    }
    for _ in 0..random.usize(0..5) {
        let option: &str = match kind {
            ShellKind::Bash => one(
                random,
                &[
                    "shopt -s extglob",
                    "shopt -s expand_aliases",
                    "shopt -s globstar nullglob",
                    "shopt -u sourcepath",
                    "set -o pipefail",
                    "set -f",
                    "set -k",
                    "set -C",
                    "set +h",
                    "set +B",
                    "set -a",
                    "set -E -T",
                ],
            ),
            ShellKind::Zsh => one(
                random,
                &[
                    "setopt extended_glob",
                    "setopt sh_word_split",
                    "unsetopt aliases",
                    "setopt rc_quotes",
                    "setopt ksh_arrays",
                    "setopt null_glob no_clobber",
                    "setopt pipe_fail",
                    "unsetopt bare_glob_qual",
                    "setopt interactive_comments",
                ],
            ),
            ShellKind::Sh => one(random, &["set -f", "set -C", "set -a", "set -b"]),
        };
        add(&[option.as_bytes()]);
    }
    // Last: from here on, the profile's own words may be aliases.
    for _ in 0..random.usize(0..6) {
        let hostile = ["ls", "alias", "set", "shopt", "echo", "export", "unset", "declare"];
        let name = if random.u8(0..4) == 0 { one(random, &hostile).into() } else { name(random) };
        let value = match kind {
            // It prints aliases with a NUL in place of some bytes.
            ShellKind::Sh => b"ls -l 'x y' \"z\"".to_vec(),
            // No redirections, whose files would be there the next time; no processes side by side.
            _ => bytes(random, 20).into_iter().filter(|byte| !b">|&".contains(byte)).collect(),
        };
        let flag = match kind {
            ShellKind::Zsh => one(random, &["", "", "-g ", "-s "]),
            _ => "",
        };
        add(&[b"\\alias ", flag.as_bytes(), name.as_bytes(), b"=", &quoted(&value)]);
    }
    text
}

fn replays_equal_login_shells(kind: ShellKind, path: &'static str) {
    let Some(path) = shell(path) else { return };
    for seed in seeds() {
        let mut random = fastrand::Rng::with_seed(seed);
        let profile = profile(kind, &mut random);
        let locale = one(&mut random, &["C", "C.UTF-8"]);
        let world = World::new(kind, path, &profile, locale);
        assert_same(&world, &profile, seed);
    }
}

#[test]
fn bash_looks_as_after_its_profile() {
    replays_equal_login_shells(ShellKind::Bash, "/bin/bash");
}

#[test]
fn zsh_looks_as_after_its_profile() {
    replays_equal_login_shells(ShellKind::Zsh, "/bin/zsh");
}

#[test]
fn dash_looks_as_after_its_profile() {
    replays_equal_login_shells(ShellKind::Sh, "/bin/dash");
}

/// Functions with the names of every word that a capture or a replay uses: the shell is as after its profile, or
/// there is no snapshot.
#[test]
fn functions_with_the_names_of_builtins_take_no_command_of_ours() {
    let names = [
        "eval", "builtin", "command", "alias", "unalias", "set", "shopt", "setopt", "unsetopt",
        "umask", "export", "declare", "typeset", "unset", "echo", "true", "exec", "source",
        "printf", "print", "zmodload", "emulate",
    ];
    for (kind, path) in
        [(ShellKind::Bash, "/bin/bash"), (ShellKind::Zsh, "/bin/zsh"), (ShellKind::Sh, "/bin/dash")]
    {
        let Some(path) = shell(path) else { continue };
        let mut snapshots = 0;
        for seed in seeds() {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut profile = "set -f; umask 027\n".to_owned();
            for _ in 0..random.usize(1..5) {
                // Of dash, special builtins cannot be functions.
                let name = match kind {
                    ShellKind::Sh => {
                        one(&mut random, &["command", "alias", "umask", "echo", "true", "printf"])
                    }
                    _ => one(&mut random, &names),
                };
                let body = match (kind, random.u8(0..3)) {
                    (_, 0) => ":".to_owned(),
                    (ShellKind::Sh, _) | (_, 1) => "\"$@\"".to_owned(),
                    _ => format!("builtin {name} \"$@\" > /dev/null"),
                };
                profile.push_str(&format!("{name}() {{ {body}; }}\n"));
            }
            let world = World::new(kind, path, profile.as_bytes(), "C");
            let Ok(snapshot) = world.snapshot(None) else { continue };
            snapshots += 1;
            let script = "/bin/sh -c 'umask; echo the command ran'; /bin/ls /proc/self/fd; case $- in *f*) (exit 7);; esac";
            let [ordinary, replayed] = [world.ordinary(script), world.replayed(&snapshot, script)]
                .map(|output| String::from_utf8_lossy(&output).into_owned());
            assert_eq!(ordinary, replayed, "{kind:?}, seed {seed}: {profile}");
        }
        assert!(snapshots > 0 || seeds().len() == 1, "{kind:?}");
    }
}

/// Options that would act on the text that restores them.
#[test]
fn options_for_errors_and_traces_act_on_the_command_only() {
    for (kind, path) in
        [(ShellKind::Bash, "/bin/bash"), (ShellKind::Zsh, "/bin/zsh"), (ShellKind::Sh, "/bin/dash")]
    {
        let Some(path) = shell(path) else { continue };
        let world = World::new(kind, path, b"alias x=y\nset -eux\n", "C");
        let snapshot = world.snapshot(None).unwrap();
        let script = "echo one; echo ${none-two}; false; echo three";
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let replayed = text(world.replayed(&snapshot, script));
        let shown = replayed.split("--- stderr\n").nth(1).unwrap();
        assert!(replayed.starts_with("one\ntwo\n\n"), "{replayed}");
        assert!(
            shown.lines().all(|line| line.contains("echo")
                || line.contains("false")
                || line.starts_with("---")),
            "{replayed}"
        );
    }
}

#[test]
fn variables_of_the_request_win_over_those_of_the_profile() {
    let Some(path) = shell("/bin/bash") else { return };
    let world = World::new(
        ShellKind::Bash,
        path,
        b"export A=profile B=profile BASH_ENV=/x\nunset REMOVED\n",
        "C",
    );
    let snapshot = world.snapshot(None).unwrap();
    let script = "echo $A $B ${REMOVED-gone} ${BASH_ENV-gone}; env | grep -c -i codex";
    let text = |env: &[(&str, &str)]| {
        let output = world.replayed_with(&snapshot, script, env);
        String::from_utf8(output).unwrap().lines().take(2).collect::<Vec<_>>().join("\n")
    };
    assert_eq!(text(&[]), "profile profile gone /x\n0");
    assert_eq!(
        text(&[("A", "request"), ("REMOVED", "r"), ("BASH_ENV", "/y")]),
        "request profile r /y\n0"
    );
}

#[test]
fn policies_filter_what_the_profile_exports() {
    let Some(path) = shell("/bin/bash") else { return };
    let profile = b"export GITHUB_TOKEN=t CODEX_API_KEY=k NODE_REPL_AUTH_TOKEN=n PLAIN=p OTHER=o CHOSEN_KEY=changed\n";
    let mut world = World::new(ShellKind::Bash, path, profile, "C");
    world.base.insert("CHOSEN_KEY".into(), "set".into());
    let names = |policy: Option<&EnvPolicy>| {
        let snapshot = world.snapshot(policy).unwrap();
        let mut names: Vec<_> =
            snapshot.changed.keys().map(|name| name.to_str().unwrap().to_owned()).collect();
        names.sort();
        names
    };
    assert_eq!(names(None), ["CHOSEN_KEY", "GITHUB_TOKEN", "OTHER", "PATH", "PLAIN"]);
    let policy = EnvPolicy {
        // Not a list to start from: that was for the server's environment.
        inherit: EnvInherit::None,
        set: [("CHOSEN_KEY", "set")].into_iter().collect(),
        ..EnvPolicy::default()
    };
    assert_eq!(names(Some(&policy)), ["CHOSEN_KEY", "OTHER", "PATH", "PLAIN"]);
    let policy = EnvPolicy { include_only: vec!["pl*".into()], ..policy };
    assert_eq!(names(Some(&policy)), ["PLAIN"]);
    let policy = EnvPolicy { include_only: vec!["[".into()], ..policy };
    assert!(matches!(world.snapshot(Some(&policy)), Err(SnapshotError::EnvPolicy(_))));
}

/// Random policies and functions: what a child of the shell has of them is what the policy lets through.
#[test]
fn policies_filter_functions_that_the_profile_exports() {
    let Some(path) = shell("/bin/bash") else { return };
    let names = ["f_token", "plain", "my_secret_f", "x_key", "other"];
    let patterns = ["BASH_FUNC_*", "BASH_FUNC_p*", "*plain*", "other", "NOTHING"];
    for seed in seeds() {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut profile = String::new();
        let exported: Vec<_> = names.into_iter().filter(|_| random.bool()).collect();
        for name in names {
            profile.push_str(&format!("{name}() {{ echo called {name}; }}\n"));
        }
        exported.iter().for_each(|name| profile.push_str(&format!("export -f {name}\n")));
        let some = |random: &mut fastrand::Rng| -> Vec<String> {
            patterns.into_iter().filter(|_| random.u8(0..4) == 0).map(str::to_owned).collect()
        };
        let policy = EnvPolicy {
            ignore_default_excludes: random.bool(),
            exclude: some(&mut random),
            include_only: some(&mut random),
            ..EnvPolicy::default()
        };
        let world = World::new(ShellKind::Bash, path, profile.as_bytes(), "C");
        let snapshot = world.snapshot(Some(&policy)).unwrap();
        let variables = exported.iter().map(|name| format!("BASH_FUNC_{name}%%").into());
        let mut allowed: Environment = variables.map(|name| (name, OsString::new())).collect();
        retain_allowed(&mut allowed, &policy).unwrap();
        let expected: Vec<_> =
            allowed.keys().map(|name| name.to_str().unwrap().to_owned()).collect();
        let script =
            "/usr/bin/env | /bin/grep -o '^BASH_FUNC_[a-z_]*%%' | /usr/bin/sort; plain; f_token";
        let shown = String::from_utf8(world.replayed(&snapshot, script)).unwrap();
        let lines: Vec<_> = shown.lines().take(expected.len() + 2).collect();
        let functions = ["called plain".to_owned(), "called f_token".to_owned()];
        let expected: Vec<_> = expected.into_iter().chain(functions).collect();
        assert_eq!(lines, expected, "seed {seed}: {policy:?}\n{profile}\n{shown}");
    }
}

#[test]
fn a_shell_that_does_not_print_its_state_gives_no_snapshot() {
    let Some(path) = shell("/bin/bash") else { return };
    for profile in [
        "exit 0",
        "exec true",
        "builtin() { echo caught; }",
        "exec > /dev/null",
        "set -n",
        "printf '\\0mark-7e57\\0umask\\0'; exit 0",
    ] {
        let world = World::new(ShellKind::Bash, path, profile.as_bytes(), "C");
        assert!(matches!(world.captured(), Err(SnapshotError::Incomplete)), "{profile}");
    }
    let one_command = World::new(ShellKind::Bash, path, b"set -o posix\n", "C");
    one_command.snapshot(None).unwrap();
}

#[test]
fn environments_that_bash_starts_differently_in_need_a_login_shell() {
    let Some(path) = shell("/bin/bash") else { return };
    let world = World::new(ShellKind::Bash, path, b"", "C");
    let snapshot = world.snapshot(None).unwrap();
    for name in ["POSIXLY_CORRECT", "SHELLOPTS", "BASHOPTS"] {
        let mut base = world.base.clone();
        base.insert(name.into(), "x".into());
        assert!(
            snapshot.replay(&world.argv("true"), base, &Env::default(), |_| ()).is_none(),
            "{name}"
        );
    }
}

/// Whatever is missing or damaged, parsing fails or gives a state; it never panics.
#[test]
fn damaged_output_is_an_error_or_another_state() {
    let Some(path) = shell("/bin/bash") else { return };
    let world = World::new(ShellKind::Bash, path, b"f() { echo; }; alias a=b; export C=d\n", "C");
    let output = world.run(&world.argv(&capture_script(world.kind, "7e57")), &world.base, None);
    CapturedState::parse(world.kind, "7e57", &output).unwrap();
    assert!(CapturedState::parse(world.kind, "other", &output).is_err());
    let mut random = fastrand::Rng::with_seed(1);
    for _ in 0..2_000 {
        let mut damaged = output.clone();
        damaged.truncate(random.usize(0..=damaged.len()));
        for _ in 0..random.usize(0..4) {
            if let Some(byte) = damaged.get_mut(random.usize(0..output.len())) {
                *byte = random.u8(..);
            }
        }
        let _ = CapturedState::parse(world.kind, "7e57", &damaged);
    }
    for length in 0..200.min(output.len()) {
        assert!(CapturedState::parse(world.kind, "7e57", &output[..length]).is_err());
    }
}

#[test]
fn quoted_words_are_read_as_they_were_written() {
    let mut random = fastrand::Rng::with_seed(2);
    for _ in 0..2_000 {
        let words: Vec<Vec<u8>> = (0..random.usize(1..4)).map(|_| bytes(&mut random, 20)).collect();
        let line: Vec<_> = words.iter().map(|word| quoted(word)).collect();
        assert_eq!(lines(&line.join(&b' ')), Some(vec![Line(words)]));
    }
    let read = |text: &str| lines(text.as_bytes());
    let one = |word: &str| Some(vec![Line(vec![word.as_bytes().to_vec()])]);
    assert_eq!(read(r#"a"b\$\"c"'d'\e"#), one("ab$\"cde"));
    assert_eq!(read(r"$'a\n\x41\101\u00e9\'\\'"), one("a\nAA\u{e9}'\\"));
    for bad in ["'a", "\"a", "$'a", "$x", "\"$x\"", "`x`", r"$'\q'"] {
        assert_eq!(read(bad), None, "{bad}");
    }
    assert_eq!(read("\n \n"), Some(Vec::new()));
}

#[test]
fn debug_shows_no_value() {
    let state = CapturedState {
        variables: [("A".into(), OsString::from_vec(b"secret".to_vec()))].into_iter().collect(),
        ..CapturedState::default()
    };
    assert!(!format!("{state:?}").contains("secret"));
}
