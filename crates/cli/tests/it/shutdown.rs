//! How the server ends; nothing that it started outlives it.

use std::os::unix::process::ExitStatusExt;

use rustix::fs::FlockOperation;
use rustix::process::Signal;
use serde_json::json;

use crate::support::*;

/// A tree of every kind of descendant; prints five pids and waits.
const TREE: &str = "\
    echo $$
    sleep 1000 & echo $!
    sh -c 'sleep 1000 & echo $!; wait' &
    setsid sh -c 'echo $$; exec sleep 1000' &
    (setsid sh -c 'sleep 1000 & echo $!' &)
    wait; exec sleep 1000";

/// Prints the pids of three descendants that outlive it, and exits: one in its session, one in another, and
/// the grandchild of a daemon.
const DAEMONS: &str = "\
    sleep 1000 >/dev/null 2>&1 </dev/null & echo $!
    setsid sleep 1000 >/dev/null 2>&1 </dev/null & echo $!
    setsid sh -c '(sleep 1000 >/dev/null 2>&1 </dev/null & echo $!)'";

/// Starts every kind of descendant; returns their pids.
async fn everything(client: &mut Client, id: &str) -> Vec<u32> {
    client.start(&format!("{id}-tree"), TREE).await;
    let mut pids = numbers(&client.lines(&format!("{id}-tree"), 5).await);
    pids.extend(daemons(client, &format!("{id}-daemons")).await);
    assert_eq!(pids.len(), 8);
    for &pid in &pids {
        assert!(is_running(pid), "{pid}");
    }
    pids
}

async fn daemons(client: &mut Client, id: &str) -> Vec<u32> {
    let (text, code) = client.run(id, DAEMONS).await;
    assert_eq!(code, 0);
    numbers(&text)
}

#[tokio::test]
async fn sigterm_kills_everything_and_exits_with_0() {
    for signal in [Signal::TERM, Signal::INT] {
        let server = Running::start(&[]);
        let mut client = server.client().await;
        let pids = everything(&mut client, "p").await;
        let warden = warden(server.pid()).unwrap();
        server.signal(signal);
        assert_eq!(server.ended().code(), Some(0));
        for pid in pids {
            assert!(!is_running(pid), "{pid} is gone before the server is");
        }
        all_gone(&[warden]).await;
    }
}

#[tokio::test]
async fn a_signal_right_after_the_address_stops_the_server() {
    for n in 0..20 {
        let server = Running::start(&[]);
        server.signal(if n % 2 == 0 { Signal::TERM } else { Signal::INT });
        assert_eq!(server.ended().code(), Some(0));
    }
}

/// A server that is stopped while processes start and exit leaves none of them.
#[tokio::test]
async fn a_busy_server_leaves_nothing_running() {
    for round in 0..10 {
        let server = Running::start(&[]);
        let mut client = server.client().await;
        client.start("first", "echo $$; exec sleep 1000").await;
        let mut pids = numbers(&client.lines("first", 1).await);
        for n in 0..30 {
            client.send_request("process/start", start(&format!("{n}"), TREE)).await;
        }
        // Stop somewhere in the middle of that.
        for _ in 0..round * 3 {
            pids.extend(
                numbers(&client.notification().await["params"]["chunk"].to_string()).first(),
            );
        }
        let below: Vec<u32> = below(server.pid()).into_iter().map(|(pid, _)| pid).collect();
        server.signal(Signal::TERM);
        assert_eq!(server.ended().code(), Some(0));
        all_gone(&below).await;
    }
}

#[tokio::test]
async fn a_killed_server_takes_everything_along() {
    let server = Running::start(&[]);
    let mut client = server.client().await;
    let pids = everything(&mut client, "p").await;
    // A terminal, and a process that ignores every signal that it can.
    let mut terminal = start("t", "trap '' HUP TERM INT; echo $$; while :; do sleep 1000; done");
    terminal["tty"] = json!(true);
    client.call("process/start", terminal).await;
    let stubborn = numbers(&client.lines("t", 1).await);
    let warden = warden(server.pid()).unwrap();
    server.signal(Signal::KILL);
    assert_eq!(server.ended().signal(), Some(9));
    all_gone(&pids).await;
    all_gone(&stubborn).await;
    all_gone(&[warden]).await;
}

/// Stopping the warden and the keepers delays the end, but no process survives.
#[tokio::test]
async fn a_stopped_warden_and_keepers_are_continued() {
    let server = Running::start(&[]);
    let mut client = server.client().await;
    client.start("p", "echo $$; setsid sleep 1000 & echo $!; kill -STOP $PPID; wait").await;
    let pids = numbers(&client.lines("p", 2).await);
    // The warden has set its name by now.
    let warden = warden(server.pid()).unwrap();
    send(warden, Signal::STOP);
    // Detection takes a moment.
    assert_eq!(client.run("q", "echo here").await, ("here\n".into(), 0));
    let answer = client.call("process/terminate", json!({"processId": "p"})).await;
    assert_eq!(answer["result"]["running"], true, "{answer}");
    assert_eq!(client.closed("p").await.1, 137);
    all_gone(&pids).await;
}

/// A warden stops a keeper briefly while it kills the keeper's processes. Here server and warden are killed at
/// that moment: the keepers still kill the rest.
#[tokio::test]
async fn keepers_stopped_by_a_killed_warden_are_continued() {
    let server = Running::start(&[]);
    let mut client = server.client().await;
    let pids = everything(&mut client, "p").await;
    let warden = warden(server.pid()).unwrap();
    let keepers: Vec<u32> = children(warden).into_iter().map(|(keeper, _)| keeper).collect();
    for &pid in [warden].iter().chain(&keepers) {
        send(pid, Signal::STOP);
    }
    eventually("they have stopped", || keepers.iter().all(|&keeper| is_stopped(keeper))).await;
    server.signal(Signal::KILL);
    assert_eq!(server.ended().signal(), Some(9));
    send(warden, Signal::KILL);
    all_gone(&pids).await;
    all_gone(&keepers).await;
}

/// Like `pkill -9 -f codex`: kills every process with the word in its command line.
#[tokio::test]
async fn killing_all_processes_by_name_kills_the_server_only() {
    let server = Running::start(&[]);
    let mut client = server.client().await;
    let pids = everything(&mut client, "p").await;
    let own: Vec<(u32, String)> = all_below(server.pid());
    assert!(own.len() > pids.len(), "warden and keepers are among them");
    for (pid, line) in own {
        assert!(!line.contains("codex"), "{pid}: {line}");
    }
    server.signal(Signal::KILL);
    server.ended();
    all_gone(&pids).await;
}

#[tokio::test]
async fn a_server_killed_during_starts_leaves_no_process() {
    for _ in 0..5 {
        let server = Running::start(&[]);
        let mut client = server.client().await;
        for n in 0..40 {
            client.send_request("process/start", start(&format!("{n}"), "exec sleep 1000")).await;
        }
        for _ in 0..5 {
            client.notification().await;
        }
        let below: Vec<u32> = below(server.pid()).into_iter().map(|(pid, _)| pid).collect();
        assert!(!below.is_empty());
        server.signal(Signal::KILL);
        server.ended();
        all_gone(&below).await;
    }
}

#[tokio::test]
async fn a_warden_that_dies_is_replaced_and_its_processes_stay_tracked() {
    let server = Running::start(&[]);
    let mut client = server.client().await;
    let mut pids = everything(&mut client, "before").await;
    for round in 0..3 {
        let old = warden(server.pid()).unwrap();
        send(old, Signal::KILL);
        // Also processes started without a warden. Processes that died with it are reported as exited.
        for n in 0..5 {
            let id = format!("during-{round}-{n}");
            let script = "echo $$; exec sleep 1000";
            while client.call("process/start", start(&id, script)).await["error"].is_object() {}
            pids.extend(numbers(&client.lines(&id, 1).await));
        }
        eventually("there is another", || {
            warden(server.pid()).is_some_and(|pid| pid != old && is_running(pid))
        })
        .await;
    }
    pids.extend(everything(&mut client, "after").await);
    for &pid in &pids {
        assert!(is_running(pid), "{pid} died with the warden");
    }
    server.signal(Signal::KILL);
    server.ended();
    all_gone(&pids).await;
}

/// The keepers below a warden that have no program yet.
fn waiting_keepers(warden: u32) -> Vec<u32> {
    let keepers = children(warden).into_iter().map(|(pid, _)| pid);
    keepers.filter(|&pid| is_running(pid) && children(pid).is_empty()).collect()
}

/// Whether a process has become a warden, and is not about to be one.
fn is_warden(pid: u32) -> bool {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    is_running(pid) && line.starts_with(b"exec-warden")
}

/// Keepers wait for the next order. Whichever of them is killed or stopped, and whenever the warden is, the
/// next start works, and none of them outlives the server.
#[tokio::test]
async fn keepers_that_wait_may_be_killed_and_end_with_the_server() {
    for seed in 0..4 {
        let mut random = fastrand::Rng::with_seed(seed);
        let server = Running::start(&[]);
        let mut client = server.client().await;
        for n in 0..3 {
            assert_eq!(client.run(&format!("first-{n}"), "echo one").await, ("one\n".into(), 0));
        }
        eventually("keepers wait", || !waiting_keepers(warden(server.pid()).unwrap()).is_empty())
            .await;
        for round in 0..40 {
            // One that has just been started has another name for a moment.
            eventually("there is a warden", || warden(server.pid()).is_some_and(is_warden)).await;
            let old = warden(server.pid()).unwrap();
            let waiting = waiting_keepers(old);
            let mut warden_dies = false;
            match (random.u8(..6), random.choice(&waiting)) {
                (0 | 1, Some(&keeper)) => {
                    send(keeper, Signal::KILL);
                    all_gone(&[keeper]).await;
                }
                (2, _) => {
                    waiting.iter().for_each(|&keeper| send(keeper, Signal::KILL));
                    all_gone(&waiting).await;
                }
                (3, Some(&keeper)) => send(keeper, Signal::STOP),
                (4, _) => {
                    warden_dies = true;
                    send(old, Signal::KILL);
                    all_gone(&[old]).await;
                }
                _ => {}
            }
            // An order that is too long for a keeper's memory is one for the warden.
            let padding = if random.u8(..4) == 0 { 100_000 } else { 0 };
            let script = format!("echo {round} # {}", "x".repeat(padding));
            let id = format!("{round}");
            while client.call("process/start", start(&id, &script)).await["error"].is_object() {
                assert!(warden_dies, "seed {seed}, round {round}: a start failed");
            }
            assert_eq!(client.closed(&id).await, (format!("{round}\n"), 0), "seed {seed}");
        }
        let left: Vec<u32> = all_below(server.pid()).into_iter().map(|(pid, _)| pid).collect();
        server.signal(if seed % 2 == 0 { Signal::KILL } else { Signal::TERM });
        server.ended();
        all_gone(&left).await;
    }
}

#[tokio::test]
async fn an_expired_session_kills_its_daemons_and_no_others() {
    let server = Running::start(&["--detach-ttl", "100ms"]);
    let mut one = server.client().await;
    let mut two = server.client().await;
    // At the same time, so that the order does not reveal the session.
    one.send_request("process/start", start("d", DAEMONS)).await;
    two.send_request("process/start", start("d", DAEMONS)).await;
    let ones = numbers(&one.closed("d").await.0);
    let twos = numbers(&two.closed("d").await.0);
    assert_eq!((ones.len(), twos.len()), (3, 3));
    drop(one);
    all_gone(&ones).await;
    assert_eq!(two.run("q", "echo still here").await, ("still here\n".into(), 0));
    for &pid in &twos {
        assert!(is_running(pid), "{pid}");
    }
}

#[tokio::test]
async fn an_expired_session_kills_every_daemon() {
    let server = Running::start(&["--detach-ttl", "0"]);
    let mut client = server.client().await;
    let mut other = server.client().await;
    let pids = everything(&mut client, "p").await;
    let others = daemons(&mut other, "d").await;
    drop(client);
    all_gone(&pids).await;
    for &pid in &others {
        assert!(is_running(pid), "{pid}");
    }
}

/// Descendants of a daemon belong to the same session.
#[tokio::test]
async fn an_orphan_of_an_orphan_belongs_to_its_session() {
    let server = Running::start(&["--detach-ttl", "0"]);
    let mut client = server.client().await;
    let directory = tempfile::tempdir().unwrap();
    let (gate, pids) = (directory.path().join("gate"), directory.path().join("pids"));
    // The daemon waits until its parent has exited, then forks two others and exits.
    let script = format!(
        "setsid sh -c 'while ! [ -e {gate} ]; do sleep 0.01; done; \
         sleep 1000 & echo $! > {pids}; setsid sh -c \"echo \\$\\$ >> {pids}; exec sleep 1000\" &' \
         >/dev/null 2>&1 </dev/null &",
        gate = gate.display(),
        pids = pids.display()
    );
    assert_eq!(client.run("p", &script).await, (String::new(), 0));
    std::fs::write(&gate, "").unwrap();
    let read = || numbers(&std::fs::read_to_string(&pids).unwrap_or_default());
    eventually("both are there", || read().len() == 2).await;
    let last = read();
    drop(client);
    all_gone(&last).await;
}

#[tokio::test]
async fn the_server_leaves_no_zombies() {
    let server = Running::start(&[]);
    let mut client = server.client().await;
    for n in 0..20 {
        // A daemon that ends by itself, after its parent.
        client.run(&format!("{n}"), "(sleep 0.05 >/dev/null 2>&1 </dev/null &)").await;
        client
            .call("process/start", json!({"processId": "x", "argv": ["/nope"], "cwd": "/"}))
            .await;
    }
    let warden = warden(server.pid()).unwrap();
    let zombies = |pid| children(pid).into_iter().filter(|(pid, _)| !is_running(*pid)).count();
    eventually("only keepers that wait are left", || {
        let left = (children(server.pid()).len(), children(warden).len());
        left == (1, waiting_keepers(warden).len()) && zombies(warden) == 0
    })
    .await;
}

/// A process that handles SIGTERM exits by itself, with its output; any other is killed after the grace time.
#[tokio::test]
async fn stop_grace_gives_processes_time_after_sigterm() {
    let server = Running::start(&["--stop-grace", "1h"]);
    let mut client = server.client().await;
    client
        .start("p", "trap 'echo saved; exit 3' TERM; sleep 1000 > /dev/null 2>&1 & echo $$; wait")
        .await;
    let pids = numbers(&client.lines("p", 1).await);
    server.signal(Signal::TERM);
    assert_eq!(client.closed("p").await, ("saved\n".into(), 3));
    assert_eq!(server.ended().code(), Some(0));
    all_gone(&pids).await;

    let server = Running::start(&["--stop-grace", "10ms"]);
    let mut client = server.client().await;
    client.start("p", "trap '' TERM; echo $$; while :; do sleep 1000; done").await;
    let pids = numbers(&client.lines("p", 1).await);
    server.signal(Signal::TERM);
    assert_eq!(server.ended().code(), Some(0));
    all_gone(&pids).await;
}

/// A closed process that the server still keeps holds no descriptor.
#[tokio::test]
async fn a_closed_process_holds_no_descriptor() {
    let server = Running::start(&[]);
    let mut client = server.client().await;
    let open = || std::fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap().count();
    // With the sockets of the keepers that wait from then on.
    for n in 0..5 {
        client.run(&format!("first-{n}"), "true").await;
    }
    let before = open();
    for n in 0..50 {
        client.run(&format!("{n}"), "echo kept").await;
    }
    eventually("all are closed", || open() <= before).await;
    let kept = client.call("process/read", json!({"processId": "7"})).await;
    assert_eq!(kept["result"]["closed"], true, "{kept}");
}

#[tokio::test]
async fn a_child_gets_the_limits_the_server_was_given() {
    let server = Running::start(&[]);
    let mut client = server.client().await;
    let own = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap();
    let (text, _) = client.run("p", "ulimit -n").await;
    assert_eq!(text, format!("{own}\n"));
    let (text, _) = client.run("q", "cat /proc/self/status; ls -l /proc/self/fd | wc -l").await;
    for set in ["SigBlk", "SigIgn", "SigCgt"] {
        assert!(text.contains(&format!("{set}:\t0000000000000000\n")), "{text}");
    }
    // The line `total`, three descriptors, and that of the listed directory.
    assert!(text.ends_with("\n5\n"), "{text}");
}

/// Under `ulimit -f`, a file over the limit fails its request, and a program is killed by the signal as
/// usual.
#[tokio::test]
async fn a_file_over_the_limit_fails_its_request_only() {
    let directory = tempfile::tempdir().unwrap();
    let uri = |name: &str| format!("file://{}/{name}", directory.path().display());
    let mut command = std::process::Command::new("sh");
    // In blocks of 512 bytes.
    command.args(["-c", "ulimit -f 200; exec \"$0\" exec-server", env!("CARGO_BIN_EXE_codex")]);
    let server = Running::start_with(&mut command);
    let mut client = server.client().await;
    let data = "A".repeat(400_000);
    let params = |name| json!({"path": uri(name), "dataBase64": data});
    let answer = client.call("fs/writeFile", params("long")).await;
    assert!(answer["error"]["message"].as_str().unwrap().contains("too large"), "{answer}");
    let small = json!({"path": uri("short"), "dataBase64": "AAAA"});
    let answer = client.call("fs/writeFile", small).await;
    assert!(answer["error"].is_null(), "{answer}");
    let script = format!("head -c 400000 /dev/zero > {}/by-program", directory.path().display());
    let (_, code) = client.run("q", &format!("exec {}", &script)).await;
    assert_eq!(code, 128 + 25, "SIGXFSZ");
    // The command line fails as on a full disk.
    let from = directory.path().join("from");
    std::fs::write(&from, vec![0; 400_000]).unwrap();
    let mut command = std::process::Command::new("sh");
    let script = "ulimit -f 200; exec \"$0\" cp :\"$1\" \"$2\"";
    command.args(["-c", script, env!("CARGO_BIN_EXE_codex")]);
    let copied = command.arg(&from).arg(directory.path().join("to")).output().unwrap();
    let said = String::from_utf8_lossy(&copied.stderr);
    assert!(copied.status.code() == Some(1) && said.contains("too large"), "{copied:?}");
}

#[test]
fn too_few_descriptors_are_reported() {
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "ulimit -n 64; exec \"$0\" exec-server", env!("CARGO_BIN_EXE_codex")]);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("only 64 files may be open at once; raise the limit"), "{said}");
}

/// The keepers kill, and they have descriptors.
#[tokio::test]
async fn processes_are_killed_without_a_free_descriptor() {
    const LIMIT: usize = 96;
    let limited = format!("ulimit -n {LIMIT}; exec \"$@\"");
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &limited, "sh"]).arg(codex().get_program());
    command.args(["exec-server", "--detach-ttl", "0"]);
    let server = Running::start_with(&mut command);
    let mut client = server.client().await;
    let mut other = server.client().await;
    let terminated = everything(&mut client, "terminated").await;
    let of_session = everything(&mut other, "session").await;

    let open = || std::fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap().count();
    // New connections leave a reserve, which the work of those that are in may use.
    for handle in 0.. {
        let params = json!({"handleId": format!("h{handle}"), "path": "file:///etc/passwd"});
        let answer = client.call("fs/open", params).await;
        if answer.get("error").is_some() || open() >= LIMIT {
            break;
        }
    }
    // Further ones get no further than the queue of the listener.
    let address = server.url.strip_prefix("ws://").unwrap();
    let mut waiting = Vec::new();
    for _ in 0..8 {
        waiting.push(std::net::TcpStream::connect(address).unwrap());
    }
    eventually("the server has no descriptor left", || open() >= LIMIT).await;

    client.call("process/terminate", json!({"processId": "terminated-tree"})).await;
    client.call("process/terminate", json!({"processId": "terminated-daemons"})).await;
    all_gone(&terminated).await;
    drop(other);
    all_gone(&of_session).await;
    drop(waiting);
    server.signal(Signal::TERM);
    assert_eq!(server.ended().code(), Some(0));
}

/// Each process starts the next and exits, so that each is seen for a moment only. All of them hold a lock.
#[tokio::test]
async fn processes_that_fork_and_exit_do_not_survive_their_warden_and_keeper() {
    for stop_server in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let lock = std::fs::File::create(&path).unwrap();
        let server = Running::start(&["--detach-ttl", "0"]);
        let mut client = server.client().await;
        let script = format!(
            "exec 9>{}; flock 9; echo $$; \
             r() {{ if [ $1 -gt 0 ]; then r $(($1 - 1)) & else exec sleep 1000; fi; }}; r 4000",
            path.display()
        );
        client.start("p", &script).await;
        client.lines("p", 1).await;
        let warden = warden(server.pid()).unwrap();
        let keepers = children(warden);
        send(warden, Signal::KILL);
        for (keeper, _) in keepers {
            send(keeper, Signal::KILL);
        }
        if stop_server {
            server.signal(Signal::TERM);
            assert_eq!(server.ended().code(), Some(0));
        }
        eventually("no process holds the lock", || {
            rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok()
        })
        .await;
    }
}
