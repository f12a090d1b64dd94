//! Shells that start from a snapshot of their profile.

use std::time::{Duration, Instant};

use serde_json::json;

use super::client::{Client, start};
use super::report::{Goal, Report, microseconds, p50};
use super::target::Target;

/// The most that a start may take once its profile is captured, however long that takes.
const LIMIT: Duration = Duration::from_millis(5);

/// start → closed of a login shell with a snapshot, against the same shell without a profile; and with a profile
/// that takes 300 ms, against a limit.
pub(crate) async fn start_to_closed(report: &mut Report<'_>, effort: usize) -> anyhow::Result<()> {
    let plain = "start→closed of bash with a snapshot, p50";
    let slow = "the same with a profile of 300 ms, p50";
    for (name, profile) in [(plain, "export A=b; f() { echo; }\n"), (slow, "sleep 0.3\n")] {
        if !report.wants(name) {
            continue;
        }
        let home = tempfile::tempdir()?;
        std::fs::write(home.path().join(".bash_profile"), profile)?;
        let policy = json!({"inherit": "none", "ignoreDefaultExcludes": true, "exclude": [],
            "set": {"HOME": home.path()}, "includeOnly": []});
        let shell = json!({"scopeId": "bench", "shell": {"name": "bash", "path": "/bin/bash"}});
        let server = Target::exec_server()?;
        let mut client = Client::initialize(&server.url).await?;
        let (mut measured, mut floor) = (Vec::new(), Vec::new());
        for n in 0..=200 * effort {
            let snapshot = format!(r#","envPolicy":{policy},"shellSnapshot":{shell}"#);
            let without = format!(r#","envPolicy":{policy}"#);
            for (flag, more, times) in
                [("-lc", &snapshot, &mut measured), ("-c", &without, &mut floor)]
            {
                let began = Instant::now();
                let argv = ["/bin/bash", flag, ":"];
                client.send(start(&format!("{n}{flag}"), &argv, more)).await?;
                client.until("process/closed").await?;
                // The first one captures.
                if n > 0 {
                    times.push(began.elapsed());
                }
            }
        }
        let measured = p50(&mut measured);
        let (floor, goal) = if name == plain { (p50(&mut floor), 1.3) } else { (LIMIT, 1.0) };
        let ratio = measured.as_secs_f64() / floor.as_secs_f64();
        let goal = Goal::AtMost(goal);
        report.figure(name, &microseconds(measured), &microseconds(floor), ratio, goal);
    }
    Ok(())
}
