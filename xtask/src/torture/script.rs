//! Random programs, with their expected output and exit code.

use fastrand::Rng;

/// A shell program, and what the model expects of it.
#[derive(Debug, Clone)]
pub(crate) struct Script {
    pub text: String,
    /// Whether it runs on a terminal, where both streams are one.
    pub tty: bool,
    /// Whether it runs in a read-only sandbox.
    pub confined: bool,
    /// Lines for its stdin, which is open only if there are any.
    pub input: Vec<String>,
    pub stdout: String,
    pub stderr: String,
    pub code: i64,
    /// Whether it leaves a process that holds its streams open until that is killed.
    pub held: bool,
}

/// Ways to leave a process behind. `SLEEP` is replaced.
const DAEMONS: [&str; 10] = [
    "SLEEP >/dev/null 2>&1 </dev/null &",
    "setsid SLEEP >/dev/null 2>&1 </dev/null &",
    "(setsid sh -c '(SLEEP &)' >/dev/null 2>&1 </dev/null &)",
    "nohup SLEEP >/dev/null 2>&1 </dev/null &",
    "setsid sh -c 'trap \"\" HUP TERM INT QUIT; while :; do SLEEP; done' >/dev/null 2>&1 </dev/null &",
    "env -i setsid SLEEP >/dev/null 2>&1 </dev/null &",
    "setsid sh -c 'sleep 0.03; setsid SLEEP & exit' >/dev/null 2>&1 </dev/null &",
    "setsid sh -c 'for i in 1 2 3 4 5 6; do SLEEP & done; sleep 0.01; SLEEP' >/dev/null 2>&1 </dev/null &",
    "setsid sh -c 'setsid sh -c \"setsid SLEEP & setsid SLEEP &\" &' >/dev/null 2>&1 </dev/null &",
    "sh -c 'for i in 1 2 3; do (sleep 0.0$i; setsid SLEEP) & done' >/dev/null 2>&1 </dev/null &",
];

/// Ways to leave a process behind that holds the streams open.
const HOLDERS: [&str; 3] = ["SLEEP &", "setsid SLEEP &", "(setsid sh -c 'SLEEP & SLEEP' &)"];

impl Script {
    /// A program whose every process has `token`, a number, in its command line or environment.
    pub(crate) fn random(rng: &mut Rng, token: &str) -> Self {
        let mut script = Self {
            text: String::new(),
            tty: rng.u8(..5) == 0,
            confined: rng.u8(..5) == 0,
            input: Vec::new(),
            stdout: String::new(),
            stderr: String::new(),
            code: 0,
            held: false,
        };
        let sleep = format!("sleep 5000.{token}");
        for _ in 0..rng.usize(1..6) {
            match rng.u8(..10) {
                0..4 => script.write(rng),
                4..7 => {
                    script.push_line(
                        &rng.choice(DAEMONS).unwrap_or_default().replace("SLEEP", &sleep),
                    );
                }
                7 => script.push_line(&format!("sleep 0.0{}", rng.u8(..6))),
                // A sandbox kills what its program leaves behind.
                8 if !script.held && !script.confined && rng.bool() => {
                    script.held = true;
                    script.push_line(
                        &rng.choice(HOLDERS).unwrap_or_default().replace("SLEEP", &sleep),
                    );
                }
                _ => script.read(rng),
            }
        }
        match rng.u8(..8) {
            0 => {
                script.push_line("kill -9 $$");
                script.code = 128 + 9;
            }
            1 => {
                script.push_line("kill -TERM $$");
                script.code = 128 + 15;
            }
            _ => {
                script.code = rng.i64(0..120);
                script.push_line(&format!("exit {}", script.code));
            }
        }
        script
    }

    fn push_line(&mut self, line: &str) {
        self.text.push_str(line);
        self.text.push('\n');
    }

    fn write(&mut self, rng: &mut Rng) {
        let count = match rng.u8(..12) {
            0 => rng.u32(50_000..150_000),
            1..4 => rng.u32(1000..5000),
            _ => rng.u32(1..40),
        };
        let tag = rng.lowercase();
        let to_stderr = !self.tty && rng.u8(..4) == 0;
        let to = if to_stderr { " >&2" } else { "" };
        self.push_line(&format!("seq -f '{tag}%.0f' 1 {count}{to}"));
        let end = if self.tty { "\r\n" } else { "\n" };
        let stream = if to_stderr { &mut self.stderr } else { &mut self.stdout };
        for n in 1..=count {
            stream.push_str(&format!("{tag}{n}{end}"));
        }
    }

    /// Echoes one line of its input. Not on a terminal, which would echo it too.
    fn read(&mut self, rng: &mut Rng) {
        if self.tty {
            return;
        }
        let line: String = (0..rng.usize(1..2000)).map(|_| rng.alphanumeric()).collect();
        self.push_line("read -r line; echo \"$line\"");
        self.stdout.push_str(&format!("{line}\n"));
        self.input.push(line);
    }
}
