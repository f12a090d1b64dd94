//! A nats-server of one's own, on a free port, with a directory that goes with it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use codex_rendezvous::NatsOptions;
use tempfile::TempDir;

pub(crate) struct NatsServer {
    dir: TempDir,
    child: Child,
    pub address: String,
}

impl NatsServer {
    pub(crate) async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let child = spawn(dir.path(), "-1");
        let mut server = Self { dir, child, address: String::new() };
        // It writes down the port that it took.
        let file = server.dir.path().join(format!("nats-server_{}.ports", server.child.id()));
        server.address = loop {
            if let Some(address) = read(&file) {
                break address;
            }
            assert!(server.child.try_wait().unwrap().is_none(), "nats-server ended");
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        server
    }

    pub(crate) fn options(&self) -> NatsOptions {
        let servers = format!("nats://{}", self.address).parse().unwrap();
        NatsOptions { servers, replicas: 1 }
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Another one at the same place, with the same data.
    pub(crate) fn restart(&mut self) {
        self.kill();
        let port = self.address.rsplit(':').next().unwrap().to_owned();
        self.child = spawn(self.dir.path(), &port);
    }
}

fn spawn(dir: &Path, port: &str) -> Child {
    Command::new("nats-server")
        .args(["-js", "-a", "127.0.0.1", "-p", port, "-sd"])
        .arg(dir.join("data"))
        .arg("--ports_file_dir")
        .arg(dir)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("install the nats-server package")
}

fn read(file: &PathBuf) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    let ports: serde_json::Value = serde_json::from_str(&text).ok()?;
    let url = ports["nats"][0].as_str()?;
    Some(url.strip_prefix("nats://")?.to_owned())
}

impl Drop for NatsServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
