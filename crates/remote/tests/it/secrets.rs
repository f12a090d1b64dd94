//! Nothing secret is ever printed: a whole session at trace level, searched.

use std::io;
use std::sync::{Arc, Mutex};

use codex_exec_client::ExecCommand;
use tracing_subscriber::fmt::MakeWriter;

use crate::cloud::{AUTHORIZATION, Cloud, URL_SECRET};
use crate::ends::{environment, link, registry};
use crate::session::{Remote, client};

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;
    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// The only test of its thread, and everything of it runs there: the subscriber sees it all.
#[tokio::test(flavor = "current_thread")]
async fn nothing_secret_is_printed_at_trace_level() {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::TRACE)
        .with_ansi(false)
        .with_writer(log.clone())
        .finish();
    let guard = tracing::subscriber::set_default(subscriber);
    let cloud = Cloud::start().await;
    let enrolment = environment(&cloud);
    let mut printed = format!("{enrolment:?} {:?} {:?}", registry(&cloud), link(&cloud));
    let remote = Remote::start(enrolment);
    cloud.upgraded(1).await;
    let session = client(&cloud).await;
    session.run(ExecCommand::shell("echo terminal-secret-42")).await.unwrap();
    cloud.drop_sockets();
    cloud.upgraded(4).await;
    session.run(ExecCommand::shell("echo again")).await.unwrap();
    cloud.script(|script| {
        script.deny = true;
        script.refuse_upgrades = vec![401];
    });
    printed.push_str(&link(&cloud).dial().await.unwrap_err().to_string());
    printed.push_str(&format!("{:?}", link(&cloud).dial().await));
    remote.stop().await;
    drop(guard);
    printed.push_str(&String::from_utf8_lossy(&log.0.lock().unwrap()));
    assert!(printed.contains("asking the registry"), "the log is there");
    for secret in [URL_SECRET, AUTHORIZATION, "sk-test", "sk-harness", "terminal-secret-42"] {
        assert!(!printed.contains(secret), "{secret} was printed");
    }
}
