//! How processes end: by exiting, by signals, by `process/terminate`.

use serde_json::json;

use crate::support::*;

/// A tree of every kind of descendant; prints five pids and waits.
pub(crate) const TREE: &str = "\
    echo $$
    sleep 1000 & echo $!
    sh -c 'sleep 1000 & echo $!; wait' &
    setsid sh -c 'echo $$; exec sleep 1000' &
    (setsid sh -c 'sleep 1000 & echo $!' &)
    wait; exec sleep 1000";

/// Starts the tree and waits until all of it runs.
pub(crate) async fn tree(client: &mut Client, id: &str) -> (Vec<u32>, Published) {
    client.start(sh(id, TREE)).await.unwrap();
    let mut all = Published::default();
    while all.text().lines().count() < 5 {
        let notice = client.notification().await;
        assert!(!all.take(&notice), "{all:?}");
    }
    let pids = numbers(&all.text());
    assert_eq!(pids.len(), 5);
    assert!(pids.iter().all(|&pid| is_running(pid)));
    (pids, all)
}

#[tokio::test]
async fn exit_codes_are_the_programs_own_or_128_and_the_signal() {
    let server = server();
    let mut client = Client::ready(&server).await;
    for (script, code) in [
        ("exit 0", 0),
        ("exit 1", 1),
        ("exit 127", 127),
        ("exit 255", 255),
        ("kill -TERM $$", 143),
        ("kill -KILL $$", 137),
        ("kill -INT $$", 130),
        ("kill -ABRT $$", 134),
        ("kill -PIPE $$", 141),
    ] {
        for (id, start) in [
            ("p", sh(&format!("p{script}"), script)),
            ("t", sh(&format!("t{script}"), script).tty()),
        ] {
            let all = client.run(start).await;
            assert_eq!(all.exit_code, code, "{id} {script}");
        }
    }
}

#[tokio::test]
async fn every_signal_reaches_the_process() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let traps = "for s in INT TERM HUP QUIT USR1 USR2; do trap \"echo got-$s\" $s; done; echo go; \
                 while :; do sleep 1000 & wait $!; done";
    client.start(sh("p", traps)).await.unwrap();
    let mut all = client.until("p", "go\n").await;
    for (signal, name) in [
        ("interrupt", "INT"),
        ("terminate", "TERM"),
        ("hangup", "HUP"),
        ("quit", "QUIT"),
        ("user1", "USR1"),
        ("user2", "USR2"),
    ] {
        let params = json!({"processId": "p", "signal": signal});
        assert_eq!(client.call("process/signal", params).await, Ok(json!({})));
        client.collect_until("p", &format!("got-{name}\n"), &mut all).await;
    }
    let params = json!({"processId": "p", "signal": "kill"});
    assert_eq!(client.call("process/signal", params.clone()).await, Ok(json!({})));
    let all = client.collect_until_closed("p", all).await;
    assert_eq!(all.exit_code, 137);
    assert_eq!(client.call("process/signal", params).await, Ok(json!({})), "also when it is over");
}

#[tokio::test]
async fn stop_and_continue_suspend_and_resume() {
    let server = server();
    let mut client = Client::ready(&server).await;
    client.start(sh("p", "echo $$; exec cat").piped()).await.unwrap();
    let all = client.until("p", "\n").await;
    let pid = numbers(&all.text())[0];
    let state = || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        stat.rsplit_once(") ").unwrap().1.as_bytes()[0]
    };
    client.call("process/signal", json!({"processId": "p", "signal": "stop"})).await.unwrap();
    eventually("it is stopped", || state() == b'T').await;
    client.write("p", "x").await;
    client.close_stdin("p").await;
    client.nothing_more().await;
    client.call("process/signal", json!({"processId": "p", "signal": "continue"})).await.unwrap();
    let all = client.collect_until_closed("p", all).await;
    assert_eq!((all.text(), all.exit_code), (format!("{pid}\nx"), 0));
}

#[tokio::test]
async fn a_signal_reaches_the_whole_group() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let script = "trap : INT; sleep 1000 & echo $!; wait; wait; exit 5";
    client.start(sh("p", script)).await.unwrap();
    let all = client.until("p", "\n").await;
    let child = numbers(&all.text())[0];
    // A shell without job control has its background jobs ignore SIGINT.
    client.call("process/signal", json!({"processId": "p", "signal": "user1"})).await.unwrap();
    gone(child).await;
    let all = client.collect_until_closed("p", all).await;
    assert_eq!(all.exit_code, 138);
}

#[tokio::test]
async fn terminate_kills_every_descendant() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let (pids, all) = tree(&mut client, "p").await;
    let terminate = json!({"processId": "p"});
    let answer = client.call("process/terminate", terminate.clone()).await;
    assert_eq!(answer, Ok(json!({"running": true})));
    // All of them held the pipe, so the close means that none is left.
    let all = client.collect_until_closed("p", all).await;
    assert_eq!(all.exit_code, 137);
    for pid in pids {
        gone(pid).await;
    }
    assert_eq!(client.call("process/terminate", terminate).await, Ok(json!({"running": false})));
}

#[tokio::test]
async fn terminate_kills_no_other_process() {
    let server = server();
    let mut client = Client::ready(&server).await;
    client.start(start("cat", &["cat"]).piped()).await.unwrap();
    let (_, all) = tree(&mut client, "p").await;
    client.call("process/terminate", json!({"processId": "p"})).await.unwrap();
    client.collect_until_closed("p", all).await;
    client.write("cat", "still here").await;
    client.close_stdin("cat").await;
    assert_eq!(client.until_closed("cat").await.text(), "still here");
}

/// Kills descendants that fork without end, and those that stop themselves.
#[tokio::test]
async fn terminate_kills_a_fork_bomb() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let script = "echo $$; while :; do setsid sh -c 'sleep 1000' & sleep 0.001; done";
    client.start(sh("p", script)).await.unwrap();
    let all = client.until("p", "\n").await;
    let pid = numbers(&all.text())[0];
    let child_count = || std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    eventually("it has forked", || numbers(&child_count().unwrap()).len() > 10).await;
    client.call("process/terminate", json!({"processId": "p"})).await.unwrap();
    // Each of them holds the pipe.
    client.collect_until_closed("p", all).await;
}

#[tokio::test]
async fn a_stopped_process_can_be_terminated() {
    let server = server();
    let mut client = Client::ready(&server).await;
    client.start(sh("p", "kill -STOP $$")).await.unwrap();
    let terminated = client.call("process/terminate", json!({"processId": "p"})).await;
    assert_eq!(terminated, Ok(json!({"running": true})));
    assert_eq!(client.until_closed("p").await.exit_code, 137);
}

#[tokio::test]
async fn a_process_can_be_terminated_right_after_its_start() {
    let server = server();
    let mut client = Client::ready(&server).await;
    for n in 0..50 {
        let id = format!("p{n}");
        let started = client.send_request("process/start", start(&id, &["sleep", "1000"]).0).await;
        let terminated = client.send_request("process/terminate", json!({"processId": id})).await;
        client.response(started).await.unwrap();
        assert_eq!(client.response(terminated).await, Ok(json!({"running": true})));
        assert_eq!(client.until_closed(&id).await.exit_code, 137);
    }
}

#[tokio::test]
async fn exited_processes_leave_no_zombies() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let mut pids = Vec::new();
    for n in 0..20 {
        let all = client.run(sh(&format!("p{n}"), "echo $$")).await;
        pids.extend(numbers(&all.text()));
        client.start(start(&format!("bad{n}"), &["/nope"])).await.unwrap_err();
    }
    for pid in pids {
        eventually("it is reaped", || {
            // Another test's process may have the number by now.
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            !stat.contains(") Z ")
        })
        .await;
    }
}

/// Descendants of an exited process may hold its streams, and can be killed.
#[tokio::test]
async fn terminate_kills_what_an_exited_process_left_running() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let ways = [
        ("p", "process/terminate", json!({"processId": "p"}), json!({"running": false})),
        ("q", "process/signal", json!({"processId": "q", "signal": "kill"}), json!({})),
    ];
    for (id, method, params, answer) in ways {
        let script = "sleep 1000 & echo $!; setsid sh -c 'echo $$; exec sleep 1000' & \
                      read line; exit 7";
        client.start(sh(id, script).piped()).await.unwrap();
        let mut all = Published::default();
        while all.text().lines().count() < 2 {
            assert!(!all.take(&client.notification().await), "{all:?}");
        }
        let pids = numbers(&all.text());
        client.write(id, "\n").await;
        while all.exit_code != 7 {
            assert!(!all.take(&client.notification().await), "{all:?}");
        }
        assert!(pids.iter().all(|&pid| is_running(pid)), "they outlive it");
        assert_eq!(client.call(method, params).await.unwrap(), answer);
        client.collect_until_closed(id, all).await;
        for pid in pids {
            gone(pid).await;
        }
    }
}

/// Also descendants that have closed the streams, so that the process is closed.
#[tokio::test]
async fn terminate_kills_what_a_closed_process_left_running() {
    let server = server();
    let mut client = Client::ready(&server).await;
    for (id, method, params) in [
        ("p", "process/terminate", json!({"processId": "p"})),
        ("q", "process/signal", json!({"processId": "q", "signal": "kill"})),
    ] {
        let script = "setsid sleep 1000 >/dev/null 2>&1 </dev/null & echo $!";
        let pids = numbers(&client.run(sh(id, script)).await.text());
        assert!(is_running(pids[0]), "it outlives the process");
        client.call(method, params).await.unwrap();
        gone(pids[0]).await;
    }
}

/// Descendants that fork and exit repeatedly, so that a scan misses them.
#[tokio::test]
async fn terminate_kills_descendants_that_fork_and_exit() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("run");
    std::fs::write(&file, "#!/bin/sh\necho .\nsetsid \"$0\" &\n").unwrap();
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let runners = ["r() { echo .; r & }; r".to_owned(), file.to_str().unwrap().to_owned()];
    for n in 0..10 {
        let id = format!("p{n}");
        client.start(sh(&id, &runners[n % 2])).await.unwrap();
        let mut all = Published::default();
        while all.stdout.len() < 200 {
            assert!(!all.take(&client.notification().await), "{all:?}");
        }
        client.call("process/terminate", json!({"processId": id})).await.unwrap();
        // A surviving descendant would hold the streams.
        client.collect_until_closed(&id, all).await;
    }
}

/// Also descendants that have left the group.
#[tokio::test]
async fn signal_kill_reaches_every_descendant() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let (pids, all) = tree(&mut client, "p").await;
    client.call("process/signal", json!({"processId": "p", "signal": "kill"})).await.unwrap();
    let all = client.collect_until_closed("p", all).await;
    assert_eq!(all.exit_code, 137);
    for pid in pids {
        gone(pid).await;
    }
}

/// A killed process closes with all its output, although another program, this test, holds its stream for
/// ever.
#[tokio::test]
async fn a_killed_process_closes_even_if_another_holds_its_stream() {
    let linger = std::time::Duration::ZERO;
    let server = server_with(|config| config.process.stream_linger = linger);
    let mut client = Client::ready(&server).await;
    let mut random = fastrand::Rng::with_seed(21);
    for case in 0..12 {
        let id = format!("p{case}");
        let (tty, exits, signal) = (random.bool(), random.bool(), random.bool());
        // More than a pipe holds, sometimes.
        let len = [0, random.usize(..4_000), random.usize(..400_000)][random.usize(..3)];
        let end = if exits { "exit 3" } else { "exec sleep 1000" };
        // Written by a descendant that outlives its parents if that exits.
        let script = format!("echo $$ go; read x; head -c {len} /dev/zero | tr '\\0' x; {end}");
        let start = sh(&id, &script);
        client.start(if tty { start.tty() } else { start.piped() }).await.unwrap();
        let mut all = client.until(&id, "go").await;
        let pid = numbers(&all.text())[0];
        let stream = format!("/proc/{pid}/fd/1");
        let held = rustix::fs::open(
            &stream,
            rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::NOCTTY,
            rustix::fs::Mode::empty(),
        );
        let held = held.unwrap();
        assert_eq!(client.write(&id, "\n").await, "accepted");
        let written = |all: &Published| all.text().bytes().filter(|&byte| byte == b'x').count();
        while written(&all) < len || (exits && !all.order.contains(&"exited")) {
            let notice = client.notification().await;
            assert!(!all.take(&notice), "closed while its stream is held: {all:?}");
        }
        // The kernel may drop a terminal's buffer when its session ends, so this is read before.
        rustix::io::write(&held, b"last").unwrap();
        client.collect_until(&id, "last", &mut all).await;
        let (method, params) = match signal {
            true => ("process/signal", json!({"processId": id, "signal": "kill"})),
            false => ("process/terminate", json!({"processId": id})),
        };
        client.call(method, params).await.unwrap();
        let all = client.collect_until_closed(&id, all).await;
        assert_eq!(all.exit_code, if exits { 3 } else { 137 }, "{id}");
        assert_eq!(written(&all), len, "{id}");
        drop(held);
    }
}
