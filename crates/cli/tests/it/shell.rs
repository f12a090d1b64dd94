//! `codex shell` in a real terminal.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use rustix::process::Signal;

use crate::commands::{Server, codex, everywhere, output};
use crate::support::{PATIENCE, below, is_running};
use crate::terminal::Terminal;

/// A login shell without the tester's own settings.
fn shell(mut command: std::process::Command) -> std::process::Command {
    command.env("HOME", "/").env("XDG_STATE_HOME", env!("CARGO_TARGET_TMPDIR"));
    command
}

#[test]
fn a_login_shell_runs_what_is_typed() {
    everywhere(|codex| {
        let mut terminal = Terminal::start(&shell(codex("shell")));
        let before = terminal.settings();
        terminal.type_in("echo $0 is $((6 * 7))\n");
        let shown = terminal.shows("is 42");
        assert!(shown.contains("sh is 42"), "{shown}");
        terminal.type_in("~?");
        terminal.shows("detach; on a server");
        terminal.type_in("exit 3\n");
        assert_eq!(terminal.ends().code(), Some(3));
        terminal.is_again(&before);
    });
}

#[test]
fn the_terminal_is_restored_however_the_shell_ends() {
    everywhere(|codex| {
        for (signal, code) in [
            (Signal::TERM, Some(143)),
            (Signal::HUP, Some(129)),
            (Signal::QUIT, Some(131)),
            (Signal::KILL, None),
        ] {
            let mut terminal = Terminal::start(&shell(codex("shell")));
            let before = terminal.settings();
            // The alternate screen, and a hidden cursor.
            terminal.type_in("printf '\\033[?1049h\\033[?25lre%s\\n' ady\n");
            terminal.shows("ready");
            assert_ne!(terminal.settings(), before, "it is raw");
            terminal.signal(signal);
            terminal.shows("\x1b[?25h\x1b[?1049l");
            assert_eq!(terminal.ends().code(), code);
            terminal.is_again(&before);
        }
    });
}

/// Reattaches to the saved shell `work`, which continues, and ends it.
fn reattaches_to_work(state: &std::path::Path) {
    let mut attach = codex();
    attach.args(["attach", "work"]).env("XDG_STATE_HOME", state);
    let mut terminal = Terminal::start(&attach);
    terminal.type_in("echo $x is he''re; exit 4\n");
    terminal.shows("kept is here");
    assert_eq!(terminal.ends().code(), Some(4));
}

#[test]
fn a_shell_is_detached_and_reattached() {
    let home = tempfile::tempdir().unwrap();
    let server = Server::start();
    let mut command = shell(server.codex("shell"));
    command.args(["--name", "work"]).env("XDG_STATE_HOME", home.path());
    let mut terminal = Terminal::start(&command);
    let before = terminal.settings();
    terminal.type_in("x=kept; echo rea''dy\n");
    terminal.shows("ready");
    terminal.type_in("\r~.");
    terminal.shows("codex attach work");
    assert_eq!(terminal.ends().code(), Some(0));
    terminal.is_again(&before);

    reattaches_to_work(home.path());
    let mut ps = codex();
    ps.arg("ps").env("XDG_STATE_HOME", home.path());
    let listed = output(&mut ps).out;
    assert!(listed.contains("work  exited 4"), "{listed}");
}

/// However the client of a named shell ends, the shell survives, and so do later attachments to it.
#[test]
fn a_named_shell_survives_its_window() {
    let home = tempfile::tempdir().unwrap();
    let server = Server::start();
    let mut open = shell(server.codex("shell"));
    open.args(["--name", "work"]).env("XDG_STATE_HOME", home.path());
    let mut attach = codex();
    attach.args(["attach", "work"]).env("XDG_STATE_HOME", home.path());
    let mut terminal = Terminal::start(&open);
    terminal.type_in("x=kept\n");
    let ends = [Some(Signal::TERM), Some(Signal::HUP), None, Some(Signal::KILL), None];
    for (n, end) in ends.into_iter().enumerate() {
        terminal.type_in(&format!("echo rea''dy {n} $x\n"));
        terminal.shows(&format!("ready {n} kept"));
        let code = match end {
            None => terminal.close().code(),
            Some(signal) => {
                terminal.signal(signal);
                terminal.ends().code()
            }
        };
        let expected = end.unwrap_or(Signal::HUP);
        let expected = (expected != Signal::KILL).then(|| 128 + expected.as_raw());
        assert_eq!(code, expected, "{end:?}");
        terminal = Terminal::start(&attach);
    }
    terminal.type_in("echo $x is he''re; exit 4\n");
    terminal.shows("kept is here");
    assert_eq!(terminal.ends().code(), Some(4));
}

/// Descendants of a shell are killed when its name becomes free, and a shell whose name cannot be saved does
/// not start.
#[test]
fn no_shell_runs_without_a_saved_name() {
    let home = tempfile::tempdir().unwrap();
    let server = Server::start();
    let mut command = shell(server.codex("shell"));
    command.args(["--name", "work"]).env("XDG_STATE_HOME", home.path());
    let mut terminal = Terminal::start(&command);
    let pid = home.path().join("pid");
    let daemon = format!("echo $$ > {}; echo rea''dy; exec sleep 1000 >/dev/null", pid.display());
    terminal.type_in(&format!("setsid sh -c \"{}\" &\n", daemon.replace('$', "\\$")));
    terminal.shows("ready");
    let daemon: u32 = std::fs::read_to_string(&pid).unwrap().trim().parse().unwrap();
    assert!(is_running(daemon));
    terminal.type_in("exit 5\n");
    assert_eq!(terminal.ends().code(), Some(5));
    let until = std::time::Instant::now() + PATIENCE;
    while is_running(daemon) {
        assert!(std::time::Instant::now() < until, "the daemon goes on");
        thread::sleep(std::time::Duration::from_millis(5));
    }
    let sessions = home.path().join("codex/sessions");
    std::fs::remove_dir(&sessions).unwrap();
    std::os::unix::fs::symlink("no/where", &sessions).unwrap();
    let mut terminal = Terminal::start(&command);
    terminal.shows("cannot save the session");
    assert_eq!(terminal.ends().code(), Some(125));
    let shells = below(server.pid());
    assert!(shells.iter().all(|(_, line)| !line.contains("-l")), "{shells:?}");
}

#[test]
fn attach_takes_over_from_a_killed_client() {
    let home = tempfile::tempdir().unwrap();
    let server = Server::start();
    let named = || {
        let mut command = shell(server.codex("shell"));
        command.args(["--name", "work"]).env("XDG_STATE_HOME", home.path());
        command
    };
    let mut terminal = Terminal::start(&named());
    terminal.type_in("x=kept; echo rea''dy\n");
    terminal.shows("ready");
    terminal.signal(Signal::KILL);
    terminal.ends();
    let mut terminal = Terminal::start(&named());
    terminal.shows("the name `work` is already in use");
    assert_eq!(terminal.ends().code(), Some(125));

    reattaches_to_work(home.path());
    let mut terminal = Terminal::start(&named());
    terminal.type_in("exit 5\n");
    assert_eq!(terminal.ends().code(), Some(5), "the name is free again");
    assert_eq!(std::fs::read_dir(home.path().join("codex/sessions")).unwrap().count(), 0);
}

#[test]
fn a_dropped_connection_costs_nothing() {
    let server = Server::start();
    let proxy = Proxy::start(server.url.strip_prefix("ws://").unwrap());
    let mut command = shell(codex());
    command.args(["shell", "--on", &format!("ws://{}", proxy.address)]);
    let mut terminal = Terminal::start(&command);
    terminal.type_in("x=kept; echo rea''dy\n");
    terminal.shows("ready");
    for round in 0..3 {
        proxy.drop_all();
        terminal.shows(&format!("connection to ws://{} lost", proxy.address));
        terminal.type_in(&format!("echo $x {round} is he''re\n"));
        terminal.shows(&format!("kept {round} is here"));
    }
    terminal.type_in("exit\n");
    assert_eq!(terminal.ends().code(), Some(0));
}

#[test]
fn a_shell_without_a_terminal_is_refused() {
    output(codex().arg("shell")).failed(125, "needs a terminal");
}

/// Forwards bytes until `drop_all`.
struct Proxy {
    address: String,
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl Proxy {
    fn start(to: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let open = Arc::new(Mutex::new(Vec::new()));
        let (to, streams) = (to.to_owned(), open.clone());
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (here, there) = (stream.unwrap(), TcpStream::connect(&to).unwrap());
                let both = [here.try_clone().unwrap(), there.try_clone().unwrap()];
                streams.lock().unwrap().extend(both);
                pass(here.try_clone().unwrap(), there.try_clone().unwrap());
                pass(there, here);
            }
        });
        Self { address, open }
    }

    fn drop_all(&self) {
        for stream in self.open.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// Forwards bytes until either side closes.
pub(crate) fn pass(mut from: TcpStream, mut to: TcpStream) {
    thread::spawn(move || {
        let mut buffer = [0; 16 << 10];
        while let Ok(len @ 1..) = from.read(&mut buffer) {
            if to.write_all(&buffer[..len]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    });
}
