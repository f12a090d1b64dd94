//! What an idle connection and an idle process cost the server in memory.

use super::client::{Client, start};
use super::report::{Goal, Report};
use super::target::Target;

pub(crate) async fn idle(report: &mut Report<'_>) -> anyhow::Result<()> {
    let kib = |bytes: f64| format!("{:.1} KiB", bytes / 1024.0);
    let name = "memory of an idle connection";
    if report.wants(name) {
        let server = Target::exec_server()?;
        let mut clients = Vec::new();
        // The first ones also pay for what all share.
        for _ in 0..50 {
            clients.push(Client::initialize(&server.url).await?);
        }
        let before = server.resident()?;
        for _ in 0..1000 {
            clients.push(Client::initialize(&server.url).await?);
        }
        let each = (server.resident()?.saturating_sub(before)) as f64 / 1000.0;
        report.figure(name, &kib(each), "24 KiB", each / (24.0 * 1024.0), Goal::AtMost(1.0));
    }
    let name = "memory of an idle process";
    if report.wants(name) {
        let server = Target::exec_server()?;
        let mut client = Client::initialize(&server.url).await?;
        let mut sleepers = async |range: std::ops::Range<usize>| -> anyhow::Result<()> {
            for n in range {
                client.send(start(&n.to_string(), &["sleep", "1000"], "")).await?;
                client.until("\"result\"").await?;
            }
            Ok(())
        };
        sleepers(0..20).await?;
        let before = server.resident()?;
        sleepers(20..420).await?;
        let each = (server.resident()?.saturating_sub(before)) as f64 / 400.0;
        report.figure(name, &kib(each), "32 KiB", each / (32.0 * 1024.0), Goal::AtMost(1.0));
    }
    Ok(())
}
