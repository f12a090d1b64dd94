//! The command line while its connection is lost: it waits or not, and prints what it does.

use std::io::Read;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread;

use rustix::process::Signal;

use crate::commands::{CommandOutput, Server, codex, output, read_until};
use crate::shell::pass;
use crate::support::{PATIENCE, send, wait};
use crate::terminal::Terminal;

/// Forwards connections, or accepts them without a response.
struct Network {
    url: String,
    up: Arc<AtomicBool>,
    open: Arc<Mutex<Vec<TcpStream>>>,
    accepted: Receiver<()>,
}

impl Network {
    fn to(server: &Server) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("ws://{}", listener.local_addr().unwrap());
        let (up, open) = (Arc::new(AtomicBool::new(true)), Arc::new(Mutex::new(Vec::new())));
        let (told, accepted) = channel();
        let to = server.url.strip_prefix("ws://").unwrap().to_owned();
        let (passing, streams) = (up.clone(), open.clone());
        thread::spawn(move || {
            for here in listener.incoming() {
                let here = here.unwrap();
                streams.lock().unwrap().push(here.try_clone().unwrap());
                if passing.load(Ordering::SeqCst) {
                    let there = TcpStream::connect(&to).unwrap();
                    streams.lock().unwrap().push(there.try_clone().unwrap());
                    pass(here.try_clone().unwrap(), there.try_clone().unwrap());
                    pass(there, here);
                }
                if told.send(()).is_err() {
                    return;
                }
            }
        });
        Self { url, up, open, accepted }
    }

    /// Drops every connection and leaves new ones without a response. Returns after the first new one.
    fn go_down(&self) {
        while self.accepted.try_recv().is_ok() {}
        self.up.store(false, Ordering::SeqCst);
        for stream in self.open.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
        self.accepted.recv_timeout(PATIENCE).expect("it tries to reconnect");
    }
}

/// A command that prints a line and then waits to be killed.
const SCRIPT: &str = "echo ready; exec sleep 1000";

fn running(command: &mut Command) -> Child {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    read_until(child.stdout.as_mut().unwrap(), "ready");
    child
}

fn ended(mut child: Child) -> CommandOutput {
    let code = wait(&mut child).code();
    let (mut out, mut err) = (String::new(), String::new());
    child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    CommandOutput { code, out, err }
}

#[test]
fn an_interrupt_ends_the_reconnect_and_prints_the_attach_command() {
    let server = Server::start();
    let network = Network::to(&server);
    let child = running(codex().args(["run", "--on", &network.url, "--", "sh", "-c", SCRIPT]));
    network.go_down();
    send(child.id(), Signal::INT);
    let said = ended(child);
    said.failed(130, "the command still runs");
    // The printed command works.
    network.up.store(true, Ordering::SeqCst);
    let way_back = said.err.split("reattach with ").last().unwrap();
    let words = shlex::split(way_back.trim()).unwrap();
    assert_eq!((&*words[0], &*words[1]), ("codex", "attach"), "{said:?}");
    let child = running(codex().args(&words[1..]));
    send(child.id(), Signal::INT);
    let said = ended(child);
    assert_eq!((said.code, &*said.err), (Some(130), ""), "{said:?}");
}

#[test]
fn ctrl_c_in_a_terminal_ends_the_reconnect() {
    let server = Server::start();
    let network = Network::to(&server);
    let mut command = codex();
    command.args(["run", "-t", "--on", &network.url, "--", "sh", "-c", SCRIPT]);
    let mut terminal = Terminal::start(&command);
    terminal.shows("ready");
    network.go_down();
    terminal.type_in("\u{3}");
    terminal.shows("the command still runs");
    assert_eq!(terminal.ends().code(), Some(130));
}

#[test]
fn zero_patience_does_not_reconnect() {
    let server = Server::start();
    let network = Network::to(&server);
    let mut command = codex();
    command.args(["run", "--on", &network.url, "--patience", "0", "--", "sh", "-c", SCRIPT]);
    let child = running(&mut command);
    for stream in network.open.lock().unwrap().drain(..) {
        let _ = stream.shutdown(Shutdown::Both);
    }
    ended(child).failed(125, "this client does not reconnect");
    let mut command = server.codex("run");
    output(command.args(["--patience", "soon", "--", "true"])).failed(2, "number of seconds");
}

#[test]
fn expired_patience_ends_the_reconnect() {
    let server = Server::start();
    let network = Network::to(&server);
    let mut command = codex();
    command.args(["run", "--on", &network.url, "--patience", "0.2", "--", "sh", "-c", SCRIPT]);
    let child = running(&mut command);
    network.go_down();
    ended(child).failed(125, "no connection within 0.2 s");
}

/// Stops every process of a server, as if the network lost all packets, until dropped.
struct Frozen<'a>(&'a Server);

impl<'a> Frozen<'a> {
    fn new(server: &'a Server) -> Self {
        send(server.pid(), Signal::STOP);
        Self(server)
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        send(self.0.pid(), Signal::CONT);
    }
}

/// No connection fails, and still the terminal says what is lost, until it is back.
#[test]
fn a_silent_server_is_shown_in_a_status_line() {
    let server = Server::start();
    let home = tempfile::tempdir().unwrap();
    let mut command = server.codex("shell");
    command.env("HOME", "/").env("XDG_STATE_HOME", home.path());
    let mut terminal = Terminal::start(&command);
    terminal.type_in("echo re''ady\n");
    terminal.shows("ready");
    let frozen = Frozen::new(&server);
    let shown = terminal.shows("Enter ~. leaves");
    assert!(shown.contains(&format!("no answer from {}", server.url)), "{shown}");
    drop(frozen);
    terminal.type_in("echo ba''ck; exit 4\n");
    terminal.shows("back");
    assert_eq!(terminal.ends().code(), Some(4));
}

/// `~.` and Ctrl-C while the server is silent end at once, and claim nothing that is not known.
#[test]
fn leaving_a_silent_server_claims_nothing() {
    for (keys, code) in [("\r~.", 0), ("\u{3}", 130)] {
        let server = Server::start();
        let home = tempfile::tempdir().unwrap();
        let mut command = server.codex("shell");
        command.args(["--name", "work"]).env("HOME", "/").env("XDG_STATE_HOME", home.path());
        let mut terminal = Terminal::start(&command);
        terminal.type_in("echo re''ady\n");
        terminal.shows("ready");
        let frozen = Frozen::new(&server);
        terminal.shows("Enter ~. leaves");
        terminal.type_in(keys);
        terminal.shows("whether the command still runs is unknown");
        terminal.shows("codex attach work");
        assert_eq!(terminal.ends().code(), Some(code), "{keys:?}");
        drop(frozen);
    }
}
