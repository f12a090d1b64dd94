//! Children die with the process that started them, and only with it.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use codex_exec_host::process::{ProcessConfig, ProcessHost};

use crate::support::*;

/// A parent-death signal follows the thread that spawned the child, and a caller's thread may end at
/// any time.
#[test]
fn child_outlives_the_thread_that_started_it() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .thread_keep_alive(Duration::from_millis(1))
        .enable_all()
        .build()
        .unwrap();
    let host = {
        let _inside = runtime.enter();
        ProcessHost::new(ProcessConfig::default()).unwrap()
    };
    let mut pids = Vec::new();
    let mut handles = Vec::new();
    for _ in 0..8 {
        let (host, inside) = (host.clone(), runtime.handle().clone());
        let asking = std::thread::spawn(move || {
            inside.block_on(async {
                let handle = start(&host, params("echo $$; exec sleep 1000")).await.unwrap();
                let pid: u32 = read(&handle, 0).await.trim().parse().unwrap();
                (handle, pid)
            })
        });
        // The thread has ended once it is joined.
        let (handle, pid) = asking.join().unwrap();
        handles.push(handle);
        pids.push(pid);
    }
    // Pool threads come and go too.
    runtime.block_on(async {
        for _ in 0..20 {
            tokio::task::spawn_blocking(|| {}).await.unwrap();
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    assert!(pids.iter().all(|&pid| is_running(pid)));
    // Dropping the runtime drops the owners of the processes.
    drop(runtime);
    for pid in pids {
        eventually("it is gone", || !is_running(pid));
    }
}

#[test]
fn dropping_the_last_handle_kills_the_process() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let pid = runtime.block_on(async {
        let host = ProcessHost::new(ProcessConfig::default()).unwrap();
        let handle = start(&host, params("echo $$; exec sleep 1000")).await.unwrap();
        read(&handle, 0).await.trim().parse::<u32>().unwrap()
    });
    eventually("it is gone", || !is_running(pid));
}

#[test]
fn killed_process_is_gone_when_gone_resolves() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let host = ProcessHost::new(ProcessConfig::default()).unwrap();
        for _ in 0..30 {
            let handle = start(&host, params("echo $$; exec sleep 1000")).await.unwrap();
            let pid = read(&handle, 0).await.trim().parse::<u32>().unwrap();
            handle.kill();
            handle.gone().await;
            // Another process may have the pid by now.
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let ours = format!(" {} ", std::process::id());
            let rest = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
            assert!(!rest.get(1..).unwrap_or("").starts_with(&ours), "a zombie is left: {stat}");
        }
    });
}

const HELPER: &str = "lifeline::helper_that_is_killed";

/// Not a test: the test binary runs this again and kills it.
#[test]
#[ignore = "a helper of another test"]
fn helper_that_is_killed() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let host = ProcessHost::new(ProcessConfig::default()).unwrap();
        let handle = start(&host, params("echo $$; exec sleep 1000")).await.unwrap();
        eprintln!("pid {}", read(&handle, 0).await.trim());
        std::future::pending::<()>().await;
    });
}

#[test]
fn without_a_warden_a_child_dies_with_a_killed_parent() {
    let mut parent = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", HELPER, "--ignored", "--nocapture"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(parent.stderr.take().unwrap()).lines();
    let pid: u32 = lines
        .map_while(Result::ok)
        .find_map(|line| line.strip_prefix("pid ").map(|pid| pid.parse().unwrap()))
        .unwrap();
    assert!(is_running(pid));
    parent.kill().unwrap();
    parent.wait().unwrap();
    eventually("it is gone", || !is_running(pid));
}
